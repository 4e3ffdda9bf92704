"""Models of a wanted size, with the proportions of a flavor."""

import math
import re
from dataclasses import dataclass, replace

import torch

from torchtitan.config.training import Model
from torchtitan.engine.model_args import find_model_args, width_unit, with_width
from torchtitan.errors import ConfigError
from torchtitan.metrics.flops import flops_per_token
from torchtitan.models import MODELS
from torchtitan.protocols import ModelArgs

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Shape:
    """A model of the ladder. `parameters` is N, without the embedding and the output layer; `flops_per_token` includes
    the latter, forward and backward."""

    dim: int
    n_layers: int
    parameters: int
    flops_per_token: float


def parse_number(text: str, flag: str) -> float:
    """The number of "0.3M": digits and, if wanted, K, M, B or T."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([KMBT]?)", text.strip(), re.IGNORECASE)
    number = float(match[1]) * UNITS[match[2].upper()] if match else 0.0
    if number <= 0:
        raise ConfigError(f"{flag}: {text!r} is not a number above 0, such as 300K, 0.3M or 1.5B.")
    return number


def short(number: float) -> str:
    """The number with three digits and a unit: 312K, 1.21M."""
    number = float(f"{number:.3g}")
    unit = max((unit for unit in UNITS if UNITS[unit] <= max(number, 1)), key=UNITS.__getitem__)
    return f"{number / UNITS[unit]:.3g}{unit}"


def find_shape(model: Model, parameters: float, seq_len: int) -> Shape:
    """The shape whose N is nearest to `parameters`, in the proportions of the configured model. The number of layers
    grows with the cube root of N, as the width then does; the width is chosen for that depth. Raises a ConfigError if
    the model cannot have another width."""
    flavor = find_model_args(model)
    if flavor.moe is not None:
        raise ConfigError(f"model.name = {model.name}: a ladder needs a dense model; its experts have no single N.")
    base, unit = shape_of(model, flavor, seq_len), width_unit(flavor)
    layers = max(1, round(base.n_layers * (parameters / base.parameters) ** (1 / 3)))
    width = base.dim * math.sqrt(parameters / base.parameters * base.n_layers / layers)
    widths = {unit * max(1, math.floor(width / unit)), unit * math.ceil(width / unit)}
    shapes = [shape_of(model, replace(with_width(flavor, dim), n_layers=layers), seq_len) for dim in widths]
    return min(shapes, key=lambda shape: abs(math.log(shape.parameters / parameters)))


def shape_of(model: Model, args: ModelArgs, seq_len: int) -> Shape:
    """Builds the model without memory, and counts."""
    with torch.device("meta"):
        built = MODELS.get(model.name).build(args)
    count = sum(parameter.numel() for parameter in built.parameters())
    assert args.vocab_size is not None
    table = args.dim * args.vocab_size
    blocks = count - (table if args.tied_embeddings else 2 * table)
    flops = flops_per_token(blocks + table, args, seq_len)
    return Shape(args.dim, args.n_layers, blocks, flops)
