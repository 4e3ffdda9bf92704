"""What `MODELS` calls gemma3."""

from torchtitan.models.gemma3.args import GEMMA3
from torchtitan.models.gemma3.hf import GEMMA3_NAMING
from torchtitan.models.registry import ModelSpec
from torchtitan.models.transformer import Transformer

FAMILY = ModelSpec(GEMMA3, build=Transformer, hf=GEMMA3_NAMING)
