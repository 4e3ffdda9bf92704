"""The runs of a ladder: a TOML file each, started as a user starts them."""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from torchtitan.config import ConfigManager, JobConfig, to_toml
from torchtitan.config.low_precision import Precision
from torchtitan.config.output import Checkpoint
from torchtitan.engine.model_args import sizes_of
from torchtitan.engine.stages import parse_stages
from torchtitan.errors import ConfigError, UserError
from torchtitan.launcher.processes import find_processes
from torchtitan.launcher.signals import STARTER, STOP_SIGNALS
from torchtitan.logging import Waiting
from torchtitan.parallel.dims import ParallelDims, find_dims
from torchtitan.tools.evaluation.find_tasks import HELD_OUT
from torchtitan.tools.ladder.fit import FinishedRun, varies_tokens
from torchtitan.tools.ladder.shapes import Shape, find_shape, parse_number, short
from torchtitan.tools.report.run import METRICS, read_lines

BATCH = "global_batch_size"


@dataclass(frozen=True)
class Rung:
    """One run of the ladder."""

    size: str  # the size that was asked for, such as "0.3M"
    shape: Shape
    tokens: int  # D, a whole number of steps
    config: JobConfig  # what is trained; its TOML file lies beside its dump folder

    @property
    def folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    @property
    def flops(self) -> float:
        return self.shape.flops_per_token * self.tokens

    @property
    def file(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.toml")

    def entries(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl so far, without one that a killed run was writing."""
        return read_lines(self.folder / METRICS)

    def loss(self) -> float | None:
        """Held-out bits per byte after the last step, the mean over the sources of a mixture; None if not there."""
        by_source = {
            key: value
            for entry in self.entries()
            if entry["step"] == self.config.training.steps
            for key, value in entry.items()
            if key.startswith(HELD_OUT) and key.endswith("/bits_per_byte") and isinstance(value, float)
        }
        return statistics.fmean(by_source.values()) if by_source else None

    def last_step(self) -> int:
        """The last step that the run has reported."""
        return max((entry["step"] for entry in self.entries()), default=0)

    def flops_per_second(self, processes: int) -> float | None:
        """The median over its reports; None before the first."""
        rates = [rate for entry in self.entries() if isinstance(rate := entry.get("tokens_per_second"), float | int)]
        return statistics.median(rates) * processes * self.shape.flops_per_token if rates else None

    def row(self) -> FinishedRun:
        """For the fit; the run must be finished."""
        loss = self.loss()
        assert loss is not None
        return FinishedRun(self.shape.parameters, self.tokens, loss)


@dataclass(frozen=True)
class Ladder:
    """Runs by series ("20 tokens per parameter", "1M tokens") and increasing size, and the run that they predict."""

    rungs: dict[str, list[Rung]]
    target: Rung
    processes: int

    @property
    def by_cost(self) -> list[Rung]:
        return sorted((rung for series in self.rungs.values() for rung in series), key=lambda rung: rung.flops)


def choose_runs(arguments: argparse.Namespace, config: JobConfig) -> Ladder:
    """The runs of a ladder. Raises a ConfigError before anything is trained."""
    processes = find_processes()
    problems: list[str] = []
    dims = find_dims(config.parallelism, processes, problems)
    if dims is None:
        raise ConfigError(*problems)
    config, folder = with_batches(config, dims), arguments.folder or Path(config.job.dump_folder)
    stages = tokens_and_lengths(config)
    mean_length = round(sum(tokens * length for tokens, length in stages) / sum(tokens for tokens, _ in stages))
    flag, listed, unit = "--tokens-per-parameter", arguments.tokens_per_parameter, "tokens per parameter"
    if arguments.tokens:
        flag, listed, unit = "--tokens", arguments.tokens, "tokens"
    amounts = sorted(parse_number(text, flag) for text in listed.split(","))
    sizes = {text.strip(): parse_number(text, "--sizes") for text in arguments.sizes.split(",")}
    wanted = parse_number(arguments.predict, "--predict")
    if wanted <= max(sizes.values()):
        raise ConfigError(f"--predict {arguments.predict} is not above the largest of --sizes, {arguments.sizes}.")

    def rung(size: str, parameters: float, amount: float) -> Rung:
        shape = find_shape(config.model, parameters, mean_length)
        tokens = amount if arguments.tokens else amount * shape.parameters
        return make_rung(config, size, shape, tokens, folder)

    by_size = sorted(sizes.items(), key=lambda size: size[1])
    rungs = {f"{short(amount)} {unit}": [rung(*size, amount) for size in by_size] for amount in amounts}
    target = rung(arguments.predict.strip(), wanted, amounts[-1])
    same: dict[tuple[int, int], str] = {}
    for trained in [*next(iter(rungs.values())), target]:
        shape = trained.shape
        if other := same.get((shape.dim, shape.n_layers)):
            raise ConfigError(
                f"--sizes: {other} and {trained.size} both become {shape.n_layers} layers of width {shape.dim}, "
                f"{short(shape.parameters)} parameters; leave one out."
            )
        same[shape.dim, shape.n_layers] = trained.size
    ladder = Ladder(rungs, target, processes)
    varies_tokens([(trained.shape.parameters, trained.tokens) for trained in ladder.by_cost])
    return ladder


def with_batches(config: JobConfig, dims: ParallelDims) -> JobConfig:
    """The configuration with the batch of each stage stated as a number of sequences, so that it does not depend on the
    number of processes. Raises a ConfigError if stages or batches change at a step or after tokens."""
    entries = config.stage.entries
    given = [config.training.global_batch_size, *(entry.sections.get("training", {}).get(BATCH) for entry in entries)]
    if any(isinstance(size, str) for size in given):
        raise ConfigError(
            f"training.{BATCH} changes at the same steps or tokens in all runs of a ladder; write a [[stage]] for each "
            "size, and end it at a fraction of training.steps."
        )
    stages = parse_stages(config, dims.dp)
    if problems := [
        f"{stage.title}: until = {entry.until} is the same in all runs of a ladder; make it a fraction of "
        f"training.steps, such as {stage.last_step / config.training.steps:.3g}."
        for entry, stage in zip(entries, stages, strict=False)
        if isinstance(entry.until, int | str)
    ]:
        raise ConfigError(*problems)
    sections = [
        entry.sections
        | {"training": entry.sections.get("training", {}) | {BATCH: own.config.training.sequences_per_step(dims.dp)}}
        for entry, own in zip(entries, stages, strict=False)
    ]
    return config.changed(
        training={BATCH: config.training.sequences_per_step(dims.dp)},
        stage={"entries": [replace(entry, sections=own) for entry, own in zip(entries, sections, strict=True)]},
    )


def tokens_and_lengths(config: JobConfig) -> list[tuple[int, int]]:
    """Tokens and sequence length of each stage, whose batches are numbers."""
    # Precision phases change neither, and may exceed the run.
    stages = parse_stages(replace(config, precision=Precision()))
    lengths = [(stage.last_step - stage.first_step + 1, stage.config.training) for stage in stages]
    return [(steps * int(own.global_batch_size) * own.seq_len, own.seq_len) for steps, own in lengths]


def make_rung(config: JobConfig, size: str, shape: Shape, tokens: float, folder: Path) -> Rung:
    """The run of this shape over about `tokens` tokens. From `config` it differs in:

    - the learning rate (also optimizer.group's), inversely proportional to the width: muP's rule for Adam and
      matrices (arXiv 2203.03466, table 3); with model.parametrization = mup it stays, and the model does the rest;
    - the warm-up, which takes the same share of the steps; the decay is a share anyway;
    - checkpoints, and an evaluation of held-out text after the last step.

    This holds for the keys of its stages, too.

    Args:
        config: as `with_batches` returns it.
    """
    before = config.training.steps
    steps = max(1, round(tokens / (sum(tokens for tokens, _ in tokens_and_lengths(config)) / before)))
    narrower = 1.0 if config.model.parametrization == "mup" else sizes_of(config.model).dim / shape.dim
    rules: dict[str, dict[str, Callable[[Any], Any]]] = {
        "training": {"steps": lambda _: steps},
        "optimizer": {
            "lr": lambda lr: lr * narrower,
            "group": lambda groups: [
                group if group.lr is None else replace(group, lr=group.lr * narrower) for group in groups
            ],
        },
        "lr_scheduler": {"warmup_steps": lambda own: min(steps, round(own * steps / before))},
        "validation": {"enabled": lambda _: True, "freq": lambda _: steps},
        "evaluation": {"tasks": lambda _: [HELD_OUT], "freq": lambda _: steps},
    }

    def changed_in(section: str, keys: dict[str, Any]) -> dict[str, Any]:
        own = rules.get(section, {})
        return {key: own[key](value) if key in own else value for key, value in keys.items()}

    name = f"{size}-{short(tokens)}"
    entries = [
        replace(entry, sections={section: changed_in(section, keys) for section, keys in entry.sections.items()})
        for entry in config.stage.entries
    ]
    changed = config.changed(
        job={
            "config_file": str(folder / f"{name}.toml"),
            "dump_folder": str(folder / name),
            "description": f"{size} parameters, {short(tokens)} tokens",
        },
        model={"dim": shape.dim, "n_layers": shape.n_layers},
        stage={"entries": entries},
        # A folder given as an absolute path would be the same for all sizes.
        checkpoint={
            "enable_checkpoint": True,
            "folder": Checkpoint.folder,
            "load_step": Checkpoint.load_step,
            "create_seed_checkpoint": False,
        },
        **{section: changed_in(section, vars(getattr(config, section))) for section in rules},
    )
    return Rung(size, shape, sum(tokens for tokens, _ in tokens_and_lengths(changed)), changed)


def write_files(rungs: Iterable[Rung]) -> None:
    """Writes the TOML files. Raises a ConfigError if the folder has runs of another configuration."""
    for rung in rungs:
        if rung.file.exists():
            if ConfigManager().parse_args([f"--job.config_file={rung.file}"]) != rung.config:
                raise ConfigError(
                    f"{rung.file} is of a ladder with another configuration; choose another --folder, or remove it."
                )
            continue
        rung.file.parent.mkdir(parents=True, exist_ok=True)
        rung.file.write_text(to_toml(rung.config), encoding="utf-8")


def train_rung(rung: Rung) -> None:
    """Trains, from the newest checkpoint if there is one. What the run says goes to a .log file beside its folder. A
    signal to stop is passed on; the run saves a checkpoint, and this process exits. The run does so too if this process
    is killed. Raises a UserError if it failed."""
    log = rung.file.with_suffix(".log")
    stopped: list[int] = []
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "torchtitan_toml"],
            env={**os.environ, "CONFIG_FILE": str(rung.file), STARTER: str(os.getpid())},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the run through this process alone, as SIGTERM does
        )

        def stop(number: int, _: FrameType | None) -> None:
            stopped.append(number)
            process.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
        try:
            with Waiting(rung.folder.name, rung.config.training.steps, "steps", rung.last_step):
                status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if stopped:
        with contextlib.suppress(OSError):  # the terminal is closed
            print(f"Stopped during {rung.folder.name}. The same command goes on from there.", file=sys.stderr)
        sys.exit(128 + stopped[0])
    if status or rung.loss() is None:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        failed = f"the run {rung.folder.name} failed, was stopped, or has no finite loss; {log} ends with:"
        raise UserError("\n".join([failed, *tail]))


def expected_seconds(rungs: Sequence[Rung], finished: Sequence[Rung], processes: int) -> float | None:
    """How long these runs take, each at the FLOP/s of the finished run of the most similar size. None if unknown."""
    total = 0.0
    for rung in rungs:
        nearest = min(finished, key=lambda other: abs(other.shape.parameters - rung.shape.parameters))
        speed = nearest.flops_per_second(processes)
        if not speed:
            return None
        total += rung.flops / speed
    return total
