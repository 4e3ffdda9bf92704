"""The model of a step: work over rates, and how work is counted and extrapolated."""

import dataclasses
from types import SimpleNamespace

import pytest

from torchtitan.config import ConfigManager
from torchtitan.plan import watch
from torchtitan.plan.lowered_step import LoweringError, count, extrapolate, lowered_work
from torchtitan.plan.step_model import COLLECTIVES_SHARE, Rates, Work, seconds_by_part

RATES = Rates({"bf16": 100.0, "int8": 200.0}, (50.0, 25.0), 10.0)
WORK = Work({"bf16": 100.0, "int8": 100.0}, (50.0, 50.0), 10.0, 20.0, 30.0, 7)


def test_parts_of_a_step() -> None:
    parts = seconds_by_part(WORK, RATES, waited=0.25, beside=5.0)
    assert parts == {
        "bf16 GEMMs": 1.0,
        "int8 GEMMs": 0.5,
        "attention": 3.0,
        "fused kernels": 1.0,
        "uncompiled operations": 2.0,
        "optimizer": 3.0,
        # The others hide behind 10.5 s, and slow them down.
        "collectives": 0.25 + 5.0 * COLLECTIVES_SHARE,
    }
    assert seconds_by_part(WORK, RATES, beside=12.0)["collectives"] == 1.5 + 10.5 * COLLECTIVES_SHARE


def test_work_of_more_layers_from_one_and_two() -> None:
    layer = Work({"int8": 3.0}, (1.0, 2.0), 4.0, 5.0, 6.0, 2)
    assert extrapolate([WORK.plus(layer), WORK.plus(layer, 2)], 5) == WORK.plus(layer, 5)
    assert extrapolate([WORK], 1) == WORK


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
    assert count(work, operator, shapes, dtypes) == (expected is not None)
    assert dataclasses.asdict(work) == dataclasses.asdict(expected or Work())


def test_collectives_in_compiled_code_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seconds of links; not as bytes of operations as well."""

    def node(operator: str | None) -> SimpleNamespace:
        return SimpleNamespace(
            get_read_write_buffers_sizes=lambda: 7,
            is_foreach=lambda: False,
            node=SimpleNamespace(inputs=[]),
            name=operator,
        )

    names = ["_c10d_functional.all_gather_into_tensor", "torchtitan.exchange_rows", "aten.sort", None]
    sizes = SimpleNamespace(optimization_hint=int)
    graph = SimpleNamespace(scheduler=SimpleNamespace(nodes=list(map(node, names))), sizevars=sizes)
    monkeypatch.setattr("torchtitan.plan.watch.compat.operator_of", lambda node: node.name)
    work = watch.work_of_graph(graph, "", count)
    assert (work.other_bytes, work.fused_bytes) == (7, 7)  # the sort; a generated kernel


def test_the_work_of_muon_is_not_guessed() -> None:
    with pytest.raises(LoweringError, match="Muon divides matrices among ranks"):
        lowered_work(ConfigManager().parse_args(["--optimizer.name=Muon"]), 8, "sm_90")
