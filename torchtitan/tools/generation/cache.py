"""Key/value cache, so that a new token costs only one token's work."""

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.kernels.attention import attend
from torchtitan.kernels.attention_sinks import with_sink_key
from torchtitan.kernels.dispatch import Kernel
from torchtitan.models.transformer import attentions
from torchtitan.protocols import AttentionSpec, Decoder


class KeyValueCache:
    """Attention of a model's layers to tokens of earlier calls; a row has at most `length`, including padding. A layer
    with a window keeps the keys and values of the last one, that of position p in place p % window.
    padding: (batch,) int64, number of padding tokens at the left of each row, which are masked."""

    def __init__(self, length: int, padding: torch.Tensor) -> None:
        self.length = length
        self.filled = 0
        self._kept: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
        # (batch, length), used as document ids: padding is a separate document.
        self._is_text = (torch.arange(length, device=padding.device) >= padding[:, None]).long()
        self._is_padded = bool(padding.any())

    def attend(
        self,
        layer: nn.Module,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ids: None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of new tokens to themselves and all earlier ones of this layer. q: (batch, n_heads, new, head_dim)
        and k, v: (batch, n_kv_heads, new, head_dim), of all tokens in the first call, then of one token per call."""
        batch, kv_heads, new, head_dim = k.shape
        places = min(spec.window or self.length, self.length)
        if layer not in self._kept:
            shape = (batch, kv_heads, places, head_dim)
            self._kept[layer] = k.new_empty(shape), v.new_empty(shape)
        keys, values = self._kept[layer]
        end = self.filled + new
        place = self.filled % places
        keys[:, :, place : place + new] = _in_places(k, places)
        values[:, :, place : place + new] = _in_places(v, places)
        if self.filled == 0:
            return attend(spec, q, k, v, self._is_text[:, :end] if self._is_padded else None, sinks=sinks)
        kept = min(end, places)
        mask = None
        if self._is_padded:
            # The position in each place: of those before `end`, the last one that belongs there.
            positions = end - 1 - (end - 1 - torch.arange(kept, device=k.device)) % places
            mask = self._is_text[:, None, None, positions].bool()
        # Query heads that share a key head take the place of the sequence dimension: one GEMM for all of them.
        grouped = q.view(batch, kv_heads, -1, head_dim)
        keys, values = keys[:, :, :kept], values[:, :, :kept]
        if sinks is not None:
            keys, values, mask = with_sink_key(keys, values, mask, sinks.view(1, kv_heads, -1, 1))
        return F.scaled_dot_product_attention(grouped, keys, values, mask).view_as(q)


def _in_places(x: torch.Tensor, places: int) -> torch.Tensor:
    """Keys or values (batch, heads, new, head_dim), or, of more than there are places, the last, each in its place."""
    new = x.shape[2]
    return x if new <= places else x[:, :, -places:].roll(new % places, 2)


@contextlib.contextmanager
def cached(model: Decoder, length: int, padding: torch.Tensor) -> Iterator[KeyValueCache]:
    """Lets a model's layers cache keys and values, and its output layer process only the last token."""
    cache = KeyValueCache(length, padding)
    assert isinstance(model.output, nn.Module)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, model, "positions", None)
        stack.enter_context(model.output.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, -1:],)))
        for module in attentions(dict(model.layers.items()), "the cache of generation (--no-cache leaves it out)"):
            run = functools.partial(cache.attend, module)
            kernel = Kernel("the cache of generation", run, does=["window", "sinks"])
            stack.callback(module.use, module.use(kernel))
        yield cache
