"""The private names of torch and torchao that this project uses; only this package imports them (`test_layers.py`).

Each module covers one part of torch and says what each name is for; this one does not import torch. All names exist in
every version listed in docs/versions.md: torch 2.11 to 2.15, torchao 0.18. Where a name differs between versions, its
module says so. Private operators (`torch._scaled_mm`, `torch._int_mm`, `torch._foreach_*`) are called where needed.
"""

from importlib.metadata import version

from torchtitan.errors import UserError


def require(owner: type, names: tuple[str, ...], purpose: str) -> None:
    """Raises a UserError if this torch's class `owner` lacks private names that we override: our overrides would
    silently never be called."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise UserError(
            f"torch {version('torch')} has no {owner.__name__}.{missing[0]}, which {purpose} needs; install one of the "
            "versions in docs/versions.md."
        )
