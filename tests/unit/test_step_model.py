"""The model of a step: work over rates."""

from torchtitan.plan.step_model import COLLECTIVES_SHARE, Rates, Work, seconds_by_part

RATES = Rates({"bf16": 100.0, "8-bit": 200.0}, (50.0, 25.0), 10.0)


def test_parts_of_a_step() -> None:
    work = Work({"bf16": 100.0, "8-bit": 100.0}, (50.0, 50.0), 10.0, 20.0, 30.0, waited=0.25, beside=5.0)
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
