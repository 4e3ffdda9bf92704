"""Extrapolation from few layers, ranks, micro-batches and grad-accumulation steps equals a full simulation."""

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny  # noqa: F401  registers models

import torchtitan.tools.plan.devices as devices
from torchtitan.checks.config_checks import check
from torchtitan.config import ConfigManager
from torchtitan.models import MODELS
from torchtitan.tools.plan.extrapolation import SimulatedJob, measure

SMALL = (
    "--model.flavor=debugmodel",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--training.mixed_precision_param=bfloat16",
)
SPARSE = ("--model.name=sparse", "--model.flavor=deep")  # the first layer is dense
TP, PP = ("--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree")
EVERY_SECOND, NONE = "--activation_checkpoint.mode=selective", "--activation_checkpoint.mode=none"


def job(flags: tuple[str, ...], world_size: int, layers: list[int], folder: Path) -> SimulatedJob:
    config = ConfigManager().parse_args([*SMALL, *flags, f"--job.dump_folder={folder}"])
    model = config.model
    args = dataclasses.replace(MODELS.get(model.name).flavor(model.flavor), vocab_size=512, n_layers=sum(layers))
    dims = check(config, world_size, "cuda")
    return SimulatedJob(config, dims, args, layers, alike=True, device=devices.named_device("H100"))


@pytest.fixture
def quick_collection() -> Iterator[None]:
    """Each simulation collects garbage, which looks through all objects that torch and the tests have made so far."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.full
@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize(
    ("flags", "world_size", "layers"),
    [
        ((NONE, TP, "--training.global_batch_size=16"), 4, [7]),
        ((EVERY_SECOND, f"{PP}=3", "--training.local_batch_size=3"), 3, [1, 11, 2]),
        ((NONE, "--optimizer.name=Muon"), 4, [7]),
        ((NONE,), 2, [7]),
        (
            (
                NONE,
                f"{PP}=2",
                "--parallelism.fsdp_reshard_after_forward=always",
                "--training.local_batch_size=5",
            ),
            4,
            [1, 7],
        ),
        ((*SPARSE, EVERY_SECOND, TP, "--parallelism.expert_parallel_degree=4"), 4, [12]),
        (
            (*SPARSE, NONE, f"{PP}=2", "--parallelism.expert_parallel_degree=2", "--training.local_batch_size=3"),
            4,
            [8, 1],
        ),
        (
            (*SPARSE, "--activation_checkpoint.mode=full", f"{PP}=4", "--training.local_batch_size=5"),
            4,
            [1, 7, 1, 1],
        ),
        (
            (NONE, f"{PP}=5", "--training.local_batch_size=5"),
            10,
            [1, 7, 1, 1, 1],
        ),
        (
            (NONE, f"{PP}=2", "--training.local_batch_size=5", "--training.global_batch_size=20"),
            2,
            [1, 1],
        ),
        (
            (NONE, f"{PP}=5", "--training.local_batch_size=3", "--parallelism.pipeline_parallel_schedule=GPipe"),
            5,
            [1, 7, 1, 1, 1],
        ),
        (
            ("--model.name=tiny_olmo3", "--model.flavor=narrow", NONE, "--parallelism.context_parallel_degree=2"),
            2,
            [12],
        ),
    ],
    ids=[
        "layers and rounds",
        "1F1B, every second layer",
        "Muon",
        "FSDP",
        "1F1B, gathering again",
        "experts",
        "1F1B, experts",
        "1F1B, a stage without experts",
        "1F1B with few microbatches",
        "1F1B with many, and rounds",
        "GPipe",
        "every second layer has a window",
    ],
)
def test_a_part_shows_the_whole(flags: tuple[str, ...], world_size: int, layers: list[int], tmp_path: Path) -> None:
    large = job(flags, world_size, layers, tmp_path)
    whole = dataclasses.replace(large, full=True)
    longest = whole.simulated_ranks()[layers.index(max(layers))]
    assert longest not in large.simulated_ranks()
    full = measure(whole)
    for computed, simulated in zip(measure(large), full, strict=True):
        # The 4 bytes of each micro-batch's loss are allocated and freed in a different order. How many matrices a rank
        # orthogonalizes at a time does not grow evenly with the layers.
        tolerance = {"rel": 0.05} if "--optimizer.name=Muon" in flags else {"abs": 4 * large.microbatches}
        assert computed.pop(("peak",)) == pytest.approx(simulated.pop(("peak",)), **tolerance)
        assert computed == {key: value for key, value in simulated.items() if not key[0].startswith("each")}
