"""Checks that a model, a batch and a pipeline schedule fit the degrees of parallelism."""

import os

from torchtitan.config import JobConfig
from torchtitan.config.system import Parallelism
from torchtitan.errors import nearest
from torchtitan.logging import logger
from torchtitan.parallel.dims import ParallelDims
from torchtitan.protocols import ModelArgs

Conflicts = dict[str, object]  # a sentence for the user: whether it applies
SCHEDULE = "parallelism.pipeline_parallel_schedule"


def model_conflicts(args: ModelArgs, dims: ParallelDims, config: JobConfig) -> Conflicts:
    """Whether degrees divide the model's sizes; where not, with degrees that do."""
    seq_len, method = config.training.seq_len, config.parallelism.context_parallel_rotate_method
    experts, ranks = None if args.moe is None else args.moe.n_experts, dims.tp * dims.cp
    pieces = ranks * (2 if dims.cp > 1 and method == "allgather" else 1)
    users = [f"{name} parallelism" for name, degree in (("tensor", dims.tp), ("context", dims.cp)) if degree > 1]
    sizes = [
        ("tensor", dims.tp, args.n_heads, "heads"),
        ("tensor", dims.tp, args.n_kv_heads, "key-value heads"),
        ("tensor", dims.tp, getattr(args, "ffn_dim", dims.tp), "feed-forward channels"),
        ("tensor", dims.tp, args.vocab_size or 0, "tokens in the vocabulary"),  # `find_model_args` fills it in
        ("expert", dims.ep, experts or 0, "experts of a layer"),
    ]
    return {
        f"parallelism.{key}_parallel_degree = {degree} does not divide the model's {size} {noun}; these degrees do: "
        f"{', '.join(str(fit) for fit in range(1, min(size, 128) + 1) if size % fit == 0)}.": size % degree
        for key, degree, size, noun in sizes
    } | {
        f"parallelism.expert_parallel_degree = {dims.ep}, but this model has no experts; set it to 1.": dims.ep > 1
        and experts is None,
        f"training.seq_len = {seq_len} cannot be divided into {pieces} equal parts, as needed for "
        f"{' and '.join(users)}; set it to {seq_len // pieces * pieces or pieces} or "
        f"{(seq_len // pieces + 1) * pieces}.": seq_len % pieces,
        f"parallelism.context_parallel_rotate_method = alltoall divides the {args.n_kv_heads} key-value heads over "
        f"tensor x context parallel ranks = {dims.tp} x {dims.cp}, which do not divide them evenly; use allgather.": (
            dims.cp > 1 and method == "alltoall" and (args.n_heads % ranks or args.n_kv_heads % ranks)
        ),
        f"parallelism.pipeline_parallel_degree = {dims.pp}: this model's output layer shares the embedding's weight, "
        "but they would be on different stages; set it to "
        "1.": dims.pp > 1 and args.tied_embeddings,
    }


def schedule_conflicts(parallelism: Parallelism) -> Conflicts:
    """Whether the schedule exists. With a CSV file, torch's names for schedules from files are allowed too."""
    name = parallelism.pipeline_parallel_schedule
    if name == Parallelism.pipeline_parallel_schedule:
        return {}
    from torchtitan.parallel.pipeline import OF_CSV, SCHEDULES  # slow import

    of_csv = name.lower() in map(str.lower, OF_CSV)
    why = " without a pipeline_parallel_schedule_csv" if of_csv else nearest(name, list(SCHEDULES))
    known = name.lower() in map(str.lower, SCHEDULES) or (of_csv and parallelism.pipeline_parallel_schedule_csv)
    return {f"{SCHEDULE}: unknown schedule {name!r}{why}; known: {', '.join(SCHEDULES)}.": not known}


def pipeline_conflicts(layers: int, config: JobConfig) -> Conflicts:
    """Whether stages and schedule fit each other, the model's layers and the batch."""
    from torchtitan.parallel import pipeline

    parallelism, training = config.parallelism, config.training
    schedule, ranks = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    name, key, degree = schedule.lower(), f"{SCHEDULE} = {schedule}", f"parallelism.pipeline_parallel_degree = {ranks}"
    points, csv = parallelism.pipeline_parallel_split_points, parallelism.pipeline_parallel_schedule_csv
    if name not in map(str.lower, [*pipeline.SCHEDULES, *pipeline.OF_CSV]):
        return {}  # reported by `schedule_conflicts`
    if points and parallelism.pipeline_parallel_layers_per_stage:
        return {"parallelism.pipeline_parallel_split_points and _layers_per_stage exclude each other; unset one.": True}
    splits = name in pipeline.SPLITS_BACKWARD
    if splits and config.model.converters:
        logger.warning(
            f"{key} computes the backward GEMMs of low-precision layers twice; 1F1B or Interleaved1F1B are faster with "
            "converters"
        )
    # Evaluation uses the pipeline of validation.
    validates = config.validation.enabled or bool(config.evaluation.tasks)
    stages, several = pipeline.count_stages(parallelism, layers), pipeline.stages_per_rank(schedule) > 1
    numbers = pipeline.split_points(parallelism, layers)
    if name in pipeline.V_SHAPED:
        fits, needed = stages == 2 * ranks, f"two stages per rank, {2 * ranks} in total"
    elif several:
        fits = stages > ranks and stages % ranks == 0
        needed = f"several stages per rank, in total {2 * ranks} or more and a multiple of {ranks}"
    else:
        fits, needed = stages == ranks, f"one stage per rank, {ranks} in total"
    conflicts: Conflicts = {
        f"{key} computes input and weight gradients separately, which compiled blocks do not support; unset "
        "training.compile, or use 1F1B or Interleaved1F1B.": splits and training.compile,
        f"parallelism.pipeline_parallel_split_points must name layers from layers.0 to layers.{layers - 1}, or norm, "
        f"each the first of a stage, in order; not {','.join(points)}.": (
            numbers is None or numbers != sorted({*numbers}) or max(numbers, default=0) > layers
        ),
        f"{SCHEDULE}_csv: there is no file {csv}.": csv and not os.path.isfile(csv),
        f"{degree} does not divide the {stages} stages.": csv and stages % ranks,
        f"{SCHEDULE}_csv is for one number of microbatches: set validation.local_batch_size to "
        f"training.local_batch_size = {training.local_batch_size}.": (
            csv and validates and config.validation.local_batch_size != training.local_batch_size
        ),
        f"{key} needs {needed}, but there are {stages}; change pipeline_parallel_split_points or _layers_per_stage"
        f"{'' if several else ', or use Interleaved1F1B'}.": not csv and not fits,
        f"{degree} with {schedule} makes {stages} stages, but the model has only {layers} layers, an embedding and an "
        "output layer; lower it.": layers + 2 < stages,
    }
    size, rotates = parallelism.pipeline_parallel_microbatch_size, name in ("interleaved1f1b", "interleavedzerobubble")
    least = stages if name in ("1f1b", "dualpipev") else 1
    for section in ("training", "validation") if validates else ("training",):
        rows = getattr(config, section).local_batch_size
        count, rounds, whole = rows // size, max(1, rows // size // ranks), rows % size == 0
        of_size = f"parallelism.pipeline_parallel_microbatch_size = {size}"
        batch = f"{section}.local_batch_size = {rows} makes {count} microbatches of {of_size}"
        conflicts |= {
            f"{section}.local_batch_size = {rows} is not a multiple of {of_size}.": not whole,
            f"{batch}, but {schedule} needs {least} or more, one for each stage; raise it to {least * size}.": (
                whole and count < least
            ),
            f"{batch}, which {schedule} cannot divide into {rounds} rounds of {ranks} ranks; use a multiple of "
            f"{ranks * size}.": whole and several and rotates and count % rounds,
        }
    return conflicts
