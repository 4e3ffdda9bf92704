"""The layer around attention.

Shapes: B batch, H query heads, G key-value heads, S sequence, D channels of a head, E channels of the residual stream.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from torchtitan.errors import ConfigError
from torchtitan.kernels.attention import attend
from torchtitan.kernels.dispatch import Kernel
from torchtitan.models.args import TransformerArgs
from torchtitan.models.norm import RMSNorm
from torchtitan.models.rope import apply_rope
from torchtitan.protocols import AttentionSpec


class Attention(nn.Module):
    """Grouped-query attention with rotary position embedding. The sizes say whether queries and keys are normalized
    before it, and whether a gate, wg, is on the output (arXiv 2505.06708)."""

    __call__: Callable[..., torch.Tensor]

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.head_dim, self.query_factor = args.head_dim, args.query_factor
        self.spec = AttentionSpec()  # a `Transformer` sets what its sizes declare
        self._kernel: Kernel | None = None
        self.sinks = nn.Parameter(torch.empty(args.n_heads)) if args.sinks else None
        self.make_layers(args)

    def make_layers(self, args: TransformerArgs) -> None:
        """Its projections and norms."""
        self.qk_norm = args.qk_norm
        if args.qk_norm is not None:
            heads = (args.n_heads, args.n_kv_heads) if args.qk_norm == "full" else (1, 1)
            self.q_norm, self.k_norm = (
                RMSNorm(count * args.head_dim, args.norm_eps, args.norm_offset) for count in heads
            )
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wg = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False) if args.gated_attention else None
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=args.wo_bias)

    def use(self, kernel: Kernel | None) -> Kernel | None:
        """Lets `kernel` compute attention, and returns what did so before; None: those of the table. A UserError if it
        does not do what this layer declares."""
        if kernel is not None:
            self.spec.require(kernel.name, kernel.does)
        before, self._kernel = self._kernel, kernel
        return before

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None, document_ids: torch.Tensor | None) -> torch.Tensor:
        """(B, S, E) to (B, S, E). The number of heads comes from the projections, which may be sharded. `rope`: a table
        of `rope_table`; None: queries and keys are not rotated."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = self.before_rope(q, k)
        q = q if self.query_factor == 1 else q * self.query_factor
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        run: Callable[..., torch.Tensor] = attend if self._kernel is None else self._kernel.run
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        out = run(self.spec, q, k, v, document_ids, **sinks)
        out = out.transpose(1, 2).flatten(2)
        mixed: torch.Tensor = self.wo(out if self.wg is None else out * self.wg(x).sigmoid())
        return mixed

    def before_rope(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries (B, S, H, D) and keys (B, S, G, D) as RoPE gets them."""
        if self.qk_norm == "head":
            return self.q_norm(q), self.k_norm(k)
        if self.qk_norm == "full":
            return self.q_norm(q.flatten(2)).view_as(q), self.k_norm(k.flatten(2)).view_as(k)
        return q, k


def attentions(blocks: Mapping[str, nn.Module], user: str) -> list[Attention]:
    """The attention of these blocks, which `user` is about to give another kernel. Raises a ConfigError for a block
    without one: it would attend as before, to a part of the context."""
    of_blocks = {
        name: [part for part in block.modules() if isinstance(part, Attention)] for name, block in blocks.items()
    }
    if lacking := next((name for name, parts in of_blocks.items() if not parts), None):
        raise ConfigError(
            f"{user} needs attention that takes other kernels, and layer {lacking} has none; derive it from "
            "torchtitan.models.attention.Attention."
        )
    return [part for parts in of_blocks.values() for part in parts]
