"""Numbers about a run: console, `metrics.jsonl`, TensorBoard, Weights & Biases; traces of time and memory."""

from torchtitan.metrics.flops import Peak, find_peak, flops_per_token
from torchtitan.metrics.profiling import Profiler
from torchtitan.metrics.reporter import MetricsReporter

__all__ = ["MetricsReporter", "Peak", "Profiler", "find_peak", "flops_per_token"]
