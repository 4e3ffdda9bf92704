"""Updates that would do harm are skipped, by all ranks together."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.config.training import Training
from torchtitan.errors import TrainingError
from torchtitan.logging import logger

WINDOW = 100  # norms that an outlier is measured by
ENOUGH = 20  # norms without which nothing is an outlier
SHOWN = 8  # ids of samples in a message
HIDDEN = "a number that a low-precision layer multiplies is not finite"


class UpdateGuard:
    """Decides after each backward pass whether the update is done.

    It is not (`skip_nonfinite`) where the loss of any rank, the gradient norm, or a number that a low-precision layer
    has rounded to a finite one is not finite; nor where the norm is above `skip_grad_norm_outliers` times the median of
    the last 100. Without `skip_nonfinite`, such rounding is reported all the same.

    Args:
        training: the section.
        record: gets the step, and of each skipped update reason, gradient norm and sample ids; on rank 0.

    Attributes:
        skipped: updates since the run began, as of the last `read`.
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

    def skips(
        self,
        step: int,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        hidden: torch.Tensor | None,
        sample_ids: list[str],
    ) -> torch.Tensor | None:
        """Above 0 where the update of `step` is to be left out: a scalar on the device, the same on every rank. None
        where nothing is watched. Collective.

        It waits for the device only where outliers are looked for: whether a value is finite, the device can tell by
        itself. What was left out is counted and said by `read`.

        Args:
            loss: this rank's, a scalar; 0 where it has none.
            grad_norm: over all ranks, a scalar.
            hidden: whether this rank's layers have rounded what is not finite; None where none can.
            sample_ids: of what this rank has read.
        """
        if not self.nonfinite and self.factor is None and hidden is None:
            return None
        faults = torch.stack([torch.isfinite(loss).logical_not(), torch.zeros_like(loss) if hidden is None else hidden])
        faults = faults.float()
        dist.all_reduce(faults)
        self._unread.append((step, faults, grad_norm, sample_ids))
        if self.factor is not None:
            before = self.skipped
            return faults.new_tensor(float(self.read() > before))
        if len(self._unread) == WINDOW:
            self.read()
        return torch.maximum(faults.amax(), torch.isfinite(grad_norm).logical_not().float()) if self.nonfinite else None

    def read(self) -> int:
        """Looks at the steps since it was last called, and says which updates were left out. Waits for the device.
        Collective.

        Returns:
            How many since the run began.

        Raises:
            TrainingError: `max_skips_in_a_row` are reached.
        """
        unread, self._unread = self._unread, []
        if unread:
            values = torch.stack([torch.cat([faults, norm.to(faults).view(1)]) for _, faults, norm, _ in unread])
            for (step, _, _, sample_ids), (loss, hidden, norm) in zip(unread, values.tolist(), strict=True):
                self._judge(step, loss == 0, hidden == 0, norm, sample_ids)
        return self.skipped

    def _judge(self, step: int, finite_loss: bool, finite_layers: bool, norm: float, sample_ids: list[str]) -> None:
        reason = self._reason(finite_loss, finite_layers, norm)
        if not finite_layers and not self.nonfinite and dist.get_rank() == 0:
            logger.warning(f"step {step}: {HIDDEN}, and training.skip_nonfinite is off: it was rounded to a finite one")
        if not reason:
            self.in_a_row = 0
            return
        self.skipped += 1
        self.in_a_row += 1
        all_sample_ids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_sample_ids, sample_ids)
        ids = list(dict.fromkeys(sample for part in all_sample_ids for sample in part))
        if dist.get_rank() == 0:
            logger.warning(f"step {step}: update skipped, {reason}; {self.skipped} so far")
            self.record(step, {"reason": reason, "grad_norm": norm if math.isfinite(norm) else None, "ids": ids})
        if self.in_a_row >= self.most_in_a_row:
            raise TrainingError(
                f"the updates of steps {step - self.in_a_row + 1} to {step} were all skipped (the last: {reason}), "
                f"which is training.max_skips_in_a_row. Samples of the last: {', '.join(ids[:SHOWN])}"
                f"{', ...' if len(ids) > SHOWN else ''}; skipped_updates.jsonl in the dump folder has all. Look at "
                "them, lower optimizer.lr, or go back with --checkpoint.load_step."
            )

    def _reason(self, finite_loss: bool, finite_layers: bool, norm: float) -> str:
        if self.nonfinite and not finite_loss:
            return "the loss is not finite"
        if not math.isfinite(norm):
            return "the gradient norm is not finite" if self.nonfinite else ""
        if self.nonfinite and not finite_layers:
            return HIDDEN
        if self.factor is None:
            return ""
        usual = statistics.median(self.norms) if len(self.norms) >= ENOUGH else math.inf
        self.norms.append(norm)  # an outlier too, so that a lasting change becomes the usual
        if norm > self.factor * usual:
            return f"the gradient norm {norm:.3g} is above {self.factor:g} times the usual {usual:.3g}"
        return ""

    def state_dict(self) -> dict[str, Any]:
        """JSON: with it a resumed run skips what the uninterrupted one would have. Collective, as `read`."""
        self.read()
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "norms": list(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])
        self.norms.extend(map(float, state["norms"]))
