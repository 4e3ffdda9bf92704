"""Muon: updates that are orthogonal matrices (kellerjordan.github.io/posts/muon), under any layout (docs/muon.md).

In each step, for each matrix of a block:

    momentum  <- 0.95 momentum + 0.05 gradient
    direction  = 0.05 gradient + 0.95 momentum                        (Nesterov)
    weight    <- (1 - lr weight_decay) weight - lr 0.2 sqrt(max(rows, columns)) U V^T of the direction = U S V^T

All singular values become 1, so that rare directions are learned as fast as the dominant ones. `orthogonalize` comes
close enough with GEMMs alone. The factor gives updates the size of AdamW's (arXiv 2502.16982), so that both share
learning rate and weight decay.

U V^T needs the complete matrix, so each has an owner (`matrix_owners`), which orthogonalizes the directions of all its
shards. While one bucket of matrices is orthogonalized, the next is collected and the previous one's results go back.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

from torchtitan.optim.low_bit import LowBitOptimizer
from torchtitan.optim.matrix_owners import BUCKET, Bucket, Matrix, Part, Received, buckets, sharding_of
from torchtitan.optim.orthogonalize import QUINTIC, Polynomial, orthogonalize, polynomials
from torchtitan.optim.state_formats import store
from torchtitan.parallel.sharded_tensors import local_tensor, sharded_like

RMS = 0.2
"""Root mean square of an update divided by its learning rate, about as in AdamW's updates (arXiv 2502.16982, section
2.2): an orthogonal matrix of size (rows, columns) has 1 / sqrt(max(rows, columns))."""
ROW_EPS = 1e-8  # added to a row's mean square
STATISTICS = torch.float32


class Muon(LowBitOptimizer):
    """Muon, for matrices, and stacks of them with more dimensions (`parameters.check_groups` ensures it). All ranks
    that hold shards of a parameter must step together.

    With `row_normalization` it is NorMuon (arXiv 2510.05491): each row of the result is divided by a moving average of
    its root mean square; the decay rate is `beta2` of the group.
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
        polar_express: bool = False,  # use the coefficients of arXiv 2505.16932, one polynomial per step
        row_normalization: bool = False,
        dtype: torch.dtype = torch.bfloat16,  # in which matrices are exchanged and orthogonalized
        bucket: int = BUCKET,  # numbers that a rank orthogonalizes between two exchanges
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "beta2": beta2}
        super().__init__(parameters, defaults, **options)
        self.momentum, self.nesterov, self.row_normalization, self.dtype = momentum, nesterov, row_normalization, dtype
        self.polynomials = polynomials(steps, coefficients, polar_express)
        self._all = self.parameters()
        self.shardings = [sharding_of(parameter) for parameter in self._all]
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.buckets = buckets(self.shardings, rank, bucket)
        groups = {ranks: _process_group(ranks) for ranks in sorted({each.ranks for each in self.buckets})}
        for each in self.buckets:
            each.group = groups[each.ranks] if each.is_sent else None
        moves = [move for each in self.buckets for move in each.moves(to_owners=True)]
        self._uses = Counter(piece.matrix.parameter for (sender, _), piece in moves if sender == rank)
        self._group_of = {parameter: group for group in self.param_groups for parameter in group["params"]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all matrices. Collective over the ranks that hold shards of them."""
        skip: torch.Tensor | None = getattr(self, "found_inf", None)
        self._count_step((parameter for parameter in self._all if parameter.grad is not None), skip)
        uses, directions = self._uses.copy(), dict[int, torch.Tensor]()

        def direction(piece: Part) -> torch.Tensor:
            """This rank's piece of a parameter's direction, which exists from its first piece to its last."""
            number = piece.matrix.parameter
            if number not in directions:
                directions[number] = self._direction(self._all[number], skip)
            uses[number] -= 1
            return (directions[number] if uses[number] else directions.pop(number))[piece.place].flatten()

        collecting = (bucket.start(True, direction, self._empty()) for bucket in self.buckets)
        arriving = next(collecting)
        returning: Callable[[], Received] = list  # nothing yet
        for bucket in self.buckets:
            received = arriving()
            arriving = next(collecting, list)
            results = self._orthogonalized(bucket, received)
            self._apply(returning(), skip)
            returning = self._return(bucket, results)
        for number, parameter in enumerate(self._all):
            if not self._uses[number]:  # another replica has sent the direction
                self._direction(parameter, skip)
        self._apply(returning(), skip)

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """As in the base class; the mean squares of rows are sharded like the parameter's leading dimensions."""
        new = not self.state[parameter]
        state = super().state_of(parameter)
        if new and self.row_normalization:
            shape = (*local_tensor(parameter).shape[:-2], parameter.shape[-2])
            zeros = torch.zeros(shape, dtype=STATISTICS, device=parameter.device)
            kept = [
                placement if not placement.is_replicate() and placement.dim < parameter.ndim - 2 else Replicate()
                for placement in getattr(parameter, "placements", ())
            ]
            state["row_mean_square"] = sharded_like(parameter, zeros, parameter.shape[:-1], kept)
        return state

    def _direction(self, parameter: nn.Parameter, skip: torch.Tensor | None) -> torch.Tensor:
        """Updates the momentum of this rank's shard. Returns what to orthogonalize."""
        if parameter.grad is None:
            return torch.zeros_like(local_tensor(parameter), dtype=self.dtype)
        state, (form,) = self.local_state(parameter), self._formats[parameter]
        grad = local_tensor(parameter.grad).float()
        new = form.read(state).lerp(grad, 1 - self.momentum)
        direction = grad.lerp(new, self.momentum) if self.nesterov else new
        form.write(state, new, self._noise(parameter, new, [form.stochastic], state["step"], "momentum")[0], skip)
        return direction.to(self.dtype)

    def _orthogonalized(self, bucket: Bucket, received: Received) -> dict[Matrix, torch.Tensor]:
        """The results of the matrices that this rank owns; matrices of the same shape are computed together."""
        by_shape: dict[tuple[int, int], list[Matrix]] = {}
        for matrix in bucket.owned():
            by_shape.setdefault(matrix.shape, []).append(matrix)
        stacks = [(alike, self._empty(len(alike), *shape)) for shape, alike in by_shape.items()]
        complete = {matrix: whole for alike, stack in stacks for matrix, whole in zip(alike, stack, strict=True)}
        for piece, numbers in received:
            target = complete[piece.matrix][piece.rows, piece.columns]
            target.copy_(numbers.view(target.shape))
        return {
            matrix: result
            for alike, stack in stacks
            for matrix, result in zip(alike, orthogonalize(stack, self.polynomials), strict=True)
        }

    def _return(self, bucket: Bucket, results: dict[Matrix, torch.Tensor]) -> Callable[[], Received]:
        """Starts to send the owners' results to the ranks that hold the weights. With row normalization, the mean
        square of each row of the full matrix follows."""
        rows, words = dict.fromkeys(results, self._empty()), 0
        if self.row_normalization:
            rows = {matrix: result.float().square().mean(1).view(self.dtype) for matrix, result in results.items()}
            words = STATISTICS.itemsize // self.dtype.itemsize
        return bucket.start(
            False,
            lambda piece: torch.cat([results[piece.matrix][piece.rows, piece.columns].flatten(), rows[piece.matrix]]),
            self._empty(),
            lambda piece: piece.numel() + words * piece.matrix.shape[0],
        )

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape or 0, dtype=self.dtype, device=self._all[0].device)

    def _apply(self, received: Received, skip: torch.Tensor | None) -> None:
        """Updates this rank's pieces of matrices from their orthogonalized momentum."""
        for piece, content in received:
            parameter, (rows, columns) = self._all[piece.matrix.parameter], piece.matrix.shape
            if parameter.grad is None:
                continue
            group, state = self._group_of[parameter], self.state[parameter]
            weight = local_tensor(parameter)[piece.place]
            update = content[: piece.numel()].view(weight.shape).float()
            scale: torch.Tensor | float = RMS * max(rows, columns) ** 0.5
            if self.row_normalization:
                squares = content[piece.numel() :].clone().view(STATISTICS)
                average = local_tensor(state["row_mean_square"])[piece.place]
                new = average.lerp(squares, 1 - group["beta2"])
                average.copy_(new if skip is None else torch.where(skip > 0, average, new))
                factors = (new + ROW_EPS).rsqrt()
                update = update * factors[piece.rows].unsqueeze(1)
                scale = RMS * (rows / (squares * factors.square()).sum()).sqrt()  # for a root mean square of RMS
            value = weight.float() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * scale * update
            rounded = weight.dtype == torch.bfloat16
            store(weight, value, self._noise(parameter, weight, [rounded], state["step"], f"{piece.place}")[0], skip)


def _process_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The process group of these ranks, created if there is none. Collective over them. None for a single rank."""
    if len(ranks) == 1:
        return None
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group
