"""Whether asynchronous tensor parallelism overlaps the GEMMs of converted layers."""

from collections.abc import Sequence

from torchtitan.config import JobConfig
from torchtitan.converters import ModelConverter


def exposed_collectives(config: JobConfig, converters: Sequence[ModelConverter]) -> str:
    """A sentence that names the converters whose GEMMs asynchronous tensor parallelism cannot overlap; "" if there are
    none."""
    if not (config.parallelism.enable_async_tensor_parallel and config.parallelism.tensor_parallel_degree > 1):
        return ""
    exposed = [
        f"{converter.name} {converter.decisions[0].recipe}"
        for converter in converters
        if converter.decisions and not converter.fuses_collectives
    ]
    if not exposed:
        return ""
    return (
        f"parallelism.enable_async_tensor_parallel: torch cannot overlap the GEMMs of {' and '.join(exposed)} with "
        "collectives, so those of converted layers are waited for; bf16 and float8 tensorwise, rowwise and "
        "rowwise_with_gw_hp overlap"
    )
