"""muP: initial values and learning rates from a base model's, so that one rate suits all sizes (docs/mup.md).

In papers, constants also multiply the output and the branches of the residual stream. To multiply what a layer returns
is to multiply its initial weight and, since Adam and Muon ignore the scale of gradients, its learning rate (arXiv
2203.03466, lemma J.1). Here it is all in these factors, so the model itself is like any other.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from torchtitan.errors import ConfigError
from torchtitan.protocols import Decoder, ModelArgs

LAYER_PATH = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class ParameterScaling:
    """Factors of one parameter: on its initial values, its learning rate under two algorithms, and AdamW's eps."""

    init: float = 1.0
    adamw: float = 1.0
    muon: float = 1.0
    eps: float = 1.0


class Powers(NamedTuple):
    """Exponents of a factor: of this model's width, and of its number of layers, each divided by the base model's."""

    width: float = 0
    depth: float = 0


@dataclass(frozen=True)
class ScalingRule:
    """How one kind of parameter scales: its initial standard deviation, its learning rate (Muon's by depth only), and
    AdamW's eps, which is as small as the gradient. Width: the parameter's fan-in; for `eps`, the residual stream's."""

    init: Powers
    lr: Powers
    eps: Powers


SCALING_RULES = {
    "embedding": ScalingRule(init=Powers(0), lr=Powers(0), eps=Powers(-1)),
    "scaled embedding": ScalingRule(init=Powers(-1 / 2), lr=Powers(-1 / 2), eps=Powers(-1 / 2)),
    "matrix": ScalingRule(init=Powers(-1 / 2), lr=Powers(-1, -1 / 2), eps=Powers(-1, -1 / 2)),
    "matrix at the end of a branch": ScalingRule(init=Powers(-1 / 2, -1 / 2), lr=Powers(-1, -1), eps=Powers(-1)),
    "matrix outside of branches": ScalingRule(init=Powers(-1 / 2), lr=Powers(-1), eps=Powers(-1)),
    "router": ScalingRule(init=Powers(-1), lr=Powers(-1, -1 / 2), eps=Powers(-1, -1 / 2)),
    "norm at the end of a branch": ScalingRule(init=Powers(0, -1 / 2), lr=Powers(0, -1), eps=Powers(-1)),
    "vector in a block": ScalingRule(init=Powers(0), lr=Powers(0, -1 / 2), eps=Powers(-1, -1 / 2)),
    "other vector": ScalingRule(init=Powers(0), lr=Powers(0), eps=Powers(-1)),
    "norm before a tied output": ScalingRule(init=Powers(-1), lr=Powers(-1), eps=Powers(0)),
    "output": ScalingRule(init=Powers(-1), lr=Powers(-1), eps=Powers(0)),
}
"""Width: arXiv 2203.03466, table 3. Depth: 2309.16620, where 1 / sqrt(depth) multiplies each branch of the residual
stream. Learning rates and eps of AdamW for both: 2505.01618, table 1 with alpha = 1/2."""


def mup(model: Decoder, base: Decoder) -> dict[str, ParameterScaling]:
    """The factors of each parameter of `model`, by name; 1 if it has the sizes of `base`.

    A layer compares with the base model's layer at the same relative depth, and gets its initial values, since these
    depend on the layer's number. Both models are complete; their parameters may be on the meta device. Raises a
    ConfigError if the base model lacks a parameter, or if head_dim differs and nothing can carry the factor, or if
    norms have an offset.
    """
    if getattr(model.args, "norm_offset", 0):
        raise ConfigError(
            "model.parametrization = mup scales the initial weights of norms, which are 0 in this model family; use "
            "standard."
        )
    parameters, base_parameters = dict(model.named_parameters()), dict(base.named_parameters())
    layers, base_layers = model.args.n_layers, base.args.n_layers
    depth = layers / base_layers
    width = model.args.dim / base.args.dim
    # Attention logits are divided by head_dim, not by its root.
    queries = (base.args.head_dim / model.args.head_dim) ** 0.5
    norms = {name for name in parameters if name.endswith(".q_norm.weight")}
    carriers = norms or {name for name in parameters if name.endswith(".wq.weight")}  # these carry the scale
    if queries != 1 and not carriers:
        raise ConfigError(
            "model.parametrization = mup changes the scale of queries, but this model family has no weights called wq "
            "or q_norm; choose a model.mup_base_flavor with the same head_dim."
        )
    ends_in_norms = any(name.endswith(".ffn_post_norm.weight") for name in parameters)
    scalings = {}
    for name, parameter in parameters.items():
        like = _counterpart(name, base_parameters, base_layers, layers)
        rule = SCALING_RULES[_kind(name, parameter, model.args, ends_in_norms)]
        shape, base_shape, std = parameter.shape, base_parameters[like].shape, model.init_std(name)
        fan_in = shape[-1] / base_shape[-1]
        init = fan_in**rule.init.width * depth**rule.init.depth
        if std:
            init *= (base.init_std(like) or std) / std
        adamw = fan_in**rule.lr.width * depth**rule.lr.depth
        muon = depth**rule.lr.depth
        if len(shape) > 1 and not name.startswith("tok_embeddings."):
            muon *= _size_of_muon(shape) / _size_of_muon(base_shape)
        eps = width**rule.eps.width * depth**rule.eps.depth
        factor = queries if name in carriers else 1.0
        scalings[name] = ParameterScaling(init * factor, adamw * factor, muon * factor, eps / factor)
    return scalings


def _kind(name: str, parameter: nn.Parameter, args: ModelArgs, ends_in_norms: bool) -> str:
    """The rule of a parameter. ends_in_norms: the last layer of a branch is a norm, which undoes the matrix's scale."""
    match name.split("."):
        case ["tok_embeddings", *_]:
            return "scaled embedding" if getattr(args, "scaled_embeddings", False) else "embedding"
        case ["norm", *_] | ["mtp", _, "norm", _] if args.tied_embeddings:
            return "norm before a tied output"
        case ["mtp", _, "norm" | "enorm" | "hnorm", _]:
            return "other vector"
        case ["mtp", _, "eh_proj", _]:
            return "matrix outside of branches"
        case ["layers" | "mtp", *_, "attention_post_norm" | "ffn_post_norm", "weight"]:
            return "norm at the end of a branch"
        case ["layers" | "mtp", *_, last] if parameter.ndim < 2 or last == "bias":
            return "vector in a block"
        case ["layers" | "mtp", *_, "wo" | "w2", "weight"] if not ends_in_norms:
            return "matrix at the end of a branch"
        case ["layers" | "mtp", *_, "router", "gate", "weight"]:
            return "router"
        case ["layers" | "mtp", *_]:
            return "matrix"
    return "other vector" if parameter.ndim < 2 else "output"


def _size_of_muon(shape: tuple[int, ...]) -> float:
    """A learning rate at which Muon's update, an orthogonal matrix times 0.2 sqrt(max(rows, columns)), has the spectral
    norm sqrt(rows / columns) times a constant, and so changes activations equally at any width (arXiv 2310.17813)."""
    rows, columns = shape[-2:]
    return float((rows / columns / max(rows, columns)) ** 0.5)


def _counterpart(name: str, base_parameters: Mapping[str, object], base_layers: int, layers: int) -> str:
    """The base model's name of a parameter: in the layer at the same relative depth, or in the nearest that has it."""
    candidates = [name]
    if in_layer := LAYER_PATH.fullmatch(name):
        place = int(in_layer[1]) * base_layers // layers
        numbers = sorted(range(base_layers), key=lambda number: abs(number - place))
        candidates = [f"layers.{number}.{in_layer[2]}" for number in numbers]
    for candidate in candidates:
        if candidate in base_parameters:
            return candidate
    raise ConfigError(f"model.mup_base_flavor: this flavor has no {name}; choose one with the same parts.")
