"""What a run logs before its first step: the decisions made, and why."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.converters import Decision
from torchtitan.converters.conversion_report import phases_to_json, summary, to_json, to_table
from torchtitan.device import BUSY, CoreMeter
from torchtitan.engine.engine import Engine
from torchtitan.engine.stages import Stage
from torchtitan.errors import counted
from torchtitan.hardware import SHARING
from torchtitan.kernels.attention import kernel_name
from torchtitan.kernels.cpu_speed import bfloat16_is_fast
from torchtitan.logging import logger
from torchtitan.optim.schedule import shortened
from torchtitan.registry import deferred

_slowness: Callable[..., list[float]] = deferred("torchtitan.converters.measured_filter:slowness")
_cpu_kernel: Callable[[str], str] = deferred("torchtitan.kernels.cpu_gemm:cpu_kernel")

SLOW_BFLOAT16 = "this CPU has no bfloat16 instructions, so bfloat16 GEMMs would be slower"
SLOW = 4  # times the time of a bf16 layer; slower than this is too slow even for experiments


def log_conversion(stages: Sequence[Stage], reports: Sequence[Sequence[Decision]]) -> tuple[str, str]:
    """Logs the precision of each linear layer, by stage, and the rule that decided it. Returns them as JSON and as a
    table for each stage, or twice ""."""
    tables, numbers = [], set[int]()
    for stage, report in zip(stages, reports, strict=True):
        if report and stage.number not in numbers:  # one for all batch sizes
            numbers.add(stage.number)
            tables.append(f"{stage.title or 'conversion to low precision'}:\n{to_table(report)}")
            logger.info(tables[-1])
            logger.info(summary(report))
    ends = [None if stage is stages[-1] else stage.last_step for stage in stages]
    text = to_json(reports[0]) if len(stages) == 1 else phases_to_json(list(zip(ends, reports, strict=True)))
    return (text, "\n\n".join(tables)) if tables else ("", "")


def log_cost_of_low_precision(engine: Engine) -> None:
    """Logs how much slower converted layers are on a CPU, measured before the first step."""
    if engine.device.type != "cpu" or dist.get_rank() > 0:
        return
    dtype = engine.config.training.mixed_precision_param
    for converter in engine.converters:
        meter = CoreMeter()
        ratios = _slowness(converter, getattr(torch, dtype)) if converter.decisions else []
        if not ratios or converter.gemms is None:
            continue
        busy = meter.threads_waiting() > BUSY
        slower = f"{min(ratios):.1f} to {max(ratios):.1f} times as long as in {dtype}"
        line = f"{converter.name} {converter.decisions[0].recipe}: its layers take {slower} on this CPU"
        if busy:
            logger.info(f"{line}, as measured beside other processes; on a quiet machine this may differ")
        elif max(ratios) > SLOW:
            logger.warning(f"{line}; use {converter.name} on a GPU, or expect steps to take that much longer")
        else:
            logger.info(f"{line}{_cpu_kernel(converter.gemms.op.operation)}")


def _selective_option(engine: Engine) -> str:
    """The option, and what "op" saves on this rank beyond torchtitan's "op": the 2nd, 4th and 6th GEMM of a block."""
    config, dims, args = engine.config, engine.meshes.dims, engine.model.args
    option = config.activation_checkpoint.selective_ac_option
    if option != "op":
        return option
    width = args.n_kv_heads * args.head_dim + args.dim + (getattr(args, "ffn_dim", 0) if args.moe is None else 0)
    layers = sum(len(stage.layers) for stage in engine.pipeline_stages.values())
    tokens = config.training.local_batch_size * config.training.seq_len // (dims.cp * dims.tp)
    size = getattr(torch, config.training.mixed_precision_param).itemsize
    kept = layers * tokens * width * size
    return f"op: the results of all GEMMs are kept, {kept / 2**30:.3g} GiB of them recomputed in torchtitan"


def _attention(engine: Engine) -> str:
    config, args = engine.config, engine.model.args
    dtype, device = getattr(torch, config.training.mixed_precision_param), engine.device.torch_device
    q = torch.empty(1, args.n_heads, 2, args.head_dim, dtype=dtype, device=device)
    in_chunks = engine.meshes.dims.cp > 1 and config.parallelism.context_parallel_rotate_method == "allgather"
    specs = [args.attention_spec(layer) for layer in range(args.n_layers)]
    documents = config.training.document_mask
    return ", ".join(dict.fromkeys(kernel_name(spec, q, args.n_kv_heads, documents, in_chunks) for spec in specs))


def log_settings(
    engine: Engine,
    *,
    data: str,
    global_batch_size: int,
    stage: Stage,
    first_step: int,
    tokens_seen: int,
    checkpoints: Path,
    before: Mapping[str, str],
) -> dict[str, str]:
    """Logs one line per decision, unless `before`, of an earlier stage, has the same. Returns the lines by name."""
    config, training, dims, device = engine.config, engine.config.training, engine.meshes.dims, engine.device
    accumulation_steps = global_batch_size // (training.local_batch_size * dims.dp)
    tokens = global_batch_size * training.seq_len
    is_slow = training.mixed_precision_param == "float32" and device.type == "cpu" and not bfloat16_is_fast()
    lines = {
        "run": f"{config.job.description}, in {config.job.dump_folder}",
        "device": f"{device.type} ({device.name}"
        + (f", {counted(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else "")
        + f"), {counted(dist.get_world_size(), 'process')}"
        + (
            f", which take turns on {counted(torch.cuda.device_count(), 'GPU')} for a test ({SHARING})"
            if device.is_shared
            else ""
        ),
        "layout": f"{dims}",
        "model": f"{config.model.name} {config.model.flavor}, {engine.full.num_parameters:,} parameters",
        "precision": f"{training.mixed_precision_param} GEMMs"
        + (f" ({SLOW_BFLOAT16})" if is_slow else "")
        + f", {training.weight_dtype} weights, float32 gradient sums"
        + (f"; converters {', '.join(config.model.converters)}" if config.model.converters else ""),
        "data": data,
        "batch": f"{global_batch_size} x {training.seq_len} = {tokens:,} tokens per step"
        f" ({training.local_batch_size} x {counted(dims.dp, 'rank')} x "
        f"{counted(accumulation_steps, 'grad-accumulation step')})",
        **({"stage": stage.title} if stage.title else {}),
        "steps": f"{first_step} to {stage.last_step}{f' of {training.steps}' if stage.title else ''}, "
        f"{tokens_seen + (stage.last_step - first_step + 1) * tokens:,} tokens in total",
        "attention": _attention(engine),
        "activations": {"none": "all stored", "full": "recomputed in every block"}.get(
            config.activation_checkpoint.mode, f"recomputed selectively ({_selective_option(engine)})"
        ),
        "compile": "each block" if training.compile else "off",
        "checkpoints": f"every {counted(config.checkpoint.interval, 'step')} to {checkpoints}"
        if config.checkpoint.enable_checkpoint
        else "off (--checkpoint.enable_checkpoint to save and resume)",
    }
    if phases := shortened(stage.schedule[1], config.lr_scheduler):
        lines["schedule"] = f"the run is shorter than its learning-rate schedule, which is shortened: {phases}"
    for name, line in lines.items():
        if line != before.get(name):
            logger.info(f"{name:12} {line}")
    return lines
