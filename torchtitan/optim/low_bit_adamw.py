"""AdamW with less memory per parameter: moments in bfloat16 or quantized, weights in bfloat16.

torchao has such optimizers, with the same codes. This one exists because torchao's quantize blocks that cross row
boundaries, so that a checkpoint loads under a different number of ranks only if blocks happen to end at shard
boundaries; because their compiled update of DTensors crashes on CPU; because they round with the process's global
random generator, which is not checkpointed and may differ between ranks that hold the same weights; and because theirs
store a small second moment as 0, whose update is then of any size (`largest_ratio`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from torchtitan.compat.dynamo import recompile_limit
from torchtitan.optim.low_bit import LowBitOptimizer, noise_of, random_bits
from torchtitan.optim.state_formats import State, StateFormat, store
from torchtitan.parallel.sharded_tensors import local_tensor
from torchtitan.registry import deferred

_few_launches: Callable[[], dict[str, Any]] = deferred("torchtitan.compat.inductor:few_launches")

TOGETHER = 8  # parameters of the same shape that a GPU updates in one compiled call
SLACK = 1.25
"""How much larger than AdamW's largest an update may be because its moments were rounded. Rounded separately, a first
moment can be large beside a second one that has lost most of its value."""


class SecondMoment(NamedTuple):
    """How second moments are stored."""

    name: str
    root: bool  # whether their square roots are
    float8: str  # the format in which AdamWFp8 stores them


SECOND_MOMENTS = {
    "v": SecondMoment("exp_avg_sq", False, "fp8"),
    "sqrt_v": SecondMoment("exp_avg_sq_root", True, "fp8"),
    "v_e5m2": SecondMoment("exp_avg_sq", False, "fp8_e5m2"),
    "sqrt_v_e5m2": SecondMoment("exp_avg_sq_root", True, "fp8_e5m2"),
}
"""By `optimizer.second_moment`."""

LocalShard = tuple[torch.Tensor, torch.Tensor, State, list[torch.Tensor | None] | torch.Tensor]
"""Of this rank: weight, gradient, state, and noise for the weight, first and second moment (see `store`), or the key
from which to compute it (see `random_bits`). The state's `step` is the number of the update, from 1."""


class LowBitAdamW(LowBitOptimizer):
    """AdamW (arXiv 1711.05101) with moments in a smaller format than float32; `second_moment` is one of
    `SECOND_MOMENTS`. The update is computed in float32; bfloat16 parameters are then rounded stochastically."""

    signed: ClassVar = {"exp_avg"}
    second_moments: ClassVar = SECOND_MOMENTS

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        second_moment: str = "v",
        **options: Any,
    ) -> None:
        self._use(second_moment)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults, **options)
        self._factor: torch.Tensor | None = None  # of the next step's gradients in float32
        self._update: Callable[..., None] = update
        if self.defaults["fused"]:
            self._update = torch.compile(update, fullgraph=True, dynamic=False, options=_few_launches())

    def _use(self, second_moment: str) -> None:
        self.stored, self.second_moment = second_moment, SECOND_MOMENTS[second_moment]
        self.moment_names = "exp_avg", self.second_moment.name

    @torch.no_grad()
    def convert_second_moments(self, second_moment: str) -> None:
        """Stores second moments as another of `SECOND_MOMENTS` from here on, also those that there are."""
        if second_moment == self.stored:
            return
        before, formats, states = self.second_moment, self._formats, self.state
        self._use(second_moment)
        self._formats, self.state = self._all_formats(), defaultdict(dict)
        for parameter, old in states.items():
            assert isinstance(parameter, nn.Parameter)
            new = self.state_of(parameter)
            new.update({name: tensor for name, tensor in old.items() if name in new})
            value = formats[parameter][1].read({name: local_tensor(tensor) for name, tensor in old.items()})
            value = value.square() if before.root else value
            value = value.sqrt() if self.second_moment.root else value
            self._formats[parameter][1].write(self.local_state(parameter), value, None)

    def _quantization_of(self, moment: str) -> str:
        is_second = moment == self.second_moment.name
        return self.second_moment.float8 if is_second and self.quantization == "fp8" else self.quantization

    def take_factor(self, factor: torch.Tensor) -> list[nn.Parameter]:
        """On GPUs, those with gradients in float32: in bfloat16 a product would have to be rounded first. Not with
        moments in 4 bits, where a compiled update would need twice the memory."""
        if not self.defaults["fused"] or self.quantization == "4bit":
            return []
        self._factor = factor
        return [p for p in self.parameters() if p.grad is not None and p.grad.dtype == torch.float32]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        skip: torch.Tensor | None = getattr(self, "found_inf", None)
        factor, self._factor = self._factor, None
        for group in self.param_groups:
            lr = torch.tensor(group["lr"], dtype=torch.float32)  # a Python float would recompile at each step
            settings = (lr, skip, self.second_moment.root, *group["betas"], group["eps"], group["weight_decay"])
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
                    scale = factor if shards[0][1].dtype == torch.float32 else None
                    with recompile_limit(128):  # one compilation per shape, and one for the rest of `TOGETHER`
                        self._update(shards, self._formats[parameters[0]], *settings, scale)

    def _shard(self, parameter: nn.Parameter) -> LocalShard:
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


def largest_ratio(beta1: float, beta2: float, step: torch.Tensor) -> torch.Tensor:
    """The most that a first moment can be, divided by the root of the second, after `step` updates with any gradients:
    by the inequality of Cauchy and Schwarz, the root of the sum over past gradients of (weight in the first moment)^2 /
    (weight in the second moment). A float32 scalar; infinite if the second moment forgets so much faster that there is
    no limit. After many updates it is 1.17 for betas of 0.9 and 0.95, and 7.3 for 0.9 and 0.999."""
    decay = beta1**2 / max(beta2, 1e-12)
    if abs(decay - 1) < 1e-3:  # The sum cannot be computed so close to 1; a slightly larger one is a limit, too.
        decay = 1.001
    return (1 - beta1) * ((1 - decay**step) / (1 - decay) / (1 - beta2)).sqrt()


def update(
    shards: list[LocalShard],
    formats: tuple[StateFormat, StateFormat],
    lr: torch.Tensor,
    skip: torch.Tensor | None,
    root: bool,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    factor: torch.Tensor | None = None,
) -> None:
    """Updates this rank's shards of parameters and moments in place, unless `skip`, a scalar on the device, is > 0.
    Gradients are first multiplied by `factor`, a float32 scalar on the device."""
    for weight, grad, state, noise in shards:
        step = state["step"]
        if isinstance(noise, torch.Tensor):
            needed = needs_noise(weight, formats)
            bits = random_bits(noise, step, weight.numel()).view(weight.shape) if any(needed) else weight
            noise = noise_of(bits, needed)
        value, grad = weight.float(), grad.float()
        if factor is not None:
            # The choice changes nothing but that a GPU rounds the product, as if it were stored. Otherwise compilers
            # put it into a fused multiply-add, with other bits than where gradients are multiplied before.
            grad = torch.where(factor == 1, grad, grad * factor)
        first, second = (form.read(state) for form in formats)
        if root:
            second = second.square()
        first = first.lerp(grad, 1 - beta1)
        second = second.lerp(grad.square(), 1 - beta2)
        root_of_second = second.sqrt()
        value = value * (1 - lr * weight_decay)
        largest = SLACK * largest_ratio(beta1, beta2, step) * (1 - beta2**step).sqrt() / (1 - beta1**step)
        direction = first / (1 - beta1**step) / (root_of_second / (1 - beta2**step).sqrt() + eps)
        value = value - lr * direction.clamp(-largest, largest)
        store(weight, value, noise[0], skip)
        formats[0].write(state, first, noise[1], skip)
        formats[1].write(state, root_of_second if root else second, noise[2], skip)
