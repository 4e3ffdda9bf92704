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
from torchtitan.converters.linear import LayerGemms
from torchtitan.converters.numerics import LayerErrors, Operands, layer_errors
from torchtitan.engine.model_args import find_model_args
from torchtitan.errors import ConfigError
from torchtitan.logging import logger
from torchtitan.models import MODELS
from torchtitan.plan.step_model import Rates

CAST_BYTES = 6  # per element of an operand: read in bf16 for its amax and to be rounded, written in two layouts

SYSTEMATIC = (1 + 0.9) / (1 - 0.9)


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

    A filter that the user has set stays; a default one is replaced by the search.
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
    candidates: Sequence[Candidate], operands: Mapping[str, Operands], rates: Rates
) -> dict[str, list[Cell | None]]:
    """For each layer one cell per candidate, in their order; None if the recipe does not convert the layer."""
    cells: dict[str, list[Cell | None]] = {}
    weights = {fqn: one.k * one.n * max(one.experts, 1) for fqn, one in candidates[0].decisions.items()}
    for fqn, captured in operands.items():
        row: list[Cell | None] = []
        in_block = any(part.isdecimal() for part in fqn.split("."))
        reached = weights[fqn] if in_block else sum(weights.values())
        for candidate in candidates:
            decision = candidate.decisions[fqn]
            if not decision.converted:
                row.append(None)
                continue
            errors = layer_errors(candidate.converter, captured)
            kind = candidate.converter.name
            gemms = candidate.converter.gemms_of(decision)
            row.append(
                Cell(errors, noise_of(errors, weights[fqn], reached), layer_seconds(decision, kind, gemms, rates))
            )
        cells[fqn] = row
    return cells


def noise_of(errors: LayerErrors, weights: int, reached: int) -> float:
    """What a layer adds to the loss, up to a factor that short runs measure (`LossModel`).

    The errors of GEMMs are small and nearly independent, so the loss rises by a sum of their squares. AdamW moves every
    weight by about the learning rate. So an error of its update, relative to the update, costs alike in all weights:
    hence `update_error`, times the number of weights. An error of the output or of the input gradient reaches other
    gradients with about its own relative size. In a block, the residual connection carries most of them past the layer,
    so as many weights count as the layer has; but all gradients come through the output layer.

    Momentum averages the random part of an update's error over steps, whose mean square becomes (1 - b) / (1 + b) of a
    step's, and leaves its systematic part, such as that of gradients rounded to 0. Here b = 0.9.

    Args:
        weights: of the layer.
        reached: weights whose gradients its input gradient reaches.
    """
    output, grad_input = (errors[gemm]["relative_error"] ** 2 for gemm in ("output", "grad_input"))
    update, bias = (errors["grad_weight"][key] ** 2 for key in ("update_error", "update_bias"))
    return reached * grad_input + weights * (output + max(update - bias, 0.0) + SYSTEMATIC * bias)


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
