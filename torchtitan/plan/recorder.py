"""Intercepts every operation of a step to record its collectives, its FLOPs and its live memory.

Works on real and fake tensors.
"""

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

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

aten = torch.ops.aten

# Of causal attention on CPU, forward and backward.
ATTENTION_GEMMS = {
    torch.ops.torchtitan.causal_attention.default: 2,
    torch.ops.torchtitan.causal_attention_gradients.default: 5,
}
KINDS = {
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
    "exchange_counts": "all-to-all",  # of parallel/expert.py
    "exchange_rows": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
"""By the name of the operation in `torch.distributed` (c10d), in functional collectives, or of our own."""

EXPERT_EXCHANGES = (torch.ops.torchtitan.exchange_counts.default, torch.ops.torchtitan.exchange_rows.default)
GROUPED_GEMMS = (
    aten._grouped_mm.default,
    torch.ops.torchtitan.grouped_mm.default,
    torch.ops.torchtitan.grouped_mm_over_rows.default,
)

PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class Collective(NamedTuple):
    """A kind of collective ("all-gather", ...) and the name of the group it runs over."""

    group: str
    kind: str


class Recorder(TorchDispatchMode):
    """Within this context, records collectives, floating-point operations and the bytes of live tensors.

    A tensor counts from the operation that creates it until its last reference is gone. Kernel workspace is not seen,
    except the float32 sums of bfloat16 GEMMs on CPUs without bfloat16 instructions.

    Args:
        name_of_group: maps a process group's own name to the name to record.
        fake_mode: of the tensors to observe; None for real ones.

    Attributes:
        count: collectives so far.
        bytes: of their full tensors: the output of an all-gather, the input of a reduce-scatter.
        flops: of GEMMs and attention so far; a multiply-add counts as two; causal attention counts half.
        flops_8bit: of 8-bit GEMMs, which only count here; and half of nvfp4's.
        current: live bytes.
        peaks: maximum live bytes so far, by the labels given to `enter`.
    """

    def __init__(self, name_of_group: Callable[[str], str], fake_mode: FakeTensorMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name_of_group = name_of_group
        self.fake_mode = fake_mode
        self.count: Counter[Collective] = Counter()
        self.bytes: Counter[Collective] = Counter()
        self.flops = 0.0
        self.flops_8bit = 0.0
        self.current = 0
        self._paused = False
        self.peaks: dict[Hashable, int] = {}
        self._labels: tuple[Hashable, ...] = ("start",)
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def clear(self) -> None:
        """Discards everything recorded, except for live memory."""
        self.count.clear()
        self.bytes.clear()
        self.flops = self.flops_8bit = 0.0
        self.peaks.clear()

    def enter(self, *labels: Hashable) -> None:
        """From now on, peaks are recorded under these labels."""
        self._labels = labels
        self._grow(0)

    def __enter__(self) -> "Recorder":
        recorder, resize, propagate = self, torch.UntypedStorage.resize_, ShardingPropagator.__dict__[PROPAGATE]

        def resize_and_record(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            before = storage.nbytes()
            result: torch.UntypedStorage = resize(storage, size)
            recorder._on_resize(storage, before, size)
            return result

        def propagate_unseen(*args: Any) -> Any:
            recorder._paused = True
            try:
                return propagate(*args)
            finally:
                recorder._paused = False

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
        for kind in types:
            if kind not in PLAIN:
                return NotImplemented  # a subclass such as DTensor first decomposes into plain operations
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1  # fake value: assume that all labels are valid and that the stages agree
        out = func(*args, **kwargs)
        namespace, scratch = func.namespace, 0
        if namespace in ("c10d", "_c10d_functional") or func in EXPERT_EXCHANGES:
            self._record(func, args, out)
        elif func in GROUPED_GEMMS:
            self.flops += grouped_flops(args[0].shape, args[1].shape)
        elif func is torch.ops.torchtitan.grouped_8bit_mm.default:
            self.flops_8bit += grouped_flops(args[0].shape, args[2].shape)
        elif func is aten._int_mm.default:
            self.flops_8bit += 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
        elif func is torch.ops.torchtitan.block_mm.default:
            # nvfp4, 16 numbers in an int64, at twice the rate of 8 bits
            self.flops_8bit += math.prod(args[0].shape) * args[3].shape[1] * (16 if args[0].dtype == torch.int64 else 2)
        elif func is torch.ops.torchtitan.emulated_float8_mm.default:
            self.flops += 2 * args[0].shape[0] * args[0].shape[1] * args[2].shape[1]
        elif func in (torch.ops.torchtitan.float8_mm.default, torch.ops.torchtitan.int8_mm.default):  # on CPU
            self.flops_8bit += 2 * args[0].shape[0] * args[0].shape[1] * args[2].shape[1]
        elif func in ATTENTION_GEMMS:
            self.flops += ATTENTION_GEMMS[func] * args[0].numel() * args[0].shape[2]  # two a multiply-add, half of them
        elif func._overloadpacket in flop_registry:
            attention = "attention" in func._overloadpacket.__name__
            shown = _repeat_kv_heads(args) if attention else args
            flops = flop_registry[func._overloadpacket](*shown, **kwargs, out_val=out)
            if func is aten._scaled_mm.default:
                self.flops_8bit += flops
            else:
                self.flops += flops / 2 if attention else flops
            if not attention and out.dtype == torch.bfloat16 and out.device.type == "cpu" and _sums_in_memory():
                scratch = 4 * out.numel()
        if isinstance(out, torch.Tensor):
            self._on_allocate(out)
        elif isinstance(out, (tuple, list)):
            for tensor in pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self._on_allocate(tensor)
        if scratch:
            self._grow(scratch)
            self.current -= scratch
        return out

    def _record(self, func: Any, args: Sequence[Any], out: object) -> None:
        kind = KINDS.get(func._overloadpacket.__name__)
        if kind is None:  # wait, barrier
            return
        sizes = [_tensor_bytes(part) for part in (*args, out)]
        if func is torch.ops.torchtitan.exchange_rows.default and args[4:] and args[4] is not None:
            sizes = [rows.numel() + 4 * rows.shape[0] for rows in (args[0], cast(torch.Tensor, out))]
        if kind in ("send", "receive") and max(sizes) <= 8:
            return  # handshake between stages in the first step
        leaves = pytree.tree_leaves(args)
        objects = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
        groups = [leaf for leaf in objects if str(leaf._type()).endswith(".ProcessGroup")]
        name = dist.ProcessGroup.unbox(groups[0]).group_name if groups else _last_string(leaves)
        # The ranks that share experts may be those of another dimension.
        key = Collective("ep" if func in EXPERT_EXCHANGES else self.name_of_group(name), kind)
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


def grouped_flops(left: Sequence[int], right: Sequence[int]) -> float:
    """Of `kernels.grouped_gemm`, from the shapes of its operands: all rows of the left one, whatever their experts."""
    return 2.0 * left[0] * left[1] * right[-1]


@functools.cache
def _sums_in_memory() -> bool:
    """Whether oneDNN's bfloat16 GEMM writes float32 sums to memory first: with AVX-512 but no bfloat16 instructions."""
    units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_avx512_supported() and not units


def _repeat_kv_heads(args: Sequence[Any]) -> list[object]:
    """Shapes of attention's operands, with grouped keys and values repeated: torch 2.11 counts no others."""
    heads = args[0].shape[1]
    shapes = (arg.shape if isinstance(arg, torch.Tensor) else arg for arg in args)
    return [(s[0], heads, *s[2:]) if isinstance(s, torch.Size) and len(s) == 4 else s for s in shapes]


def _tensor_bytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _last_string(leaves: Iterable[object]) -> str:
    """The group name of a functional collective, which follows the name of the reduction."""
    return [leaf for leaf in leaves if isinstance(leaf, str)][-1]
