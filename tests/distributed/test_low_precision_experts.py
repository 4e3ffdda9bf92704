"""Experts in low precision under every layout, and rows sent to them in low precision."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CHECKPOINTS, SMALL, assert_equal_bit_for_bit, into, losses, tensors_of, train, train_here
from workers import in_processes

from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager
from torchtitan.errors import ConfigError
from torchtitan.parallel.expert import exchange_rows

SPARSE = (*SMALL, "--experimental.custom_import=tiny", "--model.name=sparse", "--model.flavor=deep")
BASE = (*SPARSE, "--training.steps=3")
# Only the experts: other layers' scales depend on which tokens are on a rank.
OTHERS = "output,attention,feed_forward,shared_experts"
CONVERTERS = {
    "float8": ("--model.converters=float8", "--float8.recipe_name=rowwise", f"--float8.filter_fqns={OTHERS}"),
    "int8": ("--model.converters=int8", f"--int8.filter_fqns={OTHERS}"),
    "int8 gather": ("--model.converters=int8", f"--int8.filter_fqns={OTHERS}", "--int8.enable_fsdp_int8_all_gather"),
    "mx": ("--model.converters=mx", "--mx.emulate", f"--mx.filter_fqns={OTHERS}"),
    "mx nvfp4": (
        *("--model.converters=mx", "--mx.emulate", "--mx.recipe_name=nvfp4"),
        *(f"--mx.filter_fqns={OTHERS}", "--mx.keep_last_blocks_fraction=0"),
    ),
}
EP = ("--parallelism.expert_parallel_degree=2",)
TP = ("--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=4")
COMPILE = "--training.compile"
BY_OPERATION = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")
LAYOUTS = {
    "EP 2": EP,
    "EP 2, compile, recomputation by operation": (*EP, COMPILE, *BY_OPERATION),
    "FSDP 2, compile, recomputation": (COMPILE, "--activation_checkpoint.mode=full", "--training.local_batch_size=1"),
    "TP 2 and EP 2": (*TP, *EP),
    "TP 2": TP,
    "FSDP 2": (),
    "PP 2": ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"),
    "CP 2 and EP 2": ("--parallelism.context_parallel_degree=2", "--training.local_batch_size=4", *EP),
}
# Every layout with a recipe or two, and EP, where rows change their rank, with all. Under TP each block of mx is cut,
# and under FSDP a rank has other columns of rows.
WITH = {
    "EP 2, compile, recomputation by operation": ["float8", "int8 gather"],
    "FSDP 2, compile, recomputation": ["int8 gather"],
    "TP 2 and EP 2": ["float8", "mx nvfp4", "int8 gather"],
    "TP 2": ["int8", "mx", "mx nvfp4"],
    "FSDP 2": ["float8", "mx"],
    "PP 2": ["int8", "int8 gather"],
    "CP 2 and EP 2": ["int8"],
}
# An expert's weight gradient has one scale per column of its rows, so it is the same only where one rank has them all.
EXACT = {"EP 2", "TP 2 and EP 2", "CP 2 and EP 2"}
SHORT = [("EP 2", "int8")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of each converter, and of none, in one process."""
    losses_of = {}
    for name, flags in {**CONVERTERS, "": ()}.items():
        folder = tmp_path_factory.mktemp(name or "none")
        train_here(*BASE, into(folder), "--training.local_batch_size=4", *flags)
        losses_of[name] = list(losses(folder).values())
    return losses_of


@pytest.mark.full
@pytest.mark.parametrize(
    ("converter", "layout"),
    [
        pytest.param(converter, layout, marks=[] if (layout, converter) in SHORT else [pytest.mark.full])
        for converter in CONVERTERS
        for layout in LAYOUTS
        if converter in WITH.get(layout, CONVERTERS)
    ],
)
def test_losses_equal_one_process(converter: str, layout: str, alone: dict[str, list[float]], tmp_path: Path) -> None:
    output = train(*BASE, into(tmp_path), *CONVERTERS[converter], *LAYOUTS[layout], processes=2)
    # Sums in another order differ in the last bit, and a few numbers then round to the next one of 8 bits.
    tolerance = 1e-4 if layout in EXACT and not converter.startswith("mx") else 1e-3
    assert list(losses(tmp_path).values()) == pytest.approx(alone[converter], rel=tolerance)
    assert alone[converter] != alone[""]
    # 3 layers, 3 GEMMs of 3, in one micro-batch or two.
    gemms = 54 if "--training.local_batch_size=1" in LAYOUTS[layout] else 27
    counted = f"(experts): {gemms} low-precision GEMMs ran in this step, {gemms} expected" in output
    assert counted != (layout == "PP 2")


@pytest.mark.full
def test_a_run_with_gathered_experts_goes_on(tmp_path: Path) -> None:
    """With accumulation, to the same bits, and in other layouts. Checkpoints are as without the gather."""
    flags = (*SPARSE, *CHECKPOINTS, "--training.global_batch_size=8", "--training.local_batch_size=1")
    muon = (*flags, "--training.steps=4", "--optimizer.name=Muon")
    gathered = (*muon, *CONVERTERS["int8 gather"])
    folders = {name: tmp_path / name for name in ("whole", "again", "hsdp", "alone")}
    train(*gathered, *EP, into(folders["whole"]), processes=4)
    for name in ("again", "hsdp", "alone"):
        shutil.copytree(folders["whole"] / "checkpoint" / "step-2", folders[name] / "checkpoint" / "step-2")
    train(*gathered, *EP, into(folders["again"]), processes=4)
    train(*gathered, "--parallelism.data_parallel_replicate_degree=2", into(folders["hsdp"]), processes=4)
    train_here(*muon, *CONVERTERS["int8"], into(folders["alone"]))
    expected = {step: loss for step, loss in losses(folders["whole"]).items() if step > 2}
    tensors = {name: tensors_of(folder, 4) for name, folder in folders.items()}
    assert losses(folders["again"]) == expected
    assert_equal_bit_for_bit(tensors["again"], tensors["whole"])
    for other in ("hsdp", "alone"):
        assert losses(folders[other]) == pytest.approx(expected, rel=1e-3)
        described = ({name: (t.shape, t.dtype) for name, t in tensors[each].items()} for each in (other, "whole"))
        assert next(described) == next(described)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_rows_are_sent_in_low_precision(dtype: str, alone: dict[str, list[float]], tmp_path: Path) -> None:
    train(*BASE, into(tmp_path), *EP, f"--moe.all_to_all_dtype={dtype}", processes=2)
    actual = list(losses(tmp_path).values())
    assert actual != alone[""] and actual == pytest.approx(alone[""], rel=1e-3)


def sent_in_8_bits(name: str) -> tuple[list[torch.Tensor], list[int]]:
    """Rows received and gradients returned, float32 and in 8 bits; and the bytes that a rank sends, forward."""
    rank = torch.distributed.get_rank()
    group = torch.distributed.group.WORLD
    assert group is not None
    splits = torch.tensor([[1, 3], [1, 2]] if rank == 0 else [[2, 0], [3, 0]])
    x = torch.randn(int(splits[0].sum()), 48, generator=torch.Generator().manual_seed(rank))
    x[0] *= 1e4  # has no effect on other rows
    results, sizes = [], []
    for dtype in (None, getattr(torch, name)):
        leaf = x.clone().requires_grad_()
        with torch.profiler.profile(record_shapes=True, acc_events=False) as recorded:
            out = exchange_rows(leaf, splits, int(splits[1].sum()), group.group_name, dtype)
        sent = [
            event.shapes()[0]
            for event in recorded.profiler.kineto_results.events()
            if event.name() == "_c10d_functional::all_to_all_single"
        ]
        sizes += [shape[0] * shape[1] for shape in sent]
        out.backward(out.detach())
        assert leaf.grad is not None
        results += [out.detach(), leaf.grad]
    return results, sizes


@pytest.mark.parametrize(("name", "error"), [("int8", 0.02), ("float8_e4m3fn", 0.07)])
def test_each_row_has_its_own_scale_forward_and_backward(name: str, error: float) -> None:
    for results, (elements, packed) in in_processes(sent_in_8_bits, 2, name):
        out, grad, low_out, low_grad = results
        for high, low in ((out, low_out), (grad, low_grad)):
            assert ((high - low).norm(dim=1) < error * high.norm(dim=1)).all()
            assert not torch.equal(high, low)
        assert packed == elements // 48 * 52  # bytes: 48 numbers and a scale


@pytest.mark.full
def test_a_phase_switches_the_experts(alone: dict[str, list[float]], tmp_path: Path) -> None:
    """Under FSDP and expert parallelism, in the middle of the run."""
    schedule = tmp_path / "schedule.toml"
    schedule.write_text(
        f"""
        [[precision.phase]]
        until_step = 2
        [[precision.phase]]
        converters = ["int8"]
        [precision.phase.int8]
        filter_fqns = {json.dumps(OTHERS.split(","))}
        """
    )
    output = train(*BASE, into(tmp_path), f"--job.config_file={schedule}", *EP, processes=2)
    first, second, third = losses(tmp_path).values()
    assert [first, second] == pytest.approx(alone[""][:2], rel=1e-5)
    assert third != pytest.approx(alone[""][2], rel=1e-9) and third == pytest.approx(alone[""][2], rel=1e-3)
    assert "(experts): 27 low-precision GEMMs ran in this step, 27 expected" in output


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--moe.all_to_all_dtype=float8"], "no effect without parallelism.expert_parallel_degree above 1"),
        (["--moe.all_to_all_dtype=fp8", *EP], "moe.all_to_all_dtype"),
    ],
)
def test_what_cannot_be_sent_is_refused(flags: list[str], sentence: str) -> None:
    def attempt() -> Any:
        return check(ConfigManager().parse_args([*BASE, *flags]), 2, "cpu")

    with pytest.raises(ConfigError, match=sentence):
        attempt()
