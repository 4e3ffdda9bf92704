"""The promise of the report, kept: low-precision products are counted in the first training step.

Counting is done by torch's profiler, which sees operations in eager and in compiled code, in hooks and in the threads
of the backward pass.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile

from torchtitan.converters.linear import EMULATED_FLOAT8, LinearConverter, Trace
from torchtitan.errors import ConfigError
from torchtitan.logging import logger


@contextmanager
def checked_products(
    converters: Sequence[object],
    microbatches: int,
    passes: Mapping[str, int],
    on_this_rank: Container[str],
    repeated: bool,
    compiled: bool,
    others: Sequence[object] = (),
) -> Iterator[None]:
    """Around one training step, in which nothing is compiled any more: low-precision products must run as promised.

    Args:
        converters: of the run, after they have converted; others than `LinearConverter` promise nothing.
        microbatches: forward and backward passes in this step on this rank.
        passes: by path, how often a layer runs in a pass where that is not once.
        on_this_rank: paths of the modules that this rank computes.
        repeated: activation checkpointing runs forward products again, a pipeline that splits its backward pass those
            of the backward pass: they may add to the count.
        compiled: the compiler fuses the casts of emulated products, which then cannot be counted.
        others: converters of other phases of the run, of which no product may run.

    Raises:
        ConfigError: fewer products ran than promised, or, where none is repeated, more.
    """
    promised = {other.products.trace: 0 for other in others if isinstance(other, LinearConverter)}
    names: dict[Trace, list[str]] = {}
    for converter in converters:
        if not isinstance(converter, LinearConverter):
            continue
        trace, each = converter.products.trace, converter.products.forward + converter.products.backward
        chosen = [decision.fqn for decision in converter.decisions if decision.converted]
        count = sum(passes.get(fqn, 1) for fqn in chosen if fqn in on_this_rank)
        promised[trace] = promised.get(trace, 0) + microbatches * each * count
        names.setdefault(trace, []).append(f"{converter.name} {converter.recipe}")
    if not promised:
        yield
        return
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=False) as recorded:
        yield
    ran = dict.fromkeys(promised, 0)
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        for trace in promised:
            if event.name() == trace.operation and (
                not trace.input_dtypes or (event.dtypes() and event.dtypes()[0] in trace.input_dtypes)
            ):
                ran[trace] += 1
    for trace, wanted in promised.items():
        if trace not in names:
            # Beside real float8 products there are such casts too.
            if ran[trace] and not (trace == EMULATED_FLOAT8 and names):
                raise ConfigError(
                    f"[[precision.phase]]: {trace.operation} ran {ran[trace]} times in this step, though no converter "
                    "of this phase uses it. Something (compile, a feature combined with it) keeps layers in the "
                    "precision of another phase; do without the phases, or without that feature."
                )
            continue
        what = " and ".join(names[trace])
        if compiled and trace.operation == EMULATED_FLOAT8.operation:
            logger.info(f"{what}: emulated and compiled, so its products cannot be counted")
            continue
        found = ran[trace] // trace.per_product
        if found < wanted or (found > wanted and not repeated):
            raise ConfigError(
                f"model.converters: {what} promised {wanted} low-precision products in this step, and {found} ran. "
                "Something between conversion and training (parallelization, compile) takes layers out of low "
                "precision; remove the converter, or the feature combined with it."
            )
        logger.info(f"{what}: {found} low-precision products ran in this step, {wanted} promised")
