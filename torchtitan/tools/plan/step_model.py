"""Where the time of a compiled training step would go on a GPU: work, counted by formula, over measured rates.

tests/cross compares the counts with the code that the compiler generates for a GPU.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.config.system import ActivationCheckpoint
from torchtitan.converters import Decision
from torchtitan.hardware import GPUS, find_gpu
from torchtitan.metrics.flops import attended_positions
from torchtitan.optim.optimizer import OPTIMIZERS, bytes_of_state
from torchtitan.parallel.dims import ParallelDims
from torchtitan.protocols import ModelArgs, attended_channels
from torchtitan.tools.plan.devices import PlannedDevice, extent, link_bytes, min_seconds
from torchtitan.tools.plan.result import ExpectedStep, Plan


@dataclass(frozen=True)
class Rates:
    """What one GPU reaches in a training step."""

    gemm: float  # FLOP/s of large GEMMs in bf16
    gains: dict[str, float]  # gain of GEMMs over that, for each kind of operands
    attention: tuple[float, float]  # FLOP/s of the forward and of the backward pass; causal attention counts half
    bandwidth: float  # bytes/s read and written by copies
    loops: float  # the same by generated kernels
    links: float  # the part of the links' bandwidth that collectives reach
    rounding: dict[str, float] = field(default_factory=dict)  # seconds of a number, see ROUNDING
    host: dict[str, float] = field(default_factory=dict)  # seconds of a GEMM, see HOST


@dataclass(frozen=True)
class Code:
    """What a step's time depends on besides work and GPU: how the work is implemented.

    Attributes:
        attention: FLOP/s of the forward and of the backward pass; None: those of the GPU's rates.
        shares_inputs: layers with the same input round it once, not once each.
        rounded_bytes: read and written for a number that is rounded by rows and by columns, by recipe; the last one is
            of other recipes.
        sequences_as_one: tensor parallelism divides several sequences as one, so that what is gathered is in order.
        wire: bytes of a number in the all-gathers of tensor parallelism, by recipe, if all layers that use it are
            converted; 2 otherwise.
        fused: the part of their collectives that asynchronous tensor parallelism fuses with a GEMM, by recipe.
    """

    attention: tuple[float, float] | None
    shares_inputs: bool
    rounded_bytes: dict[str, float]
    sequences_as_one: bool
    wire: dict[str, int]
    fused: dict[str, float]


# The compiler reads some numbers while it makes them. Collectives fused: counted in the code that it generates for an
# H100 (tests/cross/test_steps.py).
OURS = Code(
    attention=None,
    shares_inputs=True,
    rounded_bytes={"": 3.5},
    sequences_as_one=True,
    wire={"float8 tensorwise": 1, "float8 rowwise": 1, "int8 tensorwise": 1},
    fused={"": 6 / 8, "float8 delayed": 0.0, "float8 blockwise": 0.0, "int8": 0.0, "mx": 0.0},
)
# torchtitan and torchao of June 2025. Attention: FlashAttention-2, which reaches 35% of an H100's peak (arXiv
# 2407.08608, abstract), in the backward pass by assumption 28%. Each layer rounds its own input; bytes: torchao's own
# roofline (torchao/testing/training/roofline_utils.py), which reads and writes a transposed copy for columns.
# Activations are gathered in float8 by torchao's tensorwise layers only. Fused: by assumption, as in our code, and of
# tensorwise layers as in bf16.
TORCHTITAN_2025 = Code(
    attention=(0.35 * 989e12, 0.28 * 989e12),
    shares_inputs=False,
    rounded_bytes={"float8 tensorwise": 6.0, "": 8.0},
    sequences_as_one=False,
    wire={"float8 tensorwise": 1},
    fused={"": 6 / 8, "float8 tensorwise": 6 / 8, "float8 rowwise": 2 / 8},
)

# Measured by us on an H100 and two H200s at 700 W, in bursts of 2 to 3 s: benchmarks/results, by part of a step.
# - GEMMs as if operands and results took no time (`EXPOSED`); those in 8 bits relative to them. nvfp4 runs on neither.
# - cuDNN's attention, which torch 2.11 for CUDA 13 and later take, with heads of 128 numbers.
# - Generated kernels, which reach the same on both.
CUDNN = (600e12, 460e12)
HOPPER = 800e12, {"float8": 1.85, "int8": 1.5, "nvfp4": 3.7}, 2.7e12
# Meta's H100 at 500 W. float8 GEMMs: torchao #2185, where linear layers of a 70B model's shapes, rounding included, are
# 1.71 to 1.73 times as fast as in bf16, which reaches 595 TFLOP/s there; sustained in training, 520, which is fitted to
# the bf16 row of torchtitan's table. Generated kernels: torchao/testing/training/roofline_utils.py.
META = 520e12, {"float8": 1190 / 520, "int8": 1.5, "nvfp4": 3.7}, 2.2e12
# FLOP/s of bf16 GEMMs, gain of others by kind of operands, bytes/s of generated kernels.
REACHED = {"H100": HOPPER, "H200": HOPPER, "H100 500W": META}
# Relative to that, the slowest and the fastest computation. Published are 620 to 690 TFLOP/s in bf16, sustained at
# 700 W, where a burst reaches 798.
SLOW, FAST = 0.82, 1.04
# NCCL's own bandwidth is 370 of 450 GB/s (nccl-tests #212), and 340 of 400 GB/s between machines (nccl #1218).
LINKS = 0.82
# Seconds that rounding a number by rows and by columns takes beyond its bytes, by recipe; "": of recipes that were not
# measured. On the H100, what the 8B model's kernels take longer than in bf16 (benchmarks/results).
ROUNDING_SECONDS = {"float8 tensorwise": 1.6e-12, "float8 rowwise_with_gw_hp": 2.2e-12, "int8": 3.8e-12, "": 4.4e-12}
# Seconds that the host takes for a converted layer's GEMM, by converter: measured where GPUs wait for it
# (benchmarks/results, 1B). In bf16 it keeps ahead.
HOST = {"float8": 0.50e-3, "int8": 0.78e-3}
# Seconds that a gradient takes, beyond its bytes, to be copied for FSDP's reduce-scatter: 300e9 numbers a second
# (benchmarks/results; 278e9 by the kernel's author, pytorch #120678).
CHUNK_CAT = 1.1e-12
EXPOSED = 0.5  # the part of the time for a GEMM's bytes in which it does not compute, from the measured shapes
UPDATES = 0.9  # share of the bandwidth of copies that copies and updates within a step get (benchmarks/results, 8B)
SMALL_HEADS = 0.25  # how much longer attention takes with heads of 64 numbers than of 128 (benchmarks/results, 1B)


def _rates(gpu: str, speed: float = 1.0) -> Rates:
    """`speed`: of computation, relative to the typical one."""
    gemms, gains, loops = REACHED[gpu]
    attention = CUDNN[0] * speed, CUDNN[1] * speed
    return Rates(gemms * speed, gains, attention, GPUS[gpu].copied, loops, LINKS, ROUNDING_SECONDS, HOST)


RATES = {gpu: _rates(gpu) for gpu in REACHED}
RANGES = {gpu: (_rates(gpu, SLOW), _rates(gpu, FAST)) for gpu in REACHED}
# GEMMs by operator: the places of the left and the right operand.
GEMMS = {
    "mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "bmm": (0, 1), "_int_mm": (0, 1), "_scaled_mm": (0, 1),
    "int8_mm": (0, 2), "float8_mm": (0, 2), "emulated_float8_mm": (0, 2), "block_mm": (0, 0),
    "grouped_mm": (0, 1), "grouped_mm_over_rows": (0, 1), "_grouped_mm": (0, 1), "_scaled_grouped_mm": (0, 1),
    "grouped_8bit_mm": (0, 2),
}  # fmt: skip
OPERAND_KINDS = {"bfloat16": "bf16", "int8": "int8", "float8_e4m3fn": "float8", "float8_e5m2": "float8"}
OPERAND_KINDS["int64"] = "nvfp4"  # 16 numbers in each
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
COLLECTIVES_SHARE = 16 / 132  # share of the multiprocessors that NCCL takes from computation; an assumption


@dataclass
class Work:
    """What one rank computes in a step."""

    # FLOPs by dtype of the operands; a multiply-add counts as two.
    gemms: dict[str, float] = field(default_factory=dict)
    attention: tuple[float, float] = (0.0, 0.0)  # FLOPs of forward and backward passes; causal attention counts half
    fused_bytes: float = 0.0  # read and written by generated kernels; by formula, by those that do not round
    other_bytes: float = 0.0  # read and written by uncompiled operations other than GEMMs and updates
    update_bytes: float = 0.0  # read and written by the optimizer and by clipping
    # Seconds of collectives, at the full bandwidth of links: those that computation waits for, and those beside it.
    waited: float = 0.0
    beside: float = 0.0
    # Only by formula.
    head_dim: int = 128
    grouped: float = 0.0  # FLOPs in 8 bits, of those above, of grouped GEMMs of experts
    gemm_bytes: float = 0.0  # operands and results of GEMMs
    rounded: float = 0.0  # numbers of activations and gradients that are rounded to 8 bits, by rows and by columns
    rounded_bytes: float = 0.0  # read and written for that, and for rounding weights
    precision: str = ""  # converter and recipe of most GEMMs, such as "float8 rowwise"
    calls: float = 0.0  # GEMMs of converted layers that the host starts
    gradients: float = 0.0  # numbers of them that are copied to be summed over ranks

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
            dtype = "float32" if name.startswith("emulated") else OPERAND_KINDS.get(dtypes[left], "float32")
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


def seconds_by_part(work: Work, rates: Rates, code: Code = OURS) -> dict[str, float]:
    """Seconds of a step by part. They add up: a GPU runs one large kernel at a time. Of collectives beside computation,
    what exceeds it counts, and what they take from it; of the host, what exceeds the GPU."""
    flops_8bit = {kind: flops for kind, flops in work.gemms.items() if kind not in ("bf16", "float32")}
    in_bf16 = work.flops - sum(work.attention)
    of_bytes = EXPOSED * work.gemm_bytes / rates.bandwidth
    of_bytes_in_bf16 = of_bytes * in_bf16 / (in_bf16 + sum(flops_8bit.values()) or 1.0)
    # Grouped GEMMs in 8 bits are no faster than in bf16, with 512 rows of an expert (benchmarks/results, 30B-A3B).
    grouped = {kind: work.grouped * flops / sum(flops_8bit.values()) for kind, flops in flops_8bit.items() if flops}
    seconds = {
        "bf16 GEMMs": in_bf16 / rates.gemm + of_bytes_in_bf16,
        "8-bit GEMMs": sum(
            (flops - grouped.get(kind, 0.0)) / rates.gains[kind] / rates.gemm + grouped.get(kind, 0.0) / rates.gemm
            for kind, flops in flops_8bit.items()
        )
        + of_bytes
        - of_bytes_in_bf16,
    }
    forward, backward = code.attention or rates.attention
    smaller_heads = 1 + SMALL_HEADS * max(128 / work.head_dim - 1, 0)
    seconds["attention"] = smaller_heads * (work.attention[0] / forward + work.attention[1] / backward)
    seconds["fused kernels"] = work.fused_bytes / rates.loops
    beyond_bytes = find_entry(rates.rounding, work.precision)
    seconds["rounding to 8 bits"] = work.rounded_bytes / rates.loops + work.rounded * beyond_bytes
    seconds["uncompiled operations"] = work.other_bytes / UPDATES / rates.bandwidth + work.gradients * CHUNK_CAT
    seconds["optimizer"] = work.update_bytes / UPDATES / rates.bandwidth
    computation = sum(seconds.values())
    waited, beside = work.waited / rates.links, work.beside / rates.links
    exceeding = max(0.0, beside - computation)
    seconds["collectives"] = waited + exceeding + COLLECTIVES_SHARE * min(beside, computation)
    host = work.calls * find_entry(rates.host, work.precision)
    seconds["waiting for the host"] = max(0.0, host - sum(seconds.values()))
    return seconds


def find_entry(table: Mapping[str, float], precision: str, default: float = 0.0) -> float:
    """The entry of a precision such as "float8 rowwise": its own, its converter's, or that of all others ("")."""
    converter, *_ = precision.split(" ")
    return next((table[key] for key in (precision, converter, "") if key in table), default)


def rates_of(device: PlannedDevice) -> Rates:
    """Of a device without known rates: its peak, attention at half of it, and 250 FLOPs in the time of a byte."""
    peak = device.peak_flops or math.inf
    return RATES.get(find_gpu(device.name)) or Rates(
        peak, HOPPER[1], (peak / 2, peak / 2), peak / 250, peak / 250, LINKS
    )


def expected_step(
    plan: Plan, args: Any, config: JobConfig, dims: ParallelDims, rows: int, code: Code = OURS
) -> ExpectedStep | str:
    """What the planned step is expected to take, or why that is not known."""
    gpu = find_gpu(plan.device.name)
    if gpu not in RATES:
        return f"the GPUs with known rates are {', '.join(RATES)}"
    if dims.pp > 1:
        return "a step with a pipeline is not modelled"
    if config.training.mtp_layers:
        return "multi-token prediction is not modelled"
    if OPTIMIZERS.get(config.optimizer.name).whole_matrices:
        return f"the update with {config.optimizer.name} is not modelled"
    work = work_of_step(plan, args, config, dims, rows, code)
    seconds = seconds_by_part(work, RATES[gpu], code)
    slow, fast = (sum(seconds_by_part(work, rates, code).values()) for rates in RANGES[gpu])
    available = sum(seconds.values()) * plan.world_size * (plan.device.peak_flops or math.inf) / plan.tokens_per_step
    causal = causal_flops(plan.flops_per_token, args, config.training.seq_len)
    return ExpectedStep(seconds, (fast, slow), (plan.flops_per_token / available, causal / available))


def repeated_layers(checkpointing: ActivationCheckpoint) -> float:
    """The part of the layers whose whole forward pass is repeated, 0 to 1."""
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option != "op":
        return 1 / int(checkpointing.selective_ac_option)
    return float(checkpointing.mode == "full")


def causal_flops(flops_per_token: float, args: ModelArgs, seq_len: int) -> float:
    """The FLOPs per token without the half of attention that the causal mask skips."""
    for layer in range(args.n_layers):
        args.attention_spec(layer).require("the plan's count of FLOPs", ["window", "sinks", "scale", "softcap"])
    return flops_per_token - 6 * attended_channels(args) * attended_positions(args, seq_len)


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


@dataclass(frozen=True)
class Linear:
    """The linear layers of one name in a block, on one rank.

    Attributes:
        name: the last component of their paths.
        m, k, n: of the GEMM of one of them, (m, k) x (k, n).
        count: of them: of experts, this rank's.
        input: layers with the same one read the same numbers.
    """

    name: str
    m: float
    k: float
    n: float
    count: int
    input: str


def attention_layers(args: Any, tp: int, tokens: float) -> list[Linear]:
    """The linear layers of a block's attention, as for `linear_layers`."""
    queries, keys = args.n_heads * args.head_dim / tp, args.n_kv_heads * args.head_dim / tp
    rank: int | None = getattr(args, "kv_lora_rank", None)
    if rank is None:
        gated = getattr(args, "gated_attention", False)
        outputs = {"wq": queries, "wk": keys, "wv": keys, **({"wg": queries} if gated else {})}
        layers = [Linear(name, tokens, args.dim, width, 1, "attention") for name, width in outputs.items()]
        return [*layers, Linear("wo", tokens, queries, args.dim, 1, "heads")]
    of_queries, values = args.q_lora_rank, args.n_heads * args.v_head_dim / tp
    return [
        *([Linear("wq_a", tokens / tp, args.dim, of_queries, 1, "attention")] if of_queries else []),
        Linear("wq_b" if of_queries else "wq", tokens, of_queries or args.dim, queries, 1, "latent of queries"),
        Linear("wkv_a", tokens / tp, args.dim, rank + args.qk_rope_head_dim, 1, "attention"),
        Linear("wkv_b", tokens, rank, args.n_heads * args.qk_nope_head_dim / tp + values, 1, "latent"),
        Linear("wo", tokens, values, args.dim, 1, "heads"),
    ]


def linear_layers(args: ModelArgs, dims: ParallelDims, tokens: float, width: float) -> list[Linear]:
    """Of a block.

    Args:
        tokens: of a pass, in a tensor-parallel group.
        width: of a dense feed-forward.
    """
    moe, rows, inner, count = args.moe, tokens, width / dims.tp, 1
    if moe:  # a rank gets as many rows as it sends
        rows, inner = tokens / dims.tp * moe.top_k * dims.ep / moe.n_experts, moe.ffn_dim
        count = moe.n_experts // dims.ep
    return [
        *attention_layers(args, dims.tp, tokens),
        Linear("w1", rows, args.dim, inner, count, "feed-forward"),
        Linear("w3", rows, args.dim, inner, count, "feed-forward"),
        Linear("w2", rows, inner, args.dim, count, "gate"),
    ]


def count_layers(
    work: Work, plan: Plan, layers: Sequence[Linear], blocks: float, again: float, code: Code
) -> dict[str, float]:
    """Adds the bytes of the layers' GEMMs, and of those that are converted what is rounded and called. Returns in which
    part of the blocks the layers of each name are converted.

    Args:
        layers: of a block.
        blocks: computed in a step.
        again: the part of them whose forward pass is repeated.
    """
    bytes_of_number = find_entry(code.rounded_bytes, work.precision)
    inputs: set[str] = set()
    parts: dict[str, float] = {}
    for layer in layers:
        alike = [decision.converted for decision in plan.conversion if decision.fqn.endswith(f".{layer.name}")]
        converted = parts[layer.name] = sum(alike) / max(len(alike), 1)
        size, m, k, n = 2 - converted, layer.m, layer.k, layer.n
        repeated = 0.0 if layer.input == "gate" and layer.count == 1 else again  # no gradient needs a block's last GEMM
        forward = size * (m * k + k * n) + 2 * m * n
        backward = size * (2 * m * n + k * n + m * k) + 2 * (m * k + k * n)
        number = blocks * layer.count
        work.gemm_bytes += number * ((1 + repeated) * forward + backward)
        # A repeated forward pass rounds its input again, by rows only.
        read = 0.0 if layer.input in inputs and code.shares_inputs else m * k * (1 + repeated / 2)
        rounded = number * converted * (read + m * n)
        work.rounded += rounded
        # Weights are read for both passes, once in all where the compiler can, and rounded for each.
        work.rounded_bytes += bytes_of_number * rounded + number * converted * k * n * (4 + 3 * repeated)
        if converted:
            inputs.add(layer.input)
            work.calls += blocks * converted * (3 + repeated)
            if layer.count > 1:
                work.grouped += number * converted * 2 * m * k * n * (3 + repeated)
    return parts


def main_precision(conversion: Sequence[Decision]) -> str:
    """Converter and recipe of most converted weights, such as "float8 rowwise"; "" without any."""
    weights: dict[str, int] = {}
    for decision in conversion:
        if decision.converted:
            name = f"{decision.converter} {decision.recipe}".strip()
            weights[name] = weights.get(name, 0) + decision.k * decision.n * max(decision.experts, 1)
    return max(weights, key=lambda name: weights[name], default="")


def work_of_step(plan: Plan, args: Any, config: JobConfig, dims: ParallelDims, rows: int, code: Code = OURS) -> Work:
    """What a layer computes, copies and sends, counted by hand, for the model and the devices of the plan."""
    training = config.training
    layers = args.n_layers / dims.pp
    # A rank's tokens; under TP, its part of the sequences.
    tokens = rows * training.seq_len / (dims.dp * dims.cp * dims.tp)
    passes, in_pass = rows // (training.local_batch_size * dims.dp), microbatches(config, dims)
    work = Work(head_dim=args.head_dim, precision=main_precision(plan.conversion))

    # Parameters that a token meets, and the inner width of its feed-forward.
    moe, positions = args.moe, attended_positions(args, training.seq_len)
    # FLOPs of a token's forward pass, causal; the mean over layers. Kernels compute values as wide as keys.
    attention = 2 * args.n_heads * args.head_dim * positions / args.n_layers
    multiplied = plan.flops_per_token / 6 - args.n_layers * (2 * attended_channels(args) * positions / args.n_layers)
    in_layer = (multiplied - args.vocab_size * args.dim) / args.n_layers
    of_attention = sum(layer.k * layer.n for layer in attention_layers(args, 1, tokens))
    width = (in_layer / args.dim - of_attention / args.dim) / 3

    # GEMMs and attention: forward, twice or 2.5 times that backward, and forward again without the last GEMM of a dense
    # layer, which no gradient needs.
    again = repeated_layers(config.activation_checkpoint)
    repeated = args.n_layers * (in_layer - (0 if moe else args.dim * width))
    gemms = tokens * (6 * multiplied + 2 * repeated * again) / dims.pp
    planned = plan.tokens_per_step / plan.world_size * (6 * multiplied + 2 * repeated * plan.repeated_layers)
    share_of_8_bits = min(plan.ranks[0].flops_8bit / planned, 1.0) if planned else 0.0
    kind = "int8" if work.precision.startswith("int8") else "float8"
    work.gemms = {"bf16": gemms * (1 - share_of_8_bits), kind: gemms * share_of_8_bits}
    work.attention = ((1 + again) * tokens * layers * attention, 2.5 * tokens * layers * attention)
    in_group = tokens * dims.tp / (passes * in_pass)  # tokens of a pass
    converted = count_layers(
        work, plan, linear_layers(args, dims, in_group, width), layers * passes * in_pass, again, code
    )
    head = args.vocab_size / dims.tp
    work.gemm_bytes += 6 * passes * in_pass / dims.pp * (in_group * (args.dim + head) + args.dim * head)

    # Generated kernels, in numbers of 2 bytes a token and layer: norms, residuals, rotary embedding, SwiGLU; rows of
    # experts are gathered and summed.
    expert_rows = moe.top_k * args.dim if moe else 0
    sent_rows = expert_rows if dims.ep > 1 else 0
    ahead = 11.5 * args.dim + 3 * width + 2.6 * expert_rows + 3.4 * sent_rows
    # Gradients are summed for the tokens of all ranks, before they are sent.
    back = (12.5 + 6 * dims.tp) * args.dim + 6 * width + 4.1 * expert_rows + 5.4 * sent_rows
    by_operation = config.activation_checkpoint.mode == "selective" and not again
    recomputed = 8.0 * args.dim if by_operation else again * ahead
    logits = 3.6 * args.vocab_size / dims.pp
    work.fused_bytes = 2 * tokens * (layers * (ahead + recomputed + back) + logits)

    # Weights: gathered for each pass, or once a step; gradients summed over ranks after each pass.
    reshard = config.parallelism.fsdp_reshard_after_forward
    gathers = 2 * passes * in_pass if reshard == "always" or (reshard == "default" and dims.pp == 1) else 1
    unused = plan.parameters - plan.active_parameters
    of_experts = unused * moe.n_experts / (moe.n_experts - moe.top_k) if unused else 0
    param = ITEM_BYTES[training.mixed_precision_param]
    shares = {
        "fsdp": (plan.parameters - of_experts) / dims.tp / dims.pp,
        "expert_fsdp": of_experts / dims.ep / dims.pp,
    }
    for dimension, share in shares.items():
        ranks, _ = extent(dimension, dims)
        cast = share / ranks * (4 + 3 * param)  # the copy reads float32 and writes into the gathered weight's place
        # One rank has nothing to sum, and copies into float32. A sum in bfloat16 is then copied into float32.
        reduced = ITEM_BYTES[training.mixed_precision_reduce] if ranks * dims.dp_replicate > 1 else 4
        work.other_bytes += (reduced + 4) * share / ranks * passes * (reduced < 4)
        work.gradients += share * passes
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
        asynchronous = config.parallelism.enable_async_tensor_parallel
        once_more = by_operation or again  # the forward pass's gathers
        wire, gathered = find_entry(code.wire, work.precision, 2.0), 0.0
        once, before = 1 + once_more, 1.0
        if rank := getattr(args, "kv_lora_rank", 0):  # latents are gathered in place of attention's input
            before = ((args.q_lora_rank or args.dim) + rank + args.qk_rope_head_dim) / args.dim
        for users, times in (("wq wk wv", before * once), ("w1 w3", once), ("wo", 1), ("w2", 1)):
            in_8_bits = min(converted.get(name, 0.0) for name in users.split())
            gathered += times * (1 - in_8_bits * (1 - wire / 2)) * activations * dims.tp
        scattered = (3 + before + again) * activations * dims.tp
        waited = _seconds("all-gather", gathered, "tp", dims, plan.device)
        waited += _seconds("reduce-scatter", scattered, "tp", dims, plan.device)
        # A collective has as many parts as there are ranks; only the first is waited for.
        hidden = find_entry(code.fused, work.precision) * (1 - 1 / dims.tp) if asynchronous else 0.0
        work.waited += waited * (1 - hidden)
        if training.local_batch_size > in_pass and (moe or not code.sequences_as_one):
            # Parts of several sequences are sorted by sequence.
            work.fused_bytes += 1.6 * (gathered + scattered)
    if dims.ep > 1:
        number = 2 if config.moe.all_to_all_dtype else 4
        exchanged = (number + number / 2 * again) * activations * moe.top_k * config.job.simulate_expert_load
        work.waited += _seconds("all-to-all", exchanged, "ep", dims, plan.device)
    work.waited += sum(line.seconds or 0.0 for line in plan.ranks[0].traffic if line.dimension == "cp")
    return work


def _seconds(collective: str, size: float, dimension: str, dims: ParallelDims, device: PlannedDevice) -> float:
    return min_seconds(*link_bytes(collective, size, *extent(dimension, dims)), device) or 0.0
