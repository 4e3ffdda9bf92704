"""The private names of torch and torchao that this project relies on, and nothing else imports (`test_layers.py`).

There is one module for each part of torch, which says what each name is for; this one imports no torch. All names exist
in every version of docs/versions.md: torch 2.11 to 2.15, torchao 0.18. Where one differs between versions, its module
says so. Private operators (`torch._scaled_mm`, `torch._int_mm`, `torch._foreach_*`) are called where they are needed.
"""

from importlib.metadata import version

from torchtitan.errors import UserError


def require(owner: type, names: tuple[str, ...], purpose: str) -> None:
    """Refuses a torch whose class `owner` lacks private methods or attributes that we override: without them our own
    would never be called, and nobody would notice.

    Raises:
        UserError: one of `names` is missing.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise UserError(
            f"torch {version('torch')} has no {owner.__name__}.{missing[0]}, which {purpose} needs; install one of the "
            "versions in docs/versions.md."
        )
