"""Checks that a model, a batch and a pipeline schedule fit the degrees of parallelism."""

import os

from torchtitan.config.system import Parallelism
from torchtitan.config.training import Training, Validation
from torchtitan.errors import nearest
from torchtitan.parallel.dims import ParallelDims
from torchtitan.protocols import ModelArgs

PREFIX = "parallelism."


def check_model(
    args: ModelArgs, dims: ParallelDims, parallelism: Parallelism, seq_len: int, problems: list[str]
) -> None:
    """Appends a sentence to `problems` for each size that a degree does not divide, with degrees that do.

    Args:
        args: model sizes: `n_heads`, `n_kv_heads`, `n_layers`, `vocab_size`, and optionally `ffn_dim`.
    """
    kv_heads = args.n_kv_heads
    if dims.tp > 1:
        assert args.vocab_size is not None  # `find_model_args` fills it in
        sizes = {
            "heads": args.n_heads,
            "key-value heads": kv_heads,
            "feed-forward channels": getattr(args, "ffn_dim", dims.tp),
            "tokens in the vocabulary": args.vocab_size,
        }
        for what, size in sizes.items():
            _check_divides("tensor_parallel_degree", dims.tp, size, what, problems)
    if args.moe is not None:
        _check_divides("expert_parallel_degree", dims.ep, args.moe.n_experts, "experts of a layer", problems)
    elif dims.ep > 1:
        problems.append(f"{PREFIX}expert_parallel_degree = {dims.ep}, but this model has no experts; set it to 1.")
    pieces = dims.tp * dims.cp * (2 if dims.cp > 1 and parallelism.context_parallel_rotate_method == "allgather" else 1)
    if seq_len % pieces:
        why = {
            "tensor parallelism": dims.tp > 1,
            "context parallelism": dims.cp > 1,
        }
        problems.append(
            f"training.seq_len = {seq_len} cannot be divided into {pieces} equal parts, as needed for "
            f"{' and '.join(name for name, on in why.items() if on)}; "
            f"set it to {seq_len // pieces * pieces or pieces} or {(seq_len // pieces + 1) * pieces}."
        )
    all_to_all = dims.cp > 1 and parallelism.context_parallel_rotate_method == "alltoall"
    if all_to_all and (args.n_heads % (dims.tp * dims.cp) or kv_heads % (dims.tp * dims.cp)):
        problems.append(
            f"{PREFIX}context_parallel_rotate_method = alltoall divides the {kv_heads} key-value heads over tensor x "
            f"context parallel ranks = {dims.tp} x {dims.cp}, which do not divide them evenly; use allgather."
        )
    if dims.pp > 1 and args.tied_embeddings:
        problems.append(
            f"{PREFIX}pipeline_parallel_degree = {dims.pp}: this model's output layer shares the embedding's weight, "
            "but they would be on different stages; set it to 1."
        )


def _check_divides(key: str, degree: int, size: int, what: str, problems: list[str]) -> None:
    if size % degree:
        fitting = [str(value) for value in range(1, min(size, 128) + 1) if size % value == 0]
        problems.append(
            f"{PREFIX}{key} = {degree} does not divide the model's {size} {what}; these degrees do: "
            f"{', '.join(fitting)}."
        )


def check_schedule(parallelism: Parallelism, problems: list[str]) -> None:
    """Checks that the schedule exists. With a CSV file, torch's names for schedules from files are allowed too."""
    from torchtitan.parallel.pipeline import OF_CSV, SCHEDULES  # slow import

    name = parallelism.pipeline_parallel_schedule
    known = [*SCHEDULES, *OF_CSV] if parallelism.pipeline_parallel_schedule_csv else SCHEDULES
    if name.lower() not in map(str.lower, known):
        of_csv = name.lower() in map(str.lower, OF_CSV)
        why = " without a pipeline_parallel_schedule_csv" if of_csv else nearest(name, list(SCHEDULES))
        problems.append(
            f"{PREFIX}pipeline_parallel_schedule: unknown schedule {name!r}{why}; known: {', '.join(SCHEDULES)}."
        )


def check_pipeline(
    layers: int,
    dims: ParallelDims,
    parallelism: Parallelism,
    training: Training,
    validation: Validation,
    problems: list[str],
) -> None:
    """Checks that stages and schedule fit each other, the model's layers and the batch."""
    from torchtitan.parallel.pipeline import (
        OF_CSV,
        SCHEDULES,
        V_SHAPED,
        count_stages,
        split_points,
        splits_backward,
        stages_per_rank,
    )

    name = parallelism.pipeline_parallel_schedule
    key = f"{PREFIX}pipeline_parallel_schedule"
    if name.lower() not in map(str.lower, [*SCHEDULES, *OF_CSV]):
        return  # reported by `check_schedule`
    per_rank = stages_per_rank(name)
    if training.compile and splits_backward(parallelism):
        problems.append(
            f"{key} = {name} computes input and weight gradients separately, which compiled blocks do not support; "
            "unset training.compile, or use 1F1B or Interleaved1F1B."
        )
    points = parallelism.pipeline_parallel_split_points
    each = parallelism.pipeline_parallel_layers_per_stage
    if points and each:
        problems.append(f"{PREFIX}pipeline_parallel_split_points and _layers_per_stage exclude each other; unset one.")
        return
    numbers = split_points(parallelism, layers)
    if numbers is None or numbers != sorted(set(numbers)) or not all(number <= layers for number in numbers):
        problems.append(
            f"{PREFIX}pipeline_parallel_split_points must name layers from layers.0 to layers.{layers - 1}, or norm, "
            f"each the first of a stage, in order; not {','.join(points)}."
        )
    stages = count_stages(parallelism, layers)
    csv = parallelism.pipeline_parallel_schedule_csv
    if csv:
        if not os.path.isfile(csv):
            problems.append(f"{PREFIX}pipeline_parallel_schedule_csv: there is no file {csv}.")
        if stages % dims.pp:
            problems.append(f"{PREFIX}pipeline_parallel_degree = {dims.pp} does not divide the {stages} stages.")
        if validation.enabled and validation.local_batch_size != training.local_batch_size:
            problems.append(
                f"{PREFIX}pipeline_parallel_schedule_csv is for one number of microbatches: set "
                f"validation.local_batch_size to training.local_batch_size = {training.local_batch_size}."
            )
    elif per_rank == 1 and stages != dims.pp:
        problems.append(
            f"{key} = {name} needs one stage per rank, {dims.pp} in total, but there are {stages}; change "
            "pipeline_parallel_split_points or _layers_per_stage, or use Interleaved1F1B."
        )
    elif per_rank > 1 and (stages % dims.pp or stages == dims.pp):
        problems.append(
            f"{key} = {name} needs several stages per rank, in total {2 * dims.pp} or more and a multiple of "
            f"{dims.pp}, but there are {stages}; change pipeline_parallel_split_points or _layers_per_stage."
        )
    elif name.lower() in V_SHAPED and stages != 2 * dims.pp:
        problems.append(
            f"{key} = {name} needs two stages per rank, {2 * dims.pp} in total, but there are {stages}; "
            "change pipeline_parallel_split_points or _layers_per_stage."
        )
    if layers + 2 < stages:
        problems.append(
            f"{PREFIX}pipeline_parallel_degree = {dims.pp} with {name} makes {stages} stages, but the model has only "
            f"{layers} layers, an embedding and an output layer; lower it."
        )
    _check_microbatches(name, per_rank, stages, dims, parallelism, training, validation, problems)


def _check_microbatches(
    name: str,
    per_rank: int,
    stages: int,
    dims: ParallelDims,
    parallelism: Parallelism,
    training: Training,
    validation: Validation,
    problems: list[str],
) -> None:
    size = parallelism.pipeline_parallel_microbatch_size
    batches = {"training.local_batch_size": training.local_batch_size}
    if validation.enabled:
        batches["validation.local_batch_size"] = validation.local_batch_size
    for key, rows in batches.items():
        if rows % size:
            problems.append(f"{key} = {rows} is not a multiple of {PREFIX}pipeline_parallel_microbatch_size = {size}.")
            continue
        count = rows // size
        what = f"{key} = {rows} makes {count} microbatches of {PREFIX}pipeline_parallel_microbatch_size = {size}"
        least = {"1f1b": stages, "dualpipev": stages}.get(name.lower(), 1)
        rounds = max(1, count // dims.pp)
        if count < least:
            problems.append(
                f"{what}, but {name} needs {least} or more, one for each stage; raise it to {least * size}."
            )
        elif per_rank > 1 and name.lower() in ("interleaved1f1b", "interleavedzerobubble") and count % rounds:
            problems.append(
                f"{what}, which {name} cannot divide into {rounds} rounds of {dims.pp} ranks; use a multiple of "
                f"{dims.pp * size}."
            )
