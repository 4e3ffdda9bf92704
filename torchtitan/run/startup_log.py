"""What a run logs before its first step: the decisions made, and why."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.engine.engine import Engine
from torchtitan.engine.stages import Stage
from torchtitan.errors import counted
from torchtitan.hardware import SHARING
from torchtitan.kernels.attention import kernel_name
from torchtitan.kernels.cpu_speed import bfloat16_is_fast
from torchtitan.logging import logger
from torchtitan.optim.schedule import shortened

SLOW_BFLOAT16 = "this CPU has no bfloat16 instructions, so bfloat16 GEMMs would be slower"


def _selective_option(engine: Engine) -> str:
    """The option, and what "op" saves on this rank beyond torchtitan's "op": the 2nd, 4th and 6th GEMM of a block."""
    config, dims, args = engine.config, engine.meshes.dims, engine.model.args
    option = config.activation_checkpoint.selective_ac_option
    if option != "op" or hasattr(args, "kv_lora_rank"):  # latents have other GEMMs, which are not counted
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
    stage: Stage,
    first_step: int,
    tokens_seen: int,
    checkpoints: Path,
    before: Mapping[str, str],
) -> dict[str, str]:
    """Logs one line per decision, unless `before`, of an earlier stage, has the same. Returns the lines by name."""
    config, training, dims, device = engine.config, engine.config.training, engine.meshes.dims, engine.device
    rows = training.sequences_per_step(dims.dp)
    accumulation_steps = rows // (training.local_batch_size * dims.dp)
    tokens = rows * training.seq_len
    sums = training.mixed_precision_reduce if dims.dp * dims.cp > 1 else "float32"
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
        + f", {training.weight_dtype} weights, {sums} gradient sums"
        + (f"; converters {', '.join(config.model.converters)}" if config.model.converters else ""),
        "data": data,
        "batch": f"{rows} x {training.seq_len} = {tokens:,} tokens per step"
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
