"""torchao's float8 (0.18): tensors that FSDP or tensor parallelism gathers. Importing this takes about a second.

- `float8_training_tensor`: `Float8TrainingTensor`, `GemmInputRole`, `LinearMMConfig`: an input gathered in float8
- `fsdp_utils.WeightWithDynamicFloat8CastTensor`, its `_tensor` and `_precomputed_scale`: FSDP's all-gather of weights
  in float8
- `float8_utils.amax_to_scale`: scales of weights and of layers with delayed scaling
"""

from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig
from torchao.float8.float8_utils import amax_to_scale
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

__all__ = [
    "Float8TrainingTensor",
    "GemmInputRole",
    "LinearMMConfig",
    "WeightWithDynamicFloat8CastTensor",
    "amax_to_scale",
]
