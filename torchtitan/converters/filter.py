"""An entry of `filter_fqns` matches complete components of a module's path: `layers.1` does not match `layers.10`, nor
`w1` `w13`. A component may be a glob: `layers.*.attention`, `layers.[01]`.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

AUTO_FILTER_SMALL_KN = "auto_filter_small_kn"
AUTO_FILTER_SMALL_KN_FULL = "auto_filter_small_kn_full"
AUTO_FILTER_MEASURED = "auto_filter_measured"
AUTO_FILTER_NUMERICS = "auto_filter_numerics"
AUTO_FILTERS = (AUTO_FILTER_SMALL_KN, AUTO_FILTER_SMALL_KN_FULL, AUTO_FILTER_MEASURED, AUTO_FILTER_NUMERICS)


def matches(entry: str, fqn: str) -> bool:
    """Whether the components of `entry` are consecutive components of `fqn`."""
    wanted, path = entry.split("."), fqn.split(".")
    return any(
        all(fnmatchcase(component, pattern) for component, pattern in zip(path[start:], wanted, strict=False))
        for start in range(len(path) - len(wanted) + 1)
    )


def suffixes(modules: Sequence[str]) -> list[str]:
    """All suffixes of module paths, each of which can name a module."""
    paths = [name.split(".") for name in modules]
    return sorted({".".join(path[start:]) for path in paths for start in range(len(path))})
