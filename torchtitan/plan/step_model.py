"""Where the time of a compiled training step would go on a GPU: work, counted by formula, over measured rates.

tests/cross compares the counts with the code that the compiler generates for a GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.config.system import ActivationCheckpoint
from torchtitan.hardware import GPUS, find_gpu
from torchtitan.optim.optimizer import OPTIMIZERS, bytes_of_state
from torchtitan.parallel.dims import ParallelDims
from torchtitan.plan.devices import PlannedDevice, extent, link_bytes, min_seconds
from torchtitan.plan.result import Expected, Plan
from torchtitan.protocols import ModelArgs


@dataclass(frozen=True)
class Rates:
    """Of one GPU, for large sizes."""

    # FLOP/s of GEMMs in bf16 and in 8 bits.
    gemm: float
    gemm_8bit: float
    attention: tuple[float, float]  # FLOP/s of the forward and of the backward pass; causal attention counts half
    bandwidth: float  # bytes/s read and written


def _hopper(bandwidth: float, gemm: float, gain: float, attention: float) -> Rates:
    """
    Args:
        gemm: FLOP/s of bf16 GEMMs.
        gain: of 8-bit GEMMs over that.
        attention: gain over FlashAttention-2, which reaches 35% of an H100's peak (arXiv 2407.08608, abstract), in the
            backward pass by assumption 28%.
    """
    return Rates(gemm, gain * gemm, (attention * 0.35 * 989e12, attention * 0.28 * 989e12), bandwidth)


# Slow, typical and fast. Published: 620 to 690 TFLOP/s in bf16, sustained at 700 W (a burst reaches 798); 8-bit GEMMs
# 1.4 to 1.7 times as fast on H200; cuDNN's attention, which torch 2.11 for CUDA 13 and later take, 1.7 to 2.3 times as
# fast as FlashAttention-2 (transformers #48163). Bandwidth: measured with torch 2.11.0.
_SLOW, _TYPICAL, _FAST = (620e12, 1.4, 1.7), (655e12, 1.55, 2.0), (690e12, 1.7, 2.3)
_BANDWIDTHS = {name: gpu.copied for name, gpu in GPUS.items() if gpu.copied}
RATES = {gpu: _hopper(bandwidth, *_TYPICAL) for gpu, bandwidth in _BANDWIDTHS.items()}
RANGES = {gpu: (_hopper(bandwidth, *_SLOW), _hopper(bandwidth, *_FAST)) for gpu, bandwidth in _BANDWIDTHS.items()}
# GEMMs by operator: the places of the left and the right operand.
GEMMS = {
    "mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "bmm": (0, 1), "_int_mm": (0, 1), "_scaled_mm": (0, 1),
    "int8_mm": (0, 2), "float8_mm": (0, 2), "emulated_float8_mm": (0, 2), "block_mm": (0, 0),
    "grouped_mm": (0, 1), "grouped_mm_over_rows": (0, 1), "_grouped_mm": (0, 1), "_scaled_grouped_mm": (0, 1),
    "grouped_8bit_mm": (0, 2),
}  # fmt: skip
KINDS = {"bfloat16": "bf16", "int8": "int8", "float8_e4m3fn": "float8", "float8_e5m2": "float8"}
KINDS["int64"] = "nvfp4"  # 16 numbers in each
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
COLLECTIVES_SHARE = 16 / 132  # of the multiprocessors, which NCCL takes from computation; by assumption


@dataclass
class Work:
    """What one rank computes in a step."""

    # FLOPs by dtype of the operands; a multiply-add counts as two.
    gemms: dict[str, float] = field(default_factory=dict)
    attention: tuple[float, float] = (0.0, 0.0)  # FLOPs of forward and backward passes; causal attention counts half
    fused_bytes: float = 0.0  # read and written by generated kernels
    other_bytes: float = 0.0  # read and written by uncompiled operations other than GEMMs and updates
    update_bytes: float = 0.0  # read and written by the optimizer and by clipping
    waited: float = 0.0  # seconds of collectives that computation waits for
    beside: float = 0.0  # seconds of collectives that run beside computation

    @property
    def flops(self) -> float:
        """Of attention and of GEMMs, except those in 8 and 4 bits."""
        return self.gemms.get("bf16", 0.0) + self.gemms.get("float32", 0.0) + sum(self.attention)

    @property
    def flops_8bit(self) -> float:
        """Of GEMMs in 8 bits, and half of those in nvfp4, which run twice as fast."""
        return self.gemms.get("int8", 0.0) + self.gemms.get("float8", 0.0) + self.gemms.get("nvfp4", 0.0) / 2

    def count(self, operator: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> bool:
        """Adds a GEMM or attention. Returns whether the operator ("mm" or "aten.mm") is one.

        Args:
            shapes, dtypes: of the tensors among its arguments.
        """
        name = operator.split(".")[1] if "." in operator else operator  # a name of an overload may follow
        if name in GEMMS:
            left, right = GEMMS[name]
            right = right or len(shapes) // 2  # block_mm: data and scales of the left, and as many of the right operand
            dtype = "float32" if name.startswith("emulated") else KINDS.get(dtypes[left], "float32")
            flops = 2.0 * math.prod(shapes[left]) * shapes[right][-1] * (16 if dtype == "nvfp4" else 1)
            self.gemms[dtype] = self.gemms.get(dtype, 0.0) + flops
        elif "attention" in name:
            q, k = shapes[1:3] if name.endswith("_backward") else shapes[:2]
            flops = 2.0 * math.prod(q) * k[2]  # two GEMMs, half of each
            forward, backward = self.attention
            if name.endswith(("_backward", "_gradients")):
                self.attention = (forward, backward + 2.5 * flops)
            else:
                self.attention = (forward + flops, backward)
        else:
            return False
        return True


def seconds_by_part(work: Work, rates: Rates) -> dict[str, float]:
    """Seconds of a step by part. They add up: a GPU runs one large kernel at a time. Of collectives beside computation,
    what exceeds it counts, and what they take from it."""
    seconds = {
        "bf16 GEMMs": (work.flops - sum(work.attention)) / rates.gemm,
        "8-bit GEMMs": work.flops_8bit / rates.gemm_8bit,
    }
    seconds["attention"] = work.attention[0] / rates.attention[0] + work.attention[1] / rates.attention[1]
    seconds["fused kernels"] = work.fused_bytes / rates.bandwidth
    seconds["uncompiled operations"] = work.other_bytes / rates.bandwidth
    seconds["optimizer"] = work.update_bytes / rates.bandwidth
    computation = sum(seconds.values())
    exceeding = max(0.0, work.beside - computation)
    seconds["collectives"] = work.waited + exceeding + COLLECTIVES_SHARE * min(work.beside, computation)
    return seconds


def rates_of(device: PlannedDevice) -> Rates:
    """Of a device without known rates: its peak, attention at half of it, and 250 FLOPs in the time of a byte."""
    peak = device.peak_flops or math.inf
    return RATES.get(find_gpu(device.name)) or Rates(peak, 2 * peak, (peak / 2, peak / 2), peak / 250)


def expected_step(plan: Plan, args: Any, config: JobConfig, dims: ParallelDims, rows: int) -> Expected | str:
    """What the planned step is expected to take, or why that is not known."""
    gpu = find_gpu(plan.device.name)
    if gpu not in RATES:
        return f"the GPUs with known rates are {', '.join(RATES)}"
    if dims.pp > 1:
        return "a step with a pipeline is not modelled"
    if OPTIMIZERS.get(config.optimizer.name).whole_matrices:
        return f"the update with {config.optimizer.name} is not modelled"
    work = work_of_step(plan, args, config, dims, rows)
    seconds = seconds_by_part(work, RATES[gpu])
    slow, fast = (sum(seconds_by_part(work, rates).values()) for rates in RANGES[gpu])
    available = sum(seconds.values()) * plan.world_size * (plan.device.peak_flops or math.inf) / plan.tokens_per_step
    causal = causal_flops(plan.flops_per_token, args, config.training.seq_len)
    return Expected(seconds, (fast, slow), (plan.flops_per_token / available, causal / available))


def repeated_layers(checkpointing: ActivationCheckpoint) -> float:
    """The part of the layers whose whole forward pass is repeated, 0 to 1."""
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option != "op":
        return 1 / int(checkpointing.selective_ac_option)
    return float(checkpointing.mode == "full")


def causal_flops(flops_per_token: float, args: ModelArgs, seq_len: int) -> float:
    """The FLOPs per token without the half of attention that the causal mask skips."""
    return flops_per_token - 6 * args.n_layers * args.n_heads * args.head_dim * seq_len


def step_seconds(plan: Plan, args: Any, config: JobConfig, dims: ParallelDims, rows: int) -> float:
    """Seconds of a step with other settings than the plan's; a pipeline also fills and drains."""
    work = work_of_step(plan, args, config, dims, rows)
    count = microbatches(config, dims)
    seconds = sum(seconds_by_part(work, rates_of(plan.device)).values())
    return seconds * (count + dims.pp - 1) / count


def microbatches(config: JobConfig, dims: ParallelDims) -> int:
    """Of a pass through the pipeline; 1 without one."""
    size = config.parallelism.pipeline_parallel_microbatch_size
    return config.training.local_batch_size // size if dims.pp > 1 else 1


def work_of_step(plan: Plan, args: Any, config: JobConfig, dims: ParallelDims, rows: int) -> Work:
    """What a layer computes, copies and sends, counted by hand, for the model and the devices of the plan."""
    training = config.training
    layers = args.n_layers / dims.pp
    tokens = rows * training.seq_len / (dims.dp * dims.cp * dims.tp)  # of a rank; with TP, of its part of the sequences
    work = Work()

    # Parameters that a token meets, and the inner width of its feed-forward.
    moe, queries, keys = args.moe, args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    attention = 2 * queries * training.seq_len  # FLOPs of a token's forward pass, causal
    multiplied = plan.flops_per_token / 6 - args.n_layers * attention
    in_layer = (multiplied - args.vocab_size * args.dim) / args.n_layers
    width = (in_layer / args.dim - 2 * (queries + keys)) / 3

    # GEMMs and attention: forward, twice or 2.5 times that backward, and forward again without the last GEMM of a dense
    # layer, which no gradient needs.
    again = repeated_layers(config.activation_checkpoint)
    repeated = args.n_layers * (in_layer - (0 if moe else args.dim * width))
    gemms = tokens * (6 * multiplied + 2 * repeated * again) / dims.pp
    planned = plan.tokens_per_step / plan.world_size * (6 * multiplied + 2 * repeated * plan.repeated_layers)
    share_of_8_bits = min(plan.ranks[0].flops_8bit / planned, 1.0) if planned else 0.0
    work.gemms = {"bf16": gemms * (1 - share_of_8_bits), "int8": gemms * share_of_8_bits}
    work.attention = ((1 + again) * tokens * layers * attention, 2.5 * tokens * layers * attention)

    # Generated kernels, in numbers of 2 bytes a token and layer: norms, residuals, rotary embedding, SwiGLU; rows of
    # experts are gathered and summed.
    expert_rows = moe.top_k * args.dim if moe else 0
    sent_rows = expert_rows if dims.ep > 1 else 0
    ahead = 11.5 * args.dim + 3 * width + 2.6 * expert_rows + 3.4 * sent_rows
    # Gradients are summed for the tokens of all ranks, before they are sent.
    back = (12.5 + 6 * dims.tp) * args.dim + 6 * width + 4.1 * expert_rows + 5.4 * sent_rows
    by_operation = config.activation_checkpoint.mode == "selective" and not again
    recomputed = 8.0 * args.dim if by_operation else again * ahead
    # Inputs and gradients of outputs are rounded to 8 bits by rows and by columns, partly beside what makes them.
    operands = 2 * (queries + args.dim + keys) + 2 * (expert_rows or args.dim) + 3 * width
    rounded = 2.5 * operands * share_of_8_bits
    logits = 3.6 * args.vocab_size / dims.pp
    work.fused_bytes = 2 * tokens * (layers * (ahead + recomputed + back + rounded) + logits)

    # Weights: gathered for each pass, or once a step; gradients summed over ranks after each pass.
    passes, in_pass = rows // (training.local_batch_size * dims.dp), microbatches(config, dims)
    reshard = config.parallelism.fsdp_reshard_after_forward
    gathers = 2 * passes * in_pass if reshard == "always" or (reshard == "default" and dims.pp == 1) else 1
    unused = plan.parameters - plan.active_parameters
    of_experts = unused * moe.n_experts / (moe.n_experts - moe.top_k) if unused else 0
    param, reduced = (BYTES[name] for name in (training.mixed_precision_param, training.mixed_precision_reduce))
    shares = {
        "fsdp": (plan.parameters - of_experts) / dims.tp / dims.pp,
        "expert_fsdp": of_experts / dims.ep / dims.pp,
    }
    for dimension, share in shares.items():
        ranks, _ = extent(dimension, dims)
        cast = share / ranks * (4 + 3 * param)  # from float32, and copied into its place
        work.other_bytes += (2 * param * share + cast) * gathers + (param + reduced) * share * passes
        if ranks > 1:
            work.beside += _seconds("all-gather", param * share * gathers, dimension, dims, plan.device)
            work.beside += _seconds("reduce-scatter", reduced * share * passes, dimension, dims, plan.device)
        # The update reads weights, gradients and state, and writes weights and state; clipping, four numbers.
        work.update_bytes += (28 + 2 * bytes_of_state(config.optimizer)) * share / ranks
        if dims.dp_replicate > 1:
            work.beside += _seconds("all-reduce", reduced * share / ranks, "dp_replicate", dims, plan.device)

    # Activations: of TP before and after attention and the feed-forward, of experts to them and back.
    activations = 2 * layers * tokens * args.dim
    if dims.tp > 1:
        sent, summed = 4 + 2 * (by_operation or again), 4 + again
        work.waited += _seconds("all-gather", sent * activations * dims.tp, "tp", dims, plan.device)
        work.waited += _seconds("reduce-scatter", summed * activations * dims.tp, "tp", dims, plan.device)
        if training.local_batch_size > in_pass and config.parallelism.enable_async_tensor_parallel:
            # Parts of several sequences are sorted by sequence.
            work.fused_bytes += 1.6 * (sent + summed) * activations * dims.tp
    if dims.ep > 1:
        number = 2 if config.moe.all_to_all_dtype else 4
        exchanged = (number + number / 2 * again) * activations * moe.top_k * config.job.simulate_expert_load
        work.waited += _seconds("all-to-all", exchanged, "ep", dims, plan.device)
    work.waited += sum(line.seconds or 0.0 for line in plan.ranks[0].traffic if line.dimension == "cp")
    return work


def _seconds(collective: str, size: float, dimension: str, dims: ParallelDims, device: PlannedDevice) -> float:
    return min_seconds(*link_bytes(collective, size, *extent(dimension, dims)), device) or 0.0
