"""Metrics of a run: console, `metrics.jsonl`, TensorBoard, Weights & Biases; time and memory traces."""

from torchtitan.metrics.flops import Peak, find_peak, flops_per_token
from torchtitan.metrics.reporter import MetricsReporter

__all__ = ["MetricsReporter", "Peak", "find_peak", "flops_per_token"]
