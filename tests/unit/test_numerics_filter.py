"""`auto_filter_numerics`: the layers whose GEMMs a recipe computes too inaccurately."""

import dataclasses
from typing import Any

import pytest
import tiny  # registers its models
import torch
from torch import nn

from torchtitan.config.low_precision import MX, Float8, Int8
from torchtitan.converters import CONVERTERS, Target, apply_converters
from torchtitan.converters.filter import AUTO_FILTER_NUMERICS
from torchtitan.converters.numerics import inaccurate_layers
from torchtitan.errors import ConfigError
from torchtitan.models.init import init_weights
from torchtitan.models.llama.model import Llama

TARGET = Target("cpu", tokens=128)
ARGS = dataclasses.replace(tiny.TINY, vocab_size=512)


def meta_model() -> Llama:
    with torch.device("meta"):
        return Llama(ARGS)


def test_the_flag_leaves_out_the_output_layer_in_int8_and_nvfp4_and_nothing_in_float8() -> None:
    nvfp4 = MX("nvfp4", filter_fqns=[AUTO_FILTER_NUMERICS], keep_last_blocks_fraction=0, emulate=True)
    for name, section, excluded in (
        ("int8", Int8(filter_fqns=[AUTO_FILTER_NUMERICS]), {"output"}),
        ("mx", nvfp4, {"output"}),
        ("int8", Int8("tensorwise", filter_fqns=[AUTO_FILTER_NUMERICS]), {"output"}),
        ("float8", Float8(filter_fqns=[AUTO_FILTER_NUMERICS]), set()),
    ):
        for _ in range(2):  # as a resumed run would
            (converter,) = apply_converters(meta_model(), [name], lambda _, section=section: section, TARGET)  # type: ignore[misc]
            against = {decision.fqn: decision.reason for decision in converter.decisions if not decision.converted}
            assert set(against) == excluded
            assert all(AUTO_FILTER_NUMERICS in reason for reason in against.values())


def test_the_flag_leaves_out_a_layer_with_outliers() -> None:
    model = Llama(ARGS)
    init_weights(model, model.init_std, seed=1)
    block: Any = model.layers["1"]
    takes = (block.feed_forward.w1, block.feed_forward.w3)
    with torch.no_grad():
        block.ffn_norm.weight[0] = 1e8
        for linear in takes:
            linear.weight[:, 0] = 0
    converter: Any = CONVERTERS.get("float8").build(Float8("rowwise", filter_fqns=[]), TARGET)
    linears = [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert set(inaccurate_layers(converter, model, linears)) >= {"layers.1.feed_forward.w1", "layers.1.feed_forward.w3"}
    assert not any(fqn.startswith("layers.0") for fqn in inaccurate_layers(converter, model, linears))


def test_a_model_that_does_not_fit_on_one_device_is_refused() -> None:
    with torch.device("meta"):
        model = Llama(dataclasses.replace(ARGS, dim=2**17, ffn_dim=2**19))
    converter: Any = CONVERTERS.get("int8").build(Int8(filter_fqns=[AUTO_FILTER_NUMERICS]), TARGET)
    with pytest.raises(ConfigError, match=r"int8\.filter_fqns: auto_filter_numerics .*numerics_report"):
        converter.decide(model)


def test_a_model_that_takes_no_tokens_is_refused() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(64, 64, bias=False)})
    converter: Any = CONVERTERS.get("int8").build(Int8(filter_fqns=[AUTO_FILTER_NUMERICS]), TARGET)
    with pytest.raises(ConfigError, match=r"int8\.filter_fqns: auto_filter_numerics .*ModuleDict has no embedding"):
        converter.decide(model)
