"""`--job.plan`: what a run would hold, send and compute, without running it. See docs/plan.md."""

import dataclasses
import functools
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from torchtitan.checks.config_checks import check_run
from torchtitan.config import JobConfig
from torchtitan.device import Device
from torchtitan.engine.async_gemms import exposed_collectives
from torchtitan.engine.conversion import build_converted_model, build_model, decisions_of
from torchtitan.engine.model_args import find_model_args
from torchtitan.engine.stages import Stage, sizes_without_steps
from torchtitan.errors import ConfigError, UserError
from torchtitan.logging import Waiting, logger
from torchtitan.metrics.flops import flops_per_token
from torchtitan.models import MODELS
from torchtitan.models.moe import mixtures
from torchtitan.models.mtp import MTPTransformer, mtp_flops
from torchtitan.parallel.dims import ParallelDims
from torchtitan.parallel.fsdp import require_parts
from torchtitan.parallel.pipeline import find_first_layers, layer_costs
from torchtitan.protocols import Decoder
from torchtitan.run.compute_dtype import decide_compute_dtype
from torchtitan.strict_json import finite
from torchtitan.tools.plan.devices import (
    DEFAULT,
    NODE,
    PlannedDevice,
    extent,
    link_bytes,
    min_seconds,
    named_device,
    this_device,
)
from torchtitan.tools.plan.extrapolation import SimulatedJob, dense_layers, measure
from torchtitan.tools.plan.render import GIB, draw_plan, stages_to_text, to_text
from torchtitan.tools.plan.result import Plan, RankPlan, Traffic
from torchtitan.tools.plan.simulation import Measures, target_on
from torchtitan.tools.plan.step_model import causal_flops, expected_step, repeated_layers
from torchtitan.tools.plan.suggest import suggestions

BLOCKING = ("tp", "cp", "ep")  # dimensions whose collectives computation waits for
LARGEST_ERROR = 1.1  # plan's peak memory relative to a GPU's (tests/gpu)
OVERLAPPING = ("fsdp", "expert_fsdp", "dp_replicate")


def plan(config: JobConfig, device: Device) -> None:
    """Prints what the run would hold and send, and writes plan.json and plan.png to the dump folder. `device` is this
    machine's, used unless another is named."""
    planned, why = planned_device(config, device)
    config = decide_compute_dtype(config, planned.type)
    world_size = config.job.simulate_world_size or max(1, torch.cuda.device_count())
    (dims, stages), plans = check_run(config, world_size, planned.type), []
    for sentence in sizes_without_steps(config, stages):
        logger.warning(sentence)
    for number, stage in enumerate(stages, 1):
        if stage.title:
            logger.info(f"{stage.title}, steps {stage.first_step} to {stage.last_step}")
        with stage.named_in_errors():
            plans.append(run_plan(stage.config, dims, planned, why, "plan" if number == 1 else f"plan_{number}"))
    if len(stages) > 1:
        logger.info(stages_to_text(stages, plans))
        if large := [stage for stage, plan in zip(stages, plans, strict=True) if not plan.fits]:
            raise ConfigError(*(f"{stage.title or 'this batch size'} does not fit into memory." for stage in large))
    if config.job.plan_suggest:
        first, peak = stages[0].config, functools.partial(peak_bytes, device=planned)
        rows = first.training.sequences_per_step(dims.dp)
        logger.info(suggestions(plans[0], find_model_args(first.model), first, rows, peak))


def check_memory_of_stages(all_stages: Sequence[Stage], dims: ParallelDims, device: PlannedDevice) -> None:
    """Raises a ConfigError that names the stages of a run that do not fit into memory, by more than a plan may err."""
    stages = {stage.number: stage for stage in all_stages}  # the last of several batch sizes
    large = []
    with Waiting("memory of the stages", len(stages), "stages") as waiting:
        for stage in stages.values():
            with stage.named_in_errors():
                peak = peak_bytes(decide_compute_dtype(stage.config, device.type), dims, device)
            if peak > LARGEST_ERROR * device.memory_bytes:
                large.append(
                    f"{stage.title} needs about {peak / GIB:,.0f} GiB, and {device.name} has "
                    f"{device.memory_bytes / GIB:,.0f}; lower its training.local_batch_size or training.seq_len, or "
                    'set its activation_checkpoint.mode = "full" (--job.plan shows the memory of each stage).'
                )
            waiting.done += 1
    if large:
        raise ConfigError(*large)


def peak_bytes(config: JobConfig, dims: ParallelDims, device: PlannedDevice) -> float:
    """The peak of the rank that needs most memory."""
    return max(rank["peak",] for rank in measure(make_job(config, dims, device, build_on_meta(config))))


def run_plan(config: JobConfig, dims: ParallelDims, device: PlannedDevice, why: str, name: str) -> Plan:
    """Makes the plan, prints it, and writes `<name>.json` and `<name>.png` to the dump folder."""
    start = time.perf_counter()
    plan = make_plan(config, dims, device, why)
    plan = dataclasses.replace(plan, seconds_taken=time.perf_counter() - start)
    logger.info(to_text(plan))
    file = Path(config.job.dump_folder) / f"{name}.json"
    file.write_text(json.dumps(finite(dataclasses.asdict(plan)), indent=1), encoding="utf-8")
    logger.info(f"wrote {file}")
    try:
        draw_plan(plan, file.with_suffix(".png"))
    except UserError as error:
        logger.warning(str(error))
    else:
        logger.info(f"wrote {file.with_suffix('.png')}")
    return plan


def planned_device(config: JobConfig, device: Device) -> tuple[PlannedDevice, str]:
    """The device to plan for, by `job.simulate_device`, and the reason for the choice. `device` is this machine's; a
    simulated world may consist of others. Raises a ConfigError if there is no such device."""
    name, why = config.job.simulate_device, "job.simulate_device"
    if name not in ("auto", "cpu"):
        return named_device(name), why
    if name == "cpu":
        device = Device("cpu", "CPU", torch.device("cpu"))
    elif device.type == "cuda" or config.job.simulate_world_size is None:
        why = "this machine"
    else:
        why = "assumed, since this machine has no GPU; to change it, set --job.simulate_device"
        return named_device(DEFAULT), why
    dtype = decide_compute_dtype(config, device.type).training.mixed_precision_param
    return this_device(device, getattr(torch, dtype)), why


def make_plan(config: JobConfig, dims: ParallelDims, device: PlannedDevice, why: str = "") -> Plan:
    """The plan of a configuration that `config_checks.check` has accepted; `why` the device was chosen, for a note."""
    training, name = config.training, config.model.name
    args = find_model_args(config.model)
    model, converters = build_converted_model(config, args, target_on(device, config, MODELS.get(name), dims))
    require_parts(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    embedding = 0 if args.tied_embeddings or model.tok_embeddings is None else model.tok_embeddings.weight.numel()
    active = parameters - sum(mixture.unused_parameters for mixture in mixtures(model).values())
    per_token = flops_per_token(active - embedding, args, training.seq_len)
    if isinstance(model, MTPTransformer):
        per_token += mtp_flops(model, training.seq_len)
    job = make_job(config, dims, device, model)
    mode = config.activation_checkpoint.mode
    ranks = rank_plans(job, [mode, "none", "full"])  # compared with the chosen mode
    seconds = _step_seconds(job, ranks)
    rows = job.rows
    tokens = rows * training.seq_len
    causal = causal_flops(per_token, args, training.seq_len)
    mfu = seconds and device.peak_flops and tokens * causal / (dims.world_size * device.peak_flops * seconds)
    plan = Plan(
        model=f"{name} {config.model.flavor}",
        layout=str(dims),
        world_size=dims.world_size,
        device=device,
        parameters=parameters,
        active_parameters=active,
        flops_per_token=per_token,
        tokens_per_step=tokens,
        batch=f"{rows} x {training.seq_len} = {tokens:,} tokens per step "
        f"({training.local_batch_size} x {dims.dp} ranks x {job.grad_accumulation_steps} grad-accumulation steps"
        + (f" of {job.microbatches} micro-batches)" if dims.pp > 1 else ")"),
        mode=mode,
        ranks=ranks,
        step_seconds=seconds,
        mfu=mfu,
        notes=[*_notes(job, why), *filter(None, [exposed_collectives(config, converters)])],
        repeated_layers=repeated_layers(config.activation_checkpoint),
        conversion=decisions_of(converters),
    )
    expected = expected_step(plan, args, config, dims, rows)
    if isinstance(expected, str):
        return dataclasses.replace(plan, notes=[*plan.notes, f"not expected, only bounded: {expected}"])
    note = (
        "expected: work counted by formula, over rates that were measured on such GPUs for seconds "
        "(torchtitan/tools/plan/step_model.py); a run of hours may be at the slow end"
        f"{'' if training.compile else '; with --training.compile, which is off in this configuration'}"
    )
    return dataclasses.replace(plan, expected=expected, notes=[*plan.notes, note])


def build_on_meta(config: JobConfig) -> Decoder:
    """The configured model without memory."""
    with torch.device("meta"):
        model = build_model(config, find_model_args(config.model))
    require_parts(model)
    return model


def make_job(config: JobConfig, dims: ParallelDims, device: PlannedDevice, model: Decoder) -> SimulatedJob:
    """The job of a model (on the meta device), with its stages' layers. Raises a ConfigError if a stage has none."""
    args = find_model_args(config.model)
    layers = [args.n_layers]
    if dims.pp > 1:
        firsts = find_first_layers(config.parallelism, layer_costs(model, config.training.seq_len))
        layers = [end - first for first, end in zip(firsts, [*firsts[1:], args.n_layers], strict=True)]
        if 0 in layers:
            raise ConfigError(
                "job.plan cannot simulate a stage without layers (only the embedding or the output layer); use fewer "
                "stages: lower parallelism.pipeline_parallel_degree, or change pipeline_parallel_schedule."
            )
    return SimulatedJob(config, dims, args, layers, alike=layers_alike(model, dense_layers(args)), device=device)


def layers_alike(model: Decoder, dense: int) -> bool:
    """Whether the first, `dense` layers all have the same modules with the same sizes, and the other layers too."""
    forms = [
        tuple(
            (name, type(module).__name__, tuple(parameter.shape for parameter in module.parameters(recurse=False)))
            for name, module in layer.named_modules()
        )
        for layer in model.layers.values()
    ]
    return len(set(forms[:dense])) <= 1 and len(set(forms[dense:])) <= 1


def rank_plans(job: SimulatedJob, modes: Iterable[str]) -> list[RankPlan]:
    """What the ranks of a job hold and send with the first of these modes of activation checkpointing, and their peaks
    with each."""
    jobs = {
        mode: dataclasses.replace(job, config=job.config.changed(activation_checkpoint={"mode": mode}))
        for mode in dict.fromkeys(modes)
    }
    with Waiting("plan", sum(len(job.simulated_ranks()) for job in jobs.values()), "simulations") as waiting:
        measured = {mode: measure(job, waiting) for mode, job in jobs.items()}
    return [
        _rank_plan(rank, job, {mode: of_ranks[rank] for mode, of_ranks in measured.items()})
        for rank in range(job.dims.pp)
    ]


def _rank_plan(rank: int, job: SimulatedJob, by_mode: dict[str, Measures]) -> RankPlan:
    measures = next(iter(by_mode.values()))
    peak_flops = job.device.peak_flops
    traffic = []
    for (quantity, *collective), count in measures.items():
        if quantity == "count":
            dimension, operation = collective
            size = round(measures["bytes", dimension, operation])
            ranks, stride = extent(dimension, job.dims)
            within, between = link_bytes(operation, size, ranks, stride)
            seconds = min_seconds(within, between, job.device)
            moved = size, round(within), round(between)
            traffic.append(Traffic(dimension, operation, ranks, round(count), *moved, seconds))
    parameters, gradients, optimizer = (round(measures[name,]) for name in ("parameters", "gradients", "optimizer"))
    peaks = {mode: round(of_mode["peak",]) for mode, of_mode in by_mode.items()}
    training = job.config.training
    tokens = training.local_batch_size * training.seq_len / job.dims.cp
    return RankPlan(
        rank,
        [job.layers[stage] for stage in job.own_stages(rank)],
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        largest_weight=round(measures["largest weight",]),
        largest_shard=round(measures["largest shard",]),
        peaks=peaks,
        kept_per_token={mode: (peak - parameters - gradients - optimizer) / tokens for mode, peak in peaks.items()},
        flops=measures["flops",],
        flops_8bit=measures["flops_8bit",],
        traffic=sorted(traffic, key=lambda line: (line.dimension, line.kind)),
        # Tensor cores multiply 8-bit numbers at twice the rate of bf16 (their data sheets).
        compute_seconds=(measures["flops",] + measures["flops_8bit",] / 2) / peak_flops if peak_flops else None,
    )


def _step_seconds(job: SimulatedJob, ranks: list[RankPlan]) -> float | None:
    """A lower bound: the slowest rank's computation plus its blocking collectives, or its overlapping collectives if
    these take longer; plus the time to fill and drain the pipeline."""
    totals = []
    for rank in ranks:
        if rank.compute_seconds is None or any(line.seconds is None for line in rank.traffic):
            return None
        waited = rank.compute_seconds + sum(map(rank.seconds, BLOCKING))
        if job.is_single_stage_schedule and job.dims.pp > 1:
            waited *= (job.microbatches + job.dims.pp - 1) / job.microbatches
        totals.append(max(waited, sum(map(rank.seconds, OVERLAPPING)), rank.seconds("pp")))
    return max(totals)


def _notes(job: SimulatedJob, why: str) -> list[str]:
    config, machine, of_gpus = job.config, "", ""
    if job.device.type == "cuda":
        machine, of_gpus = f"; {NODE} devices per machine", "the CUDA context, NCCL buffers (1 to 3 GiB), "
    notes = [
        f"device: {job.device.name}{f' ({why})' if why else ''}{machine}",
        "simulated: the trainer's own code builds the model and takes a step, with fake tensors and a fake process "
        "group; the step is one with a report (so it includes the all-reduce of the loss)",
        _what_is_simulated(job),
        f"not counted: workspace of kernels, {of_gpus}fragmentation",
        "lower bound: GEMMs at the device's peak, half the FLOPs of full attention, blocking tensor-, context- and "
        "expert-parallel collectives, overlapped FSDP collectives, pipeline fill and drain",
    ]
    if job.dims.ep > 1:
        notes.append(
            f"experts: the planned rank gets {config.job.simulate_expert_load:g} times as many rows of tokens as it "
            "sends (--job.simulate_expert_load); 1 is a balanced load"
        )
    if job.device.type == "cuda":
        notes.append(
            "attention as on a GPU: saves q, k, v, output and log-sum-exp; norms save their input. A run on a CPU "
            "saves more (--job.simulate_device=cpu)"
        )
    if config.training.compile:
        notes.append("simulated without compile: compiled blocks save less")
    if config.training.enable_cpu_offload:
        notes.append("parameters, gradients and optimizer state are in CPU memory, but the peak includes them")
    return notes


def _what_is_simulated(job: SimulatedJob) -> str:
    probes = job.simulated_ranks()
    layers = sorted({count for probe in probes for count in probe.layers})
    shares = [f"{' and '.join(map(str, layers))} of {'+'.join(map(str, sorted(set(job.layers))))} layers per stage"]
    if job.dims.pp > 1:
        ranks = dict.fromkeys(f"{probe.rank} of {probe.ranks}" for probe in probes)
        microbatches = sorted({probe.microbatches for probe in probes})
        shares.append(f"pipeline ranks {', '.join(ranks)}")
        shares.append(f"{' and '.join(map(str, microbatches))} of {job.microbatches} micro-batches")
    shares.append(f"{job.simulated_accumulation_steps} of {job.grad_accumulation_steps} grad-accumulation steps")
    return f"simulated: {'; '.join(shares)}. The rest is extrapolated from these, exactly"
