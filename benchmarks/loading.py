"""Peak memory of a rank while it loads published weights, beside what the plan says.

python -m benchmarks loading [--processes 8]

Two models, in sparse safetensors files of bf16 zeros, which take no space on disk: Llama 3.2 1B, loaded by a run of
that many processes (the rank with the highest peak counts), and Llama 3 70B, of which rank 0 of 256 loads its shards
without the others. The peak is memory of the process's own above that before loading. The pages of the files that it
read are apart: the system takes them back when it needs memory.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.runs import finish
from benchmarks.tables import markdown
from torchtitan.checkpoint.state_dict import model_tensors
from torchtitan.checks.config_checks import check, check_run
from torchtitan.config import ConfigManager
from torchtitan.config.manager import JobConfig
from torchtitan.device import find_device
from torchtitan.engine.engine import build_engine
from torchtitan.engine.model_args import find_model_args
from torchtitan.models import MODELS
from torchtitan.parallel.dims import build_meshes
from torchtitan.parallel.sharded_tensors import local_tensor
from torchtitan.run.build_trainer import build_trainer
from torchtitan.run.trainer import Trainer
from torchtitan.tools.interchange.exchange import load_weights
from torchtitan.tools.interchange.model import PublishedModel, published
from torchtitan.tools.interchange.sources import INDEX, find_source
from torchtitan.tools.plan.simulation import fake_process_group

MIB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")
WEIGHTS_PER_FILE = 24
LARGE, WORLD = "llama3 70B", 256
SMALL = "llama3.2 1B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments, flags = parser.parse_known_args()
    if arguments.worker or arguments.alone:
        (load_alone if arguments.alone else load_in_a_run)(flags)
        return
    rows = []
    for model, processes in ((SMALL, arguments.processes), (LARGE, 1)):
        family, flavor = model.split()
        with tempfile.TemporaryDirectory() as folder:
            write_sparse(Path(folder) / "published", published_form(family, flavor))
            flags = [f"--model.name={family}", f"--model.flavor={flavor}", f"--job.dump_folder={folder}/run"]
            flags += [
                f"--checkpoint.initial_load_path={folder}/published",
                "--training.seq_len=128",
                "--training.mixed_precision_param=bfloat16",
            ]
            start = ["-m", "torchtitan.launch"] if processes > 1 else []
            mode = "--worker" if processes > 1 else "--alone"
            lines = finish([sys.executable, *start, __file__, mode, *flags], processes).splitlines()
        highest = max((json.loads(line) for line in lines if line.startswith('{"peak"')), key=lambda rank: rank["peak"])
        world = processes if processes > 1 else WORLD
        sizes = [highest[key] for key in ("model", "shards", "largest", "planned", "peak", "mapped")]
        rows.append([model, str(world), *(f"{size / MIB:,.0f}" for size in sizes)])
    columns = ["model, MiB in float32", "ranks", "all", "shards", "largest shard", "planned", "peak", "file pages"]
    print(markdown(columns, rows))


def published_form(family: str, flavor: str) -> PublishedModel:
    spec = MODELS.get(family)
    form = published(spec, spec.flavor(flavor), None, 8192)
    assert form is not None
    return form


def write_sparse(folder: Path, model: PublishedModel) -> None:
    """A folder as `transformers` writes it, whose weights are holes in the files."""
    folder.mkdir(parents=True)
    names = list(model.shapes)
    index = {}
    for number in range(0, len(names), WEIGHTS_PER_FILE):
        header, end = {}, 0
        for name in names[number : number + WEIGHTS_PER_FILE]:
            size = 2 * prod(model.shapes[name])
            published_name = model.naming.name(name)
            header[published_name] = {"dtype": "BF16", "shape": model.shapes[name], "data_offsets": [end, end + size]}
            index[published_name] = f"model-{number}.safetensors"
            end += size
        text = json.dumps(header).encode()
        with open(folder / f"model-{number}.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    for name, content in model.files(torch.bfloat16).items():
        (folder / name).write_bytes(content)


def parse(flags: list[str]) -> JobConfig:
    return ConfigManager().parse_args(flags)


def load_in_a_run(flags: list[str]) -> None:
    """Starts a run like any other, and measures while it loads."""
    config = parse(flags)
    device = find_device(int(os.environ["LOCAL_RANK"]))
    dims, stages = check_run(config, int(os.environ["WORLD_SIZE"]), device.type)
    load = Trainer.load_checkpoint

    def measured(trainer: Trainer) -> None:
        line = report(trainer.engine.model, lambda: load(trainer))
        os.write(1, f"{line}\n".encode())  # in one piece, since ranks share the pipe
        dist.barrier()

    Trainer.load_checkpoint = measured  # type: ignore[assignment, method-assign]
    with build_trainer(config, dims, stages, device):
        pass


def load_alone(flags: list[str]) -> None:
    """What rank 0 of a large world does, without the others."""
    config = parse(flags)
    device = find_device(0)
    with fake_process_group(0, WORLD):
        dims = check(config, WORLD, device.type)
        args = find_model_args(config.model, None)
        engine = build_engine(
            config,
            build_meshes(dims, device.type, args),
            device,
            args,
            config.training.sequences_per_step(dims.dp),
            allocate=lambda model, *_: model.to_empty(
                device=device.torch_device
            ),  # no check: one rank is here, not all
        )
        form = published_form(config.model.name, config.model.flavor)

        def load() -> None:
            source = find_source(Path(config.checkpoint.initial_load_path or ""), form.naming)
            assert source is not None
            replace(form, args=args).check(source)
            load_weights(model_tensors(engine.model), source)

        print(report(engine.model, load))


def report(model: torch.nn.Module, load: Callable[[], None]) -> str:
    """Loads, and returns a line of JSON: sizes in bytes. `planned` is the plan's: the shards and the largest one."""
    weights = list(model.parameters())
    shards = [4 * local_tensor(weight).numel() for weight in weights]
    with Watch() as watch:
        load()
    sizes = {
        "peak": watch.own,
        "mapped": watch.mapped,
        "model": 4 * sum(weight.numel() for weight in weights),
        "shards": sum(shards),
        "largest": max(shards),
        "planned": sum(shards) + max(shards),
    }
    return json.dumps(sizes)


class Watch:
    """While it is active, looks at this process's memory every millisecond.

    Attributes:
        own: the most bytes of its own that it had, above those at the start.
        mapped: the most bytes of file pages in its address space, above those at the start.
    """

    def __enter__(self) -> "Watch":
        self.own, self.mapped = 0, 0
        self._before = memory()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        over = False
        while not over:
            over = self._over.wait(0.001)  # a last look after the end
            own, mapped = memory()
            self.own = max(self.own, own - self._before[0])
            self.mapped = max(self.mapped, mapped - self._before[1])


def memory() -> tuple[int, int]:
    """Bytes of this process's own memory, and of the file pages that it maps."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * PAGE, shared * PAGE


if __name__ == "__main__":
    main()
