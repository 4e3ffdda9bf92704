"""AdamW with less memory per parameter: moments in bfloat16 or quantized, weights in bfloat16.

torchao has such optimizers, and this one computes the same. It exists because torchao's quantize blocks that cross row
boundaries, so that a checkpoint loads under a different number of ranks only if blocks happen to end at shard
boundaries; because their compiled update of DTensors crashes on CPU; and because they round with the process's global
random generator, which is not checkpointed and may differ between ranks that hold the same weights.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from torchtitan.compat.dynamo import recompile_limit
from torchtitan.optim.low_bit import LowBitOptimizer, noise_of, random_bits
from torchtitan.optim.state_formats import State, StateFormat, store
from torchtitan.parallel.sharded_tensors import local_tensor

TOGETHER = 8  # parameters of the same shape that a GPU updates in one compiled call

Shard = tuple[torch.Tensor, torch.Tensor, State, list[torch.Tensor | None] | torch.Tensor]
"""Of this rank: weight, gradient, state, and noise for the weight, first and second moment (see `store`), or the key
from which to compute it (see `random_bits`). The state's `step` is the number of the update, from 1."""


class LowBitAdamW(LowBitOptimizer):
    """AdamW (arXiv 1711.05101) with moments in a smaller format than float32; with `root`, the square root of the
    second one. The update is computed in float32; bfloat16 parameters are then rounded stochastically."""

    signed: ClassVar = {"exp_avg"}

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        root: bool = False,
        **options: Any,
    ) -> None:
        self.root = root
        self.moment_names = "exp_avg", "exp_avg_sq_root" if root else "exp_avg_sq"
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults, **options)
        self._update: Callable[..., None] = update
        if self.defaults["fused"]:
            from torchtitan.compat.inductor import few_launches  # imports the compiler

            self._update = torch.compile(update, fullgraph=True, dynamic=False, options=few_launches())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        skip: torch.Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            lr = torch.tensor(group["lr"], dtype=torch.float32)  # a Python float would recompile at each step
            settings = (lr, skip, self.root, *group["betas"], group["eps"], group["weight_decay"])
            alike: dict[Any, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = (local_tensor(parameter).shape, parameter.dtype, parameter.grad.dtype)
                    alike.setdefault(key, []).append(parameter)
            for parameters in alike.values():
                self._count_step(parameters, skip)
                size = TOGETHER if self.defaults["fused"] else 1
                for first in range(0, len(parameters), size):
                    shards = [self._shard(parameter) for parameter in parameters[first : first + size]]
                    with recompile_limit(128):  # one compilation per shape, and one for the rest of `TOGETHER`
                        self._update(shards, self._formats[parameters[0]], *settings)

    def _shard(self, parameter: nn.Parameter) -> Shard:
        assert parameter.grad is not None
        weight, state = local_tensor(parameter), self.local_state(parameter)
        noise: list[torch.Tensor | None] | torch.Tensor
        if self.defaults["fused"]:
            noise = torch.tensor(self._key(parameter))
        else:
            noise = self._noise(parameter, weight, needs_noise(weight, self._formats[parameter]), state["step"])
        return weight, local_tensor(parameter.grad), state, noise


def needs_noise(weight: torch.Tensor, formats: Iterable[StateFormat]) -> list[bool]:
    """Whether the weight and each moment are rounded stochastically."""
    return [weight.dtype == torch.bfloat16, *(form.stochastic for form in formats)]


def update(
    shards: list[Shard],
    formats: tuple[StateFormat, StateFormat],
    lr: torch.Tensor,
    skip: torch.Tensor | None,
    root: bool,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Updates this rank's shards of parameters and moments in place, unless `skip`, a scalar on the device, is > 0."""
    for weight, grad, state, noise in shards:
        step = state["step"]
        if isinstance(noise, torch.Tensor):
            needed = needs_noise(weight, formats)
            bits = random_bits(noise, step, weight.numel()).view(weight.shape) if any(needed) else weight
            noise = noise_of(bits, needed)
        value, grad = weight.float(), grad.float()
        first, second = (form.read(state) for form in formats)
        if root:
            second = second.square()
        first = first.lerp(grad, 1 - beta1)
        second = second.lerp(grad.square(), 1 - beta2)
        root_of_second = second.sqrt()
        value = value * (1 - lr * weight_decay)
        denominator = root_of_second / (1 - beta2**step).sqrt() + eps
        value = value - lr / (1 - beta1**step) * first / denominator
        store(weight, value, noise[0], skip)
        formats[0].write(state, first, noise[1], skip)
        formats[1].write(state, root_of_second if root else second, noise[2], skip)
