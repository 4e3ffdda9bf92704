"""Optimizers with small states under every layout: they train, are saved, and resume bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runs import TINY, failure, into, losses, tensors_of, train, train_here
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from workers import in_processes

from torchtitan.checkpoint.state_dict import load_optimizer_tensors, model_tensors, optimizer_tensors
from torchtitan.config.training import Optimizer
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.parallel.fsdp import apply_fsdp

FLAGS = (
    *TINY,
    "--model.flavor=wide",
    "--training.steps=8",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=4",
)
BFLOAT16 = "--training.weight_dtype=bfloat16"
OPTIMIZERS = {
    "8bit": ("--optimizer.name=AdamW8bit",),
    "4bit, bfloat16 weights": ("--optimizer.name=AdamW4bit", BFLOAT16, "--checkpoint.async_mode=async"),
    "fp8": ("--optimizer.name=AdamWFp8", "--optimizer.second_moment=v"),
    "fp8 root": ("--optimizer.name=AdamWFp8",),
    "fp8 e5m2": ("--optimizer.name=AdamWFp8", "--optimizer.second_moment=v_e5m2"),
    "bfloat16 states": ("--optimizer.state_dtype=bfloat16",),
    "bfloat16 states and weights": ("--optimizer.state_dtype=bfloat16", BFLOAT16),
}
CORE = ("8bit", "4bit, bfloat16 weights", "fp8 root", "bfloat16 states")
DTYPES = {
    "8bit": {torch.float32, torch.uint8},
    "4bit, bfloat16 weights": {torch.bfloat16, torch.float32, torch.uint8},
    "fp8": {torch.float32, torch.float8_e4m3fn},
    "fp8 root": {torch.float32, torch.float8_e4m3fn},
    "fp8 e5m2": {torch.float32, torch.float8_e4m3fn, torch.float8_e5m2},
    "bfloat16 states": {torch.float32, torch.bfloat16},
    "bfloat16 states and weights": {torch.bfloat16},
}
"""For matrices: weights, codes or moments, scales."""
ALL = [pytest.param(name, marks=[] if name in CORE else [pytest.mark.full]) for name in OPTIMIZERS]
TP = "--parallelism.tensor_parallel_degree=2"


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AdamW in float32."""
    folder = tmp_path_factory.mktemp("float32")
    train_here(*FLAGS, into(folder), "--training.local_batch_size=4")
    return folder


@pytest.fixture(scope="module", params=ALL)
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Each optimizer on two FSDP ranks."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(*FLAGS, into(folder), *OPTIMIZERS[request.param], processes=2)
    return request.param, folder


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Float8 tensors can only be compared as bytes."""
    assert left and left.keys() == right.keys()
    return all(torch.equal(_bytes(left[name]), _bytes(right[name])) for name in left)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().contiguous().view(torch.uint8)


@pytest.mark.full
def test_it_trains_as_adamw_does(uninterrupted: tuple[str, Path], float32: Path) -> None:
    """But not exactly as AdamW: the moments differ."""
    name, folder = uninterrupted
    actual, expected = list(losses(folder).values()), list(losses(float32).values())
    assert actual == pytest.approx(expected, abs=2e-2 if "4bit" in name else 2e-3)
    assert actual != expected
    dtypes = {tensor.dtype for tensor in tensors_of(folder, 8).values() if tensor.ndim == 2}
    assert dtypes == DTYPES[name]


@pytest.mark.full
def test_resumed_it_ends_bit_for_bit_the_same(uninterrupted: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = uninterrupted
    shutil.copytree(folder / "checkpoint" / "step-4", tmp_path / "checkpoint" / "step-4")
    train(*FLAGS, into(tmp_path), *OPTIMIZERS[name], processes=2)
    assert list(losses(tmp_path)) == [5, 6, 7, 8]
    assert losses(tmp_path) == {step: loss for step, loss in losses(folder).items() if step > 4}
    assert same_bits(tensors_of(tmp_path, 8), tensors_of(folder, 8))


@pytest.mark.full
def test_one_process_goes_on(uninterrupted: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = uninterrupted
    shutil.copytree(folder / "checkpoint" / "step-4", tmp_path / "checkpoint" / "step-4")
    train_here(*FLAGS, into(tmp_path), *OPTIMIZERS[name], "--training.local_batch_size=4")
    expected = [loss for step, loss in losses(folder).items() if step > 4]
    # Stochastic rounding of weights differs between layouts.
    assert list(losses(tmp_path).values()) == pytest.approx(expected, abs=2e-3 if "weights" in name else 1e-4)


@pytest.mark.full
def test_a_checkpoint_with_second_moments_in_another_format_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """AdamWFp8 stored `v` in e4m3 by default before it stored the root."""
    flags = (*FLAGS, into(tmp_path), *OPTIMIZERS["fp8 root"], "--training.local_batch_size=4")
    train_here(*flags, "--optimizer.second_moment=v")
    expected = losses(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint" / "step-8")
    train_here(*flags)
    assert "the checkpoint has second moments as v: storing them as sqrt_v" in capfd.readouterr().out
    assert losses(tmp_path) == pytest.approx(expected, abs=1e-3)
    assert "optimizer.state.tok_embeddings.weight.exp_avg_sq_root.fp8" in tensors_of(tmp_path, 8)


# The formats of AdamWFp8 have scales of the same shapes, and states in bfloat16 have none: they are cut like weights.
@pytest.mark.full
@pytest.mark.parametrize("name", ["8bit", "4bit, bfloat16 weights", "fp8 root"])
def test_tensor_parallel_ranks_go_on(name: str, tmp_path: Path) -> None:
    """From FSDP 2 to FSDP 2 x TP 2 and back. Rows of 256 give each rank one block."""
    flags = (*FLAGS, "--model.flavor=blocks", *OPTIMIZERS[name])
    train(*flags, into(tmp_path / "a"), processes=2)
    shutil.copytree(tmp_path / "a" / "checkpoint" / "step-4", tmp_path / "b" / "checkpoint" / "step-4")
    train(*flags, into(tmp_path / "b"), TP, "--training.steps=6", processes=4)
    train(*flags, into(tmp_path / "b"), processes=2)
    actual, expected = losses(tmp_path / "b"), losses(tmp_path / "a")
    assert list(actual.values()) == pytest.approx([expected[step] for step in actual], abs=2e-3)


@pytest.mark.full
def test_tensor_parallel_ranks_that_cut_blocks_are_refused(tmp_path: Path) -> None:
    """Rows of 128 have one block; on two ranks each has a different block of 64."""
    flags = (*FLAGS, *OPTIMIZERS["8bit"], "--training.local_batch_size=4", into(tmp_path))
    train_here(*flags, "--training.steps=1")
    status, output = failure(*flags, TP, processes=2)
    assert status == 2
    assert "exp_avg.scale has shape (128, 1) in the checkpoint and (128, 2) in this run" in output
    assert "Set --checkpoint.exclude_from_loading=optimizer" in output


def rounded(copies: int) -> torch.Tensor:
    """This rank's shard of a weight of ones after an update that is rounded."""
    model: Any = nn.Linear(128, 4, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("copies", "shards"))
    apply_fsdp(model, [], mesh, torch.bfloat16, torch.float32, reshard_after_forward=True)
    optimizer = build_optimizer(model, Optimizer(lr=1e-3))
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return model.weight.to_local().detach().clone()


@pytest.mark.parametrize("copies", [2, 1])
def test_copies_of_bfloat16_weights_stay_alike_and_shards_are_rounded_by_themselves(copies: int) -> None:
    first, second = in_processes(rounded, 2, copies)
    assert 0 < (first < 1).float().mean() < 1
    assert torch.equal(first, second) == (copies == 2)


class Uneven(nn.Module):
    """Rows that do not divide, fewer rows than ranks, rows without blocks, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((7, 256), (1, 128), (4, 80), (5,))
        self.all = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)


NAMES = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def train_sharded(start: str | None, end: str, steps: list[int]) -> None:
    """Updates with gradients that depend only on the step. Loads files of another layout, and saves files."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in NAMES:
        model: Any = Uneven()
        apply_fsdp(model, [], mesh, torch.float32, torch.float32, reshard_after_forward=True)
        optimizer = build_optimizer(model, Optimizer(name=name, lr=0.1))
        if start is not None:
            tensors: Any = {**model_tensors(model), **optimizer_tensors(model, optimizer)}
            dcp.load(tensors, checkpoint_id=f"{start}/{name}")
            load_optimizer_tensors(model, optimizer, tensors)
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                whole = torch.randn(parameter.shape, generator=generator)
                parameter.grad = distribute_tensor(whole, mesh, parameter.placements)
            optimizer.step()
        tensors = {**model_tensors(model), **optimizer_tensors(model, optimizer)}
        dcp.save(tensors, checkpoint_id=f"{end}/{name}")


def saved(folder: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder, folder / "whole.pt")
    return torch.load(folder / "whole.pt")


@pytest.mark.parametrize("ranks", [(2, 1), pytest.param((1, 4, 2, 3), marks=pytest.mark.full)], ids=str)
def test_other_numbers_of_ranks_go_on_bit_for_bit(ranks: tuple[int, ...], tmp_path: Path) -> None:
    before = None
    for number, world_size in enumerate(ranks):
        after = str(tmp_path / str(number))
        in_processes(train_sharded, world_size, before, after, [2 * number, 2 * number + 1])
        before = after
    in_processes(train_sharded, 1, None, str(tmp_path / "whole"), list(range(2 * len(ranks))))
    for name in NAMES:
        assert same_bits(saved(Path(after) / name), saved(tmp_path / "whole" / name)), name
