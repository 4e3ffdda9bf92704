"""Checks that a pipeline schedule fits a model, a batch and the other degrees: a sentence for each mistake."""

import os
from collections.abc import Iterator

from torchtitan.config.system import Parallelism
from torchtitan.config.training import Training, Validation
from torchtitan.errors import nearest
from torchtitan.logging import logger
from torchtitan.parallel import pipeline

SCHEDULE = "parallelism.pipeline_parallel_schedule"


def schedule_conflicts(parallelism: Parallelism) -> Iterator[str]:
    """Whether the schedule exists. With a CSV file, torch's names for schedules from files are allowed too."""
    name = parallelism.pipeline_parallel_schedule
    of_csv = name.lower() in map(str.lower, pipeline.OF_CSV)
    known = name.lower() in map(str.lower, pipeline.SCHEDULES) or (
        of_csv and parallelism.pipeline_parallel_schedule_csv
    )
    if not known:
        why = " without a pipeline_parallel_schedule_csv" if of_csv else nearest(name, list(pipeline.SCHEDULES))
        yield f"{SCHEDULE}: unknown schedule {name!r}{why}; known: {', '.join(pipeline.SCHEDULES)}."


def pipeline_conflicts(
    layers: int, parallelism: Parallelism, training: Training, validation: Validation | None, converted: bool
) -> Iterator[str]:
    """Whether stages and schedule fit each other, the model's layers and the batches. `validation` is None if the run
    does not validate; `converted`: whether it has converters."""
    schedule, ranks = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    name, key, degree = schedule.lower(), f"{SCHEDULE} = {schedule}", f"parallelism.pipeline_parallel_degree = {ranks}"
    points, csv = parallelism.pipeline_parallel_split_points, parallelism.pipeline_parallel_schedule_csv
    if name not in map(str.lower, [*pipeline.SCHEDULES, *pipeline.OF_CSV]):
        return  # reported by `schedule_conflicts`
    if points and parallelism.pipeline_parallel_layers_per_stage:
        yield "parallelism.pipeline_parallel_split_points and _layers_per_stage exclude each other; unset one."
        return
    splits = name in pipeline.SPLITS_BACKWARD
    if splits and converted:
        logger.warning(
            f"{key} computes the backward GEMMs of low-precision layers twice; 1F1B or Interleaved1F1B are faster with "
            "converters"
        )
    stages, several = pipeline.count_stages(parallelism, layers), pipeline.stages_per_rank(schedule) > 1
    numbers = pipeline.split_points(parallelism, layers)
    if name in pipeline.V_SHAPED:
        fits, needed = stages == 2 * ranks, f"two stages per rank, {2 * ranks} in total"
    elif several:
        fits = stages > ranks and stages % ranks == 0
        needed = f"several stages per rank, in total {2 * ranks} or more and a multiple of {ranks}"
    else:
        fits, needed = stages == ranks, f"one stage per rank, {ranks} in total"
    if splits and training.compile:
        yield (
            f"{key} computes input and weight gradients separately, which compiled blocks do not support; unset "
            "training.compile, or use 1F1B or Interleaved1F1B."
        )
    if numbers is None or numbers != sorted({*numbers}) or max(numbers, default=0) > layers:
        yield (
            f"parallelism.pipeline_parallel_split_points must name layers from layers.0 to layers.{layers - 1}, or "
            f"norm, each the first of a stage, in order; not {','.join(points)}."
        )
    if csv and not os.path.isfile(csv):
        yield f"{SCHEDULE}_csv: there is no file {csv}."
    if csv and stages % ranks:
        yield f"{degree} does not divide the {stages} stages."
    if csv and validation and validation.local_batch_size != training.local_batch_size:
        yield (
            f"{SCHEDULE}_csv is for one number of microbatches: set validation.local_batch_size to "
            f"training.local_batch_size = {training.local_batch_size}."
        )
    if not csv and not fits:
        yield (
            f"{key} needs {needed}, but there are {stages}; change pipeline_parallel_split_points or _layers_per_stage"
            f"{'' if several else ', or use Interleaved1F1B'}."
        )
    if layers + 2 < stages:
        yield (
            f"{degree} with {schedule} makes {stages} stages, but the model has only {layers} layers, an embedding and "
            "an output layer; lower it."
        )
    size, rotates = parallelism.pipeline_parallel_microbatch_size, name in ("interleaved1f1b", "interleavedzerobubble")
    least = stages if name in ("1f1b", "dualpipev") else 1
    for section, batch in (("training", training), ("validation", validation)):
        if batch is None:
            continue
        rows = batch.local_batch_size
        count, rounds = rows // size, max(1, rows // size // ranks)
        of_size = f"parallelism.pipeline_parallel_microbatch_size = {size}"
        makes = f"{section}.local_batch_size = {rows} makes {count} microbatches of {of_size}"
        if rows % size:
            yield f"{section}.local_batch_size = {rows} is not a multiple of {of_size}."
            continue
        if count < least:
            yield f"{makes}, but {schedule} needs {least} or more, one for each stage; raise it to {least * size}."
        if several and rotates and count % rounds:
            yield (
                f"{makes}, which {schedule} cannot divide into {rounds} rounds of {ranks} ranks; use a multiple of "
                f"{ranks * size}."
            )
