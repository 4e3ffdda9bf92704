"""The plan's model of a step beside what was measured: by us on an H100 and two H200s, by torchtitan on 256 H100s.

python -m benchmarks expected [--parts]

Computed in seconds, on any machine. The measured figures are in benchmarks/results and, of torchtitan, in its
benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md and issue #1207.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from benchmarks.gpu_row import config_of
from benchmarks.gpu_rows import MODELS, MORE, RECIPES
from benchmarks.runs import ROOT
from benchmarks.tables import markdown
from torchtitan.checks.config_checks import check
from torchtitan.config import JobConfig
from torchtitan.config.system import ActivationCheckpoint, Parallelism
from torchtitan.config.training import Model, Training
from torchtitan.engine.conversion import build_converted_model, decisions_of
from torchtitan.errors import run_command
from torchtitan.metrics.flops import flops_per_token
from torchtitan.models import MODELS as FAMILIES
from torchtitan.models.moe import mixtures
from torchtitan.parallel.dims import ParallelDims
from torchtitan.tools.plan.devices import named_device
from torchtitan.tools.plan.result import ExpectedStep, Plan, RankPlan
from torchtitan.tools.plan.simulation import target_on
from torchtitan.tools.plan.step_model import OURS, TORCHTITAN_2025, Code, expected_step, repeated_layers

RESULTS = {
    "H100": ("nvidia_h100_80gb_hbm3",),
    "H200": ("nvidia_h200_1b", "nvidia_h200_experts"),
}


@dataclass(frozen=True)
class Step:
    """A step of a run.

    Attributes:
        gpu: key of the plan's devices.
        layers: of the model; 0: all.
        code: whose step it is.
    """

    name: str
    gpu: str
    config: JobConfig
    world_size: int = 1
    layers: int = 0
    code: Code = field(default=OURS, repr=False)

    @cached_property
    def expected(self) -> ExpectedStep:
        """What the plan expects."""
        expected = expected_step(*self._planned, code=self.code)
        assert isinstance(expected, ExpectedStep), expected
        return expected

    @property
    def expected_rate(self) -> float:
        """In tokens/s of a GPU."""
        plan, *_ = self._planned
        return plan.tokens_per_step / plan.world_size / self.expected.seconds

    @cached_property
    def _planned(self) -> tuple[Plan, Any, JobConfig, ParallelDims, int]:
        """What `expected_step` reads of a plan, without its simulations, and its other arguments."""
        config, device = self.config, named_device(self.gpu)
        family = FAMILIES.get(config.model.name)
        args = family.flavor(config.model.flavor)
        args = dataclasses.replace(args, n_layers=self.layers or args.n_layers)
        dims = check(config, self.world_size, "cuda")
        model, converters = build_converted_model(config, args, target_on(device, config, family, dims))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        active = parameters - sum(mixture.unused_parameters for mixture in mixtures(model).values())
        embedding = 0 if args.tied_embeddings else (args.vocab_size or 0) * args.dim
        training = config.training
        per_token = flops_per_token(active - embedding, args, training.seq_len)
        rows = config.training.sequences_per_step(dims.dp)
        again = repeated_layers(config.activation_checkpoint)
        decisions = decisions_of(converters)
        micro_batches = rows // (training.local_batch_size * dims.dp)
        flops_8bit = micro_batches * sum(
            2 * layer.m * layer.k * layer.n * max(layer.experts, 1) * (3 + again * (not layer.fqn.endswith(".w2")))
            for layer in decisions
            if layer.converted
        )
        rank = RankPlan(0, [args.n_layers], 0, 0, 0, 0, 0, {}, {}, 0.0, flops_8bit, [], None)
        plan = Plan(
            "", "", self.world_size, device, parameters, active, per_token, rows * training.seq_len, "", "", [rank],
            None, None, [], decisions, again,
        )  # fmt: skip
        return plan, args, config, dims, rows


@dataclass(frozen=True)
class Measured(Step):
    """A step that was measured, at `rate` tokens/s of a GPU."""

    rate: float = 0.0

    @property
    def error(self) -> float:
        """Of the expected rate, relative to the measured one."""
        return self.expected_rate / self.rate - 1


def on_one_gpu() -> Iterable[Measured]:
    """The rows of benchmarks/results, except for others' code and for eager steps."""
    recipes = {recipe.name: recipe for recipe in (*RECIPES, *MORE) if recipe.compile}
    for gpu, files in RESULTS.items():
        for file in files:
            results = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text(encoding="utf-8"))
            for row in results["rows"]:
                if "rate" in row and row["recipe"] in recipes:
                    shape = MODELS[row["model"]]
                    config = config_of(shape, recipes[row["recipe"]], 8192)
                    name = f"{row['model']}, {row['recipe']}"
                    yield Measured(name, gpu, config, shape.ranks, row["layers"], rate=row["rate"])


def torchtitan_70b(rate: float, recipe: str = "", *without: str, asynchronous: bool = False) -> Measured:
    """Llama 3 70B on 256 H100s, FSDP 32 x TP 8, local batch 16, full recomputation; layers `without` stay in bf16."""
    name = f"float8 {recipe}" if recipe else "bf16"
    name += f" without {' and '.join(without)}" if without else " in all layers" if recipe else ""
    config = JobConfig(
        model=Model(name="llama3", flavor="70B", converters=["float8"] if recipe else []),
        training=Training(seq_len=8192, local_batch_size=16, compile=True, mixed_precision_param="bfloat16"),
        parallelism=Parallelism(tensor_parallel_degree=8, enable_async_tensor_parallel=asynchronous),
        activation_checkpoint=ActivationCheckpoint(mode="full"),
    )
    if recipe:
        config = config.changed(float8={"recipe_name": recipe, "filter_fqns": ["output", *without]})
    name += ", asynchronous TP" if asynchronous else ""
    return Measured(name, "H100 500W", config, 256, code=TORCHTITAN_2025, rate=rate)


ASKED = (
    torchtitan_70b(597.3),
    torchtitan_70b(599.6, "rowwise"),
    torchtitan_70b(660, "rowwise", "wk", "wv"),
    torchtitan_70b(695, "rowwise", "wk", "wv", asynchronous=True),
)
ON_256 = (
    *ASKED,
    torchtitan_70b(652.4, asynchronous=True),
    torchtitan_70b(624.8, "rowwise", asynchronous=True),
    torchtitan_70b(809.8, "tensorwise"),
    torchtitan_70b(942.4, "tensorwise", asynchronous=True),
)


def table(rows: Iterable[Measured], with_ours: bool) -> str:
    """Measured and expected tokens/s of a GPU; `with_ours`: also those that our code is expected to reach there."""
    columns, cells = ["step", "measured", "expected", "error"], []
    for row in rows:
        name = row.name if with_ours else f"{row.gpu}, {row.name}"
        cells.append([name, f"{row.rate:,.0f}", f"{row.expected_rate:,.0f}", f"{row.error:+.0%}"])
        if with_ours:
            cells[-1].append(f"{dataclasses.replace(row, code=OURS).expected_rate:,.0f}")
    return markdown([*columns, *["our code, same GPUs"] * with_ours], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", action="store_true", help="also the seconds of each part of a step")
    parts = parser.parse_args().parts
    ours = list(on_one_gpu())
    print(table(ON_256, with_ours=True), table(ours, with_ours=False), sep="\n\n")
    if parts:
        names = list(ON_256[0].expected.parts)
        of_rows = [
            [f"{row.gpu}, {row.name}", *(f"{1e3 * row.expected.parts[name]:,.0f}" for name in names)]
            for row in (*ON_256, *ours)
        ]
        print("", markdown(["ms", *names], of_rows), sep="\n")


if __name__ == "__main__":
    run_command(main)
