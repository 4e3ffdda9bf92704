"""What optimizers with small states share: moments, sharded like the weights, and the noise of stochastic rounding."""

import functools
import hashlib
import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from torchtitan.cache import keep_compiled_code_private
from torchtitan.optim.combined import BaseOptimizer
from torchtitan.optim.state_formats import BlockQuantized, State, StateFormat, block_size
from torchtitan.parallel.sharded_tensors import local_tensor, mesh_dims, sharded_like


class LowBitOptimizer(BaseOptimizer):
    """An optimizer whose moments may be in a smaller format than float32.

    The noise of stochastic rounding depends only on seed, step, parameter and shard, also of resumed runs and replicas.

    On GPUs it is "fused", as `optimizer_step` understands it: if the attribute `found_inf`, a scalar on the device, is
    above 0, a step leaves everything unchanged, without the host knowing.

    With a `quantization`, the moments of vectors, and of matrices whose rows do not divide into blocks
    (`state_formats.block_size`), are still in `state_dtype`.
    """

    moment_names: tuple[str, ...] = ()  # in the state
    signed: ClassVar[set[str]] = set()  # the moments that may be negative

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        state_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        quantization: str = "",  # see `BlockQuantized`
    ) -> None:
        super().__init__(parameters, defaults)
        on_gpu = self.parameters()[0].device.type == "cuda"
        self.defaults.setdefault("fused", on_gpu)  # a CPU reads whether to skip without waiting
        if on_gpu:
            keep_compiled_code_private()
        self._random_bits = torch.compile(random_bits) if on_gpu else random_bits
        self.state_dtype = state_dtype
        self.seed, self.quantization = seed, quantization
        self._numbers = {parameter: number for number, parameter in enumerate(self.parameters())}
        self._formats = self._all_formats()

    def local_state(self, parameter: nn.Parameter) -> State:
        """This rank's shards of the state, sharing its memory."""
        return {name: local_tensor(value) for name, value in self.state_of(parameter).items()}

    def _all_formats(self) -> dict[nn.Parameter, tuple[StateFormat, ...]]:
        """Formats of each parameter's moments."""
        make = functools.cache(self._make_formats)  # shared between equal parameters, so that the compiler sees one
        return {
            parameter: make(local_row_length(parameter) if parameter.ndim > 1 else 0, parameter.device)
            for parameter in self._numbers
        }

    def _make_formats(self, row: int, device: torch.device) -> tuple[StateFormat, ...]:
        """Formats of the moments of a parameter with rows of this length."""
        if not self.quantization or not block_size(row):
            return tuple(StateFormat(name, self.state_dtype) for name in self.moment_names)
        return tuple(
            BlockQuantized(name, self._quantization_of(name), name in self.signed, row, device)
            for name in self.moment_names
        )

    def _quantization_of(self, moment: str) -> str:
        return self.quantization

    def names_of_moments(self, parameter: nn.Parameter) -> list[str]:
        """Of the tensors in the state, without those that are not moments."""
        shape = tuple(parameter.shape)
        return [name for form in self._formats[parameter] for name in form.layout(shape)]

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The state by name, initialized to zeros on first use. It is sharded like the parameter."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for form in self._formats[parameter]:
                full = form.layout(tuple(parameter.shape))
                for name, (shape, dtype) in form.layout(tuple(local_tensor(parameter).shape)).items():
                    zeros = torch.zeros(shape, dtype=dtype, device=parameter.device)
                    state[name] = sharded_like(parameter, zeros, full[name][0])
        return state

    def _count_step(self, parameters: Iterable[nn.Parameter], skip: torch.Tensor | None) -> None:
        """Counts an update of these parameters, unless the device skips it."""
        steps = [self.state_of(parameter)["step"] for parameter in parameters]
        if steps:
            counted = torch.ones_like(steps[0]) if skip is None else (skip <= 0).float()
            torch._foreach_add_(steps, [counted] * len(steps))

    def _noise(
        self, parameter: nn.Parameter, like: torch.Tensor, needs_noise: list[bool], step: torch.Tensor, use: str = ""
    ) -> list[torch.Tensor | None]:
        """16 random bits per number of `like`, for each of several tensors: those that are rounded stochastically.
        `use`: tells apart the noise of one parameter."""
        if not any(needs_noise):
            return [None] * len(needs_noise)
        if self.defaults["fused"]:
            bits = self._random_bits(torch.tensor(self._key(parameter, use=use)), step, like.numel())
            return noise_of(bits.view(like.shape), needs_noise)
        generator = torch.Generator().manual_seed(self._key(parameter, f"{int(step)}:", use))
        draw = functools.partial(torch.randint, 1 << 16, like.shape, generator=generator)
        return [draw(dtype=torch.int32) if needed else None for needed in needs_noise]

    def _key(self, parameter: nn.Parameter, step: str = "", use: str = "") -> int:
        """56 bits for a parameter's noise."""
        key = f"{self.seed}:{step}{self._numbers[parameter]}:{shard_number(parameter)}{use}"
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")


def random_bits(key: torch.Tensor, step: torch.Tensor, count: int) -> torch.Tensor:
    """`count` times 64 random bits, int64, on the device of `step`, a scalar: SplitMix64
    (doi.org/10.1145/2660193.2660195) of a counter. Unlike a generator's, they depend on a number that the host does not
    know. key: int64, a scalar on any device."""
    # range * a + start, as (range + start / a) * a (mod 2^64): of a range times a constant the compiler makes an index
    # of 32 bits, and Triton refuses it.
    start = (step.long() * 0x2545F4914F6CDD1D + key) * -0xE217C1E66C88CC3
    bits = (torch.arange(count, device=step.device) + start) * -0x61C8864680B583EB
    bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return bits ^ (bits >> 31 & (1 << 33) - 1)


def noise_of(bits: torch.Tensor, needs_noise: list[bool]) -> list[torch.Tensor | None]:
    """16 of the 64 bits for each of up to four tensors, int32."""
    return [(bits >> 16 * place & 0xFFFF).int() if needed else None for place, needed in enumerate(needs_noise)]


def local_row_length(parameter: torch.Tensor) -> int:
    """Length of the rows of a rank's shard, even if it has none."""
    sizes = [size for size, _, placement in mesh_dims(parameter) if placement.is_shard(parameter.ndim - 1)]
    return int(parameter.shape[-1]) // math.prod(sizes)


def shard_number(parameter: torch.Tensor) -> tuple[int, ...]:
    """Which shard of a parameter this rank holds; the same on ranks with the same shard."""
    return tuple(0 if placement.is_replicate() else place for _, place, placement in mesh_dims(parameter))
