"""Checks the conversion report: counts low-precision GEMMs in the first training step.

torch's profiler does the counting. It sees operations in eager and compiled code, in hooks and in backward threads. The
forward passes of converted layers are marked in its trace, recomputed ones with a different mark. So each layer's count
is exact, and GEMMs of a recomputation cannot stand in for missing ones.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from torchtitan.compat.dispatch import in_backward_pass
from torchtitan.converters.converter import LayerGemms, ModelConverter, ProfilerOp
from torchtitan.converters.formats import EMULATED_BLOCKS
from torchtitan.errors import ConfigError
from torchtitan.logging import logger, silence_profiler
from torchtitan.protocols import Passes

T = TypeVar("T")

FORWARD, RECOMPUTED = "forward pass of ", "recomputed forward pass of "


@contextmanager
def checked_gemms(
    model: nn.Module,
    converters: Sequence[ModelConverter],
    passes: Mapping[str, Passes],
    compiled: bool,
    recomputed: bool = False,
) -> Iterator[None]:
    """Wraps one training step that compiles nothing and checks that the promised low-precision GEMMs run.

    Args:
        converters: of the run, after conversion; those with decisions promise something.
        passes: by path, how often the layers on this rank run in this step.
        compiled: the compiler rounds an operand of several emulated GEMMs once, so they cannot be counted.
        recomputed: activation checkpointing is on. A compiled block recomputes in its backward pass, and the compiler
            drops what is unused, so the expected count there is a range.

    Raises:
        ConfigError: fewer or more GEMMs ran than promised.
    """
    by_op = _promised(converters)
    if not by_op:
        yield
        return
    units = {fqn: _compiled_with(model, fqn) for layers in by_op.values() for fqn, _ in layers if fqn in passes}
    silence_profiler()  # scripts have not called init_logging
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=False)
    with _marked(model, set(units.values())), profiler as recorded:
        yield
    ran = _count(recorded.profiler.kineto_results.events(), {*by_op})
    for op, layers in by_op.items():
        names = " and ".join(dict.fromkeys(layers.values()))
        if compiled and op == EMULATED_BLOCKS:
            logger.info(f"{names}: emulated and compiled, so its low-precision GEMMs cannot be counted")
            continue
        forward: Counter[str] = Counter()  # unit -> GEMMs
        backward = slack = 0
        for fqn, gemms in layers:
            if fqn in passes:
                forward[FORWARD + units[fqn]] += gemms.num_forward * passes[fqn].forward
                backward += gemms.num_backward * passes[fqn].backward
                if recomputed and units[fqn] != fqn:
                    slack += gemms.num_forward * passes[fqn].backward
        counts = {mark: count // op.per_gemm for mark, count in ran[op].items()}
        again = sum(count for mark, count in counts.items() if mark.startswith(RECOMPUTED))
        expected, seen = sum(forward.values()) + backward, sum(counts.values()) - again
        wrong = [mark for mark in forward if counts.get(mark, 0) != forward[mark]]
        if wrong or not 0 <= seen - expected <= slack:
            where = f" ({wrong[0]}: {counts.get(wrong[0], 0)} of {forward[wrong[0]]})" if wrong else ""
            raise ConfigError(
                f"model.converters: {names} should run {expected} low-precision GEMMs in this step, but {seen} "
                f"ran{where}. Something between conversion and training (parallelization, compile) disables low "
                "precision in layers; remove the converter, or the feature combined with it."
            )
        more = again + seen - expected
        logger.info(
            f"{names}: {expected} low-precision GEMMs ran in this step, {expected} expected"
            + (f"; {more} more in recomputation" if more else "")
        )


def _promised(converters: Iterable[ModelConverter]) -> dict[ProfilerOp, dict[tuple[str, LayerGemms], str]]:
    """For each operation, the converted layers whose GEMMs it computes, and what they were converted to."""
    promised: dict[ProfilerOp, dict[tuple[str, LayerGemms], str]] = {}
    for converter in converters:
        for decision in converter.decisions:
            gemms = converter.grouped_gemms if decision.experts else converter.gemms
            if decision.converted and gemms is not None:
                name = f"{decision.converter} {decision.recipe}" + (" (experts)" if decision.experts else "")
                promised.setdefault(gemms.op, {})[decision.fqn, gemms] = name
    return promised


def _compiled_with(model: nn.Module, fqn: str) -> str:
    """Path of the compiled module that contains this layer, since marks inside it would recompile it; the layer's own
    path if there is none."""
    components = fqn.split(".")
    for length in range(len(components)):
        path = ".".join(components[:length])
        if hasattr(vars(model.get_submodule(path)).get("forward"), "_torchdynamo_orig_callable"):
            return path
    return fqn


@contextmanager
def _marked(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """Marks the forward passes of these modules in the profiler's trace."""

    def run_marked(forward: Callable[..., T], path: str, *inputs: object, **more: object) -> T:
        with record_function(f"{RECOMPUTED if in_backward_pass() else FORWARD}{path}"):
            return forward(*inputs, **more)

    with ExitStack() as undo:
        for path in paths:
            module = model.get_submodule(path)
            own, forward = vars(module).get("forward"), module.forward
            module.forward = partial(run_marked, forward, path)
            undo.callback(partial(setattr, module, "forward", own) if own else partial(delattr, module, "forward"))
        yield


def _runs(name: str, op: ProfilerOp) -> bool:
    """Whether an event of this name is the operation, its own kernel, or what the compiler's autotuning
    (TORCHINDUCTOR_MAX_AUTOTUNE) replaced it with: a Triton GEMM, named after all operations that it computes."""
    private = op.operation.removeprefix("aten::_")
    triton_gemm = name.startswith("triton_tem_") and private != op.operation and f"__{private}" in name
    launched = op.kernel != "" and name.startswith(op.kernel)
    return name == op.operation or triton_gemm or launched


def _count(events: Sequence[Any], ops: Iterable[ProfilerOp]) -> dict[ProfilerOp, Counter[str]]:
    """For each operation, how often it ran within each mark; "" for unmarked ones."""
    counts: dict[ProfilerOp, Counter[str]] = {op: Counter() for op in ops}
    threads: dict[int, list[tuple[int, int, str | ProfilerOp]]] = {}
    for event in events:
        name = event.name()
        marks_and_ops: list[str | ProfilerOp] = [name] if name.startswith((FORWARD, RECOMPUTED)) else []
        for op in counts:
            if _runs(name, op) and (not op.input_dtypes or (event.dtypes() and event.dtypes()[0] in op.input_dtypes)):
                marks_and_ops.append(op)
        for mark_or_op in marks_and_ops:
            start = event.start_ns()
            threads.setdefault(event.start_thread_id(), []).append((start, -start - event.duration_ns(), mark_or_op))
    for thread in threads.values():
        around: list[tuple[int, str | ProfilerOp]] = []
        for start, minus_end, inner in sorted(thread, key=lambda entry: entry[:2]):
            while around and around[-1][0] <= start:
                around.pop()
            # Under a dispatch mode (selective checkpointing), an operation appears twice, nested. Count it once; and
            # count a grouped GEMM once, not again for each expert.
            if isinstance(inner, ProfilerOp) and not any(isinstance(outer, ProfilerOp) for _, outer in around):
                counts[inner][next((mark for _, mark in reversed(around) if isinstance(mark, str)), "")] += 1
            around.append((-minus_end, inner))
    return counts
