"""Makes fake tensors save what a device's kernels would save, where torch's fake CPU kernels differ."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from torchtitan.compat.dispatch import FakeTensor
from torchtitan.kernels.attention import OF_ALL, OF_LAST
from torchtitan.kernels.dispatch import Kernel
from torchtitan.kernels.simulated_device import simulated_device
from torchtitan.protocols import AttentionSpec

aten = torch.ops.aten


@contextlib.contextmanager
def kernel_substitutes(device_type: str) -> Iterator[None]:
    """Within this context attention and RMSNorm use the operations of "cuda" or "cpu". For fake tensors only.

    On a GPU flash attention saves queries, keys, values, output and log-sum-exp; the fused norm saves its input and one
    number per row; and the loss overwrites larger chunks of logits, without a copy. On CPU causal attention with
    unequal lengths has a mask.
    """
    rows, torchs = (ROWS, _TorchsOwn()) if device_type == "cuda" else ({}, contextlib.nullcontext())
    with simulated_device(device_type, FakeTensor, rows), torchs:
        yield


class _TorchsOwn(TorchFunctionMode):
    """The same for models that call torch's functions themselves."""

    def __torch_function__(
        self, function: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return FUNCTIONS.get(function, function)(*args, **(kwargs or {}))


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if q.dtype != torch.float32 and attn_mask is None:
        out: torch.Tensor = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
        return out
    if enable_gqa:  # the other kernel does not support grouped queries
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    bias = None
    if attn_mask is not None:
        bias = attn_mask.to(q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    out = aten._scaled_dot_product_efficient_attention(q, k, v, bias, q.requires_grad, dropout_p, is_causal)[0]
    return out


def _rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    return _RMSNorm.apply(x, weight)


class _RMSNorm(torch.autograd.Function):
    apply: ClassVar[Callable[..., torch.Tensor]]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        row = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, row)
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        return torch.empty_like(x, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _flash(spec: AttentionSpec, q: Any, k: Any, v: Any, ids: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
    out = _attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out if sinks is None else out * sinks.to(out.dtype).view(1, -1, 1, 1)


# Within documents and windows, too, a GPU's kernel saves what flash attention saves.
FLASH = Kernel("the plan's flash attention", _flash, does=["documents", "window", "sinks"])
ROWS = {
    OF_ALL: [FLASH],
    OF_LAST: [FLASH],
    "rms_norm": [Kernel("the plan's", lambda x, weight, eps: _RMSNorm.apply(x, weight))],
    "cross_entropy": [Kernel("the plan's", lambda logits, *_: logits.new_zeros((), dtype=torch.float32))],
}
FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {F.scaled_dot_product_attention: _attention, F.rms_norm: _rms_norm}
