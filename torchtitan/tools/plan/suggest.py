"""`job.plan_suggest`: the fastest settings that fit, on the same number of devices with the same global batch.

The step of a setting is estimated by formula. Its memory is simulated, as in a plan, from the fastest setting on, until
enough are found that fit.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.checks.config_checks import check
from torchtitan.config import JobConfig
from torchtitan.errors import ConfigError, aligned
from torchtitan.logging import Waiting, logger
from torchtitan.parallel.dims import ParallelDims
from torchtitan.tools.plan.devices import NODE
from torchtitan.tools.plan.render import GIB
from torchtitan.tools.plan.result import Plan
from torchtitan.tools.plan.step_model import step_seconds

SUGGESTIONS = 5
MEMORY = 0.9  # share of the device's memory: the rest is for what a plan does not count
# The lightest in memory comes first.
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
        """Whether it certainly needs no more memory, on the same layout."""
        return self.dims == other.dims and all(a <= b for a, b in zip(self.weight, other.weight, strict=True))

    def flags(self) -> dict[str, str]:
        """The flags of the setting, by key."""
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


PeakMemory = Callable[[JobConfig, ParallelDims], float]


class Peaks:
    """Bytes of candidates: `peak` simulates them for one and two sequences at a time, in which they are affine. From
    `limit` bytes on it does not matter how many they are."""

    def __init__(self, peak: PeakMemory, limit: float) -> None:
        self.peak, self.limit = peak, limit
        self.known: dict[tuple[object, ...], float] = {}

    def __call__(self, it: Candidate) -> float:
        reshard, local = it.config.parallelism.fsdp_reshard_after_forward, it.config.training.local_batch_size
        if it.dims.pp > 1:
            return self._simulated(it, reshard, local)
        lightest = self._simulated(it, "default", 1)
        if lightest > self.limit:
            return lightest
        per_sequence = self._simulated(it, "default", 2) - lightest if local > 1 else 0.0
        return self._simulated(it, reshard, 1) + (local - 1) * per_sequence

    def _simulated(self, it: Candidate, reshard: Any, local: int) -> float:
        key = (it.dims, it.config.activation_checkpoint, reshard, local)
        if key not in self.known:
            config = it.config.changed(
                parallelism={"fsdp_reshard_after_forward": reshard}, training={"local_batch_size": local}
            )
            self.known[key] = self.peak(config, it.dims)
        return self.known[key]


def suggestions(plan: Plan, args: Any, config: JobConfig, rows: int, peak: PeakMemory) -> str:
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
            elif not any(other.is_lighter(candidate) for other, _ in fitting):  # unless another is as fast with less
                fitting.append((candidate, size))
            if len(fitting) == SUGGESTIONS:
                break
    if not fitting:
        return f"No setting of these degrees fits into {MEMORY:.0%} of the device's memory; use more devices."
    lines = [["", "layout", "checkpointing", "reshard", "local batch", "peak, GiB", "step, s"]]
    pasted = []
    compiled = "" if config.training.compile else " --training.compile"
    for number, (it, size) in enumerate(fitting, 1):
        flags = it.flags()
        mode = flags.get("activation_checkpoint.selective_ac_option", flags["activation_checkpoint.mode"])
        reshard, local = flags["parallelism.fsdp_reshard_after_forward"], flags["training.local_batch_size"]
        numbers = f"{size / GIB:.1f}", f"{it.seconds:.3g}"
        lines.append([str(number), str(it.dims), mode, reshard, local, *numbers])
        pasted.append(f"{number}: {' '.join(f'--{key}={value}' for key, value in flags.items())}{compiled}")
    return (
        f"The fastest settings that fit into {MEMORY:.0%} of {plan.device.name}, on {plan.world_size} with "
        f"{rows} sequences per step; peaks are simulated, steps estimated by formula, compiled\n"
        f"{aligned(lines, left=0)}\n" + "\n".join(pasted)
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
            parallelism = {
                "data_parallel_shard_degree": -1,
                "tensor_parallel_degree": tp,
                "expert_parallel_degree": ep,
                "fsdp_reshard_after_forward": reshard,
            }
            training = {"local_batch_size": local, "global_batch_size": rows}
            tried = config.changed(parallelism=parallelism, activation_checkpoint=keys, training=training)
            try:
                dims = check(tried, plan.world_size, plan.device.type)
            except ConfigError:
                continue
            if reshard == "default" or dims.fsdp > dims.pp == 1:  # else the default keeps them, too
                yield Candidate(tried, dims, step_seconds(plan, args, tried, dims, rows))
    finally:
        logger.setLevel(level)
