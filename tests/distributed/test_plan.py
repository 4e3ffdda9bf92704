"""A plan against real runs: gloo processes train two steps, whose tensors and collectives are counted."""

import gc
import json
import os
import socket
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile, record_function

from torchtitan.checks import check, global_batch_size
from torchtitan.config import ConfigManager
from torchtitan.device import find_device
from torchtitan.parallel.record import Recorder
from torchtitan.plan import RankPlan, make_plan, planned_device
from torchtitan.simulation import name_of_group, state_bytes
from torchtitan.stand_ins import stand_ins

FLAGS = (
    "--training.seq_len=512",
    "--training.local_batch_size=2",
    "--training.mixed_precision_param=float32",
    "--activation_checkpoint.mode=none",
)
TP, CP, PP = (f"--parallelism.{kind}_parallel_degree=2" for kind in ("tensor", "context", "pipeline"))
BF16 = "--training.mixed_precision_param=bfloat16"
FULL, SELECTIVE = "--activation_checkpoint.mode=full", "--activation_checkpoint.mode=selective"
HSDP = "--parallelism.data_parallel_replicate_degree=2"
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
"""As torch's profiler names what reaches a process group, from `torch.distributed` or functional collectives."""


class Reporter:
    def step(self, step: int, loss: Any, **others: Any) -> None:
        loss()


def train(rank: int, world_size: int, layouts: list[list[str]], ports: list[int], folder: str) -> None:
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    results = []
    for flags, port in zip(layouts, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        _clear_sharding_prop_cache()  # of the layout before
        gc.collect()  # so that nothing of it is freed while memory is counted
        results.append(two_steps(flags, world_size))
    torch.save(results, f"{folder}/result{rank}")


def two_steps(flags: list[str], world_size: int) -> dict[str, Any]:
    """What the second step holds and sends, without anything of ours watching; and the third, by dimension."""
    from torchtitan.trainer import Trainer

    config = ConfigManager().parse_args(flags)
    dims = check(config, world_size, "cpu")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        trainer = Trainer(config, dims, global_batch_size(config, dims), find_device(0))
        trainer._train_step(trainer.loader.next(), Reporter())  # type: ignore[arg-type]
        gradients: list[int] = []
        trainer.optimizer.register_step_pre_hook(
            lambda *_: gradients.append(state_bytes(trainer.model, trainer.optimizer)["gradients"])
        )
        batches = trainer.loader.next()
        with record_function("measured"):
            trainer._train_step(batches, Reporter())  # type: ignore[arg-type]
    recorder = Recorder(name_of_group(trainer))
    with recorder, stand_ins("cpu"):  # torch's mask cannot be made while a recorder looks on
        trainer._train_step(trainer.loader.next(), Reporter())  # type: ignore[arg-type]
    sizes = state_bytes(trainer.model, trainer.optimizer)
    place = trainer.mesh.get_local_rank("pp")
    with trainer:
        pass  # closes it
    return {
        **sizes,
        "gradients": gradients[0],
        "rank": place,
        "by dimension": {key: (count, recorder.bytes[key]) for key, count in recorder.count.items()},
        **profiled(profiler, config.job.dump_folder),
    }


def profiled(profiler: Any, folder: str) -> dict[str, Any]:
    """Peak of memory and number of collectives in the part called "measured"."""
    path = Path(folder) / f"trace{os.environ['RANK']}.json"
    profiler.profiler.kineto_results.save(str(path))
    events = sorted(json.loads(path.read_text())["traceEvents"], key=lambda event: event.get("ts", 0))
    measured = next(event for event in events if event.get("name") == "measured")
    start, end = measured["ts"], measured["ts"] + measured["dur"]
    live: dict[int, int] = {}  # by address: gloo's threads free its copies unseen, until the address is used again
    total = peak = 0
    for event in events:
        if event.get("name") == "[memory]":
            size, address = event["args"]["Bytes"], event["args"]["Addr"]
            total -= live.pop(address, 0)
            if size > 0:
                live[address] = size
                total += size
            if start <= event["ts"] <= end:
                peak = max(peak, total)
    names = [event["name"] for event in events if start <= event.get("ts", 0) <= end and event.get("name") in KINDS]
    return {"peak": peak, "collectives": Counter(KINDS[name] for name in names)}


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def measured(world_size: int, layouts: list[list[str]], folder: Path) -> list[list[dict[str, Any]]]:
    """For each layout what each rank found."""
    ports = [free_port() for _ in layouts]
    mp.spawn(train, (world_size, layouts, ports, str(folder)), nprocs=world_size)
    by_rank = [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(world_size)]
    return [list(found) for found in zip(*by_rank, strict=True)]


def planned(flags: list[str], world_size: int) -> list[RankPlan]:
    config = ConfigManager().parse_args([*flags, "--job.plan", "--job.simulate_device=cpu"])
    dims = check(config, world_size, "cpu")
    device, why = planned_device("cpu", True, find_device(0), torch.float32)
    return make_plan(config, dims, global_batch_size(config, dims), device, why).ranks


def assert_same(plan: RankPlan, real: dict[str, Any], mode: str) -> None:
    for key in ("parameters", "gradients", "optimizer"):
        assert getattr(plan, key) == real[key], key
    assert {(line.dimension, line.kind): (line.count, line.bytes) for line in plan.traffic} == real["by dimension"]
    counts: Counter[str] = Counter()
    for line in plan.traffic:
        counts[line.kind] += line.count
    assert counts == real["collectives"]
    assert plan.peaks[mode] - plan.states == pytest.approx(real["peak"] - plan.states, rel=0.1)


LAYOUTS = {
    "FSDP 2": (2, []),
    "TP 2": (2, [TP]),
    "CP 2": (2, [CP]),
    "PP 2": (2, [PP, "--training.local_batch_size=4"]),
}
if __name__ == "__main__":
    import sys, tempfile
    which = sys.argv[1:] or list(LAYOUTS)
    w = LAYOUTS[which[0]][0]
    lay = [[*FLAGS, *LAYOUTS[k][1]] for k in which]
    d = tempfile.mkdtemp()
    lay = [[*l, f"--job.dump_folder={d}/{i}"] for i, l in enumerate(lay)]
    out = measured(w, lay, Path(d))
    for k, l, o in zip(which, lay, out):
        p = planned(l, w)
        for r, real in enumerate(o):
            pl = p[real["rank"]]
            mode = next(f.split("=")[1] for f in reversed(l) if "checkpoint.mode" in f)
            print(k, r, "real act %.2f plan act %.2f MiB" % ((real["peak"] - pl.states) / 2**20, (pl.peaks[mode] - pl.states) / 2**20), pl.states/2**20)
            try: assert_same(pl, real, mode)
            except AssertionError as e: print(str(e)[:600])
