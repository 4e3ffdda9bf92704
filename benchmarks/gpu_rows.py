"""The rows of gpu.py's table: models and recipes."""

from dataclasses import dataclass, field
from typing import Any

MODELS = {"8B": ("llama3", "8B"), "3B": ("llama3.2", "3B"), "1B": ("llama3.2", "1B")}


@dataclass(frozen=True)
class Recipe:
    """A row, except for the model.

    Attributes:
        converter: name, or "".
        keys: of the converter's section. `output` stays in bf16 (docs/performance.md).
    """

    name: str
    compile: bool = True
    converter: str = ""
    keys: dict[str, Any] = field(default_factory=dict)


def float8(recipe_name: str, *filters: str) -> dict[str, Any]:
    return {"recipe_name": recipe_name, "filter_fqns": ["output", *filters]}


BASE = Recipe("bf16 compiled")
RECIPES = (
    BASE,
    Recipe("float8 tensorwise", converter="float8", keys=float8("tensorwise")),
    Recipe("float8 rowwise, auto_filter_small_kn", converter="float8", keys=float8("rowwise", "auto_filter_small_kn")),
    Recipe("float8 rowwise", converter="float8", keys=float8("rowwise")),
    Recipe("int8 rowwise", converter="int8"),
    Recipe("bf16 eager", compile=False),
)
CACHED = Recipe("bf16 compiled, cached")  # of the first model, last and in a new process


@dataclass(frozen=True)
class Row:
    """One row of the table to be measured.

    Attributes:
        traced: whether to profile one more step, which takes some seconds.
        layers: None: as many as fit.
    """

    model: str
    recipe: Recipe
    traced: bool = True
    layers: int | None = None

    def __str__(self) -> str:
        return f"{self.model}, {self.recipe.name}"
