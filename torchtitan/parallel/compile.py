"""torch.compile for each transformer block: blocks are identical, so one compilation serves all."""

import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchtitan.cache import keep_compiled_code_private
from torchtitan.errors import ConfigError


def apply_compile(blocks: Sequence[nn.Module], device_type: str) -> None:
    """Compiles the forward of each block in place; names in state dicts do not change.

    Raises:
        ConfigError: on a CPU without a C++ compiler, which inductor requires there.
    """
    if device_type == "cpu" and not has_cpp_compiler():
        raise ConfigError("training.compile needs a C++ compiler on CPU: install g++, or set training.compile = false.")
    options: dict[str, Any] | None = None
    if device_type == "cpu":
        from torchtitan.kernels.transpose_pass import TransposeWeightGradients  # imports inductor

        options = {"post_grad_custom_pre_pass": TransposeWeightGradients()}
    keep_compiled_code_private()
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, options=options)


def has_cpp_compiler() -> bool:
    """Whether inductor can compile CPU code here."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))
