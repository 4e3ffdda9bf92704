"""The recipes that can run here, and what each costs and gains on each layer."""

import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.config import JobConfig
from torchtitan.converters import CONVERTERS, Decision, LinearConverter, Target
from torchtitan.converters.converter import LayerGemms
from torchtitan.converters.numerics import LayerErrors, Operands, layer_errors, noise_of
from torchtitan.engine.model_args import find_model_args
from torchtitan.errors import ConfigError
from torchtitan.logging import logger
from torchtitan.models import MODELS
from torchtitan.plan.step_model import Rates

CAST_BYTES = 6  # per element of an operand: read in bf16 for its amax and to be rounded, written in two layouts


@dataclass(frozen=True)
class Candidate:
    """A recipe that can run on this device.

    Attributes:
        converter: with this recipe.
        keys: of its section, as the configuration must set them.
        decisions: on each linear layer, by path; those of its own rules and of the user's filter.
    """

    converter: LinearConverter
    keys: dict[str, Any]
    decisions: dict[str, Decision]

    @property
    def name(self) -> str:
        return f"{self.converter.name} {self.converter.recipe}"

    @property
    def numbers(self) -> str:
        """The kind of its GEMMs' numbers, as in `Rates.gemm`. Scales of blocks need GEMMs of their own."""
        recipe = self.converter.recipe
        return recipe if self.converter.name == "mx" or recipe == "blockwise" else self.converter.name


@dataclass(frozen=True)
class Cell:
    """A layer in a recipe.

    Attributes:
        errors: of its GEMMs.
        noise: what it adds to the noise of the training, see `noise_of`.
        seconds: of its GEMMs and casts, modelled.
    """

    errors: LayerErrors
    noise: float
    seconds: float


def find_candidates(config: JobConfig, target: Target) -> list[Candidate]:
    """Each recipe of each registered converter of linear layers, emulated where the device cannot run it. A recipe that
    cannot run is logged with its reason.

    A filter that the user has set stays; a default one is replaced by the search, and so is nvfp4's rule to keep the
    last blocks.
    """
    with torch.device("meta"):
        model = MODELS.get(config.model.name).build(find_model_args(config.model))
    found = []
    for name in CONVERTERS.names():
        entry = CONVERTERS.get(name)
        section: Any = getattr(config, entry.section) if entry.section else None
        for recipe in recipes_of(section):
            keys: dict[str, Any] = {"recipe_name": recipe}
            if section.filter_fqns == type(section)().filter_fqns:
                keys["filter_fqns"] = []
            if recipe == "nvfp4" and section.keep_last_blocks_fraction == type(section)().keep_last_blocks_fraction:
                keys["keep_last_blocks_fraction"] = 0.0
            try:
                converter = build(entry.build, section, keys, target)
            except ConfigError as error:
                logger.info(f"{name} {recipe} is left out: {error}")
                continue
            if isinstance(converter, LinearConverter):
                found.append(Candidate(converter, keys, {one.fqn: one for one in converter.decide(model)}))
    return found


def recipes_of(section: Any) -> list[str]:
    """The values of a section's `recipe_name`; none without that key."""
    kind = typing.get_type_hints(type(section)).get("recipe_name") if section is not None else None
    kinds = [kind, *typing.get_args(kind)]
    return [name for one in kinds if typing.get_origin(one) is typing.Literal for name in typing.get_args(one)]


def build(factory: Any, section: Any, keys: dict[str, Any], target: Target) -> Any:
    """A converter with these keys; with `emulate`, added to them, if the device cannot run it otherwise."""
    try:
        return factory(dataclasses.replace(section, **keys), target)
    except ConfigError:
        if not hasattr(section, "emulate") or section.emulate:
            raise
    converter = factory(dataclasses.replace(section, **keys, emulate=True), target)
    keys["emulate"] = True
    return converter


def measure(
    candidates: Sequence[Candidate], operands: Mapping[str, Operands], rates: Rates, momentum: float
) -> dict[str, list[Cell | None]]:
    """For each layer one cell per candidate, in their order; None if the recipe does not convert the layer."""
    cells: dict[str, list[Cell | None]] = {}
    sizes = {fqn: one.k * one.n * max(one.experts, 1) for fqn, one in candidates[0].decisions.items()}
    for fqn, captured in operands.items():
        row: list[Cell | None] = []
        for candidate in candidates:
            decision = candidate.decisions[fqn]
            if not decision.converted:
                row.append(None)
                continue
            errors = layer_errors(candidate.converter, captured)
            noise = noise_of(fqn, errors, sizes, momentum)
            gemms = candidate.converter.gemms_of(decision)
            row.append(Cell(errors, noise, layer_seconds(decision, candidate.numbers, gemms, rates)))
        cells[fqn] = row
    return cells


def layer_seconds(decision: Decision, kind: str, gemms: LayerGemms | None, rates: Rates) -> float:
    """Modelled time of a layer's three GEMMs and of rounding their operands.

    Args:
        kind: of the low-precision GEMMs' numbers, a key of `Rates.gemm`; one that the device lacks is never chosen.
        gemms: which of the GEMMs are in low precision; None for bf16.
    """
    m, k, n, experts = decision.m, decision.k, decision.n, max(decision.experts, 1)
    flops = 2.0 * m * k * n * experts
    if gemms is None:
        return 3 * flops / rates.gemm["bf16"]
    if kind not in rates.gemm:
        return math.inf
    low = gemms.forward + gemms.backward
    casts = CAST_BYTES * experts * (m * k + n * k + m * n) / rates.bandwidth
    return flops * (low / rates.gemm[kind] + (3 - low) / rates.gemm["bf16"]) + casts
