"""Activation checkpointing (arXiv 1604.06174): recomputes activations in the backward pass instead of saving them."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan.config.system import ActivationCheckpoint

# Those that no imported module registers cannot run.
OPERATORS = (
    "causal_attention",  # defined in kernels/attention_cpu.py
    "float8_mm",  # defined in kernels/cpu_gemm.py
    "int8_mm",
    "block_mm",  # defined in kernels/packed_blocks.py
    "grouped_mm",  # defined in kernels/grouped_gemm.py
    "grouped_8bit_mm",
    "exchange_rows",  # defined in parallel/expert.py
    "exchange_counts",
)


def _expensive_operations() -> set[object]:
    """Operations whose results selective ("op") checkpointing saves: GEMMs and attention."""
    aten, ours = torch.ops.aten, torch.ops.torchtitan
    return {
        aten.mm.default,
        aten._scaled_mm.default,
        aten._int_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._grouped_mm.default,
        aten._scaled_grouped_mm.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        *(getattr(ours, name).default for name in OPERATORS if hasattr(ours, name)),
    }


def apply_activation_checkpoint(layers: Mapping[str, nn.Module], config: ActivationCheckpoint) -> None:
    """Wraps the forward of blocks, by number in the model, in place: every block ("full"), every n-th, or every block
    with the results of expensive operations saved ("op"). Modules are not wrapped, so that their names stay."""
    if config.mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # there is no dropout
    if config.mode == "selective" and config.selective_ac_option == "op":
        keep = _expensive_operations()

        def policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if operation in keep else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    every = int(config.selective_ac_option) if config.mode == "selective" and "context_fn" not in options else 1
    for number, block in layers.items():
        if (int(number) + 1) % every == 0:
            block.forward = functools.partial(checkpoint, block.forward, **options)
