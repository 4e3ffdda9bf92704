"""Delayed scaling over ranks: amaxes are reduced over exactly the ranks that shard a tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TINY, grad_norms, into, losses, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from workers import in_processes

from torchtitan.config.low_precision import Float8
from torchtitan.config.system import ActivationCheckpoint, Parallelism
from torchtitan.config.training import Training
from torchtitan.converters import Target, apply_converters
from torchtitan.converters.linear_converter import LinearConverter
from torchtitan.converters.scaling import amax_histories
from torchtitan.models.init import init_weights
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.models.parallelize import SHARDING, parallelize

ARGS = LlamaArgs(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=256)
NAMES = ("pp", "dp_replicate", "fsdp", "tp")


BFLOAT16 = Training(mixed_precision_param="bfloat16")


def histories_after_steps(fsdp: int, tp: int) -> dict[str, Any]:
    """On this rank, after two steps with different tokens on each data-parallel rank; also returns the losses."""
    mesh = init_device_mesh("cpu", (1, 1, fsdp, tp), mesh_dim_names=NAMES)
    with torch.device("meta"):
        model = Llama(ARGS)
    section = Float8(recipe_name="delayed", delayed_history_len=2)
    (converter,) = apply_converters(model, ["float8"], lambda _: section, Target("cpu", tensor_parallel=tp))
    assert isinstance(converter, LinearConverter)
    converter.connect(mesh)
    parallelize(model, SHARDING, mesh, None, None, Parallelism(), ActivationCheckpoint(mode="none"), BFLOAT16)
    model.to_empty(device="cpu")
    init_weights(model, model.init_std, 0)
    tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0)).chunk(fsdp)
    own = tokens[mesh.get_local_rank("fsdp")]
    for _ in range(2):
        model(own, own).backward()
        model.zero_grad()
        converter.after_step([model], 1e-3)
    scales = {name: history.scales for name, history in amax_histories([model]).items()}
    return {"histories": converter.state_dict([model]), "scales": scales}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    (result,) = in_processes(histories_after_steps, 1, 1, 1)
    return result


@pytest.mark.parametrize(("fsdp", "tp"), [(2, 1), (1, 2)])
def test_all_ranks_have_the_scales_of_the_whole_tensors(fsdp: int, tp: int, alone: dict[str, Any]) -> None:
    """The ranks' weight shards, and activations from their own tokens, have different amaxes."""
    first, second = in_processes(histories_after_steps, 2, fsdp, tp)
    assert first["histories"] == second["histories"]
    assert first["scales"] and first["scales"].keys() == second["scales"].keys()
    assert all(torch.equal(first["scales"][name], scale) for name, scale in second["scales"].items())
    assert first["histories"].keys() == alone["histories"].keys()
    for name, rows in alone["histories"].items():
        history = torch.tensor(first["histories"][name])
        torch.testing.assert_close(history[:2], torch.tensor(rows)[:2], rtol=0.05, atol=0)
        assert history[1].tolist() == rows[1]  # of the weight itself


def maximum_of_stages() -> tuple[list[float], list[float]]:
    """The maximum of the ranks' numbers, once over the group of a stage and once over all ranks."""
    from torchtitan.converters.scaling import all_reduce_max, stage_group

    mesh = init_device_mesh("cpu", (2, 1, 1, 2), mesh_dim_names=NAMES)
    rank = torch.distributed.get_rank()
    amax = torch.tensor([10.0 + rank, float("nan") if rank == 2 else 1.0])
    everyone = stage_group(init_device_mesh("cpu", (1, 2, 1, 2), mesh_dim_names=NAMES))
    return all_reduce_max(amax, stage_group(mesh)).tolist(), all_reduce_max(amax, everyone).tolist()


def test_stages_of_a_pipeline_share_nothing() -> None:
    inf = float("inf")
    expected = [([11, 1], [13, inf])] * 2 + [([13, inf], [13, inf])] * 2
    assert in_processes(maximum_of_stages, 4) == expected


DELAYED = ("--model.converters=float8", "--float8.recipe_name=delayed")
RUN = (*TINY, "--training.mixed_precision_param=bfloat16", "--checkpoint.enable_checkpoint")


def saved_histories(folder: Path, step: int) -> dict[str, list[list[float]]]:
    return json.loads((folder / "checkpoint" / f"step-{step}" / "train_state.json").read_text())["converters"]["float8"]


@pytest.mark.full
def test_a_checkpoint_holds_the_histories_of_all_stages_and_deals_them_to_another_layout(tmp_path: Path) -> None:
    saved = (*RUN, *DELAYED, "--training.local_batch_size=4", into(tmp_path / "pipeline"))
    train(*saved, "--training.steps=3", "--parallelism.pipeline_parallel_degree=2", processes=2)
    output = train(*saved, "--training.steps=5")
    assert "no amax history" not in output
    train(*RUN, *DELAYED, "--training.local_batch_size=4", into(tmp_path / "one"), "--training.steps=5")
    single, pipeline = saved_histories(tmp_path / "one", 5), saved_histories(tmp_path / "pipeline", 5)
    assert single.keys() == pipeline.keys() and len(single) == 2 * 7
    for name, rows in single.items():
        assert all(row[4] > 0 for row in pipeline[name]) and not any(row[5] for row in pipeline[name])
        torch.testing.assert_close(torch.tensor(pipeline[name]), torch.tensor(rows), rtol=0.15, atol=1e-6)
    assert list(losses(tmp_path / "pipeline").values()) == pytest.approx(
        list(losses(tmp_path / "one").values()), abs=5e-3
    )


BOUND = ("--model.converters=float8", "--float8.enable_fsdp_float8_all_gather", "--float8.weight_scale=bound")


@pytest.mark.full
@pytest.mark.parametrize("recipe", [DELAYED, BOUND], ids=["delayed", "bound"])
def test_scales_do_not_depend_on_the_number_of_ranks_that_saved_them(recipe: tuple[str, ...], tmp_path: Path) -> None:
    """Gradients contain the loss scale, which grows with the data-parallel ranks: 4 times as large here."""
    flags = (*RUN, *recipe, "--training.global_batch_size=8", "--float8.filter_fqns=")
    for ranks in (1, 4):
        folder = into(tmp_path / str(ranks))
        train(*flags, "--training.local_batch_size=8", "--training.steps=4", folder)
        train(*flags, f"--training.local_batch_size={8 // ranks}", "--training.steps=5", folder, processes=ranks)
    assert grad_norms(tmp_path / "4")[-1] == pytest.approx(grad_norms(tmp_path / "1")[-1], rel=3e-3)
    assert losses(tmp_path / "4")[5] == pytest.approx(losses(tmp_path / "1")[5], abs=1e-3)


@pytest.mark.full
def test_runs_without_the_recipe_ignore_histories_and_runs_with_it_begin_without(tmp_path: Path) -> None:
    flags = (*RUN, into(tmp_path), "--checkpoint.interval=2", "--training.local_batch_size=4")
    assert "no amax history" not in train(*flags, *DELAYED, "--training.steps=2")
    train(*flags, "--training.steps=4")
    assert "no amax history of 14 of 14 layers" in train(*flags, *DELAYED, "--training.steps=6")
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_recipes_that_keep_other_numbers_of_a_layer_follow_each_other(tmp_path: Path) -> None:
    flags = (*RUN, into(tmp_path), "--checkpoint.interval=2", "--training.local_batch_size=4")
    train(*flags, *BOUND, "--training.steps=2")
    assert "no amax history of 14 of 14 layers" in train(*flags, *DELAYED, "--training.steps=4")
    output = train(*flags, *BOUND, "--training.steps=6")
    assert "the checkpoint lacks some bounds" in output and "betas have changed" not in output
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_int8_scales_of_a_step_ahead_do_not_reach_the_backward_pass() -> None:
    for changed, exact, reference in in_processes(gradients_of_gathered_int8, 2):
        assert torch.equal(exact, reference)  # not gathered again
        assert ((changed - reference).norm() / reference.norm()) < 0.05  # gathered again, at another scale


def gradients_of_gathered_int8() -> list[torch.Tensor]:
    """With scales changed between forward and backward, with and without gathering weights again; then unchanged."""
    from torchtitan.config.low_precision import Int8
    from torchtitan.converters.gather import ShardedWeight
    from torchtitan.parallel.fsdp import apply_fsdp

    grads = []
    for again, factor in ((True, 1.7), (False, 1.7), (False, 1.0)):
        torch.manual_seed(0)
        with torch.device("meta"):
            model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(2)))
        section = Int8(recipe_name="tensorwise", enable_fsdp_int8_all_gather=True, filter_fqns=[])
        (converter,) = apply_converters(model, ["int8"], lambda _, section=section: section, Target("cpu"))  # type: ignore[misc]
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        apply_fsdp(model, list(model), mesh, torch.bfloat16, torch.float32, reshard_after_forward=again)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.to_local().copy_(torch.randn(64, 64).chunk(2)[mesh.get_local_rank()])
        converter.after_step([model], 1e-3)
        x = torch.randn(32, 64).bfloat16().requires_grad_()
        out = model(x)
        for block in model:
            (weight,) = block._get_fsdp_state()._fsdp_param_group.fsdp_params
            assert isinstance(weight._sharded_local_tensor, ShardedWeight)
            weight._sharded_local_tensor.scale_inverse.mul_(factor)
        out.float().square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    return grads
