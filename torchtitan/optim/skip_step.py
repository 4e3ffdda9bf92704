"""Skips optimizer steps that would harm the model, on all ranks together."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchtitan.config.training import Training
from torchtitan.errors import TrainingError
from torchtitan.logging import logger
from torchtitan.parallel.object_collectives import all_gather_object

WINDOW = 100  # recent gradient norms whose median defines an outlier
ENOUGH = 20  # nothing is an outlier among fewer norms
MOST_SAMPLE_IDS = 8  # sample ids in a message
SATURATED = "an operand of a low-precision GEMM is not finite"


class Skip(NamedTuple):
    """Whether an optimizer step is skipped; the same on every rank."""

    device: torch.Tensor | None = None  # a scalar, above 0 if so, which fused optimizers read; None without any check
    host: bool = False  # whether the host knows that it is skipped


ShouldSkip = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor | None, list[str]], Skip]
"""`UpdateGuard.should_skip`, or a plan's simulation of it."""


class UpdateGuard:
    """Decides after each backward pass whether to skip the optimizer step.

    With `skip_nonfinite`, it skips if the loss of any rank or the gradient norm is not finite, or if a low-precision
    layer has saturated a nonfinite number. With `skip_grad_norm_outliers`, it skips if the norm exceeds that factor
    times the median of the last 100. Without `skip_nonfinite`, it still warns of saturated infinities.

    Args:
        record: called on rank 0 for each skipped update, with its step, reason, gradient norm and sample ids.

    Attributes:
        skipped: updates skipped since the run began, as of the last `read`.
    """

    def __init__(self, training: Training, record: Callable[[int, Mapping[str, Any]], None]) -> None:
        self.nonfinite = training.skip_nonfinite
        self.factor = training.skip_grad_norm_outliers
        self.most_in_a_row = training.max_skips_in_a_row
        self.record = record
        self.skipped = 0
        self.in_a_row = 0
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self._unread: list[tuple[int, torch.Tensor, torch.Tensor, list[str]]] = []

    def should_skip(
        self,
        step: int,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        saturated: torch.Tensor | None,
        sample_ids: list[str],
    ) -> Skip:
        """Whether to skip the optimizer step of `step`. Collective.

        Waits for the device only with `skip_grad_norm_outliers`, since the median is on the host. Otherwise the device
        alone decides, and the host learns from `read` what was skipped.

        Args:
            loss: this rank's loss, a scalar; 0 if it has none.
            saturated: whether layers on this rank have saturated an infinity or NaN; None if no layer can.
        """
        if not self.nonfinite and self.factor is None and saturated is None:
            return Skip()
        no_flag = torch.zeros_like(loss)
        faults = torch.stack([torch.isfinite(loss).logical_not(), no_flag if saturated is None else saturated])
        faults = faults.float()
        dist.all_reduce(faults)
        faults = torch.cat([faults, torch.isfinite(grad_norm).logical_not().to(faults).view(1)])
        self._unread.append((step, faults, grad_norm, sample_ids))
        if self.factor is not None:
            before = self.skipped
            skips = self.read() > before
            return Skip(faults.new_tensor(float(skips)), skips)
        if len(self._unread) == WINDOW:
            self.read()
        return Skip(faults.amax() if self.nonfinite else None)

    def read(self) -> int:
        """Waits for the decisions since the last call, and logs and records each skipped update. Returns how many there
        were since the run began; raises a TrainingError if `max_skips_in_a_row` is reached. Collective."""
        unread, self._unread = self._unread, []
        if unread:
            values = torch.stack([torch.cat([faults, norm.to(faults).view(1)]) for _, faults, norm, _ in unread])
            for (step, _, _, sample_ids), (*faults, norm) in zip(unread, values.tolist(), strict=True):
                self._judge(step, [fault > 0 for fault in faults], norm, sample_ids)
        return self.skipped

    def _judge(self, step: int, faults: Sequence[bool], norm: float, sample_ids: list[str]) -> None:
        reason = self._reason(faults, norm)
        if faults[1] and not self.nonfinite and dist.get_rank() == 0:
            logger.warning(f"step {step}: {SATURATED}; it was saturated, because training.skip_nonfinite is off")
        if not reason:
            self.in_a_row = 0
            return
        self.skipped += 1
        self.in_a_row += 1
        ids = list(dict.fromkeys(sample for rank_ids in all_gather_object(sample_ids) for sample in rank_ids))
        if dist.get_rank() == 0:
            logger.warning(f"step {step}: update skipped, {reason}; {self.skipped} so far")
            self.record(step, {"reason": reason, "grad_norm": norm if math.isfinite(norm) else None, "ids": ids})
        if self.in_a_row >= self.most_in_a_row:
            raise TrainingError(
                f"the updates of steps {step - self.in_a_row + 1} to {step} were all skipped (the last: {reason}), "
                f"which reaches training.max_skips_in_a_row. Samples of the last: {', '.join(ids[:MOST_SAMPLE_IDS])}"
                f"{', ...' if len(ids) > MOST_SAMPLE_IDS else ''}; skipped_updates.jsonl in the dump folder lists all. "
                "Inspect them, lower optimizer.lr, or go back with --checkpoint.load_step."
            )

    def _reason(self, faults: Sequence[bool], norm: float) -> str:
        """Why the step is skipped; "" if it is not. `faults` are what the device decides by."""
        bad_loss, saturated, bad_norm = faults
        if self.nonfinite and (bad_loss or bad_norm):
            return f"the {'loss' if bad_loss else 'gradient norm'} is not finite"
        if self.nonfinite and saturated:
            return SATURATED
        if self.factor is None or bad_norm:
            return ""
        usual = statistics.median(self.norms) if len(self.norms) >= ENOUGH else math.inf
        self.norms.append(norm)  # include outliers, so that a lasting change becomes normal
        if norm > self.factor * usual:
            return f"the gradient norm {norm:.3g} is above {self.factor:g} times the recent median {usual:.3g}"
        return ""

    def state_dict(self) -> dict[str, Any]:
        """JSON. With it, a resumed run skips the same steps as an uninterrupted one. Collective, like `read`."""
        self.read()
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "norms": list(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])
        self.norms.extend(map(float, state["norms"]))
