"""AdamW with fewer bytes a parameter: moments in bfloat16 or in codes, weights in bfloat16.

torchao has such optimizers, and this one computes as they do. It is here because theirs keep blocks that cross the
borders of rows, so that a checkpoint fits other ranks only where blocks happen to end with shards; because their
compiled update of DTensors ends a process on CPU; and because they round by the one random generator of the process,
which is in no checkpoint and may differ between ranks with the same weights.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.cache import keep_compiled_code_private
from torchtitan.compat.optimizers import recompile_limit
from torchtitan.optim.state_formats import BlockQuantized, State, StateFormat, Unquantized, block_size, store
from torchtitan.parallel.sharded_tensors import local_tensor, sharded_like


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) whose moments are held in a smaller format than float32.

    Parameters in bfloat16 are rounded stochastically after the update, which is computed in float32. The noise depends
    on seed, step, parameter and shard alone: a resumed run draws it again, and copies of a shard draw the same.

    Args:
        state_dtype: of moments that are no codes: all of them with `codes = ""`, else those of vectors and of matrices
            whose rows have no blocks (`state_formats.block_size`).
        root: hold the square root of the second moment.
        seed: of stochastic rounding.

    Attributes:
        quantization: "8bit", "4bit" or "fp8"; "" for none.
    """

    quantization = ""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        state_dtype: torch.dtype = torch.float32,
        root: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.state_dtype = state_dtype
        self.root = root
        self.seed = seed
        all_parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._numbers = {parameter: number for number, parameter in enumerate(all_parameters)}
        make = functools.cache(self._make_formats)  # one for all alike, so that the compiler sees the same one
        self._formats = {
            parameter: make(local_row_length(parameter) if parameter.ndim > 1 else 0, parameter.device)
            for parameter in all_parameters
        }
        self._update: Callable[..., None] = update
        if all_parameters and all_parameters[0].device.type == "cuda":
            keep_compiled_code_private()
            self._update = torch.compile(update, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """An update of all parameters that have a gradient."""
        for group in self.param_groups:
            lr = torch.tensor(group["lr"], dtype=torch.float32)  # as a number it would be compiled anew each step
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, lr, group)

    def _step(self, parameter: nn.Parameter, grad: torch.Tensor, lr: torch.Tensor, group: dict[str, Any]) -> None:
        state, formats = self.state_of(parameter), self._formats[parameter]
        state["step"] += 1
        moments = self._parts(parameter)
        weight = local_tensor(parameter)
        dtypes = [weight.dtype, *(moment[""].dtype if "" in moment else None for moment in moments)]
        noise = self._noise(parameter, weight, [dtype == torch.bfloat16 for dtype in dtypes], state["step"])
        with recompile_limit(64):  # one for each shape
            self._update(
                weight,
                local_tensor(grad),
                state["step"],
                lr,
                formats,
                moments,
                noise,
                self.root,
                *group["betas"],
                group["eps"],
                group["weight_decay"],
            )

    @torch.no_grad()
    def moments(self, parameter: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second moment of what this rank holds, as the next update will see them; float32."""
        pairs = zip(self._formats[parameter], self._parts(parameter), strict=True)
        first, second = (form.read(parts) for form, parts in pairs)
        return first, second.square() if self.root else second

    def _parts(self, parameter: nn.Parameter) -> list[State]:
        """Of the first and the second moment; in their own memory."""
        state = self.state_of(parameter)
        return [
            {part: local_tensor(state[_join(key, part)]) for part in form.parts}
            for key, form in zip(self._moment_names, self._formats[parameter], strict=True)
        ]

    @property
    def _moment_names(self) -> tuple[str, str]:
        return "exp_avg", "exp_avg_sq_root" if self.root else "exp_avg_sq"

    def _make_formats(self, row: int, device: torch.device) -> tuple[StateFormat, StateFormat]:
        """Of the first and the second moment of a parameter with rows of this length."""
        if not self.quantization or not block_size(row):
            return Unquantized(self.state_dtype), Unquantized(self.state_dtype)
        return BlockQuantized(self.quantization, True, row, device), BlockQuantized(
            self.quantization, False, row, device
        )

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The state by name, made of zeros where there is none yet. Parts are divided over ranks as the parameter."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key, form in zip(self._moment_names, self._formats[parameter], strict=True):
                full = form.layout(tuple(parameter.shape))
                for part, (shape, dtype) in form.layout(tuple(local_tensor(parameter).shape)).items():
                    zeros = torch.zeros(shape, dtype=dtype, device=parameter.device)
                    state[_join(key, part)] = sharded_like(parameter, zeros, full[part][0])
        return state

    def _noise(
        self, parameter: nn.Parameter, like: torch.Tensor, needs_noise: list[bool], step: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """For the weight and its two moments: 16 random bits for each number that is to be rounded."""
        if not any(needs_noise):
            return [None] * len(needs_noise)
        key = f"{self.seed}:{int(step)}:{self._numbers[parameter]}:{shard_number(parameter)}"
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
        generator = torch.Generator(like.device).manual_seed(seed)
        draw = functools.partial(torch.randint, 1 << 16, like.shape, generator=generator, device=like.device)
        return [draw(dtype=torch.int32) if one else None for one in needs_noise]


class AdamW8bit(LowBitAdamW):
    """Moments in 8 bits."""

    quantization = "8bit"


class AdamW4bit(LowBitAdamW):
    """Moments in 4 bits."""

    quantization = "4bit"


class AdamWFp8(LowBitAdamW):
    """Moments in float8 e4m3."""

    quantization = "fp8"


def update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    step: torch.Tensor,
    lr: torch.Tensor,
    formats: tuple[StateFormat, StateFormat],
    moments: list[State],
    noise: list[torch.Tensor | None],
    root: bool,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One update of a parameter and its moments, in place; what lies on this rank.

    Args:
        step: which update it is, from 1.
        noise: for weight, first and second moment.
    """
    value, grad = weight.float(), grad.float()
    first, second = (form.read(state) for form, state in zip(formats, moments, strict=True))
    if root:
        second = second.square()
    first = first.lerp(grad, 1 - beta1)
    second = second.lerp(grad.square(), 1 - beta2)
    root_of_second = second.sqrt()
    value = value * (1 - lr * weight_decay)
    denominator = root_of_second / (1 - beta2**step).sqrt() + eps
    value = value - lr / (1 - beta1**step) * first / denominator
    store(weight, value, noise[0])
    formats[0].write(moments[0], first, noise[1])
    formats[1].write(moments[1], root_of_second if root else second, noise[2])


def _join(key: str, part: str) -> str:
    return f"{key}.{part}" if part else key


def local_row_length(parameter: torch.Tensor) -> int:
    """Numbers in a row of what a rank holds, be it no row at all."""
    row = parameter.shape[-1]
    if isinstance(parameter, DTensor):
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            row //= size if placement.is_shard(parameter.ndim - 1) else 1
    return row


def shard_number(parameter: torch.Tensor) -> tuple[int, ...]:
    """Which part of a divided parameter this rank holds; the same for ranks that hold the same."""
    if not isinstance(parameter, DTensor):
        return ()
    coordinate = parameter.device_mesh.get_coordinate() or ()
    return tuple(
        0 if placement.is_replicate() else place
        for place, placement in zip(coordinate, parameter.placements, strict=True)
    )
