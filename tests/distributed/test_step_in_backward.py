"""Updates during the backward pass: the same training in less memory."""

import shutil
from pathlib import Path

import pytest
from runs import TINY, assert_equal_bit_for_bit, grad_norms, into, losses, tensors_of, train, train_here

FLAGS = (
    *TINY,
    "--training.steps=4",
    "--training.max_norm=inf",
    "--training.no_skip_nonfinite",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=4",
)
EARLY = "--optimizer.early_step_in_backward"
TP, CP = (f"--parallelism.{dimension}_parallel_degree=2" for dimension in ("tensor", "context"))
COPIES = "--parallelism.data_parallel_replicate_degree=2"
AVERAGE = "--optimizer.ema_decay=0.75"
ONE = "--training.local_batch_size=4"
LAYOUTS = {
    "FSDP 2": (2, ()),
    "one process, 8bit": (1, (ONE, "--optimizer.name=AdamW8bit", "--model.flavor=wide")),
    "one process, tied embeddings": (1, (ONE, "--model.flavor=tied")),
    "TP 2, tied embeddings": (2, (ONE, TP, "--model.flavor=tied")),
    "DP 2": (2, (COPIES,)),
    "CP 2": (2, (ONE, CP)),
    "FSDP 2, bfloat16 weights": (2, ("--training.weight_dtype=bfloat16",)),
    "FSDP 2, moving average": (2, (AVERAGE,)),
    "TP 2, tied embeddings, moving average": (2, (ONE, TP, "--model.flavor=tied", AVERAGE)),
    "FSDP 2, EP 2, bfloat16 weights, moving average": (
        2,
        (
            *("--model.name=sparse", "--parallelism.expert_parallel_degree=2", AVERAGE),
            "--training.weight_dtype=bfloat16",
        ),
    ),
    "FSDP 2, recomputation": (2, ("--activation_checkpoint.mode=full", "--optimizer.implementation=foreach")),
}
CORE = (
    "FSDP 2",
    "FSDP 2, moving average",
    "one process, 8bit",
    "one process, tied embeddings",
    "TP 2, tied embeddings",
)
ROWS = [pytest.param(name, marks=[] if name in CORE else [pytest.mark.full]) for name in LAYOUTS]


@pytest.mark.full
@pytest.mark.parametrize("layout", ROWS)
def test_it_is_the_ordinary_update(layout: str, tmp_path: Path) -> None:
    """Bit for bit; the gradient norm, which is still reported, to rounding."""
    processes, flags = LAYOUTS[layout]
    ordinary, early = tmp_path / "ordinary", tmp_path / "early"
    for folder, more in ((ordinary, ()), (early, (EARLY,))):
        if processes == 1:
            train_here(*FLAGS, into(folder), *flags, *more)
        else:
            train(*FLAGS, into(folder), *flags, *more, processes=processes)
    assert losses(early) == losses(ordinary)
    assert grad_norms(early) == pytest.approx(grad_norms(ordinary), rel=1e-6)
    assert_equal_bit_for_bit(tensors_of(early, 4), tensors_of(ordinary, 4))


def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """With the learning rates of the schedule, which differ from step to step, and a moving average."""
    flags = (*FLAGS, ONE, EARLY, AVERAGE, "--training.steps=8", "--lr_scheduler.decay_ratio=0.5")
    whole, resumed = tmp_path / "whole", tmp_path / "parts"
    train_here(*flags, into(whole))
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoint" / "step-8")
    train_here(*flags, into(resumed))
    assert_equal_bit_for_bit(tensors_of(resumed, 8), tensors_of(whole, 8))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
