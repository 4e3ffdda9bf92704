"""Inputs of activations, kept for the backward pass in 8 bits."""

import functools
from collections.abc import Sequence
from typing import Literal

from torch import nn

from torchtitan.errors import ConfigError
from torchtitan.kernels.swiglu import swiglu
from torchtitan.kernels.swiglu_8bit import swiglu_saved_in_8_bits
from torchtitan.models.transformer import GatedUnit


def save_in_8_bits(blocks: Sequence[nn.Module], dtype: Literal["int8", "float8"]) -> None:
    """Makes the feed-forward layers keep the inputs of their activations in 8 bits."""
    units = [module for block in blocks for module in block.modules() if isinstance(module, GatedUnit)]
    layers = [unit for unit in units if unit.activation is swiglu]
    if not layers:
        raise ConfigError(
            "activation_checkpoint.swiglu_dtype: the model has no FeedForward and no Experts of torchtitan.models with "
            "SwiGLU; unset it."
        )
    activation = functools.partial(swiglu_saved_in_8_bits, dtype=dtype)
    for layer in layers:
        layer.activation = activation
