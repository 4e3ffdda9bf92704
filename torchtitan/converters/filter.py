"""Which linear layers a converter takes, and why: one filter for all precisions.

An entry of `filter_fqns` matches complete components of a module's path: `layers.1` does not match `layers.10`, nor
`w1` `w13`. A component may be a glob: `layers.*.attention`, `layers.[01]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

from torch import nn

from torchtitan.converters.converter import Decision, Target
from torchtitan.errors import ConfigError, nearest
from torchtitan.models.args import MoEArgs
from torchtitan.models.moe import GroupedLinear, MoE, Router

AUTO_FILTER_SMALL_KN = "auto_filter_small_kn"
AUTO_FILTER_MEASURED = "auto_filter_measured"
AUTO_FILTER_NUMERICS = "auto_filter_numerics"
FLAGS = (AUTO_FILTER_SMALL_KN, AUTO_FILTER_MEASURED, AUTO_FILTER_NUMERICS)


SizeRule = Callable[[int, int, int], str | None]
"""From (M, K, N) to the reason not to convert a layer of this size, or None."""
MeasuredRule = Callable[[int, int, int, int], str | None]
"""The same, from (M, K, N, experts)."""
NumericsRule = Callable[[Sequence[str]], dict[str, str]]
"""From the layers that pass all other rules to the reasons against some of them."""


@dataclass(frozen=True)
class FilterRules:
    """A recipe's requirements on a layer.

    Attributes:
        multiple_of: M, K and N must be multiples of this.
        small_kn: thresholds of `auto_filter_small_kn`; None if the recipe has none.
        measured: the measurement of `auto_filter_measured`.
        against_experts: why experts stay in high precision; "" if the recipe has grouped GEMMs.
    """

    multiple_of: int
    small_kn: SizeRule | None
    measured: MeasuredRule
    against_experts: str = "the converter has no grouped GEMMs"


class FilterSection(Protocol):
    """The configuration section of a converter with a filter."""

    @property
    def filter_fqns(self) -> list[str]: ...


def names_own_layers(section: FilterSection) -> bool:
    """Whether a section's `filter_fqns` differs from its default."""
    return section.filter_fqns != type(section)().filter_fqns


def decide(
    model: nn.Module,
    entries: Sequence[str],
    converter: str,
    recipe: str,
    rules: FilterRules,
    target: Target,
    explicit: bool = True,
    numerics: NumericsRule | None = None,
) -> list[Decision]:
    """One decision per linear layer of the model, in the model's order. Experts' layers are one for all experts.

    Args:
        explicit: whether the entries are the user's; a default need not match anything.
        numerics: the measurement of `auto_filter_numerics`.

    Raises:
        ConfigError: an entry matches no module, or asks for thresholds that the recipe does not have.
    """
    key = f"{converter}.filter_fqns"
    modules = [name for name, _ in model.named_modules() if name]
    patterns = [entry for entry in entries if entry not in FLAGS]
    unmatched = [entry for entry in patterns if not any(matches(entry, name) for name in modules)]
    if unmatched and explicit:
        known = [*FLAGS, *(name for name in suffixes(modules) if not name.isdecimal())]
        raise ConfigError(
            *(f"{key}: {entry!r} matches no module of this model{nearest(entry, known)}." for entry in unmatched)
        )
    if AUTO_FILTER_SMALL_KN in entries and rules.small_kn is None:
        raise ConfigError(
            f"{key}: {AUTO_FILTER_SMALL_KN} has no thresholds for {converter} {recipe}; "
            f"use {AUTO_FILTER_MEASURED}, which measures them on this device."
        )

    def reason_against(fqn: str, layer: nn.Linear | GroupedLinear, m: int, k: int, n: int, experts: int) -> str | None:
        if any(fqn.startswith(f"{router}.") for router in routers):
            return "the router stays in high precision"
        hit = next((entry for entry in patterns if matches(entry, fqn)), None)
        if hit is not None:
            return f"{key} names {hit}"
        if type(layer) not in (nn.Linear, GroupedLinear):
            return "already converted"
        if experts and rules.against_experts:
            return rules.against_experts
        # The rows of an expert vary, and grouped GEMMs take any number.
        for name, size in (("K", k), ("N", n), *(() if experts else (("M", m),))):
            if size % rules.multiple_of:
                return f"{name} = {size} is not a multiple of {rules.multiple_of}"
        if AUTO_FILTER_SMALL_KN in entries and rules.small_kn is not None:
            reason = rules.small_kn(m, k, n)
            if reason:
                return f"{AUTO_FILTER_SMALL_KN}: {reason}"
        if AUTO_FILTER_MEASURED in entries:
            reason = rules.measured(m, k, n, experts)
            if reason:
                return f"{AUTO_FILTER_MEASURED}: {reason}"
        return None

    routers = [fqn for fqn, module in model.named_modules() if isinstance(module, Router)]
    decisions = []
    mixture: MoEArgs | None = None
    for fqn, module in model.named_modules():
        if isinstance(module, MoE):
            mixture = module.args
        if not isinstance(module, (nn.Linear, GroupedLinear)):
            continue
        m, k, n, experts = target.tokens, *target.per_device(fqn, module.in_features, module.out_features), 0
        if isinstance(module, GroupedLinear):
            assert mixture is not None, "experts are part of a MoE"
            m, experts = target.per_expert(mixture.n_experts, mixture.top_k)
        reason = reason_against(fqn, module, m, k, n, experts)
        outcome = reason is None, reason or "passes the filter"
        decisions.append(Decision(fqn, m, k, n, converter, recipe, *outcome, experts))
    if AUTO_FILTER_NUMERICS in entries and numerics is not None:
        against = numerics([one.fqn for one in decisions if one.converted])
        decisions = [
            replace(one, converted=False, reason=f"{AUTO_FILTER_NUMERICS}: {against[one.fqn]}")
            if one.fqn in against
            else one
            for one in decisions
        ]
    return decisions


def matches(entry: str, fqn: str) -> bool:
    """Whether the components of `entry` are consecutive components of `fqn`."""
    wanted, path = entry.split("."), fqn.split(".")
    return any(
        all(fnmatchcase(part, pattern) for part, pattern in zip(path[start:], wanted, strict=False))
        for start in range(len(path) - len(wanted) + 1)
    )


def suffixes(modules: Sequence[str]) -> list[str]:
    """All suffixes of module paths, each of which can name a module."""
    return sorted({".".join(parts[i:]) for parts in (name.split(".") for name in modules) for i in range(len(parts))})
