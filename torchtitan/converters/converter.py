"""What a converter is: a change to the model before it is parallelized, and hooks for what it keeps between steps; and
what it needs to know about the run."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config.training import Optimizer
from torchtitan.parallel.dims import Style, style_of


@dataclass(frozen=True)
class Target:
    """Where a converted model will run.

    Attributes:
        device_type: "cuda", "cpu", or "meta" if a conversion is only explained, for which any device will do.
        compute_capability: of NVIDIA's GPU, such as (9, 0); None elsewhere.
        amd: the architecture of AMD's GPU, such as "gfx942"; empty elsewhere.
        tokens: M of the GEMMs, unless tensor parallelism divides them: sequences in a micro-batch times tokens of a
            sequence on one device.
        compile: whether transformer blocks are compiled.
        dtype: that unconverted layers compute in.
        sharding: tensor-parallel style by the end of a module's path.
        shards: FSDP ranks that a weight's rows are sharded over.
    """

    device_type: str
    device_name: str = ""
    compute_capability: tuple[int, int] | None = None
    amd: str = ""
    tokens: int = 512
    compile: bool = False
    dtype: torch.dtype = torch.bfloat16
    tensor_parallel: int = 1
    expert_parallel: int = 1
    sharding: Mapping[str, Style] = field(default_factory=dict)
    shards: int = 1
    optimizer: Optimizer = field(default_factory=Optimizer)

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU kernels are used; also true for a conversion that is only explained."""
        return self.device_type != "cuda"

    def per_expert(self, n_experts: int, top_k: int) -> tuple[int, int]:
        """Mean number of rows of an expert, from all ranks that share the experts, and experts on one device."""
        rows = self.tokens // self.tensor_parallel * top_k * self.expert_parallel
        return rows // n_experts, n_experts // self.expert_parallel

    def per_device(self, fqn: str, k: int, n: int) -> tuple[int, int, int]:
        """(M, K, N) of the GEMM that one device computes for a layer of `k` inputs and `n` outputs."""
        m, division = self.tokens, style_of(fqn, self.sharding)
        if division in ("colwise", "gather_colwise"):
            n //= self.tensor_parallel
        elif division == "rowwise":
            k //= self.tensor_parallel
        elif division == "sequence":
            m //= self.tensor_parallel
        return m, k, n


@dataclass(frozen=True)
class Decision:
    """The decision on one linear layer."""

    fqn: str  # its path in the model
    # Sizes of the GEMM on one device, (m, k) x (k, n).
    m: int
    k: int
    n: int
    # The converter that decided.
    converter: str
    recipe: str
    converted: bool
    reason: str  # the rule that applied, as text
    experts: int = 0  # on one device, of a layer that each expert has; m is then their mean. 0 for an ordinary layer


@dataclass(frozen=True)
class ProfilerOp:
    """How low-precision GEMMs appear in the profiler.

    Attributes:
        input_dtypes: if not empty, count only operations whose first input has one of these dtypes, in the profiler's
            spelling.
        per_gemm: number of these operations per GEMM.
        kernel: first part of the name of the Triton kernel that compiled code launches in the operation's place; empty:
            it calls the operation.
    """

    operation: str
    input_dtypes: tuple[str, ...] = ()
    per_gemm: int = 1
    kernel: str = ""


@dataclass(frozen=True)
class LayerGemms:
    """The GEMMs of one converted layer and their known errors.

    Attributes:
        output, grad_input, grad_weight: known relative error (2-norm) against float32 on normally distributed data;
            None for a GEMM that stays in high precision.
    """

    op: ProfilerOp
    output: float | None
    grad_input: float | None
    grad_weight: float | None

    @property
    def num_forward(self) -> int:
        """Number of low-precision GEMMs in a forward pass."""
        return int(self.output is not None)

    @property
    def num_backward(self) -> int:
        return int(self.grad_input is not None) + int(self.grad_weight is not None)


class ModelConverter:
    """A converter, built for one run. Only `convert` is required; a class that is no subclass gets the other methods
    from here.

    Attributes:
        name: of the converter, under which checkpoints have its state.
        decisions: one per linear layer, if it converts these.
        gemms, grouped_gemms: of a converted layer, and of one of all experts.
        warms_up: layers change behaviour after the first step, so recompile then.
        fuses_collectives: asynchronous tensor parallelism can overlap its GEMMs with collectives.
    """

    name: str = ""
    decisions: Sequence[Decision] = ()
    gemms: LayerGemms | None = None
    grouped_gemms: LayerGemms | None = None
    warms_up: bool = False
    fuses_collectives: bool = True

    def convert(self, model: nn.Module) -> None:
        """Changes the full model in place, on the meta device: not yet parallelized, compiled or wrapped. Raises a
        ConfigError if it can convert nothing, or a key of the section does not fit the model."""
        raise NotImplementedError

    def connect(self, mesh: DeviceMesh) -> None:
        """Called once after `convert`, with the mesh (pp, dp_replicate, fsdp, tp)."""

    def post_optimizer_hook(self, models: Sequence[nn.Module]) -> None:
        """Called after each optimizer step, with this rank's parts of the model."""

    def after_step(
        self, models: Sequence[nn.Module], learning_rate: float | None, skip: torch.Tensor | None = None
    ) -> None:
        """`post_optimizer_hook` with what a converter may need to know of the update. `learning_rate` is None if the
        host knows that the update was skipped; `skip` is a scalar on the device, above 0 if it was, or None if it was
        not."""
        self.post_optimizer_hook(models)

    def hidden_nonfinite(self, models: Sequence[nn.Module]) -> torch.Tensor | None:
        """Whether a layer on this rank has hidden nonfinite numbers since the last step, by turning them into finite
        ones that show in neither loss nor gradients: a scalar on the device. None if layers do not do that."""
        return None

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, Any] | None:
        """What a resumed run needs to continue exactly: JSON of this rank's layers, by path. None, on every rank, if
        there is no such state."""
        return None

    def load_state_dict(self, models: Sequence[nn.Module], state: dict[str, Any], gradient_ratio: float = 1.0) -> None:
        """Restores a `state_dict` merged over all ranks; {} if the checkpoint has none. `gradient_ratio` is this run's
        loss scale over the saving run's: gradients inside the backward pass contain the loss scale, which depends on
        the layout and the batch size."""


def with_all_hooks(converter: Any, name: str) -> ModelConverter:
    """The converter, which has all of `ModelConverter` afterwards, and a name."""
    for key, default in vars(ModelConverter).items():
        if not key.startswith("_") and not hasattr(converter, key):
            setattr(converter, key, MethodType(default, converter) if callable(default) else default)
    converter.name = converter.name or name
    result: ModelConverter = converter
    return result


@contextlib.contextmanager
def weight_unchanged(layer: Any) -> Iterator[None]:
    """Within this context, in which its weight must not change, a layer with low precision quantizes it once."""
    if not hasattr(layer, "quantized_weights"):
        yield
        return
    layer.quantized_weights = {}
    try:
        yield
    finally:
        layer.quantized_weights = None
