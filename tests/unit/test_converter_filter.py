"""Which linear layers a converter selects."""

import pytest
import torch
from torch import nn

from torchtitan.config.low_precision import Float8
from torchtitan.converters import Target
from torchtitan.converters.converter import Decision
from torchtitan.converters.filter import matches
from torchtitan.converters.linear_converter import LinearConverter
from torchtitan.converters.recipes import FLOAT8_SECTION
from torchtitan.errors import ConfigError


@pytest.mark.parametrize(
    ("entry", "fqn"),
    [
        ("output", "output"),
        ("wk", "layers.0.attention.wk"),
        ("attention.wk", "layers.0.attention.wk"),
        ("attention", "layers.0.attention.wk"),  # everything in it
        ("layers.1", "layers.1.attention.wk"),
        ("layers.*.attention", "layers.7.attention.wk"),
        ("layers.[01]", "layers.1.feed_forward.w1"),
        ("w?", "layers.1.feed_forward.w1"),
    ],
)
def test_an_entry_matches_whole_components(entry: str, fqn: str) -> None:
    assert matches(entry, fqn)


@pytest.mark.parametrize(
    ("entry", "fqn"),
    [
        ("layers.1", "layers.10.attention.wk"),
        ("w1", "layers.0.feed_forward.w13"),
        ("output", "layers.0.attention.output_proj"),
        ("attention", "layers.0.attention_norm"),
        ("attention.wk", "attention.cross.wk"),
        ("layers.0.attention.wk", "attention.wk"),
        ("layers.[01]", "layers.2.feed_forward.w1"),
        ("", "output"),
    ],
)
def test_an_entry_matches_nothing_less(entry: str, fqn: str) -> None:
    assert not matches(entry, fqn)


def model_of(**layers: tuple[int, int]) -> nn.Module:
    """Linear layers of K inputs and N outputs."""
    with torch.device("meta"):
        return nn.ModuleDict({name: nn.Linear(k, n, bias=False) for name, (k, n) in layers.items()})


def decisions_on(model: nn.Module, *entries: str, recipe: str = "tensorwise", tokens: int = 512) -> list[Decision]:
    section = Float8(recipe_name=recipe, filter_fqns=list(entries))  # type: ignore[arg-type]
    return LinearConverter(FLOAT8_SECTION, section, Target("cpu", tokens=tokens)).decide(model)


def test_layers_that_the_kernels_cannot_take_are_left_out() -> None:
    first, second, third = decisions_on(model_of(good=(64, 32), k=(24, 32), n=(32, 40)))
    assert (first.converted, second.converted, third.converted) == (True, False, False)
    assert "K = 24 is not a multiple of 16" in second.reason
    assert "N = 40 is not a multiple of 16" in third.reason


def test_tokens_that_the_kernels_cannot_take_leave_every_layer_out() -> None:
    (decision,) = decisions_on(model_of(good=(64, 32)), tokens=24)
    assert not decision.converted
    assert "M = 24 is not a multiple of 16" in decision.reason


def test_the_rule_that_decided_is_named() -> None:
    first, second = decisions_on(model_of(output=(64, 32), other=(64, 32)), "output")
    assert (first.converted, second.converted) == (False, True)
    assert first.reason == "float8.filter_fqns names output"


@pytest.mark.parametrize(
    ("entry", "suggestion"),
    [("atention.wq", "attention.wq"), ("outputs", "output"), ("auto_filter_small_nk", "auto_filter_small_kn")],
)
def test_an_entry_that_matches_nothing_is_an_error_with_the_nearest_name(entry: str, suggestion: str) -> None:
    with torch.device("meta"):
        attention = nn.ModuleDict({"wq": nn.Linear(16, 16)})
        model = nn.ModuleDict({"attention": attention, "output": nn.Linear(16, 16)})
    with pytest.raises(ConfigError, match=f"float8.filter_fqns: '{entry}' .*did you mean {suggestion}"):
        decisions_on(model, entry)


def test_all_unmatched_entries_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        decisions_on(model_of(output=(16, 16)), "one", "two", "output")
    assert len(caught.value.problems) == 2


# The thresholds of torchao's _auto_filter_for_recipe, on both sides of each limit.
@pytest.mark.parametrize(
    ("recipe", "k", "n", "too_small"),
    [
        ("tensorwise", 4096, 1024, True),
        ("tensorwise", 4112, 1024, False),
        ("tensorwise", 4096, 1040, False),
        ("rowwise", 8192, 2048, True),
        ("rowwise", 1024, 8192, True),
        ("rowwise", 2048, 4096, True),
        ("rowwise", 2064, 4096, False),
        ("rowwise", 2048, 4112, False),
        ("rowwise", 1040, 8192, False),
        ("rowwise_with_gw_hp", 2048, 4096, True),
        ("rowwise_with_gw_hp", 2064, 4096, False),
    ],
)
def test_small_layers_are_left_out_when_asked(recipe: str, k: int, n: int, too_small: bool) -> None:
    model = model_of(layer=(k, n))
    assert decisions_on(model, recipe=recipe)[0].converted
    assert decisions_on(model, "auto_filter_small_kn", recipe=recipe)[0].converted != too_small


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_thresholds_equal_torchaos(recipe: str) -> None:
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    keeps = _auto_filter_for_recipe(recipe, filter_fqns=[])
    for k in (1024, 1040, 2048, 2064, 4096, 4112):
        for n in (1024, 1040, 2048, 2064, 4096, 4112):
            model = model_of(layer=(k, n))
            (decision,) = decisions_on(model, "auto_filter_small_kn", recipe=recipe)
            assert decision.converted == keeps(model.layer, "layer")
