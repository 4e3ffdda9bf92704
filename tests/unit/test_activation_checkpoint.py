"""What activation checkpointing recomputes."""

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from runs import all_equal
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.config import JobConfig
from torchtitan.config.system import ActivationCheckpoint
from torchtitan.config.training import Training
from torchtitan.kernels import pointwise
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.parallel.activation_checkpoint import apply_activation_checkpoint
from torchtitan.run.startup_log import _selective_option

LAYERS = 4
GEMMS = 6  # of a block's seven: nothing needs the output of the last one, so recomputation stops before it


class CountedOperations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


def llama() -> Llama:
    torch.manual_seed(0)
    model = Llama(LlamaArgs(dim=32, n_layers=LAYERS, n_heads=2, n_kv_heads=2, ffn_dim=64, vocab_size=64)).bfloat16()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model


def step(model: Llama) -> tuple[list[torch.Tensor], Counter[str]]:
    """Gradients, and the number of times each operation ran; SwiGLU as "silu", whichever kernel computes it."""
    tokens = torch.arange(32).reshape(2, 16)
    kernels = patch.object(pointwise, "run_kernel", wraps=pointwise.run_kernel)
    with CountedOperations() as operations, kernels as run:
        model(tokens, tokens).backward()
    operations.count["silu"] += sum(call.args[0] == "swiglu" for call in run.call_args_list)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], operations.count


@pytest.mark.parametrize(
    ("mode", "option", "gemms_again", "activations_again"),
    [
        ("full", "2", GEMMS * LAYERS, LAYERS),
        ("selective", "1", GEMMS * LAYERS, LAYERS),
        ("selective", "2", GEMMS * LAYERS // 2, LAYERS // 2),
        ("selective", "op", 0, LAYERS),
    ],
)
def test_what_is_computed_again(mode: str, option: str, gemms_again: int, activations_again: int) -> None:
    expected, once = step(llama())
    model = llama()
    names = list(model.state_dict())
    config = ActivationCheckpoint(mode=mode, selective_ac_option=option)  # type: ignore[arg-type]
    apply_activation_checkpoint(dict(model.layers.items()), config)
    gradients, operations = step(model)
    assert operations["mm"] - once["mm"] == gemms_again
    assert operations["silu"] - once["silu"] == activations_again
    attention = "causal_attention"
    assert operations[attention] - once[attention] == gemms_again // GEMMS
    assert all_equal(gradients, expected)
    assert list(model.state_dict()) == names


def test_every_second_layer_is_counted_in_the_model_not_in_the_stage() -> None:
    """Otherwise a pipeline with one layer in each stage would recompute nothing."""
    _, once = step(llama())
    model = llama()
    for name, layer in model.layers.items():
        apply_activation_checkpoint({name: layer}, ActivationCheckpoint(mode="selective", selective_ac_option="2"))
    assert step(model)[1]["silu"] - once["silu"] == LAYERS // 2


def test_what_op_keeps_beyond_torchtitan_is_said() -> None:
    """Of a block's seven GEMMs, the 2nd, 4th and 6th."""
    model, widths = llama(), []

    class Widths(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func._opname == "mm":
                widths.append(out.shape[-1])
            return out

    with torch.no_grad(), Widths():
        model(torch.arange(32).reshape(2, 16), torch.arange(32).reshape(2, 16))
    kept = 2 * 16 * 2 * sum(sum(widths[7 * layer : 7 * layer + 7][1::2]) for layer in range(LAYERS))
    config = JobConfig(
        training=Training(local_batch_size=2, seq_len=16, mixed_precision_param="bfloat16"),
        activation_checkpoint=ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    )
    meshes = SimpleNamespace(dims=SimpleNamespace(cp=1, tp=1))
    engine: Any = SimpleNamespace(config=config, meshes=meshes, model=model, pipeline_stages={"0": model})
    assert f" {kept / 2**30:.3g} GiB " in _selective_option(engine)


def test_none_computes_nothing_again() -> None:
    _, once = step(llama())
    model = llama()
    apply_activation_checkpoint(dict(model.layers.items()), ActivationCheckpoint(mode="none"))
    assert step(model)[1] == once
