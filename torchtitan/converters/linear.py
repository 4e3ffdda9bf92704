"""Base of the converters of linear layers, ordinary ones and experts': filter, module swap, and the check that a
swapped layer quantizes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from torchtitan.converters.converter import LayerGemms, ModelConverter
from torchtitan.converters.filter import Decision, FilterRules, decide
from torchtitan.converters.numerics import Role
from torchtitan.converters.numerics_filter import inaccurate_layers
from torchtitan.converters.target import Target
from torchtitan.errors import ConfigError
from torchtitan.logging import logger
from torchtitan.models.moe import GroupedLinear


class Scaled(NamedTuple):
    """An operand before and after rounding; both float32, in units of the recipe's format.

    Attributes:
        exact: the operand times its scale.
        rounded: the nearest number of the format.
        largest: largest number of the format; larger ones saturate.
    """

    exact: torch.Tensor
    rounded: torch.Tensor
    largest: float


L = TypeVar("L", bound=nn.Linear)


def with_parameters_of(linear: nn.Linear, make: Callable[..., L], **settings: Any) -> L:
    """A layer of another class, made with these settings, that takes over the parameters of `linear`."""
    new = make(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **settings)
    new.weight, new.bias = linear.weight, linear.bias
    return new


class LinearConverter(ModelConverter):
    """Replaces linear layers with a subclass of `nn.Linear` whose weight stays a plain parameter; and so
    `GroupedLinear` layers, if the recipe has grouped GEMMs.

    A subclass sets the attributes and implements `swap`, and `swap_grouped` if it sets `grouped_gemms`.

    Attributes:
        name: of the converter and its configuration section.
        recipe: name of the recipe.
        gemms: of one layer.
        grouped_gemms: of one layer of all experts; None if experts stay in high precision (`rules.against_experts`).
        cannot_group: why this device cannot run `grouped_gemms`, with the remedy; "" if it can.
        rules: requirements of the recipe on a layer.
        decisions: one per linear layer of the model, set by `convert`.
    """

    name: str
    recipe: str
    gemms: LayerGemms
    grouped_gemms: LayerGemms | None = None
    cannot_group: str = ""
    rules: FilterRules

    def emulated(self) -> "LinearConverter":
        """A converter whose layers compute the same on any device; this one, if they all do."""
        return self

    def __init__(self, filter_fqns: Sequence[str], target: Target, explicit: bool = True) -> None:
        """`explicit`: the filter is the user's own and must match; False for a section's default."""
        self.filter_fqns = tuple(filter_fqns)
        self.explicit = explicit
        self.target = target
        self.decisions: list[Decision] = []

    def swap(self, linear: nn.Linear) -> nn.Linear:
        """A low-precision layer that takes over the parameters of `linear`, on its device."""
        raise NotImplementedError

    def swap_grouped(self, layer: GroupedLinear) -> GroupedLinear:
        """The same for a layer of all experts."""
        raise NotImplementedError

    def scaled(self, tensor: torch.Tensor, role: Role) -> Scaled:
        """Rounds a float32 operand, (rows, columns), of GEMMs that sum over columns."""
        raise NotImplementedError

    def swap_in_model(self, linear: nn.Linear, fqn: str) -> nn.Linear:
        """`swap` for the model's layer at this path, whose weight may also be gathered in low precision."""
        return self.swap(linear)

    @property
    def description(self) -> str:
        """All settings that affect speed."""
        raise NotImplementedError

    def decide(self, model: nn.Module) -> list[Decision]:
        """What `convert` would do with each linear layer of the model, without changing it."""
        return decide(
            model,
            self.filter_fqns,
            self.name,
            self.recipe,
            self.rules,
            self.target,
            self.explicit,
            functools.partial(inaccurate_layers, self, model),
        )

    def convert(self, model: nn.Module) -> None:
        self.decisions = self.decide(model)
        chosen = [decision.fqn for decision in self.decisions if decision.converted]
        if not chosen:
            raise ConfigError(
                f"model.converters: {self.name} would convert no layer. {rules_against_all(self.decisions)}"
            )
        experts = any(decision.converted and decision.experts for decision in self.decisions)
        if experts and self.cannot_group:
            raise ConfigError(f"model.converters: {self.cannot_group}")
        if self.target.device_type != "meta":
            self.check_swap()
        for fqn in chosen:
            parent, _, child = fqn.rpartition(".")
            layer = model.get_submodule(fqn)
            new = self.swap_grouped(layer) if isinstance(layer, GroupedLinear) else self.swap_in_model(layer, fqn)  # type: ignore[arg-type]
            setattr(model.get_submodule(parent), child, new)

    def gemms_of(self, decision: Decision) -> LayerGemms:
        """The GEMMs of a converted layer."""
        if not decision.experts:
            return self.gemms
        assert self.grouped_gemms is not None
        return self.grouped_gemms

    def shards_evenly(self, linear: nn.Linear, fqn: str) -> bool:
        """Whether FSDP shards the weight's rows without padding, as a low-precision gather requires."""
        _, rows = self.target.per_device(fqn, linear.in_features, linear.out_features)
        if rows % self.target.shards == 0:
            return True
        logger.warning(
            f"{self.name}: the {rows} rows of {fqn} do not divide evenly over {self.target.shards} ranks; its weight "
            "is all-gathered in high precision"
        )
        return False

    def check_swap(self) -> None:
        """Compares a converted layer of each kind with its bf16 copy, forward and backward.

        Raises:
            ConfigError: a GEMM is bit-identical (nothing was quantized) or far from the recipe's known error.
        """
        kinds = {SAMPLE_EXPERTS if one.experts else 0: self.gemms_of(one) for one in self.decisions if one.converted}
        for experts, gemms in kinds.items():
            for gemm, error in relative_errors(self, self.target.device_type, experts).items():
                expected = getattr(gemms, gemm)
                if expected is None:
                    continue
                kind = "a layer of experts" if experts else "a layer"
                what = f"model.converters: the {gemm} of {kind} converted to {self.name} {self.recipe}"
                if error == 0:
                    raise ConfigError(f"{what} is bit-identical to bf16: nothing was quantized. Remove the converter.")
                if not error < FAR_OUTSIDE * expected:
                    raise ConfigError(
                        f"{what} has a relative error of {error:.3f} against bf16 ({expected:.3f} is normal): its "
                        f"kernel is wrong on this device. Remove the converter, or set {self.name}.emulate."
                    )


FAR_OUTSIDE = 3.0  # factor on the known error
SAMPLE_TOKENS, SAMPLE_INPUTS, SAMPLE_OUTPUTS = 256, 256, 512
SAMPLE_EXPERTS = 4


def relative_errors(converter: LinearConverter, device_type: str, experts: int = 0) -> dict[str, float]:
    """Relative 2-norm difference between the GEMMs of a converted layer and of its bf16 copy, on normal data.

    Args:
        experts: of a layer of experts, one of which has no tokens; 0 for an ordinary layer.
    """
    generator = torch.Generator(device=device_type).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device_type).bfloat16()

    x, out_grad = normal(SAMPLE_TOKENS, SAMPLE_INPUTS), normal(SAMPLE_TOKENS, SAMPLE_OUTPUTS)
    modules: list[nn.Linear | GroupedLinear]
    more: tuple[torch.Tensor, ...] = ()
    if experts:
        with torch.device(device_type):
            grouped = GroupedLinear(experts, SAMPLE_INPUTS, SAMPLE_OUTPUTS).bfloat16()
        grouped.weight.data.copy_(normal(*grouped.weight.shape))
        modules = [grouped, converter.swap_grouped(grouped)]
        more = (torch.linspace(0, SAMPLE_TOKENS, experts, device=device_type).int(),)  # the first one has no tokens
    else:
        linear = nn.Linear(SAMPLE_INPUTS, SAMPLE_OUTPUTS, bias=False, device=device_type, dtype=torch.bfloat16)
        linear.weight.data.copy_(normal(*linear.weight.shape))
        modules = [linear, converter.swap(linear)]
    results = []
    for module in modules:
        module.weight.grad = None
        x_leaf = x.clone().requires_grad_()
        with torch.enable_grad():
            out = module(x_leaf, *more)
            grads = torch.autograd.grad(out, [x_leaf, module.weight], out_grad)
        results.append([out.detach().float(), *(grad.float() for grad in grads)])
    names = ("output", "grad_input", "grad_weight")
    return {name: float((low - high).norm() / high.norm()) for name, high, low in zip(names, *results, strict=True)}


def rules_against_all(decisions: Sequence[Decision]) -> str:
    """The reasons why no layer was converted, with the number of layers for each."""
    reasons: dict[str, list[str]] = {}
    for decision in decisions:
        reasons.setdefault(decision.reason, []).append(decision.fqn)
    return " ".join(f"{len(fqns)} x {reason} ({fqns[0]}, ...)." for reason, fqns in reasons.items())
