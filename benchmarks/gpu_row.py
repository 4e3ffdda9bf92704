"""The worker of gpu.py: builds a training step of a given shape and precision, and times it."""

import contextlib
import gc
import itertools
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu_cache import load_cache
from benchmarks.gpu_clock import Samples, find_reader, rates_over
from benchmarks.gpu_links import Links, simulate_links
from benchmarks.gpu_rows import Recipe, Shape
from benchmarks.machine import measure_machine
from benchmarks.model_size import causal
from benchmarks.step_split import PHASES, step_split, time_by_class
from torchtitan.config import JobConfig
from torchtitan.config.system import ActivationCheckpoint, Comm, Parallelism
from torchtitan.config.training import Model, Training
from torchtitan.data import Batch
from torchtitan.device import find_device
from torchtitan.engine.converter_hooks import checked_step
from torchtitan.engine.engine import Engine, build_engine, train_step
from torchtitan.errors import ConfigError
from torchtitan.logging import init_logging, logger
from torchtitan.models import MODELS
from torchtitan.models.args import TransformerArgs
from torchtitan.models.init import init_weights
from torchtitan.parallel.dims import ParallelDims, build_meshes
from torchtitan.parallel.process_group import init_process_group
from torchtitan.parallel.sharded_tensors import local_tensor
from torchtitan.tools.plan.simulation import fake_process_group

WARMUP = 3
LEARNING_RATE = 1e-4
WINDOW = 2.0  # seconds between readings of clock and power, of at least as many steps
SHARE_OF_MEMORY = 0.85  # fraction of the GPU's memory that an estimate may fill
LEFT_BEHIND = 2**30  # bytes that a row may leave allocated before the process is replaced
SMOKE_SIZES = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": 512}


class Bench:
    """One process's GPU, on which rows run one after the other.

    Args:
        smoke: use tiny shapes.
        seq_len: of a row's single sequence.
        steps: number of measured steps.
        ranks: of the group, of which all but this one are simulated.
    """

    def __init__(self, smoke: bool, seq_len: int, steps: int, ranks: int = 1) -> None:
        self.smoke = smoke
        self.seq_len = 64 if smoke else seq_len
        self.steps = steps
        init_logging(0, 1, color=False)
        logger.setLevel("WARNING")
        self.device = find_device(0)
        if self.device.type != "cuda" and not smoke:
            sys.exit("no CUDA device; --smoke runs tiny shapes on a CPU")
        self.links: Links | None = None
        self._end = contextlib.ExitStack()
        if ranks > 1:
            self._end.enter_context(fake_process_group(0, ranks))
            self.links = Links(ranks, self.device)
        else:
            init_process_group(self.device, Comm(), Path(tempfile.gettempdir()))
            self._end.callback(dist.destroy_process_group)
        self.settings = {
            "seq_len": self.seq_len,
            "micro-batch": "1 sequence, or 8 where experts have 4,096 rows",
            "warm-up steps": WARMUP,
            "steps": steps,
            "activation checkpointing": "none",
            "fsdp_reshard_after_forward": "never, unless resharded",
            "optimizer": "AdamW, fused, float32",
        }

    def describe_machine(self) -> dict[str, Any]:
        """Device, versions, GEMM rates, and the limits reported by the driver."""
        machine = measure_machine(sizes=(256,) if self.smoke else ())
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm,memory.total", "--format=csv"]
        limits = ""
        if self.device.type == "cuda" and shutil.which(query[0]):
            limits = subprocess.run(query, stdout=subprocess.PIPE, text=True).stdout.strip()
        return {**asdict(machine), "text": str(machine), "driver": limits}

    def load_cache(self, path: Path) -> str:
        """Gives the compiler what an earlier call saved. Returns a sentence about it."""
        artifacts, sentence = load_cache(path, self.made_with)
        for one in artifacts:
            torch.compiler.load_cache_artifacts(one)
        return sentence

    def save_artifacts(self, path: Path) -> None:
        """Writes what the compiler has made or used in this process, if anything."""
        saved = torch.compiler.save_cache_artifacts()
        if saved is not None:
            unfinished = path.with_name(f"unfinished-{path.name}")
            unfinished.write_bytes(saved[0])
            unfinished.rename(path)

    @property
    def made_with(self) -> dict[str, str]:
        """Where the compiler's cache is valid."""
        return {"torch": torch.__version__, "GPU": self.device.name}

    def layers_that_fit(self, shape: Shape) -> int:
        """All of the model's layers, or as many as fit according to an estimate.

        14 bytes per parameter: float32 weight and two moments, and the gathered bf16 copy. Gradients take 4 more, while
        activations are freed. A layer saves for its backward pass, in bf16 and uncompiled, per token: 6 vectors of dim,
        2 of the queries' width, 4 of the keys', 4 of the feed-forward's, and the float32 queries and keys of the rotary
        embedding.
        """
        args = MODELS.get(shape.family).flavor(shape.flavor)
        assert isinstance(args, TransformerArgs) and args.vocab_size is not None
        if self.smoke:
            return 2
        if shape.ranks > 1:
            return args.n_layers
        heads, kv = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        inner, rows, experts = args.ffn_dim, 0, 1
        if args.moe is not None:
            inner, rows, experts = args.moe.ffn_dim * args.moe.top_k, args.moe.top_k, args.moe.n_experts
        weights = 2 * args.dim * (heads + kv) + 3 * args.dim * inner // max(rows, 1) * experts
        # A row of an expert adds its input and its output.
        kept = 2 * ((6 + 2 * rows) * args.dim + 2 * heads + 4 * kv + 4 * inner) + 4 * 2 * (heads + kv)
        head = args.dim * args.vocab_size * (1 if args.tied_embeddings else 2)
        # Besides the states: the output layer's gradient in float32 and bf16 while the loss sums it, and logits.
        fixed = 18 * head + 8 * args.dim * args.vocab_size + 2 * 2**30
        room = SHARE_OF_MEMORY * self.device.memory_capacity_bytes() - fixed
        a_layer = 14 * weights + max(4 * weights, kept * shape.batch * self.seq_len)
        return max(1, min(args.n_layers, int(room / a_layer)))

    def run(self, shape: Shape, layers: int, recipe: Recipe, traced: bool) -> dict[str, Any]:
        """The table entries of a row."""
        device, full = self.device, MODELS.get(shape.family).flavor(shape.flavor)
        engine, args, batches = self.build(shape, layers, recipe)
        few = min(recipe.micro_batches, 2)  # the first and the last are what differs
        note = ""
        counters["inductor"].clear()
        device.synchronize()
        start = perf_counter()
        first_loss, _ = train_step(engine, batches[:few], LEARNING_RATE)
        device.synchronize()
        first_step = perf_counter() - start
        try:
            with checked_step(engine, few):
                train_step(engine, batches[1:][:few], LEARNING_RATE)
        except ConfigError as error:
            note = str(error)
        train_step(engine, batches[-few:], LEARNING_RATE)
        device.synchronize()
        if self.links is not None:
            self.links.calibrate()
        device.reset_peak_memory()
        seconds, of_host, loss = self.time_steps(engine, batches, recipe.micro_batches)
        memory = device.peak_memory_bytes()
        typical, tokens = statistics.median(seconds), self.seq_len * shape.batch * recipe.micro_batches
        converted = [d for c in engine.converters for d in getattr(c, "decisions", [])]
        result = {
            "all_layers": full.n_layers,
            "compiled": recipe.compile,
            "micro_batches": recipe.micro_batches,
            "rate": tokens / typical,
            "step_seconds": seconds,
            "host_seconds": of_host,
            "flops_per_token": {
                "full": engine.full.flops_per_token,
                "causal": causal(engine.full.flops_per_token, args, self.seq_len),
            },
            "parameters": engine.full.num_parameters,
            "memory": memory,
            "first_step": first_step,
            "compile_seconds": first_step - typical * few / recipe.micro_batches if recipe.compile else None,
            "first_loss_per_token": float(first_loss) / (few * shape.batch * self.seq_len),
            "loss_per_token": loss / tokens,
            "graphs": {
                "cached": counters["inductor"]["fxgraph_cache_hit"],
                "compiled": counters["inductor"]["fxgraph_cache_miss"],
            },
            "converted": f"{sum(d.converted for d in converted)} of {len(converted)}" if converted else "",
            "note": note,
        }
        if self.links is not None:
            asked, taken = self.links.asked_and_taken()
            result["rank"] = {
                "ranks": shape.ranks,
                "parameters": sum(local_tensor(parameter).numel() for parameter in engine.model.parameters()),
                "bytes_per_second_on_links": self.links.rate,
                "last_collectives": {"seconds_asked": asked, "seconds_taken": taken},
            }
        try:  # losing these figures must not lose the row
            result |= self.traced(engine, batches) if traced else {}
            result |= {"sustained": self.sustained(engine, batches, recipe, tokens)} if recipe.sustained else {}
        except Exception as error:
            result["note"] = f"{note} no trace, or not sustained: {error}".strip()
        return result

    def build(self, shape: Shape, layers: int, recipe: Recipe) -> tuple[Engine, Any, list[Batch]]:
        """What trains a row, the sizes of its model, and random batches."""
        config, full = config_of(shape, recipe, self.seq_len), MODELS.get(shape.family).flavor(shape.flavor)
        args = replace(full, n_layers=layers, **(smoke_sizes(full) if self.smoke else {}))
        assert args.vocab_size is not None
        meshes = build_meshes(ParallelDims(dp_shard=shape.ranks), self.device.type, args)
        engine = build_engine(config, meshes, self.device, args, rows_of_step(shape, recipe))
        if self.links is not None:
            simulate_links(engine.model, self.links)
        init_weights(engine.model, engine.model.init_std, config.training.seed)
        torch.manual_seed(0)  # here, because building the engine draws numbers
        batches = [self.batch(args.vocab_size, shape.batch) for _ in range(max(WARMUP, recipe.micro_batches))]
        return engine, args, batches

    def batch(self, vocab_size: int, rows: int) -> Batch:
        tokens = torch.randint(vocab_size, (rows, self.seq_len + 1))
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()
        return Batch(tokens[:, :-1], tokens[:, 1:], None, None)

    def time_steps(
        self, engine: Engine, batches: list[Batch], micro_batches: int, at_least: float = 0.0
    ) -> tuple[list[float], list[float], float]:
        """Seconds of each step, the host's in `train_step`, which does not wait for the device unless too much is
        queued there, and the last loss, summed over tokens.

        Args:
            at_least: seconds for which steps go on; 0: as many as a row has, fewer where they are longer.
        """
        cuda = self.device.type == "cuda"
        marks: list[Any] = []
        of_host: list[float] = []

        def mark() -> None:
            if cuda:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
            else:
                marks.append(perf_counter())

        endless = itertools.cycle(batches)
        steps = max(2, self.steps // micro_batches)
        gc.collect()
        gc.disable()
        start = perf_counter()
        mark()
        while perf_counter() - start < at_least if at_least else len(of_host) < steps:
            chosen = list(itertools.islice(endless, micro_batches))
            before = perf_counter()
            loss, _ = train_step(engine, chosen, LEARNING_RATE)
            of_host.append(perf_counter() - before)
            mark()
        self.device.synchronize()
        gc.enable()
        seconds = [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in itertools.pairwise(marks)]
        return seconds, of_host, float(loss)

    def sustained(self, engine: Engine, batches: list[Batch], recipe: Recipe, tokens: int) -> dict[str, Any]:
        """Steps without a pause: tokens/s, and clock and power meanwhile, about every 2 s. `tokens`: of a step."""
        window = WINDOW / 10 if self.smoke else WINDOW
        with Samples(find_reader() if self.device.type == "cuda" else None, window) as samples:
            seconds, _, loss = self.time_steps(engine, batches, recipe.micro_batches, recipe.sustained)
        return {
            "seconds": sum(seconds),
            "steps": len(seconds),
            "rates": rates_over(seconds, tokens, window),
            "sm_clock_mhz": samples.clocks,
            "power_watts": samples.watts,
            "loss_per_token": loss / tokens,
        }

    def traced(self, engine: Engine, batches: list[Batch]) -> dict[str, Any]:
        """Profiles one more step: its breakdown, and the device time by class of kernel."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            with profile(activities=activities, acc_events=False) as recorded, record_function("ProfilerStep#0"):
                train_step(engine, batches[0:1], LEARNING_RATE)
                self.device.synchronize()
            recorded.export_chrome_trace(str(path))
            split = step_split(path)
            classes, kernels = time_by_class(path)
        return {
            "split": {name: seconds for name, seconds in split.items() if seconds or name in PHASES},
            "device_seconds": classes,
            "kernels": kernels,
        }

    def clean(self) -> bool:
        """Frees what a row allocated. Returns whether the process can run another row."""
        torch.compiler.reset()
        gc.collect()
        if self.device.type != "cuda":
            return True
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated() < LEFT_BEHIND

    def close(self) -> None:
        self._end.close()


def smoke_sizes(args: Any) -> dict[str, Any]:
    """Replaces these values of a model's sizes."""
    moe = {} if args.moe is None else {"moe": replace(args.moe, n_experts=4, top_k=2, ffn_dim=64)}
    return SMOKE_SIZES | moe


def rows_of_step(shape: Shape, recipe: Recipe) -> int:
    """Sequences of an optimizer step, of all ranks."""
    return shape.batch * recipe.micro_batches * shape.ranks


def config_of(shape: Shape, recipe: Recipe, seq_len: int) -> JobConfig:
    """What a row trains."""
    return JobConfig(
        model=Model(name=shape.family, flavor=shape.flavor, converters=[recipe.converter] if recipe.converter else []),
        training=Training(
            seq_len=seq_len,
            local_batch_size=shape.batch,
            global_batch_size=rows_of_step(shape, recipe),
            compile=recipe.compile,
            mixed_precision_param="bfloat16",
        ),
        parallelism=Parallelism(fsdp_reshard_after_forward=shape.reshard),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
    ).changed(**({recipe.converter: recipe.keys} if recipe.converter else {}))
