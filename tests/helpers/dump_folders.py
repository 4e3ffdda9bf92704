"""Creates dump folders like a run's, without a run."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from torchtitan.config import JobConfig, to_toml

STEPS = 60


def dump_folder(folder: Path, seed: int = 0, steps: int = STEPS, **training: Any) -> Path:
    """A run with validation, checkpoints and a restart after half of its steps.

    Args:
        training: keys of [training], except for the seed and the number of steps.
    """
    folder.mkdir(parents=True)
    metrics: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 4 + 4 * math.exp(-5 * step / steps) + 0.1 * math.sin(step * (seed + 2))
        metrics.append(
            {
                "step": step,
                "loss": loss,
                "grad_norm": 1 / step,
                "lr": 1e-3,
                "tokens_per_second": 8000.0 + step,
                "mfu": 0.2,
                "step_seconds": 0.25,
                "data_wait_share": 0.01,
                "peak_memory_bytes": 2**30,
                "memory_share": 0.5,
                "tokens_seen": 512 * step,
                "skipped_updates": 0,
                "failed_saves": 0,
            }
        )
        if step % 10 == 0:
            metrics.append({"step": step, "validation_loss": loss + 0.1, "tokens_seen": 512 * step})
    write_lines(folder / "metrics.jsonl", metrics)
    config = JobConfig()
    keys = dataclasses.replace(config.training, seed=seed, steps=steps, **training)
    (folder / "config.toml").write_text(to_toml(dataclasses.replace(config, training=keys)))
    start = {
        "event": "start",
        "device": "cpu (a processor)",
        "processes": 1,
        "layout": "one process",
        "torch": "2.13.0",
    }
    half = steps // 2
    events = [
        {"step": 0, **start},
        {"step": half, "event": "checkpoint"},
        {"step": half, **start},
        {"step": steps, "event": "checkpoint"},
    ]
    write_lines(folder / "events.jsonl", events)
    return folder


def add_everything(folder: Path) -> Path:
    """Adds precision phases, a numerics report and samples."""
    layers = [
        layer(f"layers.{block}.{name}", name != "attention.wk")
        for block in range(3)
        for name in ("attention.wq", "attention.wk", "feed_forward.w1")
    ]
    phases = [
        {"phase": 1, "precision": "float8 rowwise", "last_step": 40, "layers": layers},
        {"phase": 2, "precision": "bf16", "last_step": None, "layers": []},
    ]
    (folder / "conversion.json").write_text(json.dumps(phases))
    products = {
        name: {"sqnr_db": 25.0, "saturated": 0.0, "flushed": 0.01} for name in ("output", "grad_input", "grad_weight")
    }
    numerics = {
        "recipe": "float8 rowwise",
        "steps": 20,
        "layers": {entry["fqn"]: products for entry in layers},
        "proposed_filter_fqns": ["layers.0.feed_forward.w1"],
    }
    (folder / "numerics.json").write_text(json.dumps(numerics))
    samples = [{"step": step, "prompt": "def f(", "text": f"x): # {step}"} for step in (30, 60)]
    write_lines(folder / "samples.jsonl", samples)
    with (folder / "events.jsonl").open("a") as file:
        for step, name, size in ((1, "stage <b>", 8), (41, "", 16)):
            file.write(json.dumps({"step": step, "event": "stage", "name": name, "batch_size": size}) + "\n")
    return folder


def layer(fqn: str, converted: bool) -> dict[str, Any]:
    return {
        "fqn": fqn,
        "m": 512,
        "k": 256,
        "n": 256,
        "converter": "float8" if converted else "",
        "recipe": "rowwise" if converted else "bf16",
        "converted": converted,
        "reason": "passes the filter" if converted else "float8.filter_fqns has attention.wk",
    }


def write_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
