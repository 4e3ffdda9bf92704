"""What a plan finds."""

from dataclasses import dataclass, field

from torchtitan.converters import Decision
from torchtitan.plan.devices import PlannedDevice


@dataclass(frozen=True)
class Traffic:
    """One kind of collective over one dimension of the mesh, in a step, of one rank.

    Attributes:
        ranks: that take part in each.
        count: collectives.
        bytes: of the whole tensors: what an all-gather makes, what a reduce-scatter is given.
        seconds: at least, at the stated bandwidths; None where they are unknown.
    """

    dimension: str
    kind: str
    ranks: int
    count: int
    bytes: int
    seconds: float | None


@dataclass(frozen=True)
class RankPlan:
    """A rank of one place in the pipeline, in a step.

    Attributes:
        rank: in the pipeline.
        layers: of each of its stages.
        parameters, gradients, optimizer: bytes.
        peaks: bytes of everything, by mode of activation checkpointing.
        flops: of GEMMs and attention, with what is computed again; causal attention counts half.
        flops_8bit: of GEMMs in 8 bits, apart.
    """

    rank: int
    layers: list[int]
    parameters: int
    gradients: int
    optimizer: int
    peaks: dict[str, int]
    flops: float
    flops_8bit: float
    traffic: list[Traffic]
    compute_seconds: float | None

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Plan:
    """What `plan.json` holds. Sizes are bytes, bandwidths bytes/s.

    Attributes:
        mode: of activation checkpointing, as configured.
        step_seconds: at least, for a step; None where bandwidths are unknown.
        mfu: 0 to 1, at that time.
        notes: what is simulated, computed and assumed.
        conversion: a decision for each linear layer; empty without converters.
    """

    model: str
    layout: str
    world_size: int
    device: PlannedDevice
    parameters: int
    flops_per_token: float
    tokens_per_step: int
    batch: str
    mode: str
    ranks: list[RankPlan]
    step_seconds: float | None
    mfu: float | None
    notes: list[str]
    conversion: list[Decision] = field(default_factory=list)
    seconds_taken: float = 0.0
