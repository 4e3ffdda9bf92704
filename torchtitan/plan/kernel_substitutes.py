"""Makes fake tensors save what a device's kernels would save, where torch's fake CPU kernels differ."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.nn.functional as F

from torchtitan.compat.dispatch import FakeTensor
from torchtitan.kernels import attention, matmul_8bit, pointwise, rounding
from torchtitan.kernels.dispatch import KERNELS, Kernel
from torchtitan.models import loss

aten = torch.ops.aten


@contextlib.contextmanager
def kernel_substitutes(device_type: str) -> Iterator[None]:
    """Within this context attention and RMSNorm use the operations of "cuda" or "cpu". For fake tensors only.

    On a GPU flash attention saves queries, keys, values, output and log-sum-exp; the fused norm saves its input and one
    number per row; and the loss overwrites larger chunks of logits, without a copy. On CPU causal attention with
    unequal lengths has a mask.
    """
    patched: list[tuple[ModuleType, str, object]] = [
        (attention, "causal_lower_right", _mask_on_cpu),
        (pointwise, "CLASSES", (*pointwise.CLASSES, FakeTensor)),
        (pointwise, "run_kernel", functools.partial(_run_unless_fake, pointwise.run_kernel)),
    ]
    if device_type == "cuda":
        patched = [
            (F, "scaled_dot_product_attention", _attention),
            (F, "rms_norm", _rms_norm),
            (rounding, "rounds_on_cpu", lambda x: False),
            (matmul_8bit, "_scales_rows_fast", lambda device: True),
            (loss, "is_on_gpu", lambda x: True),
            (loss, "_fused_cross_entropy", lambda logits, labels: logits.new_zeros((), dtype=torch.float32)),
        ]
    with contextlib.ExitStack() as stack:
        if device_type == "cuda":
            rows = {attention.OF_ALL: [FLASH], attention.OF_LAST: [FLASH], "rms_norm": KERNELS["rms_norm"][-1:]}
            stack.enter_context(patch.dict(KERNELS, rows))
        for module, name, value in patched:
            stack.enter_context(patch.object(module, name, value))
        yield


def _run_unless_fake(run: Callable[..., None], kernel: str, *arguments: object) -> None:
    if not any(isinstance(argument, FakeTensor) for argument in arguments):
        run(kernel, *arguments)


def _mask_on_cpu(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


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


# Within documents, too, a GPU's kernel saves what flash attention saves.
FLASH = Kernel(
    "the plan's flash attention",
    lambda spec, q, k, v, ids: _attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]),
    does=["documents"],
)


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
