"""`job.plan_suggest`: the fastest settings that fit, on the same number of devices with the same global batch.

The step of a setting is estimated by formula, in milliseconds: a compiled lowering of each would take a minute. Its
memory is simulated, as in a plan, from the fastest setting on, until enough are found that fit.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.checks.config_checks import check
from torchtitan.config import JobConfig
from torchtitan.config.system import ActivationCheckpoint
from torchtitan.errors import ConfigError, aligned
from torchtitan.hardware import find_gpu
from torchtitan.logging import Waiting, logger
from torchtitan.parallel.dims import ParallelDims
from torchtitan.plan.devices import NODE, PlannedDevice, extent, link_bytes, min_seconds
from torchtitan.plan.render import GIB
from torchtitan.plan.result import Plan
from torchtitan.plan.step_model import RATES, Rates, Work, seconds_by_part

SUGGESTIONS = 5
MEMORY = 0.9  # of the device's: the rest is for what a plan does not count
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# From the lightest in memory to the heaviest.
CHECKPOINTING: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "selective", "selective_ac_option": "op"},
    {"mode": "none"},
]


@dataclass(frozen=True)
class Candidate:
    """A setting, and its step in seconds."""

    config: JobConfig
    dims: ParallelDims
    seconds: float

    @property
    def weight(self) -> tuple[int, bool, int]:
        """What makes it heavy: recomputation, weights that stay gathered, sequences at a time."""
        checkpointing = self.config.activation_checkpoint
        kept = self.config.parallelism.fsdp_reshard_after_forward == "never"
        mode = next(n for n, keys in enumerate(CHECKPOINTING) if keys["mode"] == checkpointing.mode)
        return mode, kept, self.config.training.local_batch_size

    def is_lighter(self, other: "Candidate") -> bool:
        """Whether it needs no more memory for sure, on the same layout."""
        return self.dims == other.dims and all(a <= b for a, b in zip(self.weight, other.weight, strict=True))

    def flags(self) -> dict[str, str]:
        """That make the setting, by key."""
        config, checkpointing = self.config, self.config.activation_checkpoint
        option = {"activation_checkpoint.selective_ac_option": "op"} if checkpointing.mode == "selective" else {}
        return {
            "parallelism.data_parallel_shard_degree": str(self.dims.dp_shard),
            "parallelism.tensor_parallel_degree": str(self.dims.tp),
            "parallelism.expert_parallel_degree": str(self.dims.ep),
            "activation_checkpoint.mode": checkpointing.mode,
            **option,
            "parallelism.fsdp_reshard_after_forward": config.parallelism.fsdp_reshard_after_forward,
            "training.local_batch_size": str(config.training.local_batch_size),
        }


Peak = Callable[[JobConfig, ParallelDims], float]


class Peaks:
    """Bytes of candidates: `peak` simulates them for one and two sequences at a time, in which they are affine. From
    `limit` bytes on it does not matter how many they are."""

    def __init__(self, peak: Peak, limit: float) -> None:
        self.peak, self.limit = peak, limit
        self.known: dict[tuple[object, ...], float] = {}

    def __call__(self, it: Candidate) -> float:
        reshard, local = it.config.parallelism.fsdp_reshard_after_forward, it.config.training.local_batch_size
        if it.dims.pp > 1:
            return self._simulated(it, reshard, local)
        one = self._simulated(it, "default", 1)
        if one > self.limit:
            return one
        if local == 1:
            return self._simulated(it, reshard, 1)
        two = self._simulated(it, "default", 2)
        return self._simulated(it, reshard, 1) + (local - 1) * (two - one)

    def _simulated(self, it: Candidate, reshard: Any, local: int) -> float:
        key = (it.dims, it.config.activation_checkpoint, reshard, local)
        if key not in self.known:
            config = replace(
                it.config,
                parallelism=replace(it.config.parallelism, fsdp_reshard_after_forward=reshard),
                training=replace(it.config.training, local_batch_size=local),
            )
            self.known[key] = self.peak(config, it.dims)
        return self.known[key]


def suggestions(plan: Plan, args: Any, config: JobConfig, rows: int, peak: Peak) -> str:
    """A table of the fastest settings that fit, and the flags of each. `plan` is of the configured setting, for the
    same devices and global batch; `peak` simulates the bytes of a setting."""
    limit = MEMORY * plan.device.memory_bytes
    bytes_of = Peaks(peak, limit)
    fitting: list[tuple[Candidate, float]] = []
    heavy: list[Candidate] = []
    with Waiting("plan: memory of the fastest settings", unit="simulations", count=lambda: len(bytes_of.known)):
        for candidate in sorted(candidates(plan, args, config, rows), key=lambda it: (it.seconds, it.weight)):
            if any(other.is_lighter(candidate) for other in heavy):
                continue
            size = bytes_of(candidate)
            if size > limit:
                heavy.append(candidate)
            elif not any(other.is_lighter(candidate) for other, _ in fitting):  # as fast with less
                fitting.append((candidate, size))
            if len(fitting) == SUGGESTIONS:
                break
    if not fitting:
        return f"No setting of these degrees fits into {MEMORY:.0%} of the device's memory; use more devices."
    columns = ["", "layout", "checkpointing", "reshard", "local batch", "peak, GiB", "step, s"]
    lines = [columns]
    for number, (it, size) in enumerate(fitting, 1):
        flags = it.flags()
        mode = flags.get("activation_checkpoint.selective_ac_option", flags["activation_checkpoint.mode"])
        reshard, local = flags["parallelism.fsdp_reshard_after_forward"], flags["training.local_batch_size"]
        lines.append([str(number), str(it.dims), mode, reshard, local, f"{size / GIB:.1f}", f"{it.seconds:.3g}"])
    compiled = "" if config.training.compile else " --training.compile"
    pasted = [
        f"{number}: {' '.join(f'--{key}={value}' for key, value in it.flags().items())}{compiled}"
        for number, (it, _) in enumerate(fitting, 1)
    ]
    return (
        f"The fastest settings that fit into {MEMORY:.0%} of {plan.device.name}, on {plan.world_size} with "
        f"{rows} sequences per step; peaks are simulated, steps estimated by formula, compiled "
        f"(a plan of one of them says what it is expected to take)\n{aligned(lines, left=0)}\n" + "\n".join(pasted)
    )


def candidates(plan: Plan, args: Any, config: JobConfig, rows: int) -> Iterator[Candidate]:
    """All settings that a run would accept. Replicas, context parallelism and pipelines stay as configured."""
    powers = [2**n for n in range(plan.world_size.bit_length())]
    experts = 1 if args.moe is None else args.moe.n_experts
    batches = [n for n in powers if n <= rows]
    degrees = itertools.product([n for n in powers if n <= NODE], [n for n in powers if n <= experts])
    level = logger.level
    logger.setLevel(logging.ERROR)  # the checks would warn of settings that nobody chose
    try:
        for (tp, ep), keys, reshard, local in itertools.product(degrees, CHECKPOINTING, ("default", "never"), batches):
            parallelism = replace(
                config.parallelism,
                data_parallel_shard_degree=-1,
                tensor_parallel_degree=tp,
                expert_parallel_degree=ep,
                fsdp_reshard_after_forward=reshard,
            )
            checkpointing: ActivationCheckpoint = replace(config.activation_checkpoint, **keys)
            training = replace(config.training, local_batch_size=local, global_batch_size=rows)
            tried = replace(config, parallelism=parallelism, activation_checkpoint=checkpointing, training=training)
            try:
                dims = check(tried, plan.world_size, plan.device.type)
            except ConfigError:
                continue
            if reshard == "default" or dims.fsdp > dims.pp == 1:  # else the default keeps them, too
                yield Candidate(tried, dims, step_seconds(plan, args, tried, dims, rows))
    finally:
        logger.setLevel(level)


def rates_of(device: PlannedDevice) -> Rates:
    """Of a device without known rates: its peak, attention at half of it, and 250 FLOPs in the time of a byte."""
    peak = device.peak_flops or math.inf
    gemm = dict.fromkeys(("bf16", "float32"), peak) | {"int8": 2 * peak}
    return RATES.get(find_gpu(device.name)) or Rates(gemm, (peak / 2, peak / 2), peak / 250)


def step_seconds(plan: Plan, args: Any, config: JobConfig, dims: ParallelDims, rows: int) -> float:
    """Seconds of a compiled step, from counts by hand of what a layer computes, copies and sends."""
    training, mode = config.training, config.activation_checkpoint.mode
    layers = args.n_layers / dims.pp
    tokens = rows * training.seq_len / (dims.dp * dims.cp * dims.tp)  # of a rank; with TP, of its part of the sequences
    work, waits, runs_beside = Work(), 0.0, 0.0

    # Parameters that a token meets, and the inner width of its feed-forward.
    moe = args.moe
    attention = 2 * args.n_heads * args.head_dim * training.seq_len  # FLOPs of a token's forward pass, causal
    multiplied = plan.flops_per_token / 6 - args.n_layers * attention
    in_layer = (multiplied - args.vocab_size * args.dim) / args.n_layers
    width = (in_layer / args.dim - 2 * args.head_dim * (args.n_heads + args.n_kv_heads)) / 3

    # GEMMs and attention: forward, twice or 2.5 times that backward, and forward again without the last GEMM of a dense
    # layer, which no gradient needs.
    again = mode == "full"
    repeated = again * args.n_layers * (in_layer - (0 if moe else args.dim * width))
    gemms = tokens * (6 * multiplied + 2 * repeated) / dims.pp
    rank = plan.ranks[0]
    in_8_bits = gemms * rank.flops_8bit / max(rank.flops + rank.flops_8bit, 1)
    work.gemms = {"bf16": gemms - in_8_bits, "int8": in_8_bits}
    work.attention = ((1 + again) * tokens * layers * attention, 2.5 * tokens * layers * attention)

    # Generated kernels, in numbers of 2 bytes a token and layer: norms, residuals, rotary embedding, SwiGLU; rows of
    # experts are gathered and summed.
    expert_rows = moe.top_k * args.dim if moe else 0
    sent_rows = expert_rows if dims.ep > 1 else 0
    ahead = 11.5 * args.dim + 3 * width + 2.6 * expert_rows + 3.4 * sent_rows
    # Gradients are summed for the tokens of all ranks, before they are sent.
    back = (12.5 + 6 * dims.tp) * args.dim + 6 * width + 4.1 * expert_rows + 5.4 * sent_rows
    recomputed = {"none": 0.0, "selective": 8.0 * args.dim, "full": ahead}[mode]
    work.fused_bytes = 2 * tokens * layers * (ahead + recomputed + back)

    # Weights: gathered for each pass, or once a step; gradients summed over ranks after each pass.
    passes = rows // (training.local_batch_size * dims.dp)
    microbatches = 1
    if dims.pp > 1:
        microbatches = training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
    reshard = config.parallelism.fsdp_reshard_after_forward
    gathers = 2 * passes * microbatches if reshard == "always" or (reshard == "default" and dims.pp == 1) else 1
    unused = plan.parameters - plan.active_parameters
    of_experts = unused * moe.n_experts / (moe.n_experts - moe.top_k) if unused else 0
    param, reduced = (BYTES[name] for name in (training.mixed_precision_param, training.mixed_precision_reduce))
    shares = {
        "fsdp": (plan.parameters - of_experts) / dims.tp / dims.pp,
        "expert_fsdp": of_experts / dims.ep / dims.pp,
    }
    for dimension, share in shares.items():
        ranks, _ = extent(dimension, dims)
        if ranks > 1:
            cast = share / ranks * (4 + 3 * param)  # from float32, and copied into its place
            work.other_bytes += (2 * param * share + cast) * gathers + (param + reduced) * share * passes
            runs_beside += _seconds("all-gather", param * share * gathers, dimension, dims, plan.device)
            runs_beside += _seconds("reduce-scatter", reduced * share * passes, dimension, dims, plan.device)
        work.update_bytes += 40 * share / ranks  # AdamW reads four numbers and writes three; clipping, three more
        if dims.dp_replicate > 1:
            runs_beside += _seconds("all-reduce", reduced * share / ranks, "dp_replicate", dims, plan.device)

    # Activations: of TP before and after attention and the feed-forward, of experts to them and back.
    activations = 2 * layers * tokens * args.dim
    if dims.tp > 1:
        gathers, reductions = 4 + (0 if mode == "none" else 2), 4 + again
        waits += _seconds("all-gather", gathers * activations * dims.tp, "tp", dims, plan.device)
        waits += _seconds("reduce-scatter", reductions * activations * dims.tp, "tp", dims, plan.device)
        if training.local_batch_size > microbatches and config.parallelism.enable_async_tensor_parallel:
            # Parts of several sequences are sorted by sequence.
            work.fused_bytes += 1.6 * (gathers + reductions) * activations * dims.tp
    if dims.ep > 1:
        number = 2 if config.moe.all_to_all_dtype else 4
        sent = (number + number / 2 * again) * activations * moe.top_k * config.job.simulate_expert_load
        waits += _seconds("all-to-all", sent, "ep", dims, plan.device)
    waits += sum(line.seconds or 0.0 for line in rank.traffic if line.dimension == "cp")
    seconds = sum(seconds_by_part(work, rates_of(plan.device), waits, runs_beside).values())
    return seconds * (microbatches + dims.pp - 1) / microbatches


def _seconds(kind: str, size: float, dimension: str, dims: ParallelDims, device: PlannedDevice) -> float:
    return min_seconds(*link_bytes(kind, size, *extent(dimension, dims)), device) or 0.0
