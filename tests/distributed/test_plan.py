"""Compares plans with real runs: gloo processes train two steps, and their tensors and collectives are counted."""

import functools
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny  # noqa: F401  registers models
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from workers import on_ranks, once

from torchtitan.checks.config_checks import check, check_run
from torchtitan.config import ConfigManager
from torchtitan.device import find_device
from torchtitan.engine.forward import sum_over_ranks
from torchtitan.models.moe import mixtures
from torchtitan.optim.combined import optimizers_in
from torchtitan.tools.plan.kernel_substitutes import kernel_substitutes
from torchtitan.tools.plan.planner import build_on_meta, make_job, planned_device, rank_plans
from torchtitan.tools.plan.recorder import Recorder
from torchtitan.tools.plan.result import RankPlan
from torchtitan.tools.plan.simulation import name_of_group, state_bytes

FLAGS = (
    "--training.seq_len=256",
    "--model.name=tiny",
    "--model.flavor=half_debugmodel",
    "--training.local_batch_size=2",
    "--training.mixed_precision_param=float32",
    "--activation_checkpoint.mode=none",
)
MEASURED = 2  # steps
TP, CP, PP = (f"--parallelism.{dimension}_parallel_degree=2" for dimension in ("tensor", "context", "pipeline"))
BF16 = "--training.mixed_precision_param=bfloat16"
SUMS_IN_BFLOAT16 = "--training.mixed_precision_reduce=bfloat16"
FULL, SELECTIVE = "--activation_checkpoint.mode=full", "--activation_checkpoint.mode=selective"
HSDP = "--parallelism.data_parallel_replicate_degree=2"
EP = "--parallelism.expert_parallel_degree=2"
EVEN = ("--model.name=sparse", "--model.flavor=even")  # as many rows for each rank
SKEWED = ("--model.name=qwen3_moe", "--model.flavor=debugmodel", EP, "--job.description=skewed")
GATHER = "--int8.enable_fsdp_int8_all_gather"
KINDS = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::allgather_into_tensor_coalesced_": "all-gather",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
    "c10d::alltoall_base_": "all-to-all",
    "c10d::send": "send",
    "c10d::recv_": "receive",
}
"""As torch's profiler names operations of a process group, from `torch.distributed` or functional collectives."""


class Reporter:
    def due(self, step: int) -> bool:
        return False  # or stages gather the loads of their experts, which a plan does not count

    def step(self, step: int, **values: Any) -> None:
        pass


def train(rank: int, world_size: int, flags: list[str], port: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.save(some_steps(flags, world_size), f"{folder}/result{rank}")


def reported_step(trainer: Any, batches: Any) -> None:
    trainer.train_step(batches)
    sum_over_ranks(trainer.engine, torch.zeros(()))


def some_steps(flags: list[str], world_size: int) -> dict[str, Any]:
    """What the next steps hold and send, without interception; and the last step, by dimension."""
    from torchtitan.run.build_trainer import build_trainer

    config = ConfigManager().parse_args(flags)
    dims, stages = check_run(config, world_size, "cpu")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        trainer = build_trainer(config, dims, stages, find_device(0))
        if config.job.description == "skewed":  # all tokens choose the first experts
            for mixture in mixtures(trainer.engine.model).values():
                mixture.expert_bias[: mixture.args.top_k] = 100
        trainer.instruments.reporter = Reporter()  # type: ignore[assignment]
        reported_step(trainer, trainer.loader.next())
        gradients: list[int] = []
        if trainer.engine.step_in_backward is not None:
            gradients.append(0)
        optimizers_in(trainer.engine.optimizer)[0].register_step_pre_hook(
            lambda *_: gradients.append(state_bytes(trainer.engine.model, trainer.engine.optimizer)["gradients"])
        )
        for _ in range(MEASURED):
            batches = trainer.loader.next()
            with record_function("measured"):
                reported_step(trainer, batches)
    recorder = Recorder(name_of_group(trainer.engine.meshes, bool(mixtures(trainer.engine.model))))
    with recorder, kernel_substitutes("cpu"):  # torch's mask cannot be created under a recorder
        reported_step(trainer, trainer.loader.next())
    sizes = state_bytes(trainer.engine.model, trainer.engine.optimizer)  # without gradients, which are already freed
    place = trainer.engine.meshes.mesh.get_local_rank("pp")
    with trainer:
        pass  # closes it
    return {
        "states": (sizes["parameters"], gradients[0], sizes["optimizer"]),
        "rank": place,
        "by dimension": {key: (count, recorder.bytes[key]) for key, count in recorder.count.items()},
        **profiled(profiler, config.job.dump_folder),
    }


def profiled(profiler: Any, folder: str) -> dict[str, Any]:
    """The peak memory and number of collectives of the part called "measured": the lowest of all its peaks.

    gloo's threads free its copies unseen. The copies count until their address is reused, so a peak may be too high.
    """
    path = Path(folder) / f"trace{os.environ['RANK']}.json"
    profiler.profiler.kineto_results.save(str(path))
    events = sorted(json.loads(path.read_text())["traceEvents"], key=lambda event: event.get("ts", 0))
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("name") == "measured"]
    assert len(spans) == MEASURED
    peaks = [0] * MEASURED
    live: dict[int, int] = {}  # by address
    total = 0
    for event in events:
        if event.get("name") == "[memory]":
            size, address = event["args"]["Bytes"], event["args"]["Addr"]
            total -= live.pop(address, 0)
            if size > 0:
                live[address] = size
                total += size
            for number, (start, end) in enumerate(spans):
                if start <= event["ts"] <= end:
                    peaks[number] = max(peaks[number], total)
    start, end = spans[0]
    names = [event["name"] for event in events if start <= event.get("ts", 0) <= end and event.get("name") in KINDS]
    return {"peak": min(peaks), "collectives": Counter(KINDS[name] for name in names)}


def measured(world_size: int, layouts: list[list[str]], folder: Path) -> list[list[dict[str, Any]]]:
    """The measurements of each rank, for each layout."""
    results = []
    for flags in layouts:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun does
        on_ranks(world_size, train, world_size, flags, store.port, str(folder))
        results.append([torch.load(folder / f"result{rank}", weights_only=False) for rank in range(world_size)])
    return results


def planned(flags: Sequence[str], world_size: int) -> list[RankPlan]:
    """The plan, which several tests share; only with the flags' mode of activation checkpointing, because each mode
    that `--job.plan` compares with it takes another simulation."""
    folder = "--job.dump_folder="  # of each test
    return _planned(tuple(flag for flag in flags if not flag.startswith(folder)), world_size)


@functools.cache
def _planned(flags: tuple[str, ...], world_size: int) -> list[RankPlan]:
    # Not in the default folder, where ./run_train.sh may have left a run of another model.
    config = ConfigManager().parse_args([*flags, "--job.plan", "--job.simulate_device=cpu", "--job.dump_folder=none"])
    dims = check(config, world_size, "cpu")
    device, _ = planned_device(config, find_device(0))
    return rank_plans(make_job(config, dims, device, build_on_meta(config)), [config.activation_checkpoint.mode])


TWO = {"FSDP 2": (), "EP 2": (*EVEN, EP)}
MORE_OF_TWO = {
    "TP 2": (TP,),
    "FSDP 2, accumulated, selective, bfloat16": (
        "--training.global_batch_size=8",
        SELECTIVE,
        BF16,
    ),
    "PP 2": (PP, "--training.local_batch_size=4"),
    "FSDP 2, 8 bits": ("--optimizer.name=AdamW8bit",),
    "FSDP 2, bfloat16 weights": ("--optimizer.name=AdamW4bit", "--training.weight_dtype=bfloat16", BF16),
    "EP 2, rows in int8": (*EVEN, EP, "--moe.all_to_all_dtype=int8"),
}
FEW_TOKENS = ("--training.seq_len=64", "--training.local_batch_size=1", FULL)
SIX_LAYERS = ("--model.name=llama3", "--model.flavor=debugmodel")  # of four, one's gradients are too large a part
AFTER_BACKWARD = (*FEW_TOKENS, *SIX_LAYERS, "--training.max_norm=inf", "--training.no_skip_nonfinite")
IN_BACKWARD = (*AFTER_BACKWARD, "--optimizer.early_step_in_backward")
FOUR = {
    "HSDP 2 x 2, accumulated": (HSDP, "--training.global_batch_size=16"),
    "FSDP 2 x TP 2, bfloat16": (TP, BF16),
    "HSDP 2 x 2, Muon, bfloat16": (HSDP, BF16, "--optimizer.name=Muon"),
    "HSDP 2 x 2, sums in bfloat16": (HSDP, BF16, SUMS_IN_BFLOAT16),
    "FSDP 2 x CP 2, by heads": (CP, "--parallelism.context_parallel_rotate_method=alltoall"),
    "PP 2 x FSDP 2, interleaved": (PP, "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"),
    "FSDP 2 x EP 2": (*EVEN, EP),
    "FSDP 2 x EP 2, int8 all-gather": (*EVEN, EP, BF16, "--model.converters=int8", GATHER),
    "FSDP 2 x TP 2 x EP 4, selective": (*EVEN, TP, "--parallelism.expert_parallel_degree=4", BF16, SELECTIVE),
}
EIGHT = {"FSDP 2 x TP 2 x PP 2, full": (TP, PP, FULL)}
PLANNED = {"Qwen3, TP 2": (TP, "--model.name=tiny_qwen3", "--model.flavor=deep")}


def in_folders(layouts: dict[str, tuple[str, ...]], folder: Path) -> list[list[str]]:
    return [
        [*FLAGS, *flags, f"--job.dump_folder={folder / str(number)}"] for number, flags in enumerate(layouts.values())
    ]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    results = once(tmp_path_factory, "plan_of_two", lambda: measured(2, in_folders(TWO, folder), folder))
    return dict(zip(TWO, results, strict=True))


@pytest.mark.parametrize("layout", TWO)
def test_a_plan_is_what_two_processes_hold_and_send(
    layout: str, two: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    assert_planned((*TWO[layout], f"--job.dump_folder={tmp_path}"), 2, two[layout])


@pytest.mark.full
def test_a_plan_of_a_rank_whose_experts_get_twice_as_many_rows(tmp_path: Path) -> None:
    (real,) = measured(2, [[*FLAGS, *SKEWED, f"--job.dump_folder={tmp_path / 'run'}"]], tmp_path)
    flags, load = (*SKEWED, f"--job.dump_folder={tmp_path}"), "--job.simulate_expert_load=2"
    assert_planned((*flags, load), 2, real, ranks=1)
    balanced, skewed = (planned((*FLAGS, *flags, *more), 2)[0] for more in ((), (load,)))
    # 6 layers; each sends, receives, and sends and receives the gradients of, 512 tokens x 2 experts x 256 channels.
    rows = 6 * 4 * 512 * 2 * 256 * 4
    by_kind = [{line.kind: line.bytes for line in rank.traffic} for rank in (balanced, skewed)]
    assert by_kind[1]["all-to-all"] - by_kind[0]["all-to-all"] == rows
    # Three layers of 256 x 384 in each expert, forward and twice backward; two FLOPs a number.
    assert skewed.flops - balanced.flops == 2 * 3 * 3 * 6 * 512 * 2 * 256 * 384


def test_sums_in_bfloat16_halve_the_bytes_of_gradients(tmp_path: Path) -> None:
    sent = []
    for flags in ((HSDP, BF16), (HSDP, BF16, SUMS_IN_BFLOAT16)):
        (rank,) = planned((*FLAGS, *flags, f"--job.dump_folder={tmp_path}"), 4)
        sent.append({(line.dimension, line.kind): line.bytes for line in rank.traffic})
    reductions = {("fsdp", "reduce-scatter"), ("dp_replicate", "all-reduce")}
    assert reductions <= sent[0].keys() == sent[1].keys()
    for key in sent[0]:
        assert sent[1][key] * (2 if key in reductions else 1) == sent[0][key]


def test_an_int8_gather_halves_the_bytes_of_experts_weights() -> None:
    flags = (*FLAGS, *FOUR["FSDP 2 x EP 2, int8 all-gather"])
    (gathered,), (plain,) = (planned(each, 4) for each in (flags, flags[:-1]))
    sent = [{(line.dimension, line.kind): line.bytes for line in rank.traffic} for rank in (gathered, plain)]
    assert sent[0]["expert_fsdp", "all-gather"] < 0.52 * sent[1]["expert_fsdp", "all-gather"]
    assert sent[0]["expert_fsdp", "reduce-scatter"] == sent[1]["expert_fsdp", "reduce-scatter"]


@pytest.mark.full
def test_updates_during_the_backward_pass_lower_the_peak(tmp_path: Path) -> None:
    """Saves a third of the gradients or more; one block's, and embedding's or output layer's, still exist.

    The peaks are one process's: with two, communication buffers come and go.
    """
    folder = f"--job.dump_folder={tmp_path}"
    before, after = (planned((*FLAGS, *flags, folder), 2)[0] for flags in (AFTER_BACKWARD, IN_BACKWARD))
    assert after.gradients == 0
    assert after.peaks["full"] < before.peaks["full"] - 0.33 * before.gradients
    (real,) = measured(2, [[*FLAGS, *IN_BACKWARD, f"--job.dump_folder={tmp_path / 'run'}"]], tmp_path)
    for early in real:
        assert early["states"] == (after.parameters, 0, after.optimizer)
        assert {(line.dimension, line.kind): (line.count, line.bytes) for line in after.traffic} == early[
            "by dimension"
        ]
    # Otherwise a single shard keeps its gathered weights, of the size of the gradients here.
    reshard = "--parallelism.fsdp_reshard_after_forward=always"
    layouts = {"after backward": (*AFTER_BACKWARD, reshard), "in backward": (*IN_BACKWARD, reshard)}
    (ordinary,), (early,) = measured(1, in_folders(layouts, tmp_path), tmp_path)
    assert early["peak"] < ordinary["peak"] - 0.5 * ordinary["states"][1]


def test_weights_before_the_first_step(tmp_path: Path) -> None:
    """The largest weights are the embedding and output layer: 4,096 tokens x 128, in float32."""
    (rank,) = planned((*FLAGS, f"--job.dump_folder={tmp_path}"), 2)
    assert (rank.largest_weight, rank.largest_shard) == (4 * 4096 * 128, 4 * 4096 * 128 // 2)


# Collectives of one rank in a step, counted by hand, because the plan and the runs share the code that is counted.
# The model has 4 blocks; with the embedding and the head (norm and output layer) 6 FSDP groups. Its loss has one chunk.
# A reported step all-reduces 3 numbers over all ranks: the gradient norm, the guard's flags, the loss.
#
# FSDP. All-gathers: 6 in the forward pass, and 3 again in the backward pass, because head and last block are not
# resharded, and the embedding is not needed: 9.
# Reduce-scatters: the gradients of each group: 6.
#
# TP. A block gathers the inputs of attention and feed-forward, and reduce-scatters their outputs: 2 and 2 for 4 blocks;
# the embedding reduce-scatters once, the final norm gathers once: 9 and 9. The backward pass runs the opposite
# collective of each: 18 and 18. All-reduces: the gradients of 9 norm weights, and 2 of the loss's chunk: 11, plus the
# 3 of any step.
#
# EP. FSDP is the same. 3 blocks have experts. Each of them exchanges the numbers of rows, the rows, the results, and
# the gradients of results and rows: 15 all-to-alls. A fourth all-reduce is of the load of the experts. With FSDP 2,
# ranks that share the same experts gather the experts of 3 blocks twice, but of the last block once, and reduce-scatter
# their gradients.
#
# Qwen3 has two more norms in each of the 4 blocks: 8 more all-reduces.
#
# HSDP, two grad-accumulation steps: each gathers and reduce-scatters as FSDP does: 18 and 12. Only the last all-reduces
# the gradients of the 6 groups over the replicas: 6.
COUNTED_BY_HAND = {
    "FSDP 2": (2, {("fsdp", "all-gather"): 9, ("fsdp", "reduce-scatter"): 6, ("fsdp", "all-reduce"): 3}),
    "TP 2": (2, {("tp", "all-gather"): 18, ("tp", "reduce-scatter"): 18, ("tp", "all-reduce"): 14}),
    "EP 2": (
        2,
        {
            ("fsdp", "all-gather"): 9,
            ("fsdp", "reduce-scatter"): 6,
            ("fsdp", "all-reduce"): 4,
            ("ep", "all-to-all"): 15,
        },
    ),
    "FSDP 2 x EP 2": (
        4,
        {
            ("fsdp", "all-gather"): 9,
            ("fsdp", "reduce-scatter"): 6,
            ("fsdp", "all-reduce"): 4,
            ("expert_fsdp", "all-gather"): 5,
            ("expert_fsdp", "reduce-scatter"): 3,
            ("ep", "all-to-all"): 15,
        },
    ),
    "Qwen3, TP 2": (2, {("tp", "all-gather"): 18, ("tp", "reduce-scatter"): 18, ("tp", "all-reduce"): 22}),
    "HSDP 2 x 2, accumulated": (
        4,
        {
            ("fsdp", "all-gather"): 16,  # head and last block stay gathered
            ("fsdp", "reduce-scatter"): 12,
            ("dp_replicate", "all-reduce"): 6,
            ("world", "all-reduce"): 3,
        },
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", COUNTED_BY_HAND)
def test_collectives_are_as_many_as_counted_by_hand(
    layout: str, two: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    world_size, expected = COUNTED_BY_HAND[layout]
    flags = {**TWO, **MORE_OF_TWO, **FOUR, **PLANNED}[layout]
    (rank,) = planned((*FLAGS, *flags, f"--job.dump_folder={tmp_path}"), world_size)
    assert {(line.dimension, line.kind): line.count for line in rank.traffic} == expected
    if layout in two:
        counts = {collective: count for (_, collective), count in expected.items()}
        assert [result["collectives"] for result in two[layout]] == [counts, counts]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world_size", "layouts"), [(2, MORE_OF_TWO), (4, FOUR), (8, EIGHT)], ids=["2", "4", "8"])
def test_a_plan_of_another_layout_is_what_its_processes_hold_and_send(
    world_size: int, layouts: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    for (name, flags), real in zip(
        layouts.items(), measured(world_size, in_folders(layouts, tmp_path), tmp_path), strict=True
    ):
        # A plan is the first rank's. Under HSDP, Muon deals the second replica smaller matrices.
        ranks = 2 if name == "HSDP 2 x 2, Muon, bfloat16" else None
        assert_planned((*flags, f"--job.dump_folder={tmp_path}"), world_size, real, ranks)


def assert_planned(flags: Sequence[str], world_size: int, real: list[dict[str, Any]], ranks: int | None = None) -> None:
    """Bytes of tensors and number of collectives exactly; activations and buffers nearly.

    Args:
        ranks: how many to compare; None for all.
    """
    plans = planned((*FLAGS, *flags), world_size)
    assert len(real) == world_size
    for entry in real[:ranks]:
        plan = plans[entry["rank"]]
        assert (plan.parameters, plan.gradients, plan.optimizer) == entry["states"]
        assert {(line.dimension, line.kind): (line.count, line.bytes) for line in plan.traffic} == entry["by dimension"]
        counts: Counter[str] = Counter()
        for line in plan.traffic:
            counts[line.kind] += line.count
        assert counts == entry["collectives"]
        peak = next(iter(plan.peaks.values()))
        real_peak = entry["peak"] - plan.states  # which copies of gloo may make too high
        assert 0.8 * real_peak <= peak - plan.states <= 1.1 * real_peak
