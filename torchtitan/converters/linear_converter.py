"""The converter of linear layers, ordinary ones and experts': a recipe's row of a table, applied to a model."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.converters.converter import Decision, LayerGemms, ModelConverter, Target
from torchtitan.converters.filter import (
    AUTO_FILTER_MEASURED,
    AUTO_FILTER_NUMERICS,
    AUTO_FILTER_SMALL_KN,
    AUTO_FILTER_SMALL_KN_FULL,
    AUTO_FILTERS,
    matches,
    suffixes,
)
from torchtitan.converters.formats import Gemms, Scaled, Where
from torchtitan.converters.linear import AmaxHistory, LowPrecisionExperts, LowPrecisionLinear, join_swiglu
from torchtitan.converters.measured_filter import measured_reason
from torchtitan.converters.numerics import GEMMS, OperandRole, gemms_of, inaccurate_layers, layer_with
from torchtitan.errors import ConfigError, nearest
from torchtitan.logging import logger
from torchtitan.models.moe import GroupedLinear, MoE, Router
from torchtitan.models.sparse_args import MoEArgs
from torchtitan.models.transformer import FeedForward

SizeRule = Callable[[int, int, int], str | None]
"""From (M, K, N) to the reason not to convert a layer of this size, or None."""


class Need(NamedTuple):
    """What real GEMMs of a recipe need of a device or of other keys."""

    lacks: Callable[[Target, Any], bool]  # (target, section) -> whether it is missing
    # A sentence with the remedy; {has} is the device's compute capability, {cuda} the version that torch was built for.
    problem: str


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How layers are converted.

    Attributes:
        gemms: the formats, with the section's defaults.
        multiple_of: M, K and N must be multiples of it.
        multiple_of_on_gpu: the same on a GPU, if it needs another.
        small_kn: thresholds of `auto_filter_small_kn`.
        against_experts: why experts stay in high precision; "" if they are converted too.
        needs: what a real GEMM needs, in the order in which it is checked.
        experts_need: the same for experts.
        on_cpu: "kernels" if a CPU has them, "emulated" if it emulates the recipe unasked; "" if neither.
        gpu_experts: (layer, section) -> what computes experts on a GPU; None: `LowPrecisionExperts`.
        history: (section, device, whether scales count as known) -> the history of a layer with delayed scaling.
        scaling: (section, target) -> what computes scales in the hooks after each step.
        kept: (model, section) -> paths of modules whose layers stay in high precision, with the reason.
    """

    gemms: Gemms
    multiple_of: int
    multiple_of_on_gpu: int | None = None
    small_kn: SizeRule | None = None
    against_experts: str = ""
    needs: Sequence[Need] = ()
    experts_need: Sequence[Need] = ()
    on_cpu: Literal["kernels", "emulated", ""] = "kernels"
    gpu_experts: Callable[[GroupedLinear, Any], GroupedLinear] | None = None
    history: Callable[[Any, torch.device, bool], AmaxHistory] | None = None
    scaling: Callable[[Any, Target], ModelConverter | None] = lambda config, target: None
    kept: Callable[[nn.Module, Any], Mapping[str, str]] = lambda model, config: {}


@dataclasses.dataclass(frozen=True)
class RecipeSection:
    """The recipes of a configuration section, which names one in `recipe_name` and has `filter_fqns` and `emulate`.

    Attributes:
        name: of the section and the converter.
        recipes: by name. None is the default's.
        apply_keys: from (formats of the recipe, section) to the formats that the section's other keys ask for.
        problems: from (section, target) to keys that contradict each other, one sentence each.
        remarks: from (section, decisions) to warnings about what is converted.
        gather: from section to what makes a weight one that FSDP gathers in low precision; None if it does not.
    """

    name: str
    recipes: Mapping[str | None, Recipe]
    apply_keys: Callable[[Gemms, Any], Gemms] = lambda gemms, config: gemms
    problems: Callable[[Any, Target], Iterable[str]] = lambda config, target: ()
    remarks: Callable[[Any, Sequence[Decision]], Sequence[str]] = lambda config, decisions: ()
    gather: Callable[[Any], Callable[[Any], torch.Tensor] | None] = lambda config: None


class LinearConverter(ModelConverter):
    """Replaces linear layers with `LowPrecisionLinear`, and `GroupedLinear` layers with `LowPrecisionExperts`, if the
    recipe converts experts. Weights stay in high precision.

    Attributes:
        layer: its formats, as the section's keys and the device change them.
        multiple_of: that M, K and N must be here.
        cannot_group: why this device cannot run `grouped_gemms`, with the remedy; "" if it can.

    Raises:
        ConfigError: the device has no GEMMs of the recipe and `emulate` is not set, or keys contradict each other.
    """

    gemms: LayerGemms
    cannot_group: str = ""

    def __init__(self, section: RecipeSection, config: Any, target: Target) -> None:
        self.section, self.config, self.target = section, config, target
        if config.recipe_name not in section.recipes:  # the key of a user's own section may be any text
            asked, known = str(config.recipe_name), [name for name in section.recipes if name is not None]
            raise ConfigError(
                f"{section.name}.recipe_name: unknown recipe {asked!r}{nearest(asked, known)}; "
                f"known: {', '.join(known)}."
            )
        self.name, self.row = section.name, section.recipes[config.recipe_name]
        self.recipe = next(name for name, row in section.recipes.items() if name is not None and row is self.row)
        self.decisions: list[Decision] = []
        if problems := [*section.problems(config, target)]:
            raise ConfigError(*problems)
        if not config.emulate and (problem := self._missing(self.row.needs)):
            raise ConfigError(problem)
        self.where = self._where()
        formats = section.apply_keys(self.row.gemms, config)
        self.layer = formats.emulated() if self.where == "emulated" else formats
        self.gemms = LayerGemms(self.layer.x.op(self.where, False), *self.layer.errors())
        if not self.row.against_experts:
            self.grouped_gemms = dataclasses.replace(self.gemms, op=self.layer.x.op(self.where, True))
            self.cannot_group = self._missing(self.row.experts_need) if self.where != "emulated" else ""
        on_gpu = self.row.multiple_of_on_gpu if self.where == "gpu" else None
        self.multiple_of = on_gpu or self.row.multiple_of
        self.scaling = self.row.scaling(config, target) or ModelConverter()
        self.warms_up = self.row.history is not None
        self.fuses_collectives = self.layer.x.fuses_collectives and not self.warms_up

    def _where(self) -> Where:
        if self.config.emulate or (self.row.on_cpu == "emulated" and self.target.compute_capability is None):
            return "emulated"
        return "cpu" if self.row.on_cpu == "kernels" and self.target.on_cpu else "gpu"

    def _missing(self, needs: Sequence[Need]) -> str:
        """The problem of the first need that the target does not meet."""
        has = self.target.amd or ".".join(map(str, self.target.compute_capability or ()))
        known = {"has": has, "cuda": torch.version.cuda or "none"}
        return next((need.problem.format(**known) for need in needs if need.lacks(self.target, self.config)), "")

    @property
    def description(self) -> str:
        """All settings that affect speed."""
        config, default = self.config, type(self.config)(recipe_name=self.config.recipe_name)
        keys = (field.name for field in dataclasses.fields(config) if field.name not in ("filter_fqns", "emulate"))
        changed = [f"{key}={getattr(config, key)}" for key in keys if getattr(config, key) != getattr(default, key)]
        return " ".join([self.name, self.recipe, *(["emulated"] if self.where == "emulated" else []), *changed])

    def emulated(self) -> "LinearConverter":
        """A converter whose layers compute the same on any device; this one, if its layers run here."""
        if self.where != "gpu":
            return self
        return LinearConverter(self.section, dataclasses.replace(self.config, emulate=True), self.target)

    def low_precision(self, layer: Any) -> Any:
        """`swap_grouped` of a layer of experts, `swap` of another."""
        return self.swap_grouped(layer) if isinstance(layer, GroupedLinear) else self.swap(layer)

    def swap(self, linear: nn.Linear) -> nn.Linear:
        """A low-precision layer that takes over the parameters of `linear`, on its device."""
        device = linear.weight.device
        if device.type == "meta":  # the model is allocated later
            device = torch.device("cuda" if self.target.device_type == "cuda" else "cpu")
        # A plan simulates a step in the middle of a run.
        known = self.target.device_type == "meta"
        history = None if self.row.history is None else self.row.history(self.config, device, known)
        return LowPrecisionLinear.of(linear, self.layer, history)

    def swap_grouped(self, layer: GroupedLinear) -> GroupedLinear:
        """The same for a layer of all experts."""
        if self.row.gpu_experts is not None and self.where == "gpu":
            return self.row.gpu_experts(layer, self.config)
        return LowPrecisionExperts.of(layer, self.layer)

    def scaled(self, tensor: torch.Tensor, role: OperandRole) -> Scaled:
        """Rounds a float32 operand, (rows, columns), of GEMMs that sum over columns."""
        return getattr(self.layer, role).scaled(tensor)  # type: ignore[no-any-return]

    def decide(self, model: nn.Module) -> list[Decision]:
        """What `convert` would do with each linear layer of the model, in the model's order, without changing it.
        Experts' layers are one for all experts.

        Raises:
            ConfigError: an entry of the filter matches no module, or asks for thresholds that the recipe does not have.
        """
        self._check_filter([name for name, _ in model.named_modules() if name])
        decisions: list[Decision] = []
        mixture: MoEArgs | None = None
        routers = tuple(f"{fqn}." for fqn, module in model.named_modules() if isinstance(module, Router))
        for fqn, module in model.named_modules():
            if isinstance(module, MoE):
                mixture = module.args
            if not isinstance(module, (nn.Linear, GroupedLinear)):
                continue
            (m, k, n), experts = self.target.per_device(fqn, module.in_features, module.out_features), 0
            if isinstance(module, GroupedLinear):
                assert mixture is not None, "experts are part of a MoE"
                m, experts = self.target.per_expert(mixture.n_experts, mixture.top_k)
            sizes = m, k, n
            of_router = "the router stays in high precision" if fqn.startswith(routers) else None
            reason = of_router or self._reason_against(fqn, module, *sizes, experts)
            outcome = not reason, reason or "passes the filter", experts
            decisions.append(Decision(fqn, *sizes, self.name, self.recipe, *outcome))
        if AUTO_FILTER_NUMERICS in self.config.filter_fqns:
            against = inaccurate_layers(self, model, [layer.fqn for layer in decisions if layer.converted])
            inaccurate = {fqn: f"{AUTO_FILTER_NUMERICS}: {reason}" for fqn, reason in against.items()}
            decisions = [_leave_out(layer, inaccurate.get(layer.fqn)) for layer in decisions]
        kept = self.row.kept(model, self.config).items()
        return [
            _leave_out(layer, next((reason for path, reason in kept if matches(path, layer.fqn)), None))
            for layer in decisions
        ]

    def _check_filter(self, modules: Sequence[str]) -> None:
        key, entries = f"{self.name}.filter_fqns", self.config.filter_fqns
        if entries != type(self.config)().filter_fqns:  # a default need not match anything
            known = [*AUTO_FILTERS, *(name for name in suffixes(modules) if not name.isdecimal())]
            unmatched = [
                f"{key}: {entry!r} matches no module of this model{nearest(entry, known)}."
                for entry in entries
                if entry not in AUTO_FILTERS and not any(matches(entry, name) for name in modules)
            ]
            if unmatched:
                raise ConfigError(*unmatched)
        by_size = [entry for entry in entries if entry in (AUTO_FILTER_SMALL_KN, AUTO_FILTER_SMALL_KN_FULL)]
        if by_size and self.row.small_kn is None:
            raise ConfigError(
                f"{key}: {by_size[0]} has no thresholds for {self.name} {self.recipe}; "
                f"use {AUTO_FILTER_MEASURED}, which measures them on this device."
            )

    def _reason_against(self, fqn: str, layer: nn.Module, m: int, k: int, n: int, experts: int) -> str | None:
        entries = self.config.filter_fqns
        for entry in entries:
            if entry not in AUTO_FILTERS and matches(entry, fqn):
                return f"{self.name}.filter_fqns names {entry}"
        if type(layer) not in (nn.Linear, GroupedLinear):
            return "already converted"
        if experts and self.row.against_experts:
            return self.row.against_experts
        # The rows of an expert vary, and grouped GEMMs take any number.
        for name, size in (("K", k), ("N", n), *(() if experts else (("M", m),))):
            if size % self.multiple_of:
                return f"{name} = {size} is not a multiple of {self.multiple_of}"
        if AUTO_FILTER_SMALL_KN in entries and self.row.small_kn and (reason := self.row.small_kn(m, k, n)):
            return f"{AUTO_FILTER_SMALL_KN}: {reason}"
        full: tuple[int, int] = layer.in_features, layer.out_features  # type: ignore[assignment]
        if AUTO_FILTER_SMALL_KN_FULL in entries and self.row.small_kn and (reason := self.row.small_kn(m, *full)):
            return f"{AUTO_FILTER_SMALL_KN_FULL}: {reason}"
        if AUTO_FILTER_MEASURED in entries and (reason := measured_reason(self, m, k, n, experts)):
            return f"{AUTO_FILTER_MEASURED}: {reason}"
        return None

    def convert(self, model: nn.Module) -> None:
        self.decisions = self.decide(model)
        converted = [decision for decision in self.decisions if decision.converted]
        if not converted:
            layers_by_reason: dict[str, list[str]] = {}
            for decision in self.decisions:
                layers_by_reason.setdefault(decision.reason, []).append(decision.fqn)
            reasons = (f"{len(fqns)} x {reason} ({fqns[0]}, ...)." for reason, fqns in layers_by_reason.items())
            raise ConfigError(f"model.converters: {self.name} would convert no layer. {' '.join(reasons)}")
        if self.cannot_group and any(decision.experts for decision in converted):
            raise ConfigError(f"model.converters: {self.cannot_group}")
        for remark in self.section.remarks(self.config, converted):
            logger.warning(remark)
        if self.target.device_type != "meta":
            self.check_swap()
        gather, uneven = self.section.gather(self.config), []
        for decision in converted:
            parent, _, child = decision.fqn.rpartition(".")
            layer: Any = model.get_submodule(decision.fqn)
            new = self.low_precision(layer)
            number, what, ranks = decision.n, "rows", self.target.shards
            if decision.experts:  # over the ranks that are left for FSDP in `parallel.dims.build_meshes`
                ranks = ranks * self.target.tensor_parallel // self.target.expert_parallel
                number, what = decision.experts, "experts"
            if gather is not None and number % ranks == 0:  # FSDP pads what it divides unevenly
                new.weight = nn.Parameter(gather(new.weight))
            elif gather is not None:
                uneven.append(f"{number} {what} of {decision.fqn} over {ranks}")
            setattr(model.get_submodule(parent), child, new)
        if uneven:
            logger.warning(
                f"{self.name}: {len(uneven)} x the weight is all-gathered in high precision, since its rows or experts "
                f"do not divide evenly over FSDP's ranks ({uneven[0]}, ...)"
            )
        for module in model.modules():
            if isinstance(module, FeedForward) and self.target.device_type != "cpu":
                join_swiglu(module.w1, module.w2, module.w3)

    def connect(self, mesh: DeviceMesh) -> None:
        self.scaling.connect(mesh)

    def after_step(
        self, models: Sequence[nn.Module], learning_rate: float | None, skip: torch.Tensor | None = None
    ) -> None:
        self.scaling.after_step(models, learning_rate, skip)

    def hidden_nonfinite(self, models: Sequence[nn.Module]) -> torch.Tensor | None:
        return self.scaling.hidden_nonfinite(models)

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, Any] | None:
        return self.scaling.state_dict(models)

    def load_state_dict(self, models: Sequence[nn.Module], state: dict[str, Any], gradient_ratio: float = 1.0) -> None:
        self.scaling.load_state_dict(models, state, gradient_ratio)

    def check_swap(self) -> None:
        """Compares a converted layer of each kind with its bf16 copy, forward and backward. Raises a ConfigError if a
        GEMM is bit-identical (nothing was quantized) or far from the recipe's known error."""
        for grouped in {bool(layer.experts) for layer in self.decisions if layer.converted}:
            name, experts = ("a layer of experts", SAMPLE_EXPERTS) if grouped else ("a layer", 0)
            for gemm, error in relative_errors(self, self.target.device_type, experts).items():
                expected = getattr(self.grouped_gemms if grouped else self.gemms, gemm)
                if expected is None:
                    continue
                label = f"model.converters: the {gemm} of {name} converted to {self.name} {self.recipe}"
                if error == 0:
                    raise ConfigError(f"{label} is bit-identical to bf16: nothing was quantized. Remove the converter.")
                if not error < FAR_OUTSIDE * expected:
                    raise ConfigError(
                        f"{label} has a relative error of {error:.3f} against bf16 ({expected:.3f} is normal): its "
                        f"kernel is wrong on this device. Remove the converter, or set {self.name}.emulate."
                    )


FAR_OUTSIDE = 3.0  # factor on the known error
SAMPLE_TOKENS, SAMPLE_INPUTS, SAMPLE_OUTPUTS = 256, 256, 512
SAMPLE_EXPERTS = 4


def relative_errors(converter: LinearConverter, device_type: str, experts: int = 0) -> dict[str, float]:
    """Relative 2-norm difference between the GEMMs of a converted layer and of its bf16 copy, on normal data.
    `experts` is their number in the layer, the first of which gets no tokens; 0 for an ordinary layer."""
    generator = torch.Generator(device=device_type).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device_type).bfloat16()

    x, out_grad = normal(SAMPLE_TOKENS, SAMPLE_INPUTS), normal(SAMPLE_TOKENS, SAMPLE_OUTPUTS)
    layer = layer_with(normal(*([experts] if experts else []), SAMPLE_OUTPUTS, SAMPLE_INPUTS))
    ends = [torch.linspace(0, SAMPLE_TOKENS, experts, device=device_type).int()] if experts else []  # 0 of the first
    high, low = (gemms_of(module, x, out_grad, *ends) for module in (layer, converter.low_precision(layer)))
    return {
        gemm: float((rounded.float() - exact.float()).norm() / exact.float().norm())
        for gemm, exact, rounded in zip(GEMMS, high, low, strict=True)
    }


def _leave_out(decision: Decision, reason: str | None) -> Decision:
    """The decision, or the opposite one if it is to convert and there is a reason against that."""
    return dataclasses.replace(decision, converted=False, reason=reason) if reason and decision.converted else decision
