"""Log-likelihoods of requests, under every layout.

Requests share rows and are kept apart by document ids, so rows are almost full and have the same length. The ranks
divide the rows as they divide a training batch. The likelihood of each token is read where the model computes its loss:
the module that has `cross_entropy` gets `TokenScores` in its place for the time of a forward pass.
"""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.data import Batch
from torchtitan.engine.engine import Engine
from torchtitan.engine.forward import forward
from torchtitan.errors import ConfigError
from torchtitan.logging import Waiting
from torchtitan.models.loss import soft_cap
from torchtitan.parallel.collectives import all_gather
from torchtitan.parallel.fsdp import reshard
from torchtitan.protocols import IGNORE_INDEX, Decoder
from torchtitan.tools.evaluation.requests import Request, Score, pack_requests

USUAL_ROW = 1024  # tokens; where rows may be shorter than a sequence in training
ROW_MULTIPLE = 64
ShouldStop = Callable[[], bool]
NOT_FINITE = -2  # in the place of the most likely token, where the logits say none
NOBODY = -1  # owner of a position that belongs to no request's scored tokens


class Stopped(Exception):
    """The run is to stop, and not to wait for answers."""


class TokenScores:
    """Takes the place of a model's cross-entropy, and keeps what evaluation needs of each labelled position: of the
    `labels` in the batch, a view says by its offset which it covers. The ranks of `mesh` shard the vocabulary."""

    def __init__(self, labels: int, mesh: DeviceMesh | None, device: torch.device) -> None:
        self._group = None if mesh is None else mesh.get_group().group_name
        self.log_likelihoods = torch.zeros(labels, dtype=torch.float64, device=device)
        # The most likely token, int64; NOT_FINITE where a logit is; -1 where nothing was computed.
        self.best = torch.full((labels,), -1, device=device)

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, z_loss: float | None = None, softcap: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counted = (labels != IGNORE_INDEX).nonzero()[:, 0]
        if len(counted):
            chosen = soft_cap(logits[counted], softcap)
            if self._group is not None:
                chosen = all_gather(chosen, 1, self._group)
            log_probabilities = torch.log_softmax(chosen, -1, dtype=torch.float32)
            places = counted + labels.storage_offset()
            of_label = log_probabilities.gather(-1, labels[counted].unsqueeze(-1))[:, 0]
            self.log_likelihoods[places] = of_label.double()
            finite = log_probabilities.amax(-1).isfinite()  # NaN if any is
            self.best[places] = chosen.argmax(-1).where(finite, NOT_FINITE)
        return torch.zeros((), device=logits.device), logits


@dataclass(frozen=True)
class Scorer:
    """A model to ask. What it answers is the same on every rank, and asking is collective. Raises `Stopped` if the run
    is to stop before all answers are there."""

    forward: Callable[[Batch], Any]  # passes a batch through the model, or through the stages of its pipeline
    head: nn.Module | None  # the module with `cross_entropy`; None if it is on another rank
    pipeline_stages: Sequence[nn.Module]  # resharded at the end
    device: torch.device
    longest: int  # tokens that the model sees at once
    fixed_rows: bool  # every row must have as many: pipelines, context parallelism and compiled code are for one length
    rows: Callable[[int], int]  # number of rows in a batch of a data-parallel rank, by their length in tokens
    name: str  # in messages
    dp_rank: int = 0
    dp_size: int = 1
    positions: torch.Tensor | None = None  # positions of this rank's tokens in a row; None for all of them
    tensor_mesh: DeviceMesh | None = None  # the ranks that shard the vocabulary; None if there are none

    def score(self, requests: Sequence[Request], should_stop: ShouldStop = lambda: False) -> list[Score]:
        def of_labels(scores: TokenScores, labels: torch.Tensor) -> torch.Tensor:
            return torch.stack([scores.log_likelihoods, (scores.best != labels).double()], 1)

        totals = self._totals(requests, 2, of_labels, should_stop)
        return [
            Score(log_likelihood, missed < 0.5, request.scored)
            for (log_likelihood, missed), request in zip(totals, requests, strict=True)
        ]

    def next_tokens(self, texts: Sequence[Sequence[int]], should_stop: ShouldStop = lambda: False) -> list[int]:
        """The most likely token after each text, or NOT_FINITE."""
        requests = [Request(array("i", [*text[-self.longest :], 0]), 1) for text in texts]
        totals = self._totals(requests, 1, lambda scores, _: scores.best.double().unsqueeze(-1), should_stop)
        return [round(token) for (token,) in totals]

    def _totals(
        self,
        requests: Sequence[Request],
        columns: int,
        of_labels: Callable[[TokenScores, torch.Tensor], torch.Tensor],
        should_stop: ShouldStop,
    ) -> list[list[float]]:
        """The sum of `of_labels`, (labels, columns) float64 for the labels of a batch, over each request's labels."""
        totals = torch.zeros(len(requests), columns, dtype=torch.float64, device=self.device)
        lengths = [len(request.tokens) - 1 for request in requests]
        length = self._row_length(max(lengths), sum(lengths))
        batches = list(self._batches(pack_requests(requests, length), self.rows(length)))
        for numbers in Waiting.over(batches, "evaluation", "batches"):
            if should_stop():
                reshard(self.pipeline_stages)
                raise Stopped
            batch, owners = _build_batch(requests, numbers, length)
            scores, labels = self._run(batch), batch.labels
            if scores is None:
                continue
            if self.positions is not None:
                labels, owners = labels[:, self.positions], owners[:, self.positions]
            labels, owners = labels.flatten().to(self.device), owners.flatten().to(self.device)
            counted = owners != NOBODY
            if (scores.best[counted] == -1).any():
                raise ConfigError(self._unsuitable)
            totals.index_add_(0, owners[counted], of_labels(scores, labels)[counted])
        reshard(self.pipeline_stages)
        dist.all_reduce(totals)
        if self.tensor_mesh is not None:
            totals /= self.tensor_mesh.size()  # each of these ranks has the same totals
        return totals.tolist()

    @torch.no_grad()
    def _run(self, batch: Batch) -> TokenScores | None:
        """The scores of a batch's labels at this rank's positions, flattened; None if another rank has them."""
        if self.head is None:
            self.forward(batch)
            return None
        if not hasattr(self.head, "cross_entropy"):
            raise ConfigError(self._unsuitable)
        ranks = batch.tokens.shape[1] // len(self.positions) if self.positions is not None else 1
        scores = TokenScores(batch.labels.numel() // ranks, self.tensor_mesh, self.device)
        with patch.object(self.head, "cross_entropy", scores):
            self.forward(batch)
        return scores

    @property
    def _unsuitable(self) -> str:
        return (
            f"{self.name} does not compute its loss with `self.cross_entropy` of logits and a view of the labels, as "
            "Llama does, so its predictions cannot be read; change it."
        )

    def _row_length(self, longest: int, total: int) -> int:
        """Positions in a row, for requests of at most `longest` positions, `total` together."""
        if self.fixed_rows:
            return self.longest
        # Sequence parallelism divides rows; `longest`, as a sequence of the run, can be divided.
        multiple = math.lcm(ROW_MULTIPLE, 1 if self.tensor_mesh is None else self.tensor_mesh.size())
        return min(self.longest, -(-max(longest, min(total, USUAL_ROW)) // multiple) * multiple)

    def _batches(self, rows: list[list[int]], size: int) -> Iterator[list[list[int]]]:
        """This rank's rows, `size` at a time: as many batches on every rank, if need be with empty rows."""
        together = size * self.dp_size
        least = size if self.fixed_rows else 1
        for first in range(0, len(rows), together):
            mine = rows[first : first + together][self.dp_rank * size :][:size]
            yield mine + [[]] * (least - len(mine))


def scorer_of_run(engine: Engine) -> Scorer:
    """Asks the model that a run trains, in its layout."""
    config, dims, device = engine.config, engine.meshes.dims, engine.device.torch_device
    return Scorer(
        forward=lambda batch: forward(engine, batch),
        head=next(
            (stage for stage in engine.pipeline_stages.values() if getattr(stage, "output", stage) is not None), None
        ),
        pipeline_stages=list(engine.pipeline_stages.values()),
        device=device,
        longest=config.training.seq_len,
        fixed_rows=dims.pp > 1 or dims.cp > 1 or config.training.compile,
        rows=lambda _: config.validation.local_batch_size,
        name=f"evaluation.tasks, validation.sample_prompts: the model {config.model.name} {config.model.flavor}",
        dp_rank=engine.meshes.dp_rank,
        dp_size=dims.dp,
        positions=engine.positions if dims.cp > 1 else None,
        tensor_mesh=engine.meshes.mesh["tp"] if dims.tp > 1 else None,
    )


def scorer_of_model(model: Decoder, longest: int, batch_tokens: int, name: str) -> Scorer:
    """Asks a model that this process holds as a whole, `batch_tokens` at a time; a longer row alone."""
    device = next(model.parameters()).device

    def run(batch: Batch) -> torch.Tensor:
        assert batch.document_ids is not None
        return model(batch.tokens.to(device), batch.labels.to(device), document_ids=batch.document_ids.to(device))

    return Scorer(run, model, [], device, longest, False, lambda length: max(1, batch_tokens // length), name)


def _build_batch(requests: Sequence[Request], rows: Sequence[Sequence[int]], length: int) -> tuple[Batch, torch.Tensor]:
    """A batch of rows, and for each label the number of the request whose score it counts for, or NOBODY."""
    shape = len(rows), length
    tokens, documents = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    labels, owners = torch.full(shape, IGNORE_INDEX), torch.full(shape, NOBODY)
    for row, numbers in enumerate(rows):
        start = 0
        for place, number in enumerate(numbers, start=1):
            request = requests[number]
            ids = torch.tensor(request.tokens, dtype=torch.int64)
            end = start + len(ids) - 1
            tokens[row, start:end] = ids[:-1]
            documents[row, start:end] = place  # 0 is what follows the last request
            labels[row, end - request.scored : end] = ids[-request.scored :]
            owners[row, end - request.scored : end] = number
            start = end
    return Batch(tokens, labels, documents, None), owners
