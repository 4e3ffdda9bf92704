"""What happened to every linear layer: the table, the summary line and `conversion.json`."""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence

from torchtitan.converters.converter import Decision
from torchtitan.errors import aligned

HIGH_PRECISION = "bf16"


def conversion_report(decisions: Iterable[Sequence[Decision]]) -> list[Decision]:
    """One decision per linear layer: by the converter that took it, or else why each converter did not."""
    by_layer: dict[str, list[Decision]] = {}
    for decision in itertools.chain.from_iterable(decisions):
        by_layer.setdefault(decision.fqn, []).append(decision)
    report = []
    for of_layer in by_layer.values():
        taken = next((decision for decision in of_layer if decision.converted), None)
        if taken is None:
            reasons = [
                decision.reason if len(of_layer) == 1 else f"{decision.converter}: {decision.reason}"
                for decision in of_layer
            ]
            taken = dataclasses.replace(of_layer[0], converter="", recipe=HIGH_PRECISION, reason="; ".join(reasons))
        report.append(taken)
    return report


def to_json(report: Sequence[Decision]) -> str:
    """A list of objects: fqn, m, k, n, converter, recipe, converted, reason, experts."""
    return json.dumps(report, indent=1, default=dataclasses.asdict)


def phases_to_json(reports: Sequence[tuple[int | None, Sequence[Decision]]]) -> str:
    """A list of objects, one per phase of a precision schedule: phase (from 1), precision, last_step (null for the end
    of the run), and layers (see `to_json`)."""
    phases = [
        {"phase": number, "precision": precision_of(report), "last_step": last, "layers": report}
        for number, (last, report) in enumerate(reports, 1)
    ]
    return json.dumps(phases, indent=1, default=dataclasses.asdict)


def schedule_line(schedule: Sequence[tuple[int | None, str]]) -> str:
    """'float8 rowwise to step 900, then bf16'. A part of a schedule of batch sizes has no name."""
    return ", then ".join(
        (name or "a batch size") + ("" if last is None else f" to step {last}") for last, name in schedule
    )


def precision_of(report: Sequence[Decision]) -> str:
    """The precision of the layers: 'float8 rowwise', 'float8 rowwise + int8 rowwise', 'bf16'."""
    names = dict.fromkeys(f"{decision.converter} {decision.recipe}" for decision in report if decision.converted)
    return " + ".join(names) or HIGH_PRECISION


def to_table(report: Sequence[Decision]) -> str:
    """One line per layer. Layers of different blocks with the same decision share a line."""
    rows: dict[tuple[object, ...], list[str]] = {}
    for decision in report:
        name = ".".join("*" if component.isdecimal() else component for component in decision.fqn.split("."))
        precision = f"{decision.converter} {decision.recipe}".strip()
        experts = f" x {decision.experts} experts" if decision.experts else ""
        sizes = decision.m, decision.k, f"{decision.n}{experts}"
        rows.setdefault((name, *sizes, precision, decision.reason), []).append(decision.fqn)
    header = ("layer", "M", "K", "N", "precision", "rule")
    lines = [
        (f"{name} ({len(fqns)})" if len(fqns) > 1 else fqns[0], *map(str, rest)) for (name, *rest), fqns in rows.items()
    ]
    return aligned([header, *lines], left=len(header))


def _weights(decision: Decision) -> int:
    return decision.k * decision.n * max(decision.experts, 1)


def summary(report: Sequence[Decision]) -> str:
    """'42 of 43 linear layers converted (float8 tensorwise 42), 71% of their weights'."""
    taken = [decision for decision in report if decision.converted]
    recipes = Counter(f"{decision.converter} {decision.recipe}" for decision in taken)
    weights = sum(map(_weights, report))
    fraction = sum(map(_weights, taken)) / weights if weights else 0
    counts = ", ".join(f"{recipe} {count}" for recipe, count in recipes.items())
    return f"{len(taken)} of {len(report)} linear layers converted ({counts}), {fraction:.0%} of their weights"
