"""The loss of each source of a mixture, whose windows are whole rows of a batch."""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchtitan.data import Batch
from torchtitan.engine.engine import Engine
from torchtitan.protocols import IGNORE_INDEX, CrossEntropyFunction


class SourceLosses:
    """Sums the loss of each source over steps, from the engine's forward passes in training.

    Args:
        names: of the sources, in the order of `Batch.sources`.
    """

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        self.names = names
        self._sums = torch.zeros(len(names), 2, device=engine.device.torch_device)
        # Of each micro-batch since `add`: the summed loss of each row on this rank, and how many of its tokens count.
        self._of_rows: list[torch.Tensor] = []
        for stage in engine.pipeline_stages.values():
            stage.by_row = self._by_row

    def _by_row(self, cross_entropy: CrossEntropyFunction, labels: torch.Tensor) -> CrossEntropyFunction:
        """A `LossByRow`. A chunk of logits is given to `cross_entropy` row by row."""
        seq_len, seen = labels.shape[1], 0
        counted = (labels != IGNORE_INDEX).sum(1).float()
        of_rows = torch.stack([torch.zeros_like(counted), counted], 1)
        self._of_rows.append(of_rows)

        def by_row(logits: torch.Tensor, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal seen
            total = torch.zeros((), device=logits.device)
            bounds = [0, *range(seq_len - seen % seq_len, len(chunk), seq_len), len(chunk)]
            for start, end in itertools.pairwise(bounds):
                loss, gradient = cross_entropy(part := logits[start:end], chunk[start:end])
                if gradient.data_ptr() != part.data_ptr():  # else it has overwritten them
                    part.copy_(gradient)
                of_rows[(seen + start) // seq_len, 0] += loss
                total += loss
            seen += len(chunk)
            return total, logits

        return by_row

    def __call__(self, microbatches: Sequence[Batch], due: bool) -> dict[str, float]:
        """Call after each step. If a report is due, `loss/SOURCE`: the mean over its counted tokens since the last
        report, if it had any. Collective then."""
        if self._of_rows:  # else another rank has the last pipeline stage
            sources = torch.tensor([source for batch in microbatches for source in batch.sources])
            self._sums.index_add_(0, sources.to(self._sums.device, non_blocking=True), torch.cat(self._of_rows))
            self._of_rows.clear()
        if not due:
            return {}
        dist.all_reduce(self._sums)  # tensor-parallel ranks have the same, which the mean does not show
        sums = dict(zip(self.names, self._sums.tolist(), strict=True))
        self._sums.zero_()
        return {f"loss/{name}": loss / counted for name, (loss, counted) in sums.items() if counted}
