"""torchao's optimizers (0.18): the code tables of their 8-bit and 4-bit formats.

- `optim.quant_utils.create_dynamic_map`: the values that quantized moments can represent
"""

from torchao.optim.quant_utils import create_dynamic_map

__all__ = ["create_dynamic_map"]
