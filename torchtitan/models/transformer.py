"""What all decoder-only transformers share, as plain math, independent of parallelism and precision.

Shapes: B batch, S sequence, D channels of the residual stream, H query heads, G key-value heads, V vocabulary.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.errors import ConfigError
from torchtitan.kernels.attention import attend
from torchtitan.kernels.dispatch import Kernel
from torchtitan.kernels.swiglu import Activation, ActivationName, activation, swiglu
from torchtitan.models.args import RopeArgs, TransformerArgs
from torchtitan.models.loss import chunk_tokens, chunked_cross_entropy, cross_entropy, soft_cap
from torchtitan.models.norm import RMSNorm
from torchtitan.models.rope import apply_rope, rope_table
from torchtitan.protocols import AttentionSpec, CrossEntropyFunction, Decoder, LossByRow

OUTPUT_STD = 0.02


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
        """(B, S, D) to (B, S, D). The number of heads comes from the projections, which may be sharded. `rope`: a table
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
        """Queries (B, S, H, head_dim) and keys (B, S, G, head_dim) as RoPE gets them."""
        if self.qk_norm == "head":
            return self.q_norm(q), self.k_norm(k)
        if self.qk_norm == "full":
            return self.q_norm(q.flatten(2)).view_as(q), self.k_norm(k.flatten(2)).view_as(k)
        return q, k


class GatedUnit(nn.Module):
    """Combines the gate and the value of a feed-forward by `activation`, which may be replaced."""

    activation: Activation


class FeedForward(GatedUnit):
    """w2(activation(w1 x, w3 x)), by default SwiGLU (arXiv 2002.05202): w2(silu(w1 x) * w3 x). An activation without a
    gate has no w3."""

    __call__: Callable[..., torch.Tensor]

    def __init__(self, dim: int, inner: int, name: ActivationName = "swiglu") -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)
        self.w3 = None if name == "relu_squared" else nn.Linear(dim, inner, bias=False)
        self.activation = activation(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = self.w1(x), None if self.w3 is None else self.w3(x)
        takes_gate = self.activation is swiglu and getattr(self.w2, "takes_gate", False)
        out: torch.Tensor = self.w2(*inputs) if takes_gate else self.w2(self.activation(*inputs))
        return out


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each in a residual branch that begins or ends with an RMSNorm, or both, as
    `args.norms` says. `attention` is called like `Attention`, with (x, rope, document_ids); plans, filters and
    checkpoints call the feed-forward `name`."""

    __call__: Callable[..., torch.Tensor]

    def __init__(
        self, args: TransformerArgs, attention: nn.Module, feed_forward: nn.Module, name: str = "feed_forward"
    ) -> None:
        super().__init__()
        self.attention = attention
        self.add_module(name, feed_forward)
        self._feed_forward_name = name
        before, after = args.norms != "after", args.norms != "before"
        self.attention_norm, self.ffn_norm = _norm(args, before), _norm(args, before)
        self.attention_post_norm, self.ffn_post_norm = _norm(args, after), _norm(args, after)

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None, document_ids: torch.Tensor | None) -> torch.Tensor:
        mixed = self.attention(_normed(self.attention_norm, x), rope, document_ids)
        x = x + _normed(self.attention_post_norm, mixed)
        mixed = getattr(self, self._feed_forward_name)(_normed(self.ffn_norm, x))
        return x + _normed(self.ffn_post_norm, mixed)


def _norm(args: TransformerArgs, is_there: bool) -> RMSNorm | None:
    return RMSNorm(args.dim, args.norm_eps, args.norm_offset) if is_there else None


def _normed(norm: RMSNorm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


class TiedOutput(nn.Module):
    """An output layer that uses the embedding's weight. It has no parameter of its own."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that it is not registered a second time as a child

    @property
    def weight(self) -> torch.Tensor:
        return self._embedding[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Transformer(Decoder):
    """A decoder-only transformer, or one pipeline stage of it, in which the missing modules are None. A family sets
    `attention`, or overrides `make_block`, and `init_std` for parameters that are not in it."""

    args: TransformerArgs  # has a `vocab_size`
    attention: ClassVar[type[Attention]] = Attention

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        if args.vocab_size is None:
            raise ValueError("vocab_size is None; set it with with_vocab_size()")
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        # A dict, not a list: layers of a pipeline stage keep their numbers.
        self.layers = nn.ModuleDict({str(i): self.make_block(args, i) for i in range(args.n_layers)})
        for name, block in self.layers.items():
            for module in block.modules():
                if isinstance(module, Attention):
                    module.spec = args.attention_spec(int(name))
        self.norm = RMSNorm(args.dim, args.norm_eps, args.norm_offset)
        self.output = (
            TiedOutput(self.tok_embeddings)
            if args.tied_embeddings
            else nn.Linear(args.dim, args.vocab_size, bias=False)
        )
        self.cross_entropy: CrossEntropyFunction = cross_entropy  # loss and gradient of logits
        self.z_loss: float | None = None  # coefficient
        self.by_row: LossByRow | None = None  # sees the loss of each row in training
        # (seq,) int64 position ids of the input tokens; None for the full sequence in order.
        self.positions: torch.Tensor | None = None
        self._rope_tables: dict[RopeArgs, tuple[torch.Tensor, torch.Tensor | None]] = {}  # and `positions` of each

    def make_block(self, args: Any, layer: int) -> nn.Module:
        """The block with this number: a module called like `TransformerBlock`, with (x, rope, document_ids)."""
        return TransformerBlock(args, self.attention(args), FeedForward(args.dim, args.ffn_dim, args.activation))

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None, document_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(B, S, V) logits, or, with `labels`, the float32 sum of the cross-entropy over all tokens; without an output
        layer, the hidden states for the next stage, (B, S, D).

        Args:
            tokens: (B, S) int64; without an embedding, the hidden states of the previous stage, (B, S, D).
            labels: (B, S) int64, the next token at each position; `IGNORE_INDEX` for positions without loss.
            document_ids: (B, S); if given, attention stays within a document.
        """
        h = tokens if self.tok_embeddings is None else self.embed(tokens)
        h = self.run_layers(h, tokens.shape[1], document_ids)
        return h if self.norm is None or self.output is None else self.head(h, labels)

    def run_layers(self, h: torch.Tensor, seq_len: int, document_ids: torch.Tensor | None) -> torch.Tensor:
        for number, layer in self.layers.items():
            h = layer(h, self.rope(int(number), seq_len, h.device), document_ids)
        return h

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, S) int64 to (B, S, D)."""
        assert self.tok_embeddings is not None
        h: torch.Tensor = self.tok_embeddings(tokens)
        return h * self.args.dim**0.5 if self.args.scaled_embeddings else h

    def head(self, h: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        """Norm, output layer and loss."""
        assert self.norm is not None and self.output is not None
        h = self.norm(h)
        if labels is None:
            return soft_cap(self.output(h), self.args.logit_softcap)
        return self.loss(h, labels, self.by_row if torch.is_grad_enabled() else None)

    def loss(self, h: torch.Tensor, labels: torch.Tensor, by_row: LossByRow | None = None) -> torch.Tensor:
        """The loss of hidden states after the norm."""
        assert self.output is not None
        # The registered parameter, which receives the gradient; `weight` may be a view of it.
        owner = self.output if self.tok_embeddings is None or not self.args.tied_embeddings else self.tok_embeddings
        weight = next(owner.parameters())
        plain = type(self.output).forward in (nn.Linear.forward, TiedOutput.forward)  # not in low precision
        linear: Any = self.output.weight if plain else None
        loss = functools.partial(self.cross_entropy, z_loss=self.z_loss, softcap=self.args.logit_softcap)
        return chunked_cross_entropy(self.output, weight, h, labels, by_row(loss, labels) if by_row else loss, linear)

    def passes(self, tokens: int) -> dict[str, int]:
        """Linear layers that run more than once per forward pass over this many tokens, and how often."""
        return {"output": -(-tokens // chunk_tokens(self.args.vocab_size or 1, on_gpu=torch.cuda.is_available()))}

    def rope(self, layer: int, seq_len: int, device: torch.device) -> torch.Tensor | None:
        """The layer's RoPE table; None if it has no RoPE. Layers that rotate alike share one, which is cached between
        calls. Not a buffer, since it does not belong in a state dict."""
        args, positions = self.args.rope(layer), self.positions
        if args is None:
            return None
        length = seq_len if positions is None else len(positions)
        table, before = self._rope_tables.get(args, (None, None))
        if table is None or before is not positions or len(table) != length or table.device != device:
            places = torch.arange(seq_len) if positions is None else positions
            table = rope_table(self.args.rope_dim, places.to(device), args.theta, args.scaling)
            self._rope_tables[args] = table, positions
        return table

    def init_std(self, name: str) -> float | None:
        """Standard deviation for initialization; None for parameters (norms) that start at 1.

        1 / sqrt(fan-in) preserves the scale of activations at any width (0.0156 for 4,096 channels); layers that write
        to the residual stream are scaled down by sqrt(2 * depth) (Megatron, arXiv 1909.08053). Biases and sinks start
        at 0. Embeddings start at 1, the scale of the norms' outputs, or at what the factor sqrt(dim) makes 1; the
        output layer is small enough that the first loss is about ln(vocabulary).
        """
        tied = self.args.tied_embeddings
        match name.split("."):
            case [*_, module, "weight"] if module.endswith("norm"):
                return 0.0 if self.args.norm_offset else None
            case [*_, "bias" | "sinks"]:
                return 0.0
            case ["tok_embeddings", "weight"]:
                return OUTPUT_STD if tied else float(self.args.dim**-0.5) if self.args.scaled_embeddings else 1.0
            case ["output", "weight"]:
                return OUTPUT_STD
            case ["layers", layer, _, "wo", "weight"]:
                return float((2 * (int(layer) + 1) * self.args.n_heads * self.args.head_dim) ** -0.5)
            case ["layers", layer, _, "w2", "weight"]:
                return float((2 * (int(layer) + 1) * self.args.ffn_dim) ** -0.5)
        return float(self.args.dim**-0.5)


def attentions(blocks: Mapping[str, nn.Module], user: str) -> list[Attention]:
    """The attention of these blocks, which `user` is about to give another kernel. Raises a ConfigError for a block
    without one: it would attend as before, to a part of the context."""
    of_blocks = {
        name: [part for part in block.modules() if isinstance(part, Attention)] for name, block in blocks.items()
    }
    if lacking := next((name for name, parts in of_blocks.items() if not parts), None):
        raise ConfigError(
            f"{user} needs attention that takes other kernels, and layer {lacking} has none; derive it from "
            "torchtitan.models.transformer.Attention."
        )
    return [part for parts in of_blocks.values() for part in parts]
