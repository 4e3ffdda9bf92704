"""Where the tests of this folder run: on a GPU, or as a rehearsal on the CPU with a smaller model.

PYTHONPATH=.:tests/helpers python tests/gpu/place.py    fills carried/references, as scripts/carry_for_gpu.sh does

Runs on a GPU follow float32 runs on a CPU, which take no GPU: they are made before and carried along, as losses.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from runs import ROOT, TINY, failure, losses, train

CARRIED = ROOT / "carried" / "references"
PROGRAM = [sys.executable, str(ROOT / "train.py")]
STEPS = 20
MIDDLE = 10
FLOAT32 = "--training.mixed_precision_param=float32"
BFLOAT16 = "--training.mixed_precision_param=bfloat16"

# Runs on a GPU and on the CPU start from the same weights.
DRAWN = "--experimental.custom_import=drawn_on_cpu"
TEXT = ROOT / "torchtitan"  # the sources of Python's standard library differ between its versions

# Every step in metrics.jsonl, and checkpoints. On a GPU: the debug model of 7 million parameters, 2,048 tokens a step.
COMMON = (
    *(f"--training.steps={STEPS}", "--optimizer.lr=3e-4"),
    *("--checkpoint.enable_checkpoint", f"--checkpoint.interval={MIDDLE}"),
)
SHAPE = {
    "cpu": (*TINY, *COMMON),
    "cuda": (
        f"--job.config_file={ROOT / 'train_configs' / 'debug_model.toml'}", "--training.local_batch_size=8",
        "--metrics.log_freq=1", "--lr_scheduler.decay_ratio=0", f"--training.dataset_path={TEXT}/**/*.py", *COMMON,
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

MTP = "--training.mtp_layers=1"
# Flags of the models that runs on the device and on the CPU are made of.
MODELS: dict[str, dict[str, tuple[str, ...]]] = {
    "base": {"cpu": (), "cuda": ()},
    "experts": {"cpu": ("--model.name=sparse",), "cuda": ("--model.name=qwen3_moe",)},
    "documents": {"cpu": ("--training.document_mask",), "cuda": ("--training.document_mask",)},
    "windows": {"cpu": ("--model.name=tiny_olmo3",), "cuda": ("--model.name=olmo3",)},
    "windows and sinks": {"cpu": ("--model.name=tiny_gpt_oss",), "cuda": ("--model.name=gpt_oss",)},
    "latent attention, MTP": {"cpu": ("--model.name=tiny_deepseek_v3", MTP), "cuda": ("--model.name=deepseek_v3", MTP)},
}


@dataclass(frozen=True)
class Place:
    """A device, and runs of a small model on it and on the CPU.

    Attributes:
        device: "cuda" or "cpu".
        folder: for dump folders.
        shared: for the run that the others are compared with, which pytest's workers make once.
        name: of the model, in `MODELS`.
    """

    device: str
    folder: Path
    shared: Path
    name: str = "base"

    def of(self, name: str) -> "Place":
        """This device with another model, in folders of its own."""
        return replace(self, folder=self.folder / name, shared=self.shared / name, name=name)

    @property
    def flags(self) -> tuple[str, ...]:
        """What all runs share."""
        return (*SHAPE[self.device], *MODELS[self.name][self.device], DRAWN)

    @property
    def compile(self) -> list[str]:
        """A rehearsal has nothing to learn from the compiler for CPUs, which takes long."""
        return ["--training.compile"] * (self.device == "cuda")

    @property
    def reference(self) -> Path:
        """The folder with the losses of a float32 run on the CPU: carried along, or made on first use."""
        carried, run = CARRIED / self.name, self.shared / "reference"
        self.shared.mkdir(parents=True, exist_ok=True)
        with FileLock(self.shared / "lock"):
            if run.exists():
                return run
            if not carried.exists():
                reason = "is missing"
            elif json.loads((carried / "made_with.json").read_text()) != self.made_with():
                reason = "was made with other flags, text or random numbers"
            else:
                return carried
            if self.device == "cuda":  # nothing is carried for a rehearsal
                warnings.warn(f"The reference {self.name} {reason} in {CARRIED}: the CPU makes it now.", stacklevel=2)
            self.make_reference(run)
        return run

    def make_reference(self, run: Path) -> None:
        self.on_cpu(f"--job.dump_folder={run}", FLOAT32)

    def carry(self) -> None:
        """Makes the reference, and keeps what is read of it."""
        run, carried = self.shared / "reference", CARRIED / self.name
        self.make_reference(run)
        carried.mkdir(parents=True)
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses(run).items()]
        (carried / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (carried / "made_with.json").write_text(json.dumps(self.made_with(), indent=1) + "\n")

    def made_with(self) -> dict[str, Any]:
        """What the losses depend on: flags, text, and torch's random numbers, which its versions may change."""
        text = b"".join(path.read_bytes() for path in sorted(TEXT.rglob("*.py")))
        drawn = torch.nn.init.trunc_normal_(torch.empty(64), generator=torch.Generator().manual_seed(0))
        return {
            "flags": [flag.replace(str(ROOT), ".") for flag in (*self.flags, FLOAT32)],
            "text": hashlib.sha256(text).hexdigest(),
            "drawn": [round(float(number), 3) for number in drawn[:4]],
        }

    def rows(self, shares: int) -> list[str]:
        """Flags for the reference's global batch in so many parts: ranks, or grad-accumulation steps."""
        rows = {"cpu": 4, "cuda": 8}[self.device]
        return [f"--training.local_batch_size={rows // shares}", f"--training.global_batch_size={rows}"]

    def losses(self, name: str, *flags: str, processes: int = 1) -> tuple[list[float], str]:
        """Losses of a run on the device, and its output."""
        run = self.folder / name.replace(" ", "_")
        output = self.on_device(f"--job.dump_folder={run}", *flags, processes=processes)
        return list(losses(run).values()), output

    def on_device(self, *flags: str, processes: int = 1) -> str:
        """Trains. Returns the output."""
        return self.train(self.flags, *flags, processes=processes)

    def on_cpu(self, *flags: str) -> str:
        return self.train(self.flags, *flags, visible=False)

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
        return failure(*self.flags, *flags, command=PROGRAM)

    def environment(self, visible: bool) -> dict[str, str]:
        return {**os.environ, **hidden(not visible)}


def hidden(gpus: bool) -> dict[str, str]:
    """Environment variables that hide the GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ""} if gpus else {}


if __name__ == "__main__":
    shutil.rmtree(CARRIED, ignore_errors=True)
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            Place("cuda", Path(folder), Path(folder), name).carry()
    size = sum(file.stat().st_size for file in CARRIED.rglob("*.*"))
    print(f"carried/references: {len(MODELS)} runs on the CPU, {size / 1024:.0f} KiB")
