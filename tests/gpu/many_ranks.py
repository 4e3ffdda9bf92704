"""Every layout over NCCL on one GPU that the ranks share, each gradient beside one rank's; then kills, signals, saves.

python tests/gpu/many_ranks.py FOLDER [--only WORD] [--seconds 240] [--device cuda]

Writes a line to FOLDER/rows.jsonl as each row ends, and FOLDER/table.md, most important rows first. `--device cpu`
rehearses over gloo. A second call in the same folder finds what the first has compiled.

The ranks are compared with one on the same GPU, so no run on a CPU is needed. They take turns on it, so this shows what
is right, not what is fast. NCCL 2.30 or later is needed: scripts/carry_for_gpu.sh brings one along, which is preloaded
here.
"""

import argparse
import json
import lzma
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from equality import degrees
from runs import (
    HELPERS,
    LAUNCHER,
    ROOT,
    Run,
    assert_equal_bit_for_bit,
    checkpoint_steps,
    into,
    last_step,
    lines_of,
    losses,
    started,
    tensors_of,
)  # fmt: skip

from benchmarks.tables import markdown
from torchtitan.errors import UserError
from torchtitan.hardware import SHARING

CARRIED = ROOT / "carried" / "nccl" / "libnccl.so.2.xz"
PATIENCE = 100  # seconds for a row; a collective that hangs ends no row
DENSE = f"--job.config_file={ROOT / 'train_configs' / 'debug_model.toml'}"
SPARSE = f"--job.config_file={ROOT / 'train_configs' / 'debug_moe.toml'}"
SIZE = ("--training.seq_len=256", "--training.local_batch_size=4")
FLOAT32, BFLOAT16 = (f"--training.mixed_precision_param={dtype}" for dtype in ("float32", "bfloat16"))
SCHEDULE = "--parallelism.pipeline_parallel_schedule="
ALL_TO_ALL = "--parallelism.context_parallel_rotate_method=alltoall"
ASYNC = "--parallelism.enable_async_tensor_parallel"
LOSS = "--moe.balance=loss"
WINDOWS, SINKS = "--model.name=olmo3", "--model.name=gpt_oss"
LATENT = "--model.name=deepseek_v3", "--training.mtp_layers=1"
LATE = "--experimental.custom_import=late"  # the GPU lags behind, FSDP's own stream most of all
FLOAT8, INT8 = "--model.converters=float8", "--model.converters=int8"

RECIPES: dict[str, tuple[str, ...]] = {
    "float32": (FLOAT32,),
    "bf16": (BFLOAT16,),
    "bf16, compiled": (BFLOAT16, "--training.compile"),
    "float8 tensorwise, gathered, precomputed scales": (
        *(BFLOAT16, "--training.compile", FLOAT8, "--float8.enable_fsdp_float8_all_gather"),
        "--float8.precompute_float8_dynamic_scale_for_fsdp",
    ),
    "float8 tensorwise": (BFLOAT16, "--training.compile", FLOAT8),
    "float8 rowwise": (BFLOAT16, "--training.compile", FLOAT8, "--float8.recipe_name=rowwise"),
    "float8 delayed": (BFLOAT16, "--training.compile", FLOAT8, "--float8.recipe_name=delayed"),
    "int8 rowwise, gathered": (BFLOAT16, "--training.compile", INT8, "--int8.enable_fsdp_int8_all_gather"),
    "int8 tensorwise, gathered": (
        *(BFLOAT16, "--training.compile", INT8, "--int8.recipe_name=tensorwise", "--int8.enable_fsdp_int8_all_gather"),
    ),
    "Muon, bf16": (BFLOAT16, "--optimizer.name=Muon"),
}


@dataclass(frozen=True)
class Layout:
    """Rows of the table: a layout and the recipes that it is checked with.

    Attributes:
        flags: that select the layout; of the model with experts if `sparse`.
        on_cpu: whether a rehearsal has it.
    """

    name: str
    processes: int
    flags: tuple[str, ...]
    recipes: tuple[str, ...]
    sparse: bool = False
    on_cpu: bool = True


TENSORWISE, COMPILED, ROWWISE, _, INT8_ROWWISE, INT8_TENSORWISE, MUON = list(RECIPES)[3:]
PP = (*degrees(pp=2), "--training.local_batch_size=8")
LAYOUTS = [  # most important first, as a GPU's minutes may end
    Layout("FSDP 2", 2, (), ("float32", TENSORWISE, ROWWISE, "bf16, compiled")),
    Layout("TP 2, asynchronous", 2, (*degrees(tp=2), ASYNC), ("bf16, compiled", ROWWISE, COMPILED), on_cpu=False),
    Layout("TP 2", 2, degrees(tp=2), ("float32", "bf16, compiled", ROWWISE)),
    Layout("FSDP 2 x TP 2", 4, degrees(tp=2), ("float32", ROWWISE)),
    Layout("FSDP 2 x TP 2, asynchronous", 4, (*degrees(tp=2), ASYNC), (ROWWISE, "bf16, compiled"), on_cpu=False),
    Layout("HSDP 2 x 2", 4, degrees(replicate=2), ("float32", TENSORWISE, INT8_ROWWISE)),
    Layout("EP 2", 2, degrees(ep=2), ("float32", "bf16, compiled", ROWWISE, INT8_ROWWISE), sparse=True),
    Layout("DDP 2", 2, degrees(replicate=2), ("float32", "bf16")),
    Layout("CP 2", 2, degrees(cp=2), ("float32", "bf16, compiled")),
    Layout("CP 2, all-to-all", 2, (*degrees(cp=2), ALL_TO_ALL), ("float32", "bf16")),
    Layout("PP 2, 1F1B", 2, PP, ("float32", "bf16, compiled")),
    Layout("PP 2, Interleaved1F1B", 2, (*PP, f"{SCHEDULE}Interleaved1F1B"), ("float32", "bf16")),
    Layout("PP 2, ZBVZeroBubble", 2, (*PP, f"{SCHEDULE}ZBVZeroBubble"), ("float32", "bf16")),
    Layout("FSDP 4", 4, (), ("float32", "bf16, compiled", INT8_TENSORWISE)),
    Layout("TP 4", 4, degrees(tp=4), ("float32", "bf16, compiled")),
    Layout("EP 4", 4, degrees(ep=4), ("float32", "bf16"), sparse=True),
    Layout("EP 2 x TP 2", 4, degrees(ep=2, tp=2), ("float32", "bf16"), sparse=True),
    Layout(
        "PP 2 x EP 2, balance by loss", 4, (*degrees(pp=2, ep=2), "--training.local_batch_size=8", LOSS),
        ("float32", "bf16"), sparse=True,
    ),
    Layout("FSDP 2", 2, (), ("float8 delayed", INT8_ROWWISE, INT8_TENSORWISE, MUON)),
    Layout("HSDP 2 x 2", 4, degrees(replicate=2), (MUON,)),
    Layout("TP 2, windows and sinks", 2, (*degrees(tp=2), SINKS), ("float32", "bf16, compiled"), sparse=True),
    Layout("CP 2, windows", 2, (*degrees(cp=2), WINDOWS), ("float32", "bf16, compiled")),
    Layout("EP 2, latent attention and MTP", 2, (*degrees(ep=2), *LATENT), ("float32", "bf16, compiled"), sparse=True),
    Layout("FSDP 2, late", 2, (LATE,), ("float32", TENSORWISE, INT8_TENSORWISE)),
    Layout("EP 2, late", 2, (*degrees(ep=2), LATE), ("float32",), sparse=True),
    Layout("HSDP 2 x 2, late", 4, (*degrees(replicate=2), LATE), ("float32",)),
]  # fmt: skip


def rows(device: str) -> dict[str, tuple[int, tuple[str, ...]]]:
    """The rows of the table: the number of processes and the flags of each."""
    result = {}
    for layout in LAYOUTS:
        for recipe in layout.recipes if device == "cuda" or layout.on_cpu else ():
            flags = (SPARSE if layout.sparse else DENSE, *SIZE, *layout.flags, *RECIPES[recipe])
            if device == "cpu":  # which has nothing to learn from the compiler for CPUs
                flags = tuple(flag for flag in flags if flag != "--training.compile")
            result[f"{layout.name} | {recipe}"] = (layout.processes, flags)
    return result


def compare_layouts(names: list[str], file: Path, device: str) -> None:
    """Runs on every rank: one row after another, in one process group each. Rank 0 writes the results."""
    from torchtitan.config import ConfigManager
    from torchtitan.config.extension import import_user_module
    from torchtitan.engine.model_args import register_models
    from torchtitan.launcher.rank_process import RANK, WORLD_SIZE
    from torchtitan.logging import init_logging
    from torchtitan.parallel import async_tensor
    from torchtitan.tools.layout_comparison import Measured, compare

    init_logging(RANK, WORLD_SIZE, color=False)
    enable, passes = async_tensor.enable_async_tensor_parallel, list[Any]()

    def enable_and_keep(mesh: Any) -> Any:
        passes.append(enable(mesh))
        return passes[-1]

    async_tensor.enable_async_tensor_parallel = enable_and_keep
    known: dict[str, Measured] = {}
    for name in names:
        began = time.perf_counter()
        config = ConfigManager().parse_args(list(rows(device)[name][1]))
        if config.experimental.custom_import:
            import_user_module(config.experimental.custom_import, "experimental.custom_import")
        register_models(config)
        passes.clear()
        try:
            compared = compare(config, full=False, known=known)
        except UserError as error:
            result: dict[str, Any] = {"name": name, "failed": str(error)}
        else:
            if compared is None:
                continue
            worst = {row.quantity: row for row in reversed(compared[2])}  # the first of each quantity is the worst
            result = {
                "name": name,
                "trained": compared[1],
                "failed": "; ".join(f"{row.quantity} {row.name}: {row.cause}" for row in compared[2] if row.cause)[
                    :500
                ],
                "gradients": sum(row.quantity == "gradient" for row in compared[2]),
                **{quantity: (row.error, row.allowed) for quantity, row in worst.items()},
            }
            if passes:
                result["fused"] = [passes[-1].count, passes[-1].count + passes[-1].separate]
        if RANK == 0:
            with file.open("a") as lines:
                lines.write(json.dumps({**result, "seconds": round(time.perf_counter() - began, 1)}) + "\n")


# What happens in the life of a run of two ranks.

SAVING = ("--checkpoint.enable_checkpoint", "--training.deterministic", "--optimizer.lr=1e-3", "--metrics.log_freq=1")
SHAPE = {
    "cuda": (DENSE, "--training.seq_len=256", "--training.local_batch_size=4"),
    "cpu": (DENSE, "--experimental.custom_import=tiny", "--model.name=tiny", "--model.flavor=narrow",
            "--training.seq_len=64", "--training.local_batch_size=2"),
}  # fmt: skip


class Life:
    """Runs of two ranks that something happens to."""

    def __init__(self, device: str, folder: Path, environment: dict[str, Any]) -> None:
        self.device, self.folder, self.environment = device, folder, environment

    @contextmanager
    def run(self, name: str, *flags: str, **environment: Any) -> Iterator[Run]:
        program = (*SHAPE[self.device], *SAVING, into(self.folder / name), *flags)
        with started(*program, processes=2, fresh=self.device == "cuda", **self.environment, **environment) as run:
            yield run

    def finished(self, name: str, *flags: str, **environment: str) -> str:
        with self.run(name, *flags, **environment) as run:
            status, output = run.finish(PATIENCE)
        assert status == 0, output
        return output

    def a_killed_rank_comes_back_bit_for_bit(self) -> None:
        flags = ("--training.steps=12", "--checkpoint.interval=3")
        with self.run("killed", *flags, PET_MAX_RESTARTS="1") as run:
            run.wait_until(lambda: last_step(self.folder / "killed") >= 5)
            pid = run.pid_of_rank(1)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            status, output = run.finish(PATIENCE)
        assert status == 0 and "rank 1 was killed by SIGKILL" in output, output
        self.finished("whole", *flags)
        self.same("killed", "whole", 12)

    def asynchronous_saves_hold_what_plain_ones_do(self) -> None:
        flags = ("--training.steps=6", "--checkpoint.interval=2")
        pinned = {"cuda": "async_with_pinned_mem", "cpu": "async"}[self.device]
        self.finished("pinned", *flags, f"--checkpoint.async_mode={pinned}")
        self.finished("plain", *flags)
        for step in (2, 4, 6):
            self.same("pinned", "plain", step)

    def sigterm_saves_and_the_next_start_goes_on(self) -> None:
        flags = ("--training.steps=10000", "--checkpoint.interval=10000")
        with self.run("stopped", *flags) as run:
            run.wait_until(lambda: last_step(self.folder / "stopped") >= 3)
            run.signal_group(signal.SIGTERM)
            _, output = run.finish(PATIENCE)
        (step,) = checkpoint_steps(self.folder / "stopped")
        assert step >= 3, output
        self.finished("stopped", f"--training.steps={step + 2}")
        assert list(losses(self.folder / "stopped")) == list(range(1, step + 3))

    def a_rank_that_stands_still_is_named(self) -> None:
        with self.run("still", "--training.steps=10000", "--comm.train_timeout_seconds=40") as run:
            run.wait_until(lambda: last_step(self.folder / "still") >= 3)
            pid = run.pid_of_rank(1)
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            run.wait_until(lambda: "no heartbeat from rank 1" in run.output())

    def two_ranks_save_the_gibibytes_they_hold(self) -> None:
        size = {"cuda": "gibibytes", "cpu": "narrow"}[self.device]
        flags = (
            "--experimental.custom_import=tiny",
            "--model.name=tiny",
            f"--model.flavor={size}",
            "--optimizer.lr=1e-30",
        )
        self.finished("seed", *flags, "--checkpoint.create_seed_checkpoint", NGPU="1")
        start = self.folder / "seed" / "checkpoint" / "step-0"
        self.finished("saved", *flags, "--training.steps=1", f"--checkpoint.initial_load_path={start}")
        self.same("seed", "saved", 0, 1)

    def same(self, left: str, right: str, *steps: int) -> None:
        tensors = [tensors_of(self.folder / name, step) for name, step in ((left, steps[0]), (right, steps[-1]))]
        names = [name for name in tensors[0] if name in tensors[1] and (len(steps) == 1 or "optimizer" not in name)]
        assert_equal_bit_for_bit(*({name: each[name] for name in names} for each in tensors))
        if len(steps) == 1:
            assert tensors[0].keys() == tensors[1].keys()


LIFE: dict[str, Callable[[Life], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        Life.a_killed_rank_comes_back_bit_for_bit, Life.asynchronous_saves_hold_what_plain_ones_do,
        Life.sigterm_saves_and_the_next_start_goes_on, Life.a_rank_that_stands_still_is_named,
        Life.two_ranks_save_the_gibibytes_they_hold,
    )
}  # fmt: skip


def sharing(folder: Path) -> dict[str, str]:
    """The environment of ranks that share a GPU, with what was carried of NCCL. Exits if nothing was and torch's NCCL
    is too old."""
    from torchtitan.device import SHARING_NCCL, _nccl_version

    environment = {SHARING: "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "NCCL_NVLS_ENABLE": "0"}
    if (_nccl_version() or 0) >= SHARING_NCCL:
        return environment
    if not CARRIED.exists():
        raise UserError(f"{CARRIED} is missing, and this torch's NCCL lets no ranks share a GPU; run carry_for_gpu.sh.")
    library = folder / "libnccl.so.2"
    if not library.exists():
        library.write_bytes(lzma.decompress(CARRIED.read_bytes()))
    return {**environment, "LD_PRELOAD": str(library)}


class Rows:
    """Runs rows until the time is over, several kinds at once, and keeps what each has shown."""

    def __init__(self, folder: Path, device: str, seconds: float) -> None:
        self.folder, self.device, self.end = folder, device, time.monotonic() + seconds
        self.file, self.began = folder / "rows.jsonl", time.monotonic()
        # A rehearsal's processes are forks of one that has imported torch; libraries for GPUs need fresh interpreters.
        self.environment: dict[str, Any] = sharing(folder) if device == "cuda" else {}

    def done(self) -> dict[str, Any]:
        return {line["name"]: line for line in lines_of(self.file)}

    def write(self, name: str, failed: str, seconds: float) -> None:
        with self.file.open("a") as lines:
            lines.write(json.dumps({"name": name, "failed": failed, "seconds": round(seconds, 1)}) + "\n")

    def layouts(self, names: Sequence[str], processes: int) -> None:
        """Rows of one number of processes, which are started once, and again after a row that fails."""
        while (left := [name for name in names if name not in self.done()]) and time.monotonic() < self.end:
            program = (__file__, json.dumps([left, str(self.file), self.device]))
            with started(command=(*LAUNCHER, *program), processes=processes, **self.environment) as run:
                since, finished = time.monotonic(), len(left)
                while run.process.poll() is None and time.monotonic() < self.end:
                    time.sleep(0.2)
                    if (now := len([name for name in left if name not in self.done()])) < finished:
                        since, finished = time.monotonic(), now
                    if time.monotonic() - since > PATIENCE:
                        break
                output = run.output()
            stuck = next((name for name in left if name not in self.done()), None)
            if stuck is not None and time.monotonic() < self.end:
                self.write(stuck, f"no result: {output[-1500:]}", time.monotonic() - since)

    def lives(self, names: Iterable[str]) -> None:
        for number, name in enumerate(names):
            if time.monotonic() >= self.end:
                return
            began, failed = time.monotonic(), ""
            try:
                LIFE[name](Life(self.device, self.folder / f"life {number}", self.environment))
            except Exception as error:  # the row has failed, and the others go on
                failed = f"{type(error).__name__}: {error}"[-1500:]
            self.write(name, failed, time.monotonic() - began)

    def table(self, names: Iterable[str]) -> str:
        """Markdown; rows that did not run are missing."""
        done, cells = self.done(), list[list[str]]()
        for name in names:
            if name not in done:
                continue
            line, (layout, _, recipe) = done[name], name.partition(" | ")
            errors = [
                f"{line[quantity][0]:.0e} of {line[quantity][1]:.0e}" if quantity in line else ""
                for quantity in ("loss", "norm", "gradient", "weight")
            ]
            fused = " of ".join(map(str, line.get("fused", [])))
            verdict = line["failed"].splitlines()[-1][:80] if line["failed"] else "equal"
            cells.append([layout, recipe, *errors, fused, str(line["seconds"]), verdict])
        columns = ["layout", "recipe", "loss", "gradient norm", "worst gradient", "weights", "fused", "s", "result"]
        return markdown(columns, cells)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="rows with this in their names")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").unlink(missing_ok=True)
    every = rows(options.device)
    names = [name for name in [*every, *LIFE] if options.only in name]
    running = Rows(folder, options.device, options.seconds)
    of_size = {size: [name for name in names if name in every and every[name][0] == size] for size in (2, 4)}
    threads = [threading.Thread(target=running.layouts, args=(of_size[size], size)) for size in of_size]
    threads.append(threading.Thread(target=running.lives, args=([name for name in names if name in LIFE],)))
    paths = (str(ROOT), str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")]))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(paths), **hidden}):
        for thread in threads:
            thread.start()
            if options.device == "cpu":
                thread.join()
        for thread in threads:
            thread.join()
    table = running.table(names)
    (folder / "table.md").write_text(table + "\n")
    done = running.done()
    failed = [name for name in names if name not in done or done[name]["failed"]]
    print(f"{table}\n\n{len(names) - len(failed)} of {len(names)} rows are equal to one rank, or as they should be")
    for name in failed:
        print(f"FAILED {name}: {done[name]['failed'] if name in done else 'no time was left'}")
    return 1 if failed else 0


if __name__ == "__main__":
    if "RANK" in os.environ:
        from torchtitan.launcher.rank_process import rank_process
        from torchtitan.launcher.signals import exit_now

        left, file, device = json.loads(sys.argv[1])
        with rank_process(saves=False):
            compare_layouts(left, Path(file), device)
        exit_now(0)
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"Error: {error}")
