"""Rows of gpu.py's table by torchtitan 0.1.0 (mid-2025): its own trainer and steps, timed as ours are.

gpu.py runs it, in a process whose `torchtitan` is that one and which does not see this repository. Data are random
tokens. What the trainer imports for data sets, tokenizers and the command line is replaced, for it is not carried.
"""

import argparse
import gc
import json
import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

MARK = "@gpu "
WARMUP = 3
OUT_OF_MEMORY = "out of memory"
Batch = tuple[dict[str, Any], Any]


def work(rows: list[dict[str, Any]], seconds: float, longest: float, steps: int, smoke: bool, **_: Any) -> None:
    """As the worker of gpu.py."""
    end = time.monotonic() + seconds
    replace_imports()
    import torch

    if smoke and not torch.cuda.is_available():
        act_as_device(torch)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for row in rows:
        if time.monotonic() + longest > end:
            send({"no time for another": True})
            break
        start = time.monotonic()
        about = {"model": row["model"], "recipe": row["recipe"]["name"], "layers": row["layers"]}
        usable = True
        try:
            result = run(row, steps, smoke)
            longest = max(longest, time.monotonic() - start)
            send({**about, **result, "wall_seconds": time.monotonic() - start})
        except Exception as error:
            reason = OUT_OF_MEMORY if OUT_OF_MEMORY in str(error) else f"{type(error).__name__}: {error}"
            send({**about, "failed": " ".join(reason.split())[:400]})
            usable = OUT_OF_MEMORY not in reason and "CUDA error" not in reason
        if not usable:
            sys.exit(1)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run(row: dict[str, Any], steps: int, smoke: bool) -> dict[str, Any]:
    """The table entries of a row; `layers` of the model."""
    import torch
    import torchtitan.models.llama3 as llama3
    from torchtitan.config_manager import JobConfig
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan.train import Trainer  # type: ignore[attr-defined]

    seq_len, vocabulary = (64, 512) if smoke else (8192, 128256)
    sizes = llama3.llama3_configs["debugmodel" if smoke else row["model"]]
    all_layers, sizes.n_layers = sizes.n_layers, row["layers"]
    config = JobConfig()
    config.model.flavor = "debugmodel" if smoke else row["model"]
    config.training.seq_len, config.training.local_batch_size = seq_len, 1
    config.training.compile = row["recipe"]["compile"]
    config.training.steps, config.lr_scheduler.warmup_steps = WARMUP + steps, 1
    config.activation_checkpoint.mode = "none"
    config.optimizer.implementation = "fused"
    config.metrics.log_freq = 10**9
    if row["recipe"]["converter"]:
        config.model.converters = [row["recipe"]["converter"]]
        for key, value in {**row["recipe"]["keys"], "emulate": smoke}.items():
            setattr(config.float8, key, value)
    spec = get_train_spec("llama3")
    spec.build_tokenizer_fn = lambda config: SimpleNamespace(n_words=vocabulary, eos_id=0)
    spec.build_dataloader_fn = lambda **options: None
    trainer = Trainer(config)
    trainer.step = 1  # the first step is always logged
    batches = endless(vocabulary, seq_len, trainer.device)
    cuda = trainer.device.type == "cuda"
    marks: list[Any] = []

    def mark() -> None:
        if cuda:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())

    def step() -> None:
        trainer.step += 1
        trainer.train_step(batches)

    start = time.perf_counter()
    step()
    if cuda:
        torch.cuda.synchronize()
    first_step = time.perf_counter() - start
    for _ in range(WARMUP - 1):
        step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    mark()
    for _ in range(steps):
        step()
        mark()
    if cuda:
        torch.cuda.synchronize()
    times = [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in pairwise(marks)]
    sizes.n_layers = all_layers
    full = trainer.metrics_processor.num_flops_per_token
    attention = 12 * row["layers"] * sizes.dim * seq_len
    typical = statistics.median(times)
    return {
        "all_layers": all_layers,
        "compiled": config.training.compile,
        "rate": seq_len / typical,
        "step_seconds": times,
        "flops_per_token": {"full": full, "causal": full - attention / 2},
        "parameters": sum(p.numel() for p in trainer.model_parts[0].parameters()),
        "memory": torch.cuda.max_memory_allocated() if cuda else 0,
        "first_step": first_step,
        "compile_seconds": first_step - typical if config.training.compile else None,
        "converted": "",
        "note": "",
    }


def endless(vocabulary: int, seq_len: int, device: Any) -> Iterator[Batch]:
    """Batches that are on the device already."""
    import torch

    tokens = torch.randint(vocabulary, (WARMUP, 1, seq_len + 1), device=device)
    number = 0
    while True:
        yield {"input": tokens[number % WARMUP, :, :-1]}, tokens[number % WARMUP, :, 1:].contiguous()
        number += 1


def replace_imports() -> None:
    """Empty modules in place of packages that nothing here uses."""
    for name in (
        "datasets",
        "datasets.distributed",
        "tiktoken",
        "tiktoken.load",
        "tyro",
        "torchdata",
        "torch.utils.tensorboard",
    ):
        sys.modules[name] = MagicMock(__spec__=None)
    loader = ModuleType("torchdata.stateful_dataloader")
    loader.StatefulDataLoader = type("StatefulDataLoader", (), {})  # type: ignore[attr-defined]
    sys.modules[loader.__name__] = loader


def act_as_device(torch: Any) -> None:
    """Gives `torch.cpu` the functions that the trainer calls: it has no path for a CPU."""
    cpu = torch.cpu
    cpu.get_device_name = lambda *_: "CPU"
    cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**34)
    cpu.memory_stats = lambda *_: defaultdict(int)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    cpu.current_device = lambda: 0
    torch._utils._get_available_device_type = lambda: "cpu"


def send(message: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(message)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", required=True, help="rows to measure, from gpu.py")
    work(**json.loads(parser.parse_args().worker))
