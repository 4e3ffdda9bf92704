"""Trains a few steps under a layout and in one process, and compares every parameter's gradient.

A wrong gradient under parallelism shows in no loss curve: a norm whose gradient is not summed over tensor-parallel
ranks still trains. One process computes the same step without any collective, so it is the reference. Weights start
from the same numbers under every layout (`models.init`), and batches do not depend on the number of ranks.

In float32 the two agree to 1e-5. In bfloat16 or 8 bits they differ by rounding, and how much depends on the model: a
router may send a token elsewhere. So one process trains twice, the second time sequence by sequence, from weights that
differ by up to half the spacing of bfloat16 numbers. The deviation between these two tells what rounding does.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.checkpoint.state_dict import model_tensors
from torchtitan.checks.config_checks import check
from torchtitan.config import JobConfig
from torchtitan.config.output import Checkpoint, Metrics, Profiling
from torchtitan.config.system import ActivationCheckpoint, Parallelism
from torchtitan.config.training import Evaluation, Training, Validation
from torchtitan.device import find_device
from torchtitan.engine.engine import train_step
from torchtitan.engine.forward import sum_over_ranks
from torchtitan.engine.model_args import find_model_args, register_models, sizes_of
from torchtitan.engine.stages import parse_stages
from torchtitan.errors import ConfigError, counted
from torchtitan.logging import init_logging, logger
from torchtitan.models import MODELS
from torchtitan.optim.skip_step import Skip
from torchtitan.parallel.dims import ParallelDims, find_dims
from torchtitan.parallel.object_collectives import all_gather_object
from torchtitan.parallel.sharded_tensors import local_tensor
from torchtitan.protocols import ModelArgs
from torchtitan.strict_json import finite
from torchtitan.tools.temporary_trainer import temporary_trainer
from torchtitan.world import world

STEPS = 3  # an optimizer's state matters from the second on
LEARNING_RATE = 1e-2  # so that updates show in weights of any size; the run's may be too small
FLOAT32_TOLERANCE = 1e-5  # docs/measurements/parallelism.md: the worst of a hundred layouts is below it
# Bound for weights: Adam's update of an element whose gradient is nearly zero is its sign (2e-4 seen).
FLOAT32_UPDATES = 1e-3
COPIES = 1e-6  # ranks' copies of a tensor come out of the same collective
BF16_ROUNDING = 2.0**-9  # half the spacing of bfloat16 numbers, relative
SPREADS = 4.0  # a deviation may be this many times that between the runs of one process: a layout rounds more often
# Largest bound that rounding can set: a gradient averaged over two ranks once too often is off by 0.5.
MOST_ALLOWED = 0.3
SMALL = "small"  # name of the flavor that a check trains
LEAST_WIDTH, LEAST_LENGTH = 256, 128
MOST_ROWS = 10  # parameters in the table
TITLES = {"loss": "loss", "norm": "gradient norm", "gradient": "gradient of {name}", "weight": "{name} after 3 steps"}


class Measured(NamedTuple):
    """A short training."""

    # (quantity, name) as in `Comparison`. Losses and norms: (STEPS,) float64; gradients: of step 1, not clipped;
    # weights: after the last step.
    tensors: dict[tuple[str, str], Tensor]
    dtype: str  # the type of GEMMs without a converter
    exact: bool  # whether all GEMMs and sums over ranks are in float32
    torn: set[tuple[str, str]]  # keys of what is not the same on all ranks that hold it


class Comparison(NamedTuple):
    """A tensor under the layout, compared with the same tensor of one process."""

    quantity: str  # "loss", "norm" (of all gradients), "gradient" or "weight"
    name: str  # the parameter's name; empty for numbers of the whole model
    error: float  # 2-norm of the difference, divided by the 2-norm of the reference
    allowed: float  # largest error that rounding explains
    cosine: float  # between the two
    ratio: float  # the ratio of their norms
    cause: str  # what an error of this kind means; empty if it is within what is allowed


def compare_and_print(config: JobConfig, full: bool, output: Path | None) -> int:
    """Runs on every rank; rank 0 prints, and writes all comparisons to `output`. Returns 1 if something deviates."""
    place = world()
    init_logging(place.rank, place.size, color=not config.metrics.disable_color_printing)
    register_models(config)
    compared = compare(config, full)
    if compared is None:
        return 0
    dims, trained, rows = compared
    wrong = [row for row in rows if row.cause]
    print(f"{dims}: {trained}\n")
    print(f"{'':58}{'error':>9}{'allowed':>9}{'cosine':>8}{'ratio':>7}")
    worst = list({row.quantity: row for row in reversed(rows)}.values())[::-1]
    for row in [*worst, *(row for row in wrong if row not in worst)][: len(worst) + MOST_ROWS]:
        cause = f"  {row.cause}" if row.cause else ""
        title = TITLES[row.quantity].format(name=row.name)
        print(f"{title:58}{row.error:9.1e}{row.allowed:9.1e}{row.cosine:8.3f}{row.ratio:7.3f}{cause}")
    print(f"\n{f'{len(wrong)} of {len(rows)} deviate' if wrong else 'equal to one process'}")
    if output:
        content = {"layout": str(dims), "trained": trained, "comparisons": [row._asdict() for row in rows]}
        try:
            output.write_text(json.dumps(finite(content), indent=1))
        except OSError as error:
            raise ConfigError(f"--output: {output} cannot be written ({error.strerror}).") from None
    return 1 if wrong else 0


def compare(
    config: JobConfig, full: bool, known: dict[str, Measured] | None = None
) -> tuple[ParallelDims, str, list[Comparison]] | None:
    """Checks the layout of a configuration, with all its sizes if `full`. Collective.

    Args:
        known: keeps what one process has measured, for further layouts of the same training.

    Returns:
        On rank 0 the degrees, what was trained, and all comparisons. None on other ranks.

    Raises:
        ConfigError: the configuration cannot be run on this number of processes.
    """
    rank, local_rank, world_size, _ = world()
    device = find_device(local_rank)
    with tempfile.TemporaryDirectory() as folder:
        config = _training_alone(config, folder)
        config = config if full else _small(config, world_size, device.type)
        dims = check(config, world_size, device.type)
    if world_size == 1:
        logger.warning(
            "one process: only compilation, recomputation and accumulation are checked; to check a layout, set NGPU to "
            "the number of its processes"
        )
    rows, local = config.training.sequences_per_step(dims.dp), config.training.local_batch_size
    references = []
    if rank == 0:  # the others wait for it in `init_process_group`
        known = {} if known is None else known
        with _alone():
            at_once = max(local, 2 - rows % 2) if full else rows
            logger.info(f"1 of 3: one process, {at_once} sequences at once")
            try:
                references.append(_of_one_process(config, known, rows, at_once, compiles=False))
            except ConfigError as error:
                remedy = ("leave out --full, with which one process must hold the model.",) if full else ()
                raise ConfigError(*error.problems, *remedy) from None
            logger.info("2 of 3: one process, sequence by sequence")
            compiles = config.training.compile
            references.append(_of_one_process(config, known, rows, 1, compiles, rounds=True))
    logger.info(f"3 of 3: {dims}")
    measured = _measure(config)
    if rank > 0:
        return None
    args = find_model_args(config.model)
    precision = ", ".join([measured.dtype, *config.model.converters])
    trained = (
        f"{config.model.name}, {counted(args.n_layers, 'layer')}, width {args.dim}, {rows} x {config.training.seq_len} "
        f"tokens, {precision}, {config.optimizer.name}"
    )
    return dims, trained, _comparisons([*references, measured], dims)


def _training_alone(config: JobConfig, folder: str) -> JobConfig:
    """The training of a configuration on the built-in text, with nothing around it."""
    stages = parse_stages(config)
    if len(stages) > 1:
        logger.info(f"of the run's {stages[-1].number} stages, the first is checked")
    config = dataclasses.replace(
        stages[0].config,
        validation=Validation(),
        evaluation=Evaluation(),
        metrics=Metrics(),
        profiling=Profiling(),
        checkpoint=Checkpoint(),
    )
    data: dict[str, Any] = {"dataset": Training.dataset, "dataset_path": None, "dataset_mixture": []}
    always = {"max_norm": math.inf, "skip_nonfinite": False, "skip_grad_norm_outliers": None}
    return config.changed(
        job={"dump_folder": folder, "plan": False},
        model={"tokenizer_path": None},
        training={"steps": STEPS, **data, **always},
        lr_scheduler={"warmup_steps": 0},
        optimizer={"early_step_in_backward": False},
        comm={"init_timeout_seconds": max(config.comm.init_timeout_seconds, 3600)},
    )


def _small(config: JobConfig, world_size: int, device_type: str) -> JobConfig:
    """The smallest model and batch of the configuration's kind that its degrees of parallelism divide."""
    training = config.training
    dims = find_dims(config.parallelism, world_size, [])
    if dims is None:
        check(config, world_size, device_type)
        raise AssertionError("check raises what find_dims has found")
    accumulates = config.training.sequences_per_step(dims.dp) > training.local_batch_size * dims.dp
    microbatches = config.parallelism.pipeline_parallel_microbatch_size * dims.pp
    batches = [2] if dims.pp == 1 else [microbatches, 2 * microbatches, training.local_batch_size]
    filters = {
        name: {"filter_fqns": [entry for entry in section.filter_fqns if not entry.startswith("auto_")]}
        for name, section in vars(config).items()
        if hasattr(section, "filter_fqns")  # those rules leave small layers in bfloat16
    }
    spec, full = MODELS.get(config.model.name), sizes_of(config.model)
    for args, local in itertools.product((*_sizes(full, dims), full), batches):
        MODELS.replace(config.model.name, dataclasses.replace(spec, flavors={**spec.flavors, SMALL: args}))
        batch = {
            "seq_len": min(training.seq_len, LEAST_LENGTH * dims.cp * dims.tp),
            "local_batch_size": local,
            "global_batch_size": local * dims.dp * (1 + accumulates),
        }
        small = config.changed(model={"flavor": SMALL, "dim": None, "n_layers": None}, training=batch, **filters)
        with contextlib.suppress(ConfigError), _quiet():
            check(small, world_size, device_type)
            return small
    return config  # check says why


def _sizes(args: ModelArgs, dims: ParallelDims) -> Iterator[ModelArgs]:
    """Smaller sizes, ascending. Heads keep their width, and share key-value heads as before."""
    fields = {field.name for field in dataclasses.fields(args)}
    small: dict[str, Any] = {"vocab_size": None}
    if args.moe is not None:
        groups = args.moe.n_groups
        experts = max(2 * dims.ep, 2 * groups * math.ceil(args.moe.top_k / args.moe.top_groups))
        experts = groups * math.ceil(experts / groups)
        dense = min(args.moe.n_dense_layers, 1)
        small["moe"] = dataclasses.replace(args.moe, n_experts=min(args.moe.n_experts, experts), n_dense_layers=dense)
    for layers in sorted({min(layers, args.n_layers) for layers in (2, 2 * dims.pp, 4 * dims.pp, args.n_layers)}):
        for heads in range(1, args.n_kv_heads + 1) if {"n_kv_heads", "ffn_dim"} <= fields else ():
            share = Fraction(heads, args.n_kv_heads)
            sizes = {name: share * getattr(args, name) for name in ("dim", "n_heads", "n_kv_heads", "ffn_dim")}
            if sizes["dim"] >= LEAST_WIDTH and all(size.denominator == 1 for size in sizes.values()):
                whole = {name: int(size) for name, size in sizes.items()}
                yield dataclasses.replace(args, n_layers=layers, **whole, **small)
        yield dataclasses.replace(args, n_layers=layers)


def _of_one_process(
    config: JobConfig, known: dict[str, Measured], rows: int, at_once: int, compiles: bool, rounds: bool = False
) -> Measured:
    batch = {"local_batch_size": at_once, "global_batch_size": rows}
    config = dataclasses.replace(
        config, parallelism=Parallelism(), activation_checkpoint=ActivationCheckpoint(mode="none")
    ).changed(training={**batch, "compile": compiles, "enable_cpu_offload": False})
    key = repr((config.changed(job={"dump_folder": ""}), find_model_args(config.model), rounds))
    if key not in known:
        known[key] = _measure(config, rounds)
    return known[key]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """This process knows of no others."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


@contextlib.contextmanager
def _quiet(level: int = logging.WARNING) -> Iterator[None]:
    """Without log lines up to this level, except those that say how far something has come (`Waiting`)."""

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno > level or record.threadName == "progress"

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def _measure(config: JobConfig, rounds: bool = False) -> Measured:
    """Trains. Collective. `rounds`: unless GEMMs are in float32, each weight first changes at random, by as much as
    rounding it to bfloat16 may."""
    torch.compiler.reset()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # gathers are slow, and rare
    with _quiet(logging.INFO), temporary_trainer(config) as trainer:
        engine = trainer.engine
        dtype = trainer.config.training.mixed_precision_param
        rounded = config.model.converters or config.training.mixed_precision_reduce != "float32"
        exact = dtype == "float32" and not rounded
        if rounds and not exact:
            with torch.no_grad():
                for weight in map(local_tensor, engine.model.parameters()):
                    weight *= 1 + BF16_ROUNDING * (2 * torch.rand_like(weight) - 1)
        losses, norms = [], []
        own: dict[tuple[str, str], Tensor] = {}  # this rank's tensors

        def record_gradients(step: int, *_: Any) -> Skip:
            """Stands in for the guard that may skip an update."""
            for name, parameter in engine.model.named_parameters() if step == 1 else ():
                if parameter.grad is not None:
                    plain = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
                    own["gradient", plain] = _full(parameter.grad)
            return Skip()

        for step in range(1, STEPS + 1):
            loss, norm = train_step(engine, trainer.loader.next(), LEARNING_RATE, record_gradients, step)
            losses.append(sum_over_ranks(engine, loss).double().cpu())
            norms.append(norm.double().cpu())
        # Not buffers: the bias that evens out the load of experts moves by a sign, which rounding may change.
        tensors = model_tensors(engine.model)
        own |= {("weight", name): _full(tensors[name]) for _, name in own}
        stage, *others = engine.meshes.mesh.get_coordinate() or [0]
        sketches = {key: _sketch(tensor) for key, tensor in own.items()}
        torn, first = set(), dict[tuple[int, str, str], Tensor]()
        every = {("loss", ""): torch.stack(losses), ("norm", ""): torch.stack(norms)}
        # The tensors of one rank of each stage, and of all others enough to see that they have the same.
        shown = {} if any(others) else own
        for its_stage, its_sketches, its_tensors in all_gather_object((stage, sketches, shown)):
            every |= its_tensors
            for key, sketch in its_sketches.items():
                expected = first.setdefault((its_stage, *key), sketch)
                if not _are_copies(sketch, expected):
                    torn.add(key)
        return Measured(every, dtype, exact, torn)


def _sketch(tensor: Tensor) -> Tensor:
    """(2,) float64: two numbers by which copies of a tensor are compared."""
    flat = tensor.flatten().double()
    return torch.stack([flat.norm(), flat @ torch.linspace(-1, 1, len(flat), dtype=torch.float64)])


def _are_copies(sketch: Tensor, expected: Tensor) -> bool:
    return bool((sketch - expected).norm() <= COPIES * expected.norm())


def _full(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", torch.float32, copy=True)


def _comparisons(runs: Sequence[Measured], dims: ParallelDims) -> list[Comparison]:
    """Every number of the last run, under the layout, beside one process's; the worst of each quantity first."""
    result: list[Comparison] = []
    expected, again, parallel = (run.tensors for run in runs)
    spreads = {key: _error(tensor, again[key]) for key, tensor in expected.items()}
    torn, exact = runs[-1].torn, runs[-1].exact
    for quantity in ("loss", "norm", "gradient", "weight"):  # weights last: a gradient may have spoiled them
        # Two runs may agree in a single number, the norm, by chance.
        usual_in = "gradient" if quantity == "norm" else quantity
        usual = statistics.median(spread for key, spread in spreads.items() if key[0] == usual_in)
        least = 2 * BF16_ROUNDING
        if exact:
            least = FLOAT32_UPDATES if quantity == "weight" else FLOAT32_TOLERANCE
        rows = []
        for key in [key for key in expected if key[0] == quantity]:
            allowed = min(max(least, SPREADS * max(spreads[key], usual)), MOST_ALLOWED)
            row = _comparison(*key, expected[key], parallel.get(key), allowed, dims)
            if key in torn:
                cause = ": ".join(filter(None, ("ranks hold different copies", row.cause)))
                row = row._replace(error=math.inf, cause=cause)
            rows.append(row)
        if quantity == "weight":
            follows = any(row.cause for row in result)
            cause = "follows from the gradients" if follows else "the optimizer's update is another one"
            rows = [row._replace(cause=cause) if row.cause and math.isfinite(row.error) else row for row in rows]
        result += sorted(rows, key=lambda row: -row.error / row.allowed)
    return result


def _comparison(
    quantity: str, name: str, expected: Tensor, actual: Tensor | None, allowed: float, dims: ParallelDims
) -> Comparison:
    if actual is None or actual.shape != expected.shape:
        cause = "the layout has no such tensor, or one of another shape"
        return Comparison(quantity, name, math.inf, allowed, 0.0, 0.0, cause)
    error = _error(expected, actual)
    ratio = float(actual.norm() / expected.norm().clamp(min=1e-30))
    cosine = float(torch.dot(actual.flatten(), expected.flatten()) / (actual.norm() * expected.norm()).clamp(min=1e-30))
    cause = "" if error <= allowed else _cause(cosine, ratio, dims)
    return Comparison(quantity, name, error, allowed, cosine, ratio, cause)


def _error(expected: Tensor, actual: Tensor) -> float:
    error = float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf


def _cause(cosine: float, ratio: float, dims: ParallelDims) -> str:
    """What a deviation means, in words."""
    if not math.isfinite(ratio):
        return "not finite"
    sizes = {name: getattr(dims, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep")}
    sizes = {name: size for name, size in sizes.items() if size > 1}

    def axes_of(degree: float) -> str:
        return " or ".join(name for name, size in sizes.items() if abs(size / degree - 1) < 0.1)

    if cosine > 0.99:
        if abs(ratio - 1) < 0.02:
            return "more than rounding does"
        if where := axes_of(ratio):
            return f"summed twice over {where}, or not averaged over it"
        if where := axes_of(1 / max(ratio, 1e-9)):
            return f"averaged over {where} once too often, or not summed over it"
        return f"scaled by {ratio:.3g}"
    if ratio < 0.9:
        axes = axes_of(ratio**-2) or " or ".join(sizes) or "stages"
        return f"a part is missing: not summed over {axes}, or a micro-batch is lost"
    return "wrong values, such as another rank's"
