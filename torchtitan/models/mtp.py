"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): layers that predict further tokens in training.

Depth k, counted from 1, has a transformer block, which reads the hidden states of the depth before, at first the
model's before its final norm, and the embeddings of the tokens k positions ahead. With a final norm of its own and the
model's output layer it predicts the tokens k + 1 ahead. Modules are called as in DeepSeek-V3's files. Without
`mtp_tokens`, as in evaluation, the model is what it would be without these layers.

Shapes: B batch, S sequence, D channels, V vocabulary, K depths.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torchtitan.config.training import Training
from torchtitan.errors import ConfigError
from torchtitan.kernels.operator import Function
from torchtitan.models.init import init_weights
from torchtitan.models.norm import RMSNorm
from torchtitan.models.parallelize import parallelize
from torchtitan.models.transformer import Attention, Transformer
from torchtitan.protocols import IGNORE_INDEX, Decoder, attended_channels


def mtp_inputs(
    tokens: torch.Tensor, labels: torch.Tensor, document_ids: torch.Tensor, depths: int
) -> dict[str, torch.Tensor]:
    """Tokens and labels of each depth, (B, depths, S) int64: at depth k, counted from 1, those k positions ahead.

    A position has a label at depth k only if it has one at all smaller depths, and the target is in the same document.

    Args:
        tokens: (B, S + 1) int64, with the last label.
        labels: (B, S); `IGNORE_INDEX` for positions without loss.
        document_ids: (B, S + 1), of `tokens`.
    """
    seq_len, counted = labels.shape[1], labels != IGNORE_INDEX
    further_tokens, further_labels = [], []
    for depth in range(1, depths + 1):
        ahead = F.pad(labels[:, depth:], (0, depth), value=IGNORE_INDEX)
        alike = document_ids[:, depth + 1 :] == document_ids[:, : seq_len - depth]
        counted = counted & (ahead != IGNORE_INDEX) & F.pad(alike, (0, depth))
        further_labels.append(ahead.where(counted, IGNORE_INDEX))
        further_tokens.append(F.pad(tokens[:, depth:seq_len].clamp(min=0), (0, depth)))
    return {"mtp_tokens": torch.stack(further_tokens, 1), "mtp_labels": torch.stack(further_labels, 1)}


class MTPLayer(nn.Module):
    """One depth."""

    __call__: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def __init__(self, model: Transformer, number: int) -> None:
        super().__init__()
        args = model.args
        self.enorm, self.hnorm, self.norm = (RMSNorm(args.dim, args.norm_eps, args.norm_offset) for _ in range(3))
        self.eh_proj = nn.Linear(2 * args.dim, args.dim, bias=False)
        self.block = model.make_block(args, number)
        for module in self.block.modules():
            if isinstance(module, Attention):
                module.spec = args.attention_spec(number)

    def forward(
        self, h: torch.Tensor, embedded: torch.Tensor, rope: torch.Tensor | None, document_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the hidden states of the depth before and the embeddings of the tokens ahead, (B, S, D), to the hidden
        states of this one, and the same after its final norm."""
        x = self.block(self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(h)], -1)), rope, document_ids)
        ready = self.norm(x)
        return x, ready if ready._base is None else ready.clone()  # FSDP warns of views


class MTPTransformer(Transformer):
    """What the class of a model inherits from, too, with these layers."""

    mtp: nn.ModuleDict | None  # the depths, counted from 0; None in all pipeline stages but the last
    mtp_loss_coefficient: float
    # Of each micro-batch since they were read: the summed cross-entropy over all depths, and the number of its targets.
    # In a list, which the stages of a pipeline share.
    mtp_losses: list[torch.Tensor]

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        mtp_tokens: torch.Tensor | None = None,
        mtp_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Transformer.forward`; in training with what `data.mtp_inputs` makes, (B, K, S) int64. Between pipeline
        stages the embeddings of the tokens ahead follow the hidden states as further rows, ((1 + K) B, S, D). The loss
        is that of the next token; its gradient is that of all losses."""
        if mtp_tokens is None:
            return super().forward(tokens, labels, document_ids)
        if self.tok_embeddings is None:
            h, *embedded = tokens.chunk(1 + mtp_tokens.shape[1])
        else:
            h, *embedded = map(self.embed, (tokens, *mtp_tokens.unbind(1)))
        h = self.run_layers(h, tokens.shape[1], document_ids)
        if self.mtp is None:
            return torch.cat([h, *embedded])
        x, normed = h, []
        for number, ahead in enumerate(embedded, self.args.n_layers):
            layer = self.mtp[str(number - self.args.n_layers)]
            x, ready = layer(x, ahead, self.rope(number, tokens.shape[1], tokens.device), document_ids)
            normed.append(ready)
        return self.head(h, labels, normed, mtp_labels)

    def head(
        self,
        h: torch.Tensor,
        labels: torch.Tensor | None,
        normed: Sequence[torch.Tensor] = (),  # one for each depth
        mtp_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Transformer.head`, for all depths."""
        loss = super().head(h, labels)
        if mtp_labels is None:
            return loss
        further = [self.loss(x, of_depth) for x, of_depth in zip(normed, mtp_labels.unbind(1), strict=True)]
        total = torch.stack(further).sum()
        self.mtp_losses.append(torch.stack([total.detach(), (mtp_labels != IGNORE_INDEX).sum()]))
        return _WithGradientOf.apply(loss, total, self.mtp_loss_coefficient / len(further))

    def passes(self, tokens: int) -> dict[str, int]:
        assert self.mtp is not None  # called of the full model
        return {name: count * (1 + len(self.mtp)) for name, count in super().passes(tokens).items()}

    def init_std(self, name: str) -> float | None:
        """As for the layer after the last one; sums of two times as many channels in the projection."""
        match name.split("."):
            case ["mtp", depth, "block", *rest]:
                return super().init_std(".".join(["layers", str(self.args.n_layers + int(depth)), *rest]))
            case ["mtp", _, "eh_proj", _]:
                return float((2 * self.args.dim) ** -0.5)
        return super().init_std(name)


class _WithGradientOf(Function):
    """`loss`, with the gradient of loss + factor * further."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, further: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return loss.clone()  # FSDP warns of views

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, grad * ctx.factor, None


def add_mtp(model: Decoder, training: Training, own_parallelize: object) -> None:
    """Adds the layers to a full model, on the meta device, in place. Raises a ConfigError if it is no `Transformer`, or
    has a forward pass or, in its `ModelSpec`, a `parallelize` of its own, which would not run or divide them."""
    cls: Any = type(model)
    if cls.forward is not Transformer.forward or own_parallelize is not parallelize:
        raise ConfigError(
            f"training.mtp_layers: {cls.__name__} has a forward pass or a `parallelize` of its own; unset it, or use a "
            "model that has those of torchtitan.models."
        )
    assert isinstance(model, Transformer)
    number = model.args.n_layers
    layers = {str(depth): MTPLayer(model, number + depth) for depth in range(training.mtp_layers)}
    model.__class__ = type(cls.__name__, (MTPTransformer, cls), {})
    assert isinstance(model, MTPTransformer)
    model.mtp, model.mtp_loss_coefficient, model.mtp_losses = nn.ModuleDict(layers), training.mtp_loss_coefficient, []


def init_mtp(model: MTPTransformer, seed: int, factor_of: Callable[[str], float]) -> None:
    """Initializes these layers alone."""
    if model.mtp is not None:
        init_weights(model.mtp, lambda name: model.init_std(f"mtp.{name}"), seed, lambda name: factor_of(f"mtp.{name}"))


def mtp_flops(model: MTPTransformer, seq_len: int) -> float:
    """FLOPs per token that `flops_per_token` does not count: of the output layer, which all depths share, and of
    attention."""
    assert model.mtp is not None and model.output is not None
    args, depths = model.args, len(model.mtp)
    weight: Any = model.output.weight
    positions = sum(args.attention_spec(args.n_layers + depth).positions(seq_len) for depth in range(depths))
    return float(6 * weight.numel() * depths + 12 * attended_channels(args) * positions)


def mtp_metrics(model: MTPTransformer, device: torch.device, _: object, due: bool) -> dict[str, float]:
    """Call after each step. If a report is due, the mean loss of this step's targets at all depths. Collective then."""
    seen = torch.stack([torch.zeros(2, device=device), *model.mtp_losses]).sum(0)
    model.mtp_losses.clear()
    if not due:
        return {}
    dist.all_reduce(seen)  # tensor-parallel ranks have the same; ranks without the last stage have none
    return {"mtp_loss": float(seen[0] / seen[1])}
