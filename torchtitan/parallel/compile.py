"""torch.compile for each transformer block: blocks that are alike share one compilation."""

import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchtitan.cache import keep_compiled_code_private
from torchtitan.compat.dynamo import raise_recompile_limit
from torchtitan.errors import ConfigError
from torchtitan.registry import deferred

_fuse_gathers = deferred("torchtitan.kernels.compiler_passes:FuseGathers")
_transpose_weight_gradients = deferred("torchtitan.kernels.compiler_passes:TransposeWeightGradients")

# Variants of a block's compiled code: training, validation and evaluation differ in length; dynamo's default.
VARIANTS = 8


def apply_compile(blocks: Sequence[nn.Module], device_type: str) -> None:
    """Compiles the forward of each block in place; names in state dicts do not change. Raises a ConfigError on a CPU
    without a C++ compiler, which inductor requires there."""
    if device_type == "cpu" and not has_cpp_compiler():
        raise ConfigError("training.compile needs a C++ compiler on CPU: install g++, or set training.compile = false.")
    options: dict[str, Any] | None = None
    if device_type == "cpu":
        options = {"post_grad_custom_pre_pass": _transpose_weight_gradients()}
    elif device_type == "cuda":
        options = {"joint_custom_post_pass": _fuse_gathers()}
    keep_compiled_code_private()
    # All blocks are compilations of one function, and in low precision no two need be alike.
    raise_recompile_limit(VARIANTS * len(blocks))
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, options=options)


def has_cpp_compiler() -> bool:
    """Whether inductor can compile CPU code here."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))
