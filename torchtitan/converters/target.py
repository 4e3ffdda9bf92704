"""What a converter needs to know about the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from torchtitan.config.training import Optimizer
from torchtitan.parallel.dims import Style
from torchtitan.parallel.tensor import style_of


@dataclass(frozen=True)
class Target:
    """Where a converted model will run.

    Attributes:
        device_type: "cuda", "cpu", or "meta" if a conversion is only explained, for which any device will do.
        device_name: name of the hardware.
        compute_capability: of a CUDA device, such as (9, 0); None elsewhere.
        tokens: M of the GEMMs: sequences in a micro-batch times tokens of a sequence on one device.
        compile: whether transformer blocks are compiled.
        dtype: that unconverted layers compute in.
        tensor_parallel: the degree.
        expert_parallel: the degree.
        plan: tensor-parallel style by the end of a module's path.
        shards: FSDP ranks that a weight's rows are sharded over.
        optimizer: its configuration section.
    """

    device_type: str
    device_name: str = ""
    compute_capability: tuple[int, int] | None = None
    tokens: int = 512
    compile: bool = False
    dtype: torch.dtype = torch.bfloat16
    tensor_parallel: int = 1
    expert_parallel: int = 1
    plan: Mapping[str, Style] = field(default_factory=dict)
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

    def per_device(self, fqn: str, k: int, n: int) -> tuple[int, int]:
        """(K, N) of the GEMM that one device computes for a layer of `k` inputs and `n` outputs."""
        division = style_of(fqn, self.plan)
        if division == "colwise":
            n //= self.tensor_parallel
        elif division == "rowwise":
            k //= self.tensor_parallel
        return k, n
