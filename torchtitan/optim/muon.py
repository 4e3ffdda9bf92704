"""Muon (kellerjordan.github.io/posts/muon): momentum, orthogonalized, for the matrices of a model under any layout.

Each update needs complete matrices, while a rank holds shards. So matrices are divided among the ranks
(`matrix_owners`): the momentum is updated shard by shard, an owner orthogonalizes it, and every rank subtracts its part
of the result. Exchanges of one bucket overlap with the orthogonalization of another.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from torchtitan.optim.low_bit import LowBitOptimizer
from torchtitan.optim.matrix_owners import (
    BUCKET,
    Bucket,
    Exchange,
    Part,
    Sharding,
    buckets,
    group_of,
    numbers,
    sharding_of,
)
from torchtitan.optim.orthogonalize import QUINTIC, Polynomial, flops, orthogonalize, polynomials
from torchtitan.optim.state_formats import store
from torchtitan.parallel.sharded_tensors import local_tensor

RMS = 0.2
"""Root mean square of an update divided by its learning rate, about that of AdamW's updates (arXiv 2502.16982, section
2.2): an orthogonal matrix of size (rows, columns) has 1 / sqrt(max(rows, columns))."""
ROW_EPS = 1e-8  # added to a row's mean square
STATISTICS = torch.float32


class Muon(LowBitOptimizer):
    """Muon with Nesterov momentum and decoupled weight decay, scaled by 0.2 sqrt(max(rows, columns)) to the size of
    AdamW's updates (arXiv 2502.16982).

    A parameter with more than two dimensions is a stack of matrices. All ranks that hold shards of a parameter must
    step together.

    Args:
        parameters: of at least two dimensions.
        coefficients: of the Newton-Schulz iteration.
        steps: of the iteration.
        polar_express: use the coefficients of arXiv 2505.16932, one polynomial per step.
        row_normalization: NorMuon (arXiv 2510.05491): divide each row of the result by a moving average of its root
            mean square; the decay rate is `beta2` of the group.
        bucket: numbers that a rank orthogonalizes between two exchanges.

    Attributes:
        dtype: in which matrices are exchanged and orthogonalized.
    """

    moment_names = ("momentum_buffer",)
    signed: ClassVar = {"momentum_buffer"}

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        beta2: float = 0.95,
        coefficients: Polynomial = QUINTIC,
        steps: int = 5,
        polar_express: bool = False,
        row_normalization: bool = False,
        state_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.bfloat16,
        bucket: int = BUCKET,
        seed: int = 0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "beta2": beta2}, state_dtype, seed)
        self.momentum, self.nesterov = momentum, nesterov
        self.polynomials = polynomials(steps, coefficients, polar_express)
        self.row_normalization = row_normalization
        self.dtype = dtype
        self._all = self.parameters()
        flat = [parameter for parameter in self._all if parameter.ndim < 2]
        if flat:
            raise ValueError(f"Muon takes matrices, not a parameter of shape {tuple(flat[0].shape)}")
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self.shardings = [sharding_of(parameter) for parameter in self._all]
        self.buckets = buckets(self.shardings, self._rank, bucket)
        groups = {ranks: group_of(ranks) for ranks in sorted({bucket.ranks for bucket in self.buckets})}
        self._groups = [groups[bucket.ranks] if bucket.remote else None for bucket in self.buckets]
        self._group_of = {parameter: group for group in self.param_groups for parameter in group["params"]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all matrices. Collective over the ranks that hold shards of them."""
        skip: torch.Tensor | None = getattr(self, "found_inf", None)
        self._count_step((parameter for parameter in self._all if parameter.grad is not None), skip)
        directions = _Directions(self, skip)
        gathering = self._gather(0, directions) if self.buckets else None
        returning: Exchange | None = None
        for number, bucket in enumerate(self.buckets):
            assert gathering is not None
            received = gathering.wait()
            gathering = self._gather(number + 1, directions) if number + 1 < len(self.buckets) else None
            results = self._orthogonalized(bucket, received)
            if returning is not None:
                self._apply(self.buckets[number - 1], returning, skip)
            returning = self._return(number, results)
        if returning is not None:
            self._apply(self.buckets[-1], returning, skip)
        directions.finish()

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The state by name, initialized to zeros on first use. The momentum is sharded like the parameter; the mean
        squares of rows like its leading dimensions."""
        new = not self.state[parameter]
        state = super().state_of(parameter)
        if new and self.row_normalization:
            shape = (*local_tensor(parameter).shape[:-2], parameter.shape[-2])
            zeros = torch.zeros(shape, dtype=STATISTICS, device=parameter.device)
            if isinstance(parameter, DTensor):
                leading = parameter.ndim - 2
                kept = [
                    placement if not placement.is_replicate() and placement.dim < leading else Replicate()  # type: ignore[attr-defined]
                    for placement in parameter.placements
                ]
                full = torch.empty(parameter.shape[:-1], device="meta")
                zeros = DTensor.from_local(
                    zeros, parameter.device_mesh, kept, run_check=False, shape=full.shape, stride=full.stride()
                )
            state["row_mean_square"] = zeros
        return state

    def _direction(self, parameter: nn.Parameter, skip: torch.Tensor | None) -> torch.Tensor:
        """Updates the momentum of this rank's shard. Returns what to orthogonalize."""
        if parameter.grad is None:
            return torch.zeros_like(local_tensor(parameter), dtype=self.dtype)
        state, (form,), (stored,) = self.state_of(parameter), self._formats[parameter], self._parts(parameter)
        grad = local_tensor(parameter.grad).float()
        new = form.read(stored).lerp(grad, 1 - self.momentum)
        direction = grad.lerp(new, self.momentum) if self.nesterov else new
        rounded = "" in stored and stored[""].dtype == torch.bfloat16
        form.write(stored, new, self._noise(parameter, new, [rounded], state["step"], "momentum")[0], skip)
        return direction.to(self.dtype)

    def _gather(self, number: int, directions: "_Directions") -> Exchange:
        """Starts to send this rank's parts to their owners."""
        bucket = self.buckets[number]
        for parameter in {parameter for updates in bucket.updates.values() for parameter, _ in updates}:
            directions.make(parameter)  # also on ranks that send nothing, because their replica is not the owner's
        outgoing = {
            owner: [directions.part(parameter, part) for parameter, part in mine] for owner, mine in bucket.mine.items()
        }
        incoming = {rank: [numbers(part) for _, part in theirs] for rank, theirs in bucket.theirs.items()}
        return self._exchange(number, outgoing, incoming)

    def _return(self, number: int, results: Sequence[torch.Tensor]) -> Exchange:
        """Starts to send the owners' results to the ranks that hold the weights. With row normalization, the mean
        square of each row of the full matrix follows."""
        bucket, words = self.buckets[number], STATISTICS.itemsize // self.dtype.itemsize
        rows = [
            result.float().square().mean(1).view(self.dtype) if self.row_normalization else result.new_empty(0)
            for result in results
        ]
        outgoing = {
            rank: [torch.cat([results[one][part.rows, part.columns].flatten(), rows[one]]) for one, part in theirs]
            for rank, theirs in bucket.results.items()
        }
        incoming = {
            rank: [
                numbers(part) + (self._all[parameter].shape[-2] * words if self.row_normalization else 0)
                for parameter, part in updates
            ]
            for rank, updates in bucket.updates.items()
        }
        return self._exchange(number, outgoing, incoming)

    def _exchange(
        self, number: int, outgoing: dict[int, list[torch.Tensor]], incoming: dict[int, list[int]]
    ) -> Exchange:
        like = torch.empty(0, dtype=self.dtype, device=self._all[0].device)
        return Exchange(self._groups[number], self.buckets[number].ranks, self._rank, outgoing, incoming, like)

    def _orthogonalized(self, bucket: Bucket, received: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
        """The results of the matrices that this rank owns; those of the same shape are computed together."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for number, matrix in enumerate(bucket.matrices):
            rows, columns = self._all[matrix.parameter].shape[-2:]
            by_shape.setdefault((rows, columns), []).append(number)
        device, results = self._all[0].device, [torch.empty(0)] * len(bucket.matrices)
        place: dict[int, torch.Tensor] = {}
        stacks = []
        for (rows, columns), same in by_shape.items():
            stack = torch.empty(len(same), rows, columns, dtype=self.dtype, device=device)
            place |= dict(zip(same, stack, strict=True))
            stacks.append((same, stack))
        for rank, theirs in bucket.theirs.items():
            for (number, part), piece in zip(theirs, received[rank], strict=True):
                target = place[number][part.rows, part.columns]
                target.copy_(piece.view(target.shape))
        for same, stack in stacks:
            for number, result in zip(same, orthogonalize(stack, self.polynomials), strict=True):
                results[number] = result
        return results

    def _apply(self, bucket: Bucket, returning: Exchange, skip: torch.Tensor | None) -> None:
        received = returning.wait()
        for rank, updates in bucket.updates.items():
            for (number, part), payload in zip(updates, received[rank], strict=True):
                parameter = self._all[number]
                if parameter.grad is not None:
                    self._update(parameter, part, payload, skip)

    def _update(self, parameter: nn.Parameter, part: Part, payload: torch.Tensor, skip: torch.Tensor | None) -> None:
        """Updates this rank's part of one matrix from its orthogonalized momentum."""
        group, state = self._group_of[parameter], self.state[parameter]
        rows, columns = parameter.shape[-2:]
        weight = local_tensor(parameter)[part.place]
        update = payload[: numbers(part)].view(weight.shape).float()
        scale: torch.Tensor | float = RMS * max(rows, columns) ** 0.5
        if self.row_normalization:
            squares = payload[numbers(part) :].clone().view(STATISTICS)
            average = local_tensor(state["row_mean_square"])[part.place]
            new = average.lerp(squares, 1 - group["beta2"])
            average.copy_(new if skip is None else torch.where(skip > 0, average, new))
            factors = (new + ROW_EPS).rsqrt()
            update = update * factors[part.rows].unsqueeze(1)
            scale = RMS * (rows / (squares * factors.square()).sum()).sqrt()  # so that the root mean square is RMS
        value = weight.float() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * scale * update
        rounded = weight.dtype == torch.bfloat16
        store(weight, value, self._noise(parameter, weight, [rounded], state["step"], f"{part.place}")[0], skip)


@dataclass(frozen=True)
class MuonWork:
    """What one rank does in an update.

    Attributes:
        ranks: of the group that exchanges; () if nothing crosses between ranks.
        collectives: all-to-alls.
        bytes: of all of them, the larger of what the rank sends and receives.
        flops: of the orthogonalization.
    """

    ranks: tuple[int, ...]
    collectives: int
    bytes: int
    flops: int


def work_of(shardings: Sequence[Sharding], rank: int, dtype: torch.dtype, steps: int, size: int = BUCKET) -> MuonWork:
    """The work of a rank that holds shards of these parameters, without row normalization."""
    ranks: tuple[int, ...] = ()
    collectives = sent = computed = 0
    for bucket in buckets(shardings, rank, size):
        for matrix in bucket.matrices:
            rows, columns = shardings[matrix.parameter].shape[-2:]
            computed += flops(rows, columns, steps)
        if bucket.remote:
            ranks, collectives = bucket.ranks, collectives + 2
            for outgoing, incoming in ((bucket.mine, bucket.theirs), (bucket.results, bucket.updates)):
                sent += max(
                    sum(numbers(part) for other, parts in side.items() if other != rank for _, part in parts)
                    for side in (outgoing, incoming)
                )
    return MuonWork(ranks, collectives, sent * dtype.itemsize, computed)


class _Directions:
    """What to orthogonalize of each parameter, computed when first needed and kept until all of it is sent."""

    def __init__(self, optimizer: Muon, skip: torch.Tensor | None) -> None:
        self._optimizer, self._skip = optimizer, skip
        self._made: dict[int, torch.Tensor] = {}
        self._left = dict.fromkeys(range(len(optimizer._all)))
        mine = [part for bucket in optimizer.buckets for parts in bucket.mine.values() for part in parts]
        self._uses = Counter(number for number, _ in mine)

    def make(self, number: int) -> None:
        """Updates the momentum of a parameter, once per step."""
        if number in self._left:
            del self._left[number]
            direction = self._optimizer._direction(self._optimizer._all[number], self._skip)
            if self._uses[number]:
                self._made[number] = direction

    def part(self, number: int, part: Part) -> torch.Tensor:
        """This rank's part of one matrix of a parameter."""
        found = self._made[number][part.place]
        self._uses[number] -= 1
        if self._uses[number] == 0:
            del self._made[number]
        return found

    def finish(self) -> None:
        """Updates the rest: parameters of which this rank has an empty shard count the step too."""
        for number in list(self._left):
            self.make(number)


class Muon8bit(Muon):
    """Muon with an 8-bit momentum."""

    quantization = "8bit"
