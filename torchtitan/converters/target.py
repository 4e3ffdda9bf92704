"""What a converter needs to know of the run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Where a converted model will run.

    Attributes:
        device_type: "cuda" or "cpu".
        compute_capability: of a CUDA device, such as (9, 0); None on CPU.
        compile: whether transformer blocks are compiled.
    """

    device_type: str
    compute_capability: tuple[int, int] | None = None
    compile: bool = False
