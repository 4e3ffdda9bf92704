"""Which linear layers a converter takes, and why: one filter for all precisions.

An entry of `filter_fqns` names whole components of a module's path, so `layers.1` is not `layers.10` and `w1` is not
`w13`. A component may be a glob: `layers.*.attention`, `layers.[01]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from torchtitan.errors import ConfigError, nearest

AUTO_FILTER_SMALL_KN = "auto_filter_small_kn"
FLAGS = (AUTO_FILTER_SMALL_KN,)


@dataclass(frozen=True)
class Decision:
    """What becomes of one linear layer.

    Attributes:
        fqn: its path in the model.
        k, n: inputs and outputs; its weight is (n, k).
        converted: whether the converter takes it.
        reason: the rule that decided, for people.
    """

    fqn: str
    k: int
    n: int
    converted: bool
    reason: str


def decide(
    model: nn.Module, entries: Sequence[str], key: str, too_small: str | None, multiple_of: int
) -> list[Decision]:
    """One decision for each `nn.Linear` of the model, in the model's order.

    Args:
        entries: `filter_fqns`; never changed.
        key: of the configuration that `entries` come from, for messages.
        too_small: recipe whose thresholds `auto_filter_small_kn` applies (`SMALL_KN`); None where it has none.
        multiple_of: the products' kernels need K and N to be multiples of this.

    Raises:
        ConfigError: an entry matches no module.
    """
    modules = [name for name, _ in model.named_modules() if name]
    patterns = [entry for entry in entries if entry not in FLAGS]
    unmatched = [entry for entry in patterns if not any(matches(entry, name) for name in modules)]
    if unmatched:
        known = [*FLAGS, *suffixes(modules)]
        raise ConfigError(
            *(f"{key}: {entry!r} matches no module of this model{nearest(entry, known)}." for entry in unmatched)
        )
    auto = AUTO_FILTER_SMALL_KN in entries
    decisions = []
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        n, k = module.weight.shape
        reason = None
        hit = next((entry for entry in patterns if matches(entry, fqn)), None)
        if hit is not None:
            reason = f"{key} names {hit}"
        elif k % multiple_of or n % multiple_of:
            reason = f"K = {k} and N = {n} are not both multiples of {multiple_of}"
        elif auto and too_small is not None:
            reason = small_kn(too_small, k, n)
        decisions.append(Decision(fqn, k, n, reason is None, reason or "no rule against it"))
    return decisions


def matches(entry: str, fqn: str) -> bool:
    """Whether the components of `entry` stand one after another among those of `fqn`."""
    wanted, path = entry.split("."), fqn.split(".")
    return any(
        all(fnmatchcase(part, pattern) for part, pattern in zip(path[start:], wanted, strict=False))
        for start in range(len(path) - len(wanted) + 1)
    )


def suffixes(modules: Sequence[str]) -> list[str]:
    """Every way to name a module from some component on."""
    return sorted({".".join(parts[i:]) for parts in (name.split(".") for name in modules) for i in range(len(parts))})


def small_kn(recipe: str, k: int, n: int) -> str | None:
    """Why a layer is too small to gain from `recipe`, or None.

    The thresholds are torchao's (`torchao.float8.float8_linear_utils._auto_filter_for_recipe`), measured on an H100;
    rowwise_with_gw_hp takes rowwise's.
    """
    if recipe == "tensorwise":
        return f"{AUTO_FILTER_SMALL_KN}: K = {k} <= 4096 and N = {n} <= 1024" if k <= 4096 and n <= 1024 else None
    if n <= 2048:
        return f"{AUTO_FILTER_SMALL_KN}: N = {n} <= 2048"
    if k <= 1024:
        return f"{AUTO_FILTER_SMALL_KN}: K = {k} <= 1024"
    if n <= 4096 and k <= 2048:
        return f"{AUTO_FILTER_SMALL_KN}: N = {n} <= 4096 and K = {k} <= 2048"
    return None
