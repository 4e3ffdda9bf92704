"""A mixture of experts in place of a dense feed-forward layer: router, routed experts, shared experts.

No token is dropped and no expert has a capacity: rows are sorted by expert, and one grouped GEMM serves all experts.
The order is deterministic: by expert, then by token.

Shapes: T tokens, D channels, E experts, k experts of a token, R = T k rows, one for each expert of each token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from torchtitan.kernels.exact_gemm import exact_linear
from torchtitan.kernels.grouped_gemm import add_bias, ends_of, grouped_linear, reorder_rows, sum_over_experts
from torchtitan.kernels.operator import Function
from torchtitan.kernels.swiglu import activation
from torchtitan.models.sparse_args import MoEArgs, SparseArgs
from torchtitan.models.transformer import FeedForward, GatedUnit, Transformer, TransformerBlock


class GroupedLinear(nn.Module):
    """A linear layer of each expert. Its weight is (E, out_features, in_features) and its bias, if it has one, (E,
    out_features), or this rank's of them. Subclasses override `matmul`."""

    __call__: Callable[..., torch.Tensor]

    def __init__(self, n_experts: int, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(n_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(n_experts, out_features)) if bias else None

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """(rows, in_features), sorted by expert, to (rows, out_features); `ends` are the ends of the experts."""
        out = self.matmul(x, ends)
        return out if self.bias is None else add_bias(out, self.bias, ends)

    def matmul(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """As `forward`, without the bias."""
        return grouped_linear(x, self.weight, ends)

    @classmethod
    def with_weight_of(cls, layer: "GroupedLinear") -> Self:
        """A layer of this class that takes over the parameters of `layer`."""
        with torch.device("meta"):
            new = cls(0, layer.in_features, layer.out_features)
        new.weight, new.bias = layer.weight, layer.bias
        return new

    def extra_repr(self) -> str:
        return f"experts={len(self.weight)}, in_features={self.in_features}, out_features={self.out_features}"


Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From rows, sorted by this rank's experts, and the end of each expert's rows to results."""

Dispatch = Callable[[Compute, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes rows, (R, D) and sorted by expert, with the ranks that have their experts (`parallel.expert`), from the
number of each expert's rows, (E,) int64. Results are in the order of the rows."""


def compute_here(experts: Compute, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The `Dispatch` of a rank that has all experts."""
    return experts(rows, ends_of(counts))


class Experts(GatedUnit):
    """A `FeedForward` in each expert: w2(activation(w1 x, w3 x))."""

    def __init__(self, dim: int, args: MoEArgs) -> None:
        super().__init__()
        self.active_parameters = 3 * dim * args.ffn_dim * args.top_k  # parameters that a token uses
        self.active_parameters += (2 * args.ffn_dim + dim) * args.top_k if args.biases else 0
        self.w1 = GroupedLinear(args.n_experts, dim, args.ffn_dim, args.biases)
        self.w2 = GroupedLinear(args.n_experts, args.ffn_dim, dim, args.biases)
        self.w3 = GroupedLinear(args.n_experts, dim, args.ffn_dim, args.biases)
        self.activation = activation(args.activation)

    def compute(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Not `forward`, which FSDP may replace with the block's (`parallel.expert.gather_with_block`)."""
        return self.w2(self.activation(self.w1(x, ends), self.w3(x, ends)), ends)


class Router(nn.Module):
    """Scores the experts for each token, in float32. `balance_loss` maps scores and chosen experts to the same scores,
    and adds the gradient of a loss for an even load to theirs; `z_loss` does so with logits (`models.expert_balance`).
    """

    __call__: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def __init__(self, dim: int, args: MoEArgs) -> None:
        super().__init__()
        self.args = args
        self.gate = nn.Linear(dim, args.n_experts, bias=args.biases)
        self.balance_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self.z_loss: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From (B, S, D), with a bias, (E,) float32, that is added to the scores for the choice of experts only, to
        (B, S, k) float32 weights and int64 numbers of the chosen experts, and (B, S, E) float32 scores."""
        logits = exact_linear(x, self.gate.weight)
        logits = logits if self.gate.bias is None else logits + self.gate.bias.float()
        if self.z_loss is not None and torch.is_grad_enabled():
            logits = self.z_loss(logits)
        scores = logits.softmax(-1) if self.args.score == "softmax" else logits.sigmoid()
        chosen = self._in_best_groups(scores.detach() + bias).topk(self.args.top_k, dim=-1).indices
        if self.balance_loss is not None and torch.is_grad_enabled():
            scores = self.balance_loss(scores, chosen)
        weights = scores.gather(-1, chosen)
        if self.args.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.args.scale, chosen, scores

    def _in_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores, (B, S, E), with -inf for experts outside a token's best groups (arXiv 2412.19437, 2.1.2)."""
        if self.args.top_groups == self.args.n_groups:
            return scores
        groups: torch.Tensor = scores.unflatten(-1, (self.args.n_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.args.top_groups, dim=-1).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        return groups.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


class MoE(nn.Module):
    """Router, routed experts and shared experts."""

    expert_bias: torch.Tensor  # (E,) float32, balances the load without a loss (arXiv 2408.15664); in checkpoints
    # (E + 1,) float64, since the last optimizer step: rows of each expert on this rank, and the router's entropy in
    # nats, summed over tokens.
    statistics: torch.Tensor
    __call__: Callable[..., torch.Tensor]

    def __init__(self, dim: int, args: MoEArgs) -> None:
        super().__init__()
        self.args = args
        self.router = Router(dim, args)
        self.experts = Experts(dim, args)
        self.shared_experts = FeedForward(dim, args.n_shared_experts * args.ffn_dim) if args.n_shared_experts else None
        self.register_buffer("expert_bias", torch.zeros(args.n_experts, dtype=torch.float32))
        self.register_buffer("statistics", torch.zeros(args.n_experts + 1, dtype=torch.float64), persistent=False)
        self.dispatch: Dispatch = compute_here  # how rows reach the ranks that have their experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to (B, S, D)."""
        k = self.args.top_k
        weights, chosen, scores = self.router(x, self.expert_bias)
        flat = chosen.flatten()
        counts = torch.zeros_like(self.expert_bias, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))
        if torch.is_grad_enabled():
            weights = _Recorded.apply(weights, scores, counts, self.statistics)
        order = flat.argsort(stable=True)  # row j of the sorted rows is row order[j] of (T, k)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(flat.shape[0], device=x.device))
        rows = reorder_rows(x.flatten(0, 1), order // k, place.view(-1, k))
        out = self.dispatch(self.experts.compute, rows, counts)
        routed = _Combine.apply(out, weights.view(-1, k), order, place.view(-1, k)).view_as(x)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)

    @property
    def unused_parameters(self) -> int:
        """How many of its parameters a token does not use."""
        return self.experts.active_parameters // self.args.top_k * (self.args.n_experts - self.args.top_k)


def mixtures(model: nn.Module) -> dict[str, MoE]:
    """The mixtures of experts in a model, or on this rank, by path."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


@torch.no_grad()
def reset_buffers(model: nn.Module) -> None:
    """Sets biases and statistics of all mixtures to zero; call it when their memory was allocated."""
    for mixture in mixtures(model).values():
        mixture.expert_bias.zero_()
        mixture.statistics.zero_()


class _Combine(Function):
    """Of each token, the sum of its experts' results, (R, D) and sorted by expert, times their weights, (T, k) float32.
    order: (R,), flattened (T, k) index of each sorted row; places: (T, k), where these are among the sorted rows."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        weights = weights.to(out.dtype)
        ctx.save_for_backward(out, weights, order, places)
        by_token = out.index_select(0, places.flatten()).unflatten(0, places.shape)
        return sum_over_experts(by_token.mul_(weights.unsqueeze(-1)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out, weights, order, places = ctx.saved_tensors
        sorted_grad = grad.index_select(0, order // places.shape[1])
        out_grad = sorted_grad * weights.flatten()[order].unsqueeze(1)
        weights_grad = torch.linalg.vecdot(sorted_grad, out).float()
        return out_grad, weights_grad[places], None, None


class _Recorded(Function):
    """The identity of `weights`; adds to `statistics` in the backward pass, since the forward may run twice."""

    @staticmethod
    def forward(
        ctx: Any, weights: torch.Tensor, scores: torch.Tensor, counts: torch.Tensor, statistics: torch.Tensor
    ) -> torch.Tensor:
        shares = scores / scores.sum(-1, keepdim=True)
        entropy = torch.special.entr(shares).sum()
        ctx.save_for_backward(torch.cat([counts.double(), entropy.double().view(1)]))
        ctx.statistics = statistics
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (seen,) = ctx.saved_tensors
        ctx.statistics.add_(seen)
        return grad, None, None, None


class SparseTransformer(Transformer):
    """A decoder whose blocks have a mixture of experts as `moe`, after `moe.n_dense_layers` with a `feed_forward`."""

    args: SparseArgs

    def make_block(self, args: Any, layer: int) -> nn.Module:
        if layer < args.moe.n_dense_layers:
            return super().make_block(args, layer)
        return TransformerBlock(args, self.attention(args), MoE(args.dim, args.moe), name="moe")

    def init_std(self, name: str) -> float | None:
        """As for a dense model, by the width of an expert's own layers. Normalized weights of k experts are about
        scale / k each; if that makes the sum smaller than the output of a dense layer, `w2` of experts starts larger.
        """
        moe = self.args.moe
        match name.split("."):
            case ["layers", layer, "moe", module, "w2", "weight"]:
                gain = max(1.0, moe.top_k**0.5 / moe.scale) if module == "experts" and moe.normalize else 1.0
                return gain * float((2 * (int(layer) + 1) * moe.ffn_dim) ** -0.5)
        return super().init_std(name)
