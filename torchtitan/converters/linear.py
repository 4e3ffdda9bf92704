"""What all converters of linear layers share: filter, module swap, and the check that a swapped layer quantizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.converters.filter import Decision, FilterRules, decide
from torchtitan.converters.target import Target
from torchtitan.errors import ConfigError
from torchtitan.logging import logger


@dataclass(frozen=True)
class ProfilerOp:
    """How the profiler sees low-precision GEMMs.

    Attributes:
        operation: its name.
        input_dtypes: where not empty, only those count whose first input has one of these dtypes, as the profiler
            spells them.
        per_gemm: how many of them a GEMM takes.
    """

    operation: str
    input_dtypes: tuple[str, ...] = ()
    per_gemm: int = 1


# An emulated GEMM rounds both operands to float8 and back before a GEMM in high precision.
EMULATED_FLOAT8 = ProfilerOp("aten::_to_copy", ("c10::Float8_e4m3fn", "c10::Float8_e5m2"), 2)


@dataclass(frozen=True)
class LayerGemms:
    """The GEMMs of one converted layer, and how exact they are.

    Attributes:
        op: how they are recognized.
        output, grad_input, grad_weight: relative error (2-norm) against float32 that the recipe is known to have on
            normal data; None for a GEMM that stays in high precision.
    """

    op: ProfilerOp
    output: float | None
    grad_input: float | None
    grad_weight: float | None

    @property
    def forward(self) -> int:
        """Low-precision GEMMs in a forward pass."""
        return int(self.output is not None)

    @property
    def backward(self) -> int:
        return int(self.grad_input is not None) + int(self.grad_weight is not None)


Role = Literal["input", "weight", "out_grad"]
"""An operand of the three GEMMs: output takes input and weight, grad_input takes out_grad and weight, grad_weight
takes out_grad and input."""


class Scaled(NamedTuple):
    """An operand before and after rounding, in float32, both in the units of the recipe's numbers.

    Attributes:
        exact: the operand times its scale.
        rounded: the nearest number of the format.
        largest: number of the format; what is beyond it saturates.
    """

    exact: torch.Tensor
    rounded: torch.Tensor
    largest: float


class LinearConverter:
    """Swaps linear layers for a subclass of `nn.Linear` whose weight stays a plain parameter.

    A subclass sets the attributes and writes `swap`.

    Attributes:
        name: of the converter and its section.
        recipe: within the converter.
        gemms: of one layer.
        decisions: one for each linear layer of the model, after `convert`.
        warms_up: whether layers compute otherwise after the first step: compiled code is made anew then.
    """

    name: str
    recipe: str
    gemms: LayerGemms
    rules: FilterRules
    warms_up: bool = False

    def __init__(self, filter_fqns: Sequence[str], target: Target, explicit: bool = True) -> None:
        """`explicit`: the user's own list, which must match; False for a section's default."""
        self.filter_fqns = tuple(filter_fqns)
        self.explicit = explicit
        self.target = target
        self.decisions: list[Decision] = []

    def swap(self, linear: nn.Linear) -> nn.Linear:
        """A low-precision layer with the parameters of `linear`, on its device."""
        raise NotImplementedError

    def scaled(self, tensor: torch.Tensor, role: Role) -> Scaled:
        """How an operand in float32, (rows, columns) with GEMMs summing over columns, is rounded."""
        raise NotImplementedError

    def swap_in_model(self, linear: nn.Linear, fqn: str) -> nn.Linear:
        """`swap` for the layer of the model at this path, which may be gathered in low precision too."""
        return self.swap(linear)

    @property
    def description(self) -> str:
        """All settings that bear on speed."""
        raise NotImplementedError

    def decide(self, model: nn.Module) -> list[Decision]:
        """What `convert` would do with each linear layer of the model; changes nothing."""
        return decide(model, self.filter_fqns, self.name, self.recipe, self.rules, self.target, self.explicit)

    def convert(self, model: nn.Module) -> None:
        self.decisions = self.decide(model)
        chosen = [decision.fqn for decision in self.decisions if decision.converted]
        if not chosen:
            raise ConfigError(
                f"model.converters: {self.name} would convert no layer. {rules_against_all(self.decisions)}"
            )
        if self.target.device_type != "meta":
            self.check_swap()
        for fqn in chosen:
            parent, _, child = fqn.rpartition(".")
            setattr(model.get_submodule(parent), child, self.swap_in_model(model.get_submodule(fqn), fqn))  # type: ignore[arg-type]

    def shards_evenly(self, linear: nn.Linear, fqn: str) -> bool:
        """Whether FSDP divides the rows of a weight without padding, as a gather in low precision needs it."""
        _, rows = self.target.per_device(fqn, linear.in_features, linear.out_features)
        if rows % self.target.shards == 0:
            return True
        logger.warning(
            f"{self.name}: the {rows} rows of {fqn} are not divided evenly over {self.target.shards} ranks; it is "
            "gathered in high precision"
        )
        return False

    def post_optimizer_hook(self, models: Sequence[nn.Module]) -> None:
        """Nothing, unless a recipe keeps something between steps."""

    # What a recipe needs whose scales have a history; nothing for the others.

    def connect(self, mesh: DeviceMesh) -> None:
        """Once, after `convert`: the ranks as (pp, dp_replicate, fsdp, tp)."""

    def after_step(self, models: Sequence[nn.Module], learning_rate: float | None) -> None:
        """`post_optimizer_hook`, knowing the learning rate of the update; None where it was skipped."""
        self.post_optimizer_hook(models)

    def hidden_nonfinite(self, models: Sequence[nn.Module]) -> torch.Tensor | None:
        """Whether since the last step a layer on this rank has made finite numbers of what is not finite, so that
        neither loss nor gradients show it: a scalar on the device. None where layers do not do so."""
        return None

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, Any] | None:
        """What a resumed run needs to go on exactly: JSON by path of the layer, of the layers on this rank. None, on
        every rank, where there is no such thing."""
        return None

    def load_state_dict(self, models: Sequence[nn.Module], state: dict[str, Any]) -> None:
        """Takes up `state_dict`, joined over all ranks; {} of a checkpoint without it."""

    def check_swap(self) -> None:
        """Compares a converted layer with its bf16 copy, forward and backward.

        Raises:
            ConfigError: a GEMM is bit-identical (nothing was quantized) or far from the recipe's known error.
        """
        errors = relative_errors(self, self.target.device_type)
        for gemm, error in errors.items():
            expected = getattr(self.gemms, gemm)
            if expected is None:
                continue
            what = f"model.converters: the {gemm} of a layer converted to {self.name} {self.recipe}"
            if error == 0:
                raise ConfigError(f"{what} is bit-identical to bf16: nothing was quantized. Remove the converter.")
            if not error < FAR_OUTSIDE * expected:
                raise ConfigError(
                    f"{what} is {error:.3f} off from bf16, where {expected:.3f} is normal: its kernel does not work on "
                    f"this device. Remove the converter, or set {self.name}.emulate."
                )


FAR_OUTSIDE = 3.0  # times the known error
SAMPLE_TOKENS, SAMPLE_INPUTS, SAMPLE_OUTPUTS = 256, 256, 512


def relative_errors(converter: LinearConverter, device_type: str) -> dict[str, float]:
    """Relative 2-norm distance of a converted layer's GEMMs from those of its bf16 copy, on normal data."""
    generator = torch.Generator(device=device_type).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device_type).bfloat16()

    linear = nn.Linear(SAMPLE_INPUTS, SAMPLE_OUTPUTS, bias=False, device=device_type, dtype=torch.bfloat16)
    weight, x, out_grad = (
        normal(SAMPLE_OUTPUTS, SAMPLE_INPUTS),
        normal(SAMPLE_TOKENS, SAMPLE_INPUTS),
        normal(SAMPLE_TOKENS, SAMPLE_OUTPUTS),
    )
    with torch.no_grad():
        linear.weight.copy_(weight)
    results = []
    for module in (linear, converter.swap(linear)):
        module.weight.grad = None
        x_leaf = x.clone().requires_grad_()
        with torch.enable_grad():
            out = module(x_leaf)
            grads = torch.autograd.grad(out, [x_leaf, module.weight], out_grad)
        results.append([out.detach().float(), *(grad.float() for grad in grads)])
    names = ("output", "grad_input", "grad_weight")
    return {name: float((low - high).norm() / high.norm()) for name, high, low in zip(names, *results, strict=True)}


def rules_against_all(decisions: Sequence[Decision]) -> str:
    """The rules that took every layer, with how many each."""
    reasons: dict[str, list[str]] = {}
    for decision in decisions:
        reasons.setdefault(decision.reason, []).append(decision.fqn)
    return " ".join(f"{len(fqns)} x {reason} ({fqns[0]}, ...)." for reason, fqns in reasons.items())
