"""The results of a plan."""

from dataclasses import dataclass, field

from torchtitan.converters import Decision
from torchtitan.tools.plan.devices import PlannedDevice


@dataclass(frozen=True)
class Traffic:
    """One kind of collective over one mesh dimension, per rank and step."""

    dimension: str
    kind: str
    ranks: int  # number of participants
    count: int  # number of collectives
    # Bytes of the full tensors: the output of an all-gather, the input of a reduce-scatter, the larger of both for
    # an all-to-all.
    bytes: int
    # Bytes that a rank's links carry in one direction, at least.
    within_node: int
    between_nodes: int
    seconds: float | None  # lower bound at the stated bandwidths; None if they are unknown


@dataclass(frozen=True)
class RankPlan:
    """One step of the rank of one pipeline stage."""

    rank: int  # in the pipeline
    layers: list[int]  # layers of each of its pipeline stages
    # In bytes.
    parameters: int
    gradients: int
    optimizer: int
    # Bytes of the largest full parameter and of this rank's largest shard, in float32.
    largest_weight: int
    largest_shard: int
    peaks: dict[str, int]  # total bytes, by mode of activation checkpointing
    kept_per_token: dict[str, float]  # activations and buffers among these, in bytes per token of the rank's batch
    flops: float  # GEMMs and attention, including recomputation; causal attention counts half
    flops_8bit: float  # 8-bit GEMMs, counted separately
    traffic: list[Traffic]
    compute_seconds: float | None

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def seconds(self, dimension: str) -> float:
        """Of collectives over a mesh dimension; an unknown duration counts as 0."""
        return sum(line.seconds or 0.0 for line in self.traffic if line.dimension == dimension)


@dataclass(frozen=True)
class ExpectedStep:
    """What a compiled step is expected to take."""

    parts: dict[str, float]  # seconds by part, which add up to the step, at typical rates
    range: tuple[float, float]  # seconds at fast and at slow rates
    mfu: tuple[float, float]  # attention counted in full, and half of it (causal); 0 to 1

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Plan:
    """The content of `plan.json`. Sizes are bytes, bandwidths bytes/s."""

    model: str
    layout: str
    world_size: int
    device: PlannedDevice
    parameters: int
    active_parameters: int  # the part of `parameters` that a token uses
    flops_per_token: float
    tokens_per_step: int
    batch: str
    mode: str  # the mode of activation checkpointing, as configured
    ranks: list[RankPlan]
    step_seconds: float | None  # lower bound for a step; None if bandwidths are unknown
    mfu: float | None  # 0 to 1, at that time; causal attention counts half
    notes: list[str]  # what is simulated, computed and assumed
    # A decision for each linear layer; empty without converters.
    conversion: list[Decision] = field(default_factory=list)
    repeated_layers: float = 0.0  # the part of the layers whose forward pass is repeated, 0 to 1
    # A step's time, by formula; None if the device's rates are unknown or the layout is not modelled.
    expected: ExpectedStep | None = None
    seconds_taken: float = 0.0

    @property
    def peak(self) -> int:
        """Of the rank that needs most memory, in bytes."""
        return max(rank.peaks[self.mode] for rank in self.ranks)

    @property
    def fits(self) -> bool:
        return self.peak <= self.device.memory_bytes
