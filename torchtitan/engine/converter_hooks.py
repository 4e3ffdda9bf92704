"""State of the converters in checkpoints, and the proof that their GEMMs run."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torchtitan.engine.conversion import steps_that_compile
from torchtitan.engine.engine import Engine
from torchtitan.parallel.object_collectives import all_gather_object
from torchtitan.protocols import IN_BLOCKS, Passes
from torchtitan.registry import deferred

_checked_gemms: Callable[..., contextlib.AbstractContextManager[None]]
_checked_gemms = deferred("torchtitan.converters.gemm_check:checked_gemms")


def converter_state(engine: Engine) -> dict[str, Any]:
    """State that converters keep between steps, by converter name: JSON, for the full model. Collective."""
    own = {converter.name: converter.state_dict([engine.model]) for converter in engine.converters}
    dims, mesh = engine.meshes.dims, engine.meshes.mesh
    gathers = dims.pp > 1 and any(state is not None for state in own.values())
    stages: list[Any] = all_gather_object(own, mesh.get_group("pp")) if gathers else [own]
    return {
        name: {fqn: layer for stage in stages for fqn, layer in stage[name].items()}
        for name, state in own.items()
        if state is not None
    }


def load_converter_state(engine: Engine, state: Mapping[str, Any], loss_scale: float) -> None:
    """Loads `converter_state` from a checkpoint with this `loss_scale`, except for converters that the run lacks."""
    ratio = engine.loss_scale / loss_scale
    for converter in engine.converters:
        converter.load_state_dict([engine.model], state.get(converter.name, {}), ratio)


def steps_to_check(engine: Engine, first_step: int) -> set[int]:
    """The steps in which to count low-precision GEMMs: the first of the run, and of each stage, that compiles nothing.
    The GEMMs of a compiler's tracing would be counted too."""
    compiled = engine.config.training.compile
    if any(converter.decisions for converter in engine.converters):
        return {first_step + steps_that_compile(engine.converters, compiled)}
    return set()


def checked_step(engine: Engine, microbatches: int, check: bool = True) -> contextlib.AbstractContextManager[None]:
    """Wraps a training step; with `check`, one that compiles nothing, and must run all promised low-precision GEMMs."""
    if not check:
        return contextlib.nullcontext()
    return _checked_gemms(
        engine.model,
        engine.converters,
        _passes_of_layers(engine, microbatches),
        compiled=engine.config.training.compile,
        recomputed=engine.config.activation_checkpoint.mode != "none",
    )


def _passes_of_layers(engine: Engine, microbatches: int) -> dict[str, Passes]:
    """How often each module on this rank runs per step."""
    by_name = {}
    for number, stage in engine.pipeline_stages.items():
        passes = Passes(1, 1) if engine.pipeline is None else engine.pipeline.passes(number)
        for name, _ in stage.named_modules():
            calls = engine.full.calls.get(name, 1)
            # The output layer, which is outside the blocks, gets its gradients from the loss in the forward pass.
            backward = passes.backward if name.startswith(IN_BLOCKS) else passes.forward
            by_name[name] = Passes(microbatches * passes.forward * calls, microbatches * backward * calls)
    return by_name
