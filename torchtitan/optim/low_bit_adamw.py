"""AdamW with less memory per parameter: moments in bfloat16 or quantized, weights in bfloat16.

torchao has such optimizers, and this one computes the same. It exists because theirs quantize blocks that cross row
boundaries, so that a checkpoint loads under a different number of ranks only if blocks happen to end at shard
boundaries; because their compiled update of DTensors crashes on CPU; and because they round with the process's global
random generator, which is not checkpointed and may differ between ranks that hold the same weights.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from torchtitan.cache import keep_compiled_code_private
from torchtitan.compat.dynamo import recompile_limit
from torchtitan.optim.low_bit import LowBitOptimizer
from torchtitan.optim.state_formats import State, StateFormat, store
from torchtitan.parallel.sharded_tensors import local_tensor


class LowBitAdamW(LowBitOptimizer):
    """AdamW (arXiv 1711.05101) with moments in a smaller format than float32.

    The update is computed in float32; bfloat16 parameters are then rounded stochastically.

    Args:
        root: store the square root of the second moment.
    """

    signed: ClassVar = {"exp_avg"}

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
        self.root = root
        self.moment_names = "exp_avg", "exp_avg_sq_root" if root else "exp_avg_sq"
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults, state_dtype, seed)
        self._update: Callable[..., None] = update
        if self.parameters()[0].device.type == "cuda":
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
