"""Intercepts every operation of a step to record its collectives, its FLOPs and its live memory.

Works on real and fake tensors.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist

from torchtitan.compat.dispatch import (
    PROPAGATE,
    FakeTensor,
    FakeTensorMode,
    ShardingPropagator,
    TorchDispatchMode,
    pytree,
)
from torchtitan.kernels import attention_cpu, grouped_8bit, grouped_gemm, matmul_8bit, packed_blocks  # noqa: F401  their operators
from torchtitan.parallel import expert  # noqa: F401
from torchtitan.tools.plan.step_model import Work

aten = torch.ops.aten

COLLECTIVE_KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "exchange_counts": "all-to-all",  # defined in parallel/expert.py
    "exchange_rows": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
"""By the name of the operation in `torch.distributed` (c10d), in functional collectives, or of our own."""

EXPERT_EXCHANGES = (torch.ops.torchtitan.exchange_counts.default, torch.ops.torchtitan.exchange_rows.default)
SUMMED = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class Recorder(TorchDispatchMode):
    """Within this context, records collectives, floating-point operations and the bytes of live tensors.

    A tensor counts from the operation that creates it until its last reference is gone. Kernel workspace is not seen,
    except the float32 sums of bfloat16 GEMMs on CPUs without bfloat16 instructions.

    Args:
        name_of_group: maps a process group's own name to the name to record.
        fake_mode: of the tensors to observe; None for real ones.
        device_type: of the device that fake tensors, which are on the CPU, stand for.

    Attributes:
        count: collectives so far, by the name of the group and the kind ("all-gather", ...).
        bytes: of their full tensors: the output of an all-gather, the input of a reduce-scatter.
        work: GEMMs and attention so far.
        current: live bytes.
        peaks: maximum live bytes so far, by the labels given to `enter`.
    """

    def __init__(
        self, name_of_group: Callable[[str], str], fake_mode: FakeTensorMode | None = None, device_type: str = "cpu"
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name_of_group = name_of_group
        self.fake_mode = fake_mode
        self.device_type = device_type
        self.clear()
        self.current = 0
        self._paused = False
        self._labels: tuple[Hashable, ...] = ("start",)
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def clear(self) -> None:
        """Discards everything recorded, except for live memory."""
        self.count: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.work = Work()
        self.peaks: dict[Hashable, int] = {}

    def enter(self, *labels: Hashable) -> None:
        """From now on, peaks are recorded under these labels."""
        self._labels = labels
        self._grow(0)

    def __enter__(self) -> "Recorder":
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator.__dict__[PROPAGATE]

        def resize_and_record(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            before = storage.nbytes()
            result: torch.UntypedStorage = resize(storage, size)
            self._on_resize(storage, before, size)
            return result

        def propagate_unseen(*args: Any) -> Any:
            self._paused = True
            try:
                return propagate(*args)
            finally:
                self._paused = False

        self._replaced = ExitStack()
        # FSDP frees and allocates memory by resizing storages.
        self._replaced.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_record))
        # DTensor infers shapes with full-size fake tensors.
        self._replaced.enter_context(patch.object(ShardingPropagator, PROPAGATE, propagate_unseen))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._replaced.close()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most calls; fast path
        if self._paused:
            return func(*args, **(kwargs or {}))
        if any(cls not in PLAIN for cls in types):
            return NotImplemented  # a subclass such as DTensor first decomposes into plain operations
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1  # fake value: assume that all labels are valid and that the stages agree
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            self._on_allocate(tensor)
        if func.namespace in ("c10d", "_c10d_functional") or func in EXPERT_EXCHANGES:
            self._record(func, args, out)
            return out
        self.work.count(func._opname, *shapes_and_dtypes(tensors_in((args, kwargs))))
        if func._opname in SUMMED and out.dtype == torch.bfloat16 and self.device_type == out.device.type == "cpu":
            sums = 4 * out.numel() if _sums_in_memory() else 0
            self._grow(sums)
            self.current -= sums
        return out

    def _record(self, func: Any, args: Sequence[Any], out: object) -> None:
        collective = COLLECTIVE_KINDS.get(func._overloadpacket.__name__)
        if collective is None:  # wait, barrier
            return
        sizes = [sum(tensor.nbytes for tensor in tensors_in(argument)) for argument in (*args, out)]
        if func is torch.ops.torchtitan.exchange_rows.default and args[4:] and args[4] is not None:
            sizes = [rows.numel() + 4 * rows.shape[0] for rows in (args[0], cast(torch.Tensor, out))]
        if collective in ("send", "receive") and max(sizes) <= 8:
            return  # handshake between stages in the first step
        leaves = pytree.tree_leaves(args)
        objects = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
        groups = [leaf for leaf in objects if str(leaf._type()).endswith(".ProcessGroup")]
        if groups:
            name: str = dist.ProcessGroup.unbox(groups[0]).group_name
        else:  # a functional collective: the group's name follows the reduction's
            name = [leaf for leaf in leaves if isinstance(leaf, str)][-1]
        # The ranks that share experts may also be a whole other dimension.
        key = ("ep" if func in EXPERT_EXCHANGES else self.name_of_group(name), collective)
        self.count[key] += 1
        self.bytes[key] += max(sizes)

    def _on_allocate(self, tensor: torch.Tensor) -> None:
        if getattr(tensor, "fake_mode", None) is not self.fake_mode:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes()
        self._live[key] = (size, weakref.ref(storage, lambda _: self._on_free(key)))
        self._grow(size)

    def _on_free(self, key: int) -> None:
        size, _ = self._live.pop(key)
        self.current -= size

    def _on_resize(self, storage: torch.UntypedStorage, before: int, size: int) -> None:
        key = storage._cdata
        if key in self._live:
            self._live[key] = (size, self._live[key][1])
            self._grow(size - before)

    def _grow(self, size: int) -> None:
        self.current += size
        for label in self._labels:
            if self.current > self.peaks.get(label, -1):
                self.peaks[label] = self.current


@functools.cache
def _sums_in_memory() -> bool:
    """Whether oneDNN's bfloat16 GEMM writes float32 sums to memory first: with AVX-512 but no bfloat16 instructions."""
    units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_avx512_supported() and not units


def tensors_in(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def shapes_and_dtypes(tensors: Iterable[torch.Tensor]) -> tuple[list[tuple[int, ...]], list[str]]:
    """As `Work.count` takes them."""
    described = [(tuple(map(int, tensor.shape)), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
    return [shape for shape, _ in described], [dtype for _, dtype in described]
