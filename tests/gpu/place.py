"""Where the tests of this folder run: on a GPU, or as a rehearsal on the CPU with a smaller model."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from runs import ROOT, TINY, failure, losses, train

PROGRAM = [sys.executable, str(ROOT / "train.py")]
STEPS = 20
MIDDLE = 10
FLOAT32 = "--training.mixed_precision_param=float32"
BFLOAT16 = "--training.mixed_precision_param=bfloat16"

# Every step in metrics.jsonl, and checkpoints. On a GPU: the debug model of 7 million parameters, 2,048 tokens a step.
COMMON = (
    *(f"--training.steps={STEPS}", "--optimizer.lr=3e-4"),
    *("--checkpoint.enable_checkpoint", f"--checkpoint.interval={MIDDLE}"),
)
SHAPE = {
    "cpu": (*TINY, *COMMON),
    "cuda": (
        f"--job.config_file={ROOT / 'train_configs' / 'debug_model.toml'}", "--training.local_batch_size=8",
        "--metrics.log_freq=1", "--lr_scheduler.decay_ratio=0", *COMMON,
    ),
}  # fmt: skip
# Three steps of 4,096 tokens that need some GiB.
WIDE = {
    "cpu": (*TINY, "--training.steps=3"),
    "cuda": (
        *TINY, "--model.flavor=gibibytes", "--training.seq_len=2048", "--training.local_batch_size=2",
        "--training.global_batch_size=2", "--training.steps=3",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A device, and runs of a small model on it and on the CPU.

    Attributes:
        device: "cuda" or "cpu".
        folder: for dump folders.
        shared: for the run that the others are compared with, which pytest's workers make once.
        model: flags of another model than `SHAPE`'s.
    """

    device: str
    folder: Path
    shared: Path
    model: tuple[str, ...] = ()

    def of(self, name: str, *model: str) -> "Place":
        """This device with another model, in folders of its own."""
        return replace(self, folder=self.folder / name, shared=self.shared / name, model=model)

    @property
    def compile(self) -> list[str]:
        """A rehearsal has nothing to learn from the compiler for CPUs, which takes long."""
        return ["--training.compile"] * (self.device == "cuda")

    @property
    def reference(self) -> Path:
        """The dump folder of a float32 run on the CPU, made on first use from the weights that all runs start from."""
        run, start = self.shared / "reference", self.shared / "start"
        self.shared.mkdir(parents=True, exist_ok=True)
        with FileLock(self.shared / "lock"):
            if not run.exists():
                self.on_cpu(f"--job.dump_folder={start}", "--checkpoint.create_seed_checkpoint")
                self.on_cpu(f"--job.dump_folder={run}", FLOAT32, self.from_start)
        return run

    @property
    def from_start(self) -> str:
        """The flag for the common initial weights: a GPU draws others than a CPU."""
        return f"--checkpoint.initial_load_path={self.shared / 'start' / 'checkpoint' / 'step-0'}"

    def rows(self, shares: int) -> list[str]:
        """Flags for the reference's global batch in so many parts: ranks, or grad-accumulation steps."""
        rows = {"cpu": 4, "cuda": 8}[self.device]
        return [f"--training.local_batch_size={rows // shares}", f"--training.global_batch_size={rows}"]

    def losses(self, name: str, *flags: str, processes: int = 1) -> tuple[list[float], str]:
        """Losses of a run on the device from the common initial weights, and its output."""
        assert self.reference.exists()
        run = self.folder / name.replace(" ", "_")
        output = self.on_device(f"--job.dump_folder={run}", self.from_start, *flags, processes=processes)
        return list(losses(run).values()), output

    def on_device(self, *flags: str, processes: int = 1) -> str:
        """Trains. Returns the output."""
        return self.train(SHAPE[self.device], *self.model, *flags, processes=processes)

    def on_cpu(self, *flags: str) -> str:
        return self.train(SHAPE[self.device], *self.model, *flags, visible=False)

    def train(
        self, shape: Sequence[str], *flags: str, visible: bool = True, processes: int = 1, **environment: Any
    ) -> str:
        if self.device == "cpu" and not environment:
            return train(*shape, *flags, processes=processes)  # forked
        # In processes of their own: a CUDA error must not reach the next test.
        options: dict[str, Any] = {"command": PROGRAM} if processes == 1 else {"processes": processes}
        options |= hidden(not visible)
        return train(*shape, *flags, **options, OMP_NUM_THREADS="4", **environment)

    def failure_on_device(self, *flags: str) -> tuple[int, str]:
        return failure(*SHAPE[self.device], *flags, command=PROGRAM)

    def environment(self, visible: bool) -> dict[str, str]:
        return {**os.environ, **hidden(not visible)}


def hidden(gpus: bool) -> dict[str, str]:
    """Environment variables that hide the GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ""} if gpus else {}
