"""A user's module, `--experimental.custom_import=drawn_on_cpu`: a GPU starts from the weights that a CPU draws.
Contains the models of tiny.py."""

from typing import Any

import tiny  # noqa: F401  registers its models
import torch
from torch import nn

trunc_normal_ = nn.init.trunc_normal_


def on_cpu(tensor: torch.Tensor, *, generator: torch.Generator, **options: Any) -> torch.Tensor:
    """`nn.init.trunc_normal_` on any device with a CPU's numbers, which the generator's seed gives."""
    same = torch.Generator().manual_seed(generator.initial_seed())
    return tensor.copy_(trunc_normal_(torch.empty(tensor.shape, dtype=tensor.dtype), generator=same, **options))


nn.init.trunc_normal_ = on_cpu  # type: ignore[assignment]
