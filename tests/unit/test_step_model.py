"""The model of a step: work over rates."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan.models import MODELS
from torchtitan.tools.plan.step_model import COLLECTIVES_SHARE, Rates, Work, attention_layers, seconds_by_part

RATES = Rates(
    gemm=100.0,
    gains={"int8": 2.0, "float8": 2.0, "nvfp4": 4.0},
    attention=(50.0, 25.0),
    bandwidth=10.0,
    loops=5.0,
    links=0.5,
    rounding={"float8 tensorwise": 0.25, "": 0.5},
    host={"int8": 2.0},
)


@pytest.mark.parametrize(
    ("family", "flavor"),
    [
        ("llama3", "8B"),
        ("afmoe", "Nano-6B-A1B"),
        ("deepseek_v3", "Moonlight-16B-A3B"),
        ("deepseek_v3", "671B-A37B"),
    ],
)
def test_layers_of_attention_are_the_model_s(family: str, flavor: str) -> None:
    """Each with its inputs and outputs, of which tensor parallelism divides one where it divides heads."""
    spec = MODELS.get(family)
    args: Any = spec.flavor(flavor)
    with torch.device("meta"):
        model: Any = spec.build(dataclasses.replace(args, n_layers=1))
    attention = model.layers["0"].attention
    expected = {name: child.weight.shape for name, child in attention.named_children() if isinstance(child, nn.Linear)}
    assert {layer.name: (layer.n, layer.k) for layer in attention_layers(args, 1, 8.0)} == expected
    divided = {layer.name: layer.m * layer.n * layer.k for layer in attention_layers(args, 2, 8.0)}
    assert divided == {name: 8.0 * shape.numel() / 2 for name, shape in expected.items()}


def test_parts_of_a_step() -> None:
    gemms = {"bf16": 90.0, "float32": 10.0, "int8": 50.0, "float8": 40.0, "nvfp4": 20.0}
    work = Work(
        gemms, (50.0, 50.0), grouped=11.0, gemm_bytes=42.0, rounded=4.0, rounded_bytes=10.0, fused_bytes=15.0,
        other_bytes=18.0, update_bytes=27.0, waited=0.25, beside=2.5,
    )  # fmt: skip
    # Of the bytes' 4.2 s, half are exposed. Grouped GEMMs in 8 bits are as fast as in bf16: a tenth of all, 0.11 s
    # instead of 0.05.
    grouped = 11 * (50 / 110 / 200 + 40 / 110 / 200 + 20 / 110 / 400)
    expected = {
        "bf16 GEMMs": 1.0 + 2.1 * 100 / 210,
        "8-bit GEMMs": 0.5 - grouped + 0.11 + 2.1 * 110 / 210,
        "attention": 3.0,
        "fused kernels": 3.0,
        "rounding to 8 bits": 2.0 + 4 * 0.5,
        "uncompiled operations": 2.0,
        "optimizer": 3.0,
        # The others hide behind computation, and slow it down.
        "collectives": 0.5 + 5.0 * COLLECTIVES_SHARE,
        "waiting for the host": 0.0,
    }
    assert seconds_by_part(work, RATES) == pytest.approx(expected)
    longer = Work({"bf16": 1050.0}, beside=6.0)
    assert seconds_by_part(longer, RATES)["collectives"] == 1.5 + 10.5 * COLLECTIVES_SHARE


def test_what_takes_longer_by_recipe_and_shape() -> None:
    def parts(**of_work: Any) -> dict[str, float]:
        return seconds_by_part(Work(attention=(50.0, 25.0), **of_work), RATES)

    assert parts(head_dim=128)["attention"] == parts(head_dim=256)["attention"] == 2.0
    assert parts(head_dim=64)["attention"] == 2.0 * 1.25
    assert parts(rounded=1.0, precision="float8 tensorwise")["rounding to 8 bits"] == 0.25
    assert parts(rounded=1.0, precision="float8 rowwise")["rounding to 8 bits"] == 0.5
    assert parts(calls=3.0, precision="int8 rowwise")["waiting for the host"] == 3 * 2.0 - 2.0
    assert parts(calls=3.0, precision="float8 rowwise")["waiting for the host"] == 0.0


@pytest.mark.parametrize(
    ("operator", "shapes", "dtypes", "expected"),
    [
        ("aten.mm", [(2, 3), (3, 5)], ["bfloat16"] * 2, Work({"bf16": 60.0})),
        ("aten.addmm", [(5,), (2, 3), (3, 5)], ["bfloat16"] * 3, Work({"bf16": 60.0})),
        ("aten._scaled_mm", [(2, 3), (3, 5), (), ()], ["float8_e5m2", "float8_e4m3fn"], Work({"float8": 60.0})),
        ("aten._int_mm", [(2, 3), (3, 5)], ["int8"] * 2, Work({"int8": 60.0})),
        # Batch 2, 8 heads that share 4 keys and values, 16 tokens, 32 numbers a head; two GEMMs, and five backward.
        ("aten._scaled_dot_product_flash_attention", [(2, 8, 16, 32), *[(2, 4, 16, 32)] * 2], ["bfloat16"] * 3,
         Work(attention=(2 * 2 * 8 * 16 * 16 * 32, 0.0))),
        ("aten._scaled_dot_product_flash_attention_backward",
         [(2, 8, 16, 32), (2, 8, 16, 32), *[(2, 4, 16, 32)] * 2], ["bfloat16"] * 4,
         Work(attention=(0.0, 2.5 * 2 * 2 * 8 * 16 * 16 * 32))),
        ("aten.add", [(2, 3), (2, 3)], ["bfloat16"] * 2, None),
    ],
)  # fmt: skip
def test_what_counts_as_a_gemm(
    operator: str, shapes: list[tuple[int, ...]], dtypes: list[str], expected: Work | None
) -> None:
    work = Work()
    assert work.count(operator, shapes, dtypes) == (expected is not None)
    assert dataclasses.asdict(work) == dataclasses.asdict(expected or Work())
