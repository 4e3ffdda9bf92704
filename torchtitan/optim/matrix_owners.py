"""Which rank computes with which complete matrix, and the exchange of the shards that this takes.

A parameter of more than two dimensions, such as a stack of experts (E, out, in), is a stack of matrices. Each matrix
has an owner among the ranks of its parameter's mesh. The owner collects the shards, computes, and sends every rank its
piece of the result. Replicas (HSDP) share the work: an owner collects from its own replica, and sends to all of them.

Matrices are exchanged in buckets, with one all-to-all each way. All at once, an update of Llama 3 8B on 8 GPUs would
take 6.3 GiB beside weights, gradients and momenta (9.8 GiB); in buckets of 2^25 numbers it takes 0.9 GiB.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.parallel.sharded_tensors import Box, shard_box

BUCKET = 1 << 25  # numbers that a rank owns in a bucket, unless one matrix has more


class Sharding(NamedTuple):
    """How a parameter is spread over ranks."""

    shape: tuple[int, ...]  # the full parameter's shape
    boxes: dict[int, Box]  # global rank of the parameter's mesh -> what it holds; only this rank if it is not a DTensor
    replicas: dict[int, tuple[int, ...]]  # global rank -> which copy of the parameter it belongs to


class Matrix(NamedTuple):
    """A complete matrix."""

    parameter: int  # number of its parameter
    place: tuple[int, ...]  # in that parameter's leading dimensions
    shape: tuple[int, int]  # rows and columns
    owner: int  # global rank


class Part(NamedTuple):
    """What one rank holds of a matrix."""

    matrix: Matrix
    holder: int  # global rank
    rows: slice  # in the matrix
    columns: slice
    place: tuple[int, ...]  # in the leading dimensions of the holder's shard
    collected: bool  # whether the owner assembles the matrix from it, rather than from an equal one of its own replica

    def numel(self) -> int:
        return int((self.rows.stop - self.rows.start) * (self.columns.stop - self.columns.start))


Received = list[tuple[Part, torch.Tensor]]
Move = tuple[tuple[int, int], Part]  # (sender, receiver), and the piece whose content is sent


def sharding_of(parameter: torch.Tensor) -> Sharding:
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return Sharding(shape, {rank: tuple(slice(0, size) for size in shape)}, {rank: ()})
    mesh, placements = parameter.device_mesh, parameter.placements
    places = {int(mesh.mesh[place]): place for place in itertools.product(*map(range, mesh.shape))}
    replicated = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
    return Sharding(
        shape,
        {rank: shard_box(shape, [*zip(mesh.shape, place, placements, strict=True)]) for rank, place in places.items()},
        {rank: tuple(place[dim] for dim in replicated) for rank, place in places.items()},
    )


def _reaches(box: Box, place: tuple[int, ...]) -> bool:
    """Whether a box contains some of the matrix at this place."""
    *leading, rows, columns = box
    inside = all(held.start <= index < held.stop for held, index in zip(leading, place, strict=True))
    return inside and rows.start < rows.stop and columns.start < columns.stop


def pieces(sharding: Sharding, matrix: Matrix) -> Iterator[Part]:
    """Who holds what of a matrix, in the mesh's order; ranks with none of it are left out."""
    for rank, box in sharding.boxes.items():
        if _reaches(box, matrix.place):
            *leading, rows, columns = box
            place = tuple(index - held.start for held, index in zip(leading, matrix.place, strict=True))
            collected = sharding.replicas[rank] == sharding.replicas[matrix.owner]
            yield Part(matrix, rank, rows, columns, place, collected)


def deal(shardings: Sequence[Sharding]) -> list[Matrix]:
    """An owner for each matrix, the largest first: the rank that has the fewest numbers so far. With equal matrices
    this is round robin. A matrix that ranks hold complete stays with one of these."""
    load: Counter[int] = Counter()
    dealt = []
    for number, sharding in sorted(enumerate(shardings), key=lambda numbered: -math.prod(numbered[1].shape[-2:])):
        rows, columns = sharding.shape[-2:]
        complete = slice(0, rows), slice(0, columns)
        for place in itertools.product(*map(range, sharding.shape[:-2])):
            holders = [rank for rank, box in sharding.boxes.items() if box[-2:] == complete and _reaches(box, place)]
            owner = min(holders or sharding.boxes, key=lambda rank: load[rank])
            load[owner] += rows * columns
            dealt.append(Matrix(number, place, (rows, columns), owner))
    return dealt


@dataclass
class Bucket:
    """Matrices that are exchanged together."""

    rank: int
    ranks: tuple[int, ...]  # that take part; owners and holders
    # Those that this rank holds, or whose matrix it owns; in the same order on all ranks.
    pieces: list[Part] = field(default_factory=list)
    is_sent: bool = False  # whether anything crosses between ranks
    group: dist.ProcessGroup | None = None  # the group of `ranks`; None if nothing crosses

    def owned(self) -> list[Matrix]:
        """The matrices whose owner is this rank."""
        return list(dict.fromkeys(piece.matrix for piece in self.pieces if piece.matrix.owner == self.rank))

    def moves(self, to_owners: bool) -> list[Move]:
        """Of what owners collect, or of their results on the way back."""
        if to_owners:
            return [((piece.holder, piece.matrix.owner), piece) for piece in self.pieces if piece.collected]
        return [((piece.matrix.owner, piece.holder), piece) for piece in self.pieces]

    def start(
        self,
        to_owners: bool,
        content: Callable[[Part], torch.Tensor],
        empty: torch.Tensor,
        size: Callable[[Part], int] = Part.numel,
    ) -> Callable[[], Received]:
        """Starts to send pieces, while computation goes on: of each its content, (size(piece),), with the dtype and
        device of `empty`, (0,). Returns a function that waits for this rank's pieces and their contents. Collective."""
        moves = self.moves(to_owners)
        kept = [(piece, content(piece)) for (sender, receiver), piece in moves if sender == receiver]
        if self.group is None:
            return lambda: kept
        sent, sent_counts = self._others(1, moves, size)
        arriving, counts = self._others(0, moves, size)
        outgoing = torch.cat([empty, *map(content, sent)])
        incoming = empty.new_empty(sum(counts))
        work = dist.all_to_all_single(incoming, outgoing, counts, sent_counts, group=self.group, async_op=True)

        def wait() -> Received:
            work.wait()
            return [*kept, *zip(arriving, incoming.split(list(map(size, arriving))), strict=True)]

        return wait

    def _others(self, end: int, moves: list[Move], size: Callable[[Part], int]) -> tuple[list[Part], list[int]]:
        """The pieces that have another rank at this end of their move, by that rank, and the numbers for each rank."""
        others: dict[int, list[Part]] = {rank: [] for rank in self.ranks}
        for ends, piece in moves:
            if ends[end] != self.rank:
                others[ends[end]].append(piece)
        return list(itertools.chain(*others.values())), [sum(map(size, pieces)) for pieces in others.values()]


def buckets(shardings: Sequence[Sharding], rank: int, size: int = BUCKET) -> list[Bucket]:
    """The same number of buckets in the same order on all ranks of a mesh, as seen by `rank`."""
    by_key: dict[tuple[tuple[int, ...], int], Bucket] = {}
    owned: Counter[int] = Counter()
    for matrix in deal(shardings):
        sharding = shardings[matrix.parameter]
        ranks = tuple(sorted(sharding.boxes))
        bucket = by_key.setdefault((ranks, owned[matrix.owner] // size), Bucket(rank, ranks))
        owned[matrix.owner] += math.prod(matrix.shape)
        for piece in pieces(sharding, matrix):
            bucket.is_sent |= piece.holder != matrix.owner
            if rank in (piece.holder, matrix.owner):
                bucket.pieces.append(piece)
    return [by_key[key] for key in sorted(by_key)]
