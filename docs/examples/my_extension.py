"""Your own model, data set and converter, with a section of the configuration: see docs/extension.md."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import nn
from typing_extensions import Doc

from torchtitan.converters import CONVERTERS, ConverterEntry, Target
from torchtitan.converters.filter import matches
from torchtitan.data import DATASETS, Document
from torchtitan.errors import ConfigError
from torchtitan.logging import logger
from torchtitan.models import MODELS, ModelSpec
from torchtitan.models.llama.args import LlamaArgs

# The configuration: experimental.custom_args_module names this module, whose JobConfig is merged into torchtitan's.


@dataclass
class Rounding:
    """Train weights for integers of few bits (converter rounding)."""

    bits: Annotated[int, Ge(2), Le(8), Doc("Bits per rounded weight.")] = 8
    filter_fqns: Annotated[list[str], Doc("Layers not to convert.")] = field(default_factory=lambda: ["output"])


@dataclass
class JobConfig:
    rounding: Rounding = field(default_factory=Rounding)


# The converter: linear layers round their weights in the forward pass, and gradients pass the rounding unchanged.


class RoundedLinear(nn.Linear):
    bits: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = self.weight.detach().abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (self.bits - 1) - 1)
        rounded = (self.weight / step).round() * step
        # The value of `rounded` with the gradient of `weight`: arXiv 1308.3432.
        return nn.functional.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


class RoundingConverter:
    def __init__(self, config: Rounding, target: Target) -> None:
        self.config = config

    def convert(self, model: nn.Module) -> None:
        linears = [fqn for fqn, module in model.named_modules() if type(module) is nn.Linear]
        left_alone = self.config.filter_fqns
        chosen = [fqn for fqn in linears if not any(matches(entry, fqn) for entry in left_alone)]
        if not chosen:
            raise ConfigError("model.converters: rounding would convert no layer; shorten rounding.filter_fqns.")
        for fqn in chosen:
            linear = model.get_submodule(fqn)
            linear.__class__ = RoundedLinear  # the same weight and name, another forward
            linear.bits = self.config.bits  # type: ignore[assignment]
        logger.info(f"rounding ({self.config.bits} bits): converted {len(chosen)} of {len(linears)} linear layers")

    def post_optimizer_hook(self, models: Sequence[nn.Module]) -> None:
        """Nothing: weights are rounded in each forward pass."""


CONVERTERS.register("rounding", ConverterEntry(section="rounding", build=RoundingConverter))


# The data set: documents by index. What the loader needs beyond that (order, packing, resume) it does itself.


class Sums:
    """10,000 documents of ten additions."""

    fingerprint = "sums-1"  # another one where the documents change

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int, /) -> Document:
        numbers = random.Random(index)
        pairs = [(numbers.randint(0, 999), numbers.randint(0, 999)) for _ in range(10)]
        return Document("".join(f"{a} + {b} = {a + b}\n" for a, b in pairs), id=f"sums[{index}]")


DATASETS.register("sums", lambda path, text_column: Sums())


# The model: a new family, with one more size than llama3.

MODELS.register(
    "my_llama",
    ModelSpec(
        {
            **MODELS.get("llama3").flavors,
            "tiny": LlamaArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=192, vocab_size=None),
        }
    ),
)
