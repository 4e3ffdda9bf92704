"""Names in a TOML file and the objects they refer to."""

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import pytest

from torchtitan.errors import ConfigError, nearest
from torchtitan.models import MODELS, ModelSpec
from torchtitan.registry import Registry, deferred


def test_own_entries_stand_beside_the_builtin_ones() -> None:
    builtin = {"blue": 1}
    colors = Registry("color", "model.color", builtin)
    colors.register("green", 2)
    assert (colors.get("blue"), colors.get("green"), colors.names()) == (1, 2, ["blue", "green"])
    assert builtin == {"blue": 1}


def test_unknown_name_lists_the_names_that_exist() -> None:
    colors = Registry("color", "model.color", {"green": 1, "blue": 2})
    with pytest.raises(ConfigError) as caught:
        colors.get("blu")
    assert str(caught.value) == "model.color: unknown color 'blu' (did you mean blue?); known: blue, green."


def test_taken_name_is_refused_but_the_same_entry_may_come_twice() -> None:
    red = object()
    colors = Registry("color", "model.color", {"red": red})
    colors.register("red", red)
    with pytest.raises(ConfigError, match="A color named 'red' is registered already"):
        colors.register("red", object())


def test_a_row_is_imported_when_it_is_first_asked_for() -> None:
    fractions: Registry[object] = Registry("fraction", "model.fraction", {"half": "fractions:missing"})
    fractions.register("whole", "fractions:Fraction")
    assert fractions.names() == ["half", "whole"]
    assert fractions.get("whole") is fractions.get("whole") is Fraction
    with pytest.raises(AttributeError):
        fractions.get("half")
    assert deferred("fractions:Fraction")(1, 2) == Fraction(1, 2)


def test_models() -> None:
    assert set(MODELS.get("llama2").flavors) == {"debugmodel", "7B", "13B", "70B"}
    assert set(MODELS.get("llama3").flavors) == {"debugmodel", "1B", "3B", "8B", "70B", "405B"}
    with pytest.raises(ConfigError, match=r"model\.flavor: unknown flavor '7B'.*known: debugmodel, 1B, 3B, 8B"):
        MODELS.get("llama3").flavor("7B")


def test_sizes_of_a_users_family_need_not_know_of_experts() -> None:
    @dataclass(frozen=True)
    class Sizes:
        n_layers: int = 2

    spec = ModelSpec({"own": Sizes()})  # type: ignore[dict-item]
    sizes: Any = spec.flavor("own")
    assert sizes.moe is None
    # As before, checkpoints of dense models do not record experts, and checkpoints of sparse ones do.
    assert asdict(sizes) == {"n_layers": 2}
    recorded: Any = [MODELS.get(name).flavor("debugmodel") for name in ("llama3", "qwen3", "qwen3_moe")]
    assert ["moe" in asdict(args) for args in recorded] == [False, False, True]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("training.step", "training.steps"),
        ("validation.step", "validation.steps"),
        ("traning.steps", "training.steps"),
        ("training.log_freq", "metrics.log_freq"),
        ("steps", "training.steps"),
        ("Training.Steps", "training.steps"),
        ("training.zzz", None),
    ],
)
def test_nearest_key(name: str, expected: str | None) -> None:
    known = ["training.steps", "training.gc_freq", "validation.steps", "metrics.log_freq"]
    assert nearest(name, known) == (f" (did you mean {expected}?)" if expected else "")
    assert nearest(name, []) == ""
