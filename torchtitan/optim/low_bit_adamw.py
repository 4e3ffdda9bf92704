"""AdamW with less memory per parameter: moments in bfloat16 or quantized, weights in bfloat16.

torchao has such optimizers, and this one computes the same. It exists because theirs quantize blocks that cross row
boundaries, so that a checkpoint loads under a different number of ranks only if blocks happen to end at shard
boundaries; because their compiled update of DTensors crashes on CPU; and because they round with the process's global
random generator, which is not checkpointed and may differ between ranks that hold the same weights.
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
    """AdamW (arXiv 1711.05101) with moments in a smaller format than float32.

    The update is computed in float32; bfloat16 parameters are then rounded stochastically. The noise depends only on
    seed, step, parameter and shard: a resumed run draws the same noise, and so do replicas of a shard.

    Args:
        state_dtype: dtype of unquantized moments: all of them if `quantization` is "", else those of vectors and of
            matrices whose rows do not divide into blocks (`state_formats.block_size`).
        root: store the square root of the second moment.
        seed: for stochastic rounding.

    Attributes:
        quantization: "8bit", "4bit" or "fp8"; "" for none.
    """

    quantization = ""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
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
        make = functools.cache(self._make_formats)  # shared between equal parameters, so that the compiler sees one
        self._formats = {
            parameter: make(local_row_length(parameter) if parameter.ndim > 1 else 0, parameter.device)
            for parameter in all_parameters
        }
        self._update: Callable[..., None] = update
        if all_parameters and all_parameters[0].device.type == "cuda":
            keep_compiled_code_private()
            self._update = torch.compile(update, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        for group in self.param_groups:
            lr = torch.tensor(group["lr"], dtype=torch.float32)  # a Python float would recompile at each step
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
        with recompile_limit(64):  # one compilation per shape
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
        """First and second moment of this rank's shard, as the next update will read them; float32."""
        pairs = zip(self._formats[parameter], self._parts(parameter), strict=True)
        first, second = (form.read(parts) for form, parts in pairs)
        return first, second.square() if self.root else second

    def _parts(self, parameter: nn.Parameter) -> list[State]:
        """Local tensors of the first and the second moment, sharing the state's memory."""
        state = self.state_of(parameter)
        return [
            {part: local_tensor(state[_join(key, part)]) for part in form.parts}
            for key, form in zip(self._moment_names, self._formats[parameter], strict=True)
        ]

    @property
    def _moment_names(self) -> tuple[str, str]:
        return "exp_avg", "exp_avg_sq_root" if self.root else "exp_avg_sq"

    def _make_formats(self, row: int, device: torch.device) -> tuple[StateFormat, StateFormat]:
        """Formats of the first and the second moment of a parameter with rows of this length."""
        if not self.quantization or not block_size(row):
            return Unquantized(self.state_dtype), Unquantized(self.state_dtype)
        return BlockQuantized(self.quantization, True, row, device), BlockQuantized(
            self.quantization, False, row, device
        )

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The state by name, initialized to zeros on first use. It is sharded like the parameter."""
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
        """For the weight and its two moments: 16 random bits per number, for those that are rounded stochastically."""
        if not any(needs_noise):
            return [None] * len(needs_noise)
        key = f"{self.seed}:{int(step)}:{self._numbers[parameter]}:{shard_number(parameter)}"
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
        generator = torch.Generator(like.device).manual_seed(seed)
        draw = functools.partial(torch.randint, 1 << 16, like.shape, generator=generator, device=like.device)
        return [draw(dtype=torch.int32) if one else None for one in needs_noise]


class AdamW8bit(LowBitAdamW):
    """AdamW with 8-bit moments."""

    quantization = "8bit"


class AdamW4bit(LowBitAdamW):
    """AdamW with 4-bit moments."""

    quantization = "4bit"


class AdamWFp8(LowBitAdamW):
    """AdamW with float8 e4m3 moments."""

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
    """One update of this rank's shard of a parameter and its moments, in place.

    Args:
        step: number of the update, from 1.
        noise: for the weight, first and second moment.
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
    """Length of the rows of a rank's shard, even if it has none."""
    row = parameter.shape[-1]
    if isinstance(parameter, DTensor):
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            row //= size if placement.is_shard(parameter.ndim - 1) else 1
    return row


def shard_number(parameter: torch.Tensor) -> tuple[int, ...]:
    """Which shard of a parameter this rank holds; the same on ranks with the same shard."""
    if not isinstance(parameter, DTensor):
        return ()
    coordinate = parameter.device_mesh.get_coordinate() or ()
    return tuple(
        0 if placement.is_replicate() else place
        for place, placement in zip(coordinate, parameter.placements, strict=True)
    )
