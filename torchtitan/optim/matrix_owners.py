"""Which rank computes with which complete matrix, and the exchange of the shards that this takes.

A parameter of more than two dimensions, such as a stack of experts (E, out, in), is a stack of matrices. Each matrix
has an owner among the ranks of its parameter's mesh. The owner collects the shards, computes, and sends every rank its
part of the result. Replicas (HSDP) share the work: an owner collects from its own replica, and sends to all of them.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.parallel.sharded_tensors import shard_box

BUCKET = 1 << 25  # numbers that a rank owns in a bucket, unless one matrix has more


@dataclass(frozen=True)
class Sharding:
    """How a parameter is spread over ranks.

    Attributes:
        shape: of the full parameter.
        ranks: global ranks of its mesh; (this rank,) if it is not a DTensor.
        boxes: the part that each of them holds, a slice per dimension.
        replica: which copy of the parameter each of them belongs to.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    boxes: tuple[tuple[slice, ...], ...]
    replica: tuple[tuple[int, ...], ...]


class Matrix(NamedTuple):
    """A complete matrix: number of its parameter, its place in that parameter's leading dimensions, global rank of its
    owner."""

    parameter: int
    place: tuple[int, ...]
    owner: int


class Part(NamedTuple):
    """The part of a matrix that a rank holds: global rank, rows, columns, and its place in the leading dimensions of
    that rank's shard."""

    rank: int
    rows: slice
    columns: slice
    place: tuple[int, ...]


def sharding_of(parameter: torch.Tensor) -> Sharding:
    if not isinstance(parameter, DTensor):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return Sharding(tuple(parameter.shape), (rank,), (tuple(slice(0, size) for size in parameter.shape),), ((),))
    mesh, placements = parameter.device_mesh, parameter.placements
    places = list(itertools.product(*(range(size) for size in mesh.shape)))
    replicated = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
    return Sharding(
        tuple(parameter.shape),
        tuple(int(mesh.mesh[place]) for place in places),
        tuple(shard_box(parameter.shape, mesh.shape, placements, place) for place in places),
        tuple(tuple(place[dim] for dim in replicated) for place in places),
    )


def parts(sharding: Sharding, place: tuple[int, ...]) -> list[Part]:
    """Who holds what of the matrix at this place, in the order of `sharding.ranks`; ranks with none of it are left
    out."""
    found = []
    for rank, box in zip(sharding.ranks, sharding.boxes, strict=True):
        *leading, rows, columns = box
        inside = all(part.start <= at < part.stop for part, at in zip(leading, place, strict=True))
        if inside and rows.stop > rows.start and columns.stop > columns.start:
            local = tuple(at - part.start for part, at in zip(leading, place, strict=True))
            found.append(Part(rank, rows, columns, local))
    return found


def sources(sharding: Sharding, matrix: Matrix) -> list[Part]:
    """The parts from which the owner assembles the matrix: those of its own replica."""
    replica = dict(zip(sharding.ranks, sharding.replica, strict=True))
    return [part for part in parts(sharding, matrix.place) if replica[part.rank] == replica[matrix.owner]]


def deal(shardings: Sequence[Sharding]) -> list[Matrix]:
    """An owner for each matrix, the largest first: the rank that has the fewest numbers so far. With equal matrices
    this is round robin. A matrix that ranks hold complete stays with one of these."""
    load: dict[int, int] = {}
    matrices = [
        (number, place)
        for number, sharding in enumerate(shardings)
        for place in itertools.product(*map(range, sharding.shape[:-2]))
    ]
    size_of = functools.cache(lambda number: shardings[number].shape[-2] * shardings[number].shape[-1])
    dealt = []
    for number, place in sorted(matrices, key=lambda matrix: -size_of(matrix[0])):
        rows, columns = shardings[number].shape[-2:]
        complete = [
            part.rank
            for part in parts(shardings[number], place)
            if (part.rows, part.columns) == (slice(0, rows), slice(0, columns))
        ]
        owner = min(complete or shardings[number].ranks, key=lambda rank: load.get(rank, 0))
        load[owner] = load.get(owner, 0) + size_of(number)
        dealt.append(Matrix(number, place, owner))
    return dealt


@dataclass
class Bucket:
    """Matrices that are exchanged together, and this rank's part in it.

    Attributes:
        ranks: that take part; owners and holders.
        matrices: whose owner is this rank.
        mine: by rank, the parts that this rank sends to owners: (parameter, part).
        theirs: by rank, what this rank receives as an owner: (number in `matrices`, part).
        results: by rank, what it sends as an owner: (number in `matrices`, part).
        updates: by rank, what it receives: (parameter, part).
        remote: whether anything crosses between ranks.
    """

    ranks: tuple[int, ...]
    matrices: list[Matrix] = field(default_factory=list)
    mine: dict[int, list[tuple[int, Part]]] = field(default_factory=dict)
    theirs: dict[int, list[tuple[int, Part]]] = field(default_factory=dict)
    results: dict[int, list[tuple[int, Part]]] = field(default_factory=dict)
    updates: dict[int, list[tuple[int, Part]]] = field(default_factory=dict)
    remote: bool = False


def buckets(shardings: Sequence[Sharding], rank: int, size: int = BUCKET) -> list[Bucket]:
    """The same number of buckets in the same order on all ranks of a mesh, as seen by `rank`."""
    found: dict[tuple[tuple[int, ...], int], Bucket] = {}
    owned: dict[int, int] = {}
    for matrix in deal(shardings):
        sharding = shardings[matrix.parameter]
        rows, columns = sharding.shape[-2:]
        key = (tuple(sorted(sharding.ranks)), owned.get(matrix.owner, 0) // size)
        owned[matrix.owner] = owned.get(matrix.owner, 0) + rows * columns
        bucket = found.setdefault(key, Bucket(key[0]))
        if matrix.owner == rank:
            bucket.matrices.append(matrix)
        number = len(bucket.matrices) - 1
        for part in sources(sharding, matrix):
            if part.rank == rank:
                bucket.mine.setdefault(matrix.owner, []).append((matrix.parameter, part))
            if matrix.owner == rank:
                bucket.theirs.setdefault(part.rank, []).append((number, part))
        for part in parts(sharding, matrix.place):
            bucket.remote |= part.rank != matrix.owner
            if matrix.owner == rank:
                bucket.results.setdefault(part.rank, []).append((number, part))
            if part.rank == rank:
                bucket.updates.setdefault(matrix.owner, []).append((matrix.parameter, part))
    return [found[key] for key in sorted(found)]


class Exchange:
    """Sends tensors to ranks and receives theirs, while computation goes on.

    Args:
        group: None if nothing crosses between ranks.
        ranks: of the group, in its order.
        outgoing: by global rank, tensors of one dtype.
        incoming: by global rank, the numbers to receive.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        rank: int,
        outgoing: dict[int, list[torch.Tensor]],
        incoming: dict[int, list[int]],
        like: torch.Tensor,
    ) -> None:
        self._own = [tensor.flatten() for tensor in outgoing.get(rank, [])]
        self._rank, self._incoming = rank, incoming
        self._order = [other for other in ranks if other != rank]
        self._work: dist.Work | None = None
        if group is not None:
            sent = [[tensor.flatten() for tensor in outgoing.get(other, [])] for other in ranks]
            counts = [0 if other == rank else sum(map(len, sent[place])) for place, other in enumerate(ranks)]
            expected = [0 if other == rank else sum(incoming.get(other, [])) for other in ranks]
            flat = [tensor for place, other in enumerate(ranks) if other != rank for tensor in sent[place]]
            self._sent = torch.cat(flat) if flat else like.new_empty(0)
            self._received = like.new_empty(sum(expected))
            self._work = dist.all_to_all_single(
                self._received, self._sent, expected, counts, group=group, async_op=True
            )

    def wait(self) -> dict[int, list[torch.Tensor]]:
        """What each rank has sent, flat."""
        found = {self._rank: self._own}
        if self._work is not None:
            self._work.wait()
            sizes = [size for other in self._order for size in self._incoming.get(other, [])]
            pieces = iter(self._received.split(sizes))
            for other in self._order:
                found[other] = [next(pieces) for _ in self._incoming.get(other, [])]
        return found


def numbers(part: Part) -> int:
    """How many numbers a part has."""
    count: int = (part.rows.stop - part.rows.start) * (part.columns.stop - part.columns.start)
    return count


def group_of(ranks: Iterable[int]) -> dist.ProcessGroup | None:
    """The process group of these ranks, created if there is none. Collective over them. None for a single rank."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return None
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group
