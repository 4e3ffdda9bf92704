"""The model of a step: work over rates."""

import dataclasses

import pytest

from torchtitan.plan.step_model import COLLECTIVES_SHARE, Rates, Work, seconds_by_part

RATES = Rates(100.0, 200.0, (50.0, 25.0), 10.0)


def test_parts_of_a_step() -> None:
    gemms = {"bf16": 90.0, "float32": 10.0, "int8": 50.0, "float8": 40.0, "nvfp4": 20.0}
    work = Work(gemms, (50.0, 50.0), 10.0, 20.0, 30.0, waited=0.25, beside=5.0)
    assert seconds_by_part(work, RATES) == {
        "bf16 GEMMs": 1.0,
        "8-bit GEMMs": 0.5,
        "attention": 3.0,
        "fused kernels": 1.0,
        "uncompiled operations": 2.0,
        "optimizer": 3.0,
        # The others hide behind 10.5 s, and slow them down.
        "collectives": 0.25 + 5.0 * COLLECTIVES_SHARE,
    }
    longer = Work({"bf16": 1050.0}, beside=12.0)
    assert seconds_by_part(longer, RATES)["collectives"] == 1.5 + 10.5 * COLLECTIVES_SHARE


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
