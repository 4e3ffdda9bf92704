"""AdamW with small moments: the same update as torch's and torchao's, with the promised number of bytes."""

import functools
import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchao.optim
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8

from torchtitan.config.training import Optimizer
from torchtitan.optim.clip import clip_grad_norm
from torchtitan.optim.combined import CombinedOptimizer
from torchtitan.optim.low_bit import noise_of, random_bits
from torchtitan.optim.low_bit_adamw import SECOND_MOMENTS, LowBitAdamW, largest_ratio, update
from torchtitan.optim.optimizer import build_optimizer, set_learning_rate
from torchtitan.optim.state_formats import BlockQuantized, block_size

EXAMPLES = 12
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIONS: Any = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
QUANTIZED_OPTIMIZERS: dict[str, Any] = {
    "8bit": torchao.optim.AdamW8bit,
    "4bit": torchao.optim.AdamW4bit,
    "fp8": torchao.optim.AdamWFp8,
}

STATES: dict[str, Any] = {"8bit": OptimState8bit, "4bit": OptimState4bit, "fp8": OptimStateFp8}


def train(make: Make, steps: int = 10, spread: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix and a vector after several updates with the same gradients, concatenated.

    Args:
        spread: of the magnitudes of gradients, in powers of e.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((24, 256), (256,))]
    magnitudes = [(torch.randn(parameter.shape, generator=generator) * spread).exp() for parameter in parameters]
    optimizer = make(parameters)
    for _ in range(steps):
        for parameter, magnitude in zip(parameters, magnitudes, strict=True):
            parameter.grad = (torch.randn(parameter.shape, generator=generator) * magnitude).to(dtype)
        optimizer.step()
    return torch.cat([parameter.detach().float().flatten() for parameter in parameters])


def error(make: Make, **how: Any) -> float:
    """Error of the total update relative to torch's AdamW in float32: 2-norm of the difference over the update's
    2-norm."""
    start, expected = (train(lambda them: torch.optim.AdamW(them, **OPTIONS), steps, **how) for steps in (0, 10))
    return float((train(make, **how) - expected).norm() / (expected - start).norm())


def test_in_float32_it_is_torchs_adamw() -> None:
    assert error(lambda them: LowBitAdamW(them, **OPTIONS)) < 1e-6


@pytest.mark.parametrize(("quantization", "optimizer_class"), QUANTIZED_OPTIMIZERS.items())
def test_codes_equal_torchaos(quantization: str, optimizer_class: Any) -> None:
    """Every code of the first moment and of a second one; so the update that reads them is the same, too."""
    for signed in (True, False):
        value = torch.randn(24, 256, generator=torch.Generator().manual_seed(1))
        value = value if signed else (0.1 + value.abs()).square()
        form = BlockQuantized("m", quantization, signed, 256, torch.device("cpu"))
        state = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in form.layout((24, 256)).items()}
        form.write(state, value, None)
        torchaos = STATES[quantization].zeros((24, 256), *([] if quantization == "fp8" else [signed]), block_size=128)
        torchaos.copy_(value)
        assert torch.equal(state[form.name].flatten().view(torch.uint8), torchaos.codes.flatten().view(torch.uint8))
        largest = (
            torch.finfo(torch.float8_e4m3fn).max if quantization == "fp8" else 1
        )  # torchao's codes of fp8 reach it
        torch.testing.assert_close(state[form.scale].flatten() / largest, torchaos.scale.flatten(), rtol=1e-6, atol=0)
    # Numbers whose second moment torchao stores as 0, and after many steps numbers between two codes, may differ.
    for steps, allowed in ((2, 0.001), (10, 0.02)):
        actual = train(lambda them: LowBitAdamW(them, **OPTIONS, quantization=quantization), steps)
        with torch.compiler.set_stance("force_eager"):
            expected = train(lambda them: optimizer_class(them, **OPTIONS, block_size=128), steps)
        assert ((actual - expected).abs() > 1e-6).float().mean() <= allowed


def test_errors_of_the_formats_are_in_their_order() -> None:
    errors = {
        "bfloat16": error(lambda them: LowBitAdamW(them, **OPTIONS, state_dtype=torch.bfloat16)),
        "8bit": error(lambda them: LowBitAdamW(them, **OPTIONS, quantization="8bit")),
        "fp8 root": error(lambda them: LowBitAdamW(them, **OPTIONS, quantization="fp8", second_moment="sqrt_v")),
        "fp8": error(lambda them: LowBitAdamW(them, **OPTIONS, quantization="fp8")),
        "4bit": error(lambda them: LowBitAdamW(them, **OPTIONS, quantization="4bit")),
    }
    assert 1e-4 < errors["bfloat16"] < errors["8bit"] < errors["fp8"] < errors["4bit"] < 0.5
    # A code has an error of up to 1/16. A root stored in it has that error; the root of a stored number has half of it.
    assert errors["fp8"] < errors["fp8 root"] < 2 * errors["fp8"]


FORMATS: dict[str, dict[str, Any]] = {
    "AdamW8bit": {"quantization": "8bit"},
    "AdamW4bit": {"quantization": "4bit"},
    **{f"AdamWFp8, {stored}": {"quantization": "fp8", "second_moment": stored} for stored in SECOND_MOMENTS},
    "bfloat16 states": {"state_dtype": torch.bfloat16},
}


def test_a_root_or_e5m2_keeps_gradients_of_all_magnitudes_where_the_second_moment_in_e4m3_does_not() -> None:
    """Within a block they span over six powers of ten. Squared, the small ones are below the smallest code of e4m3,
    which is stored instead, so that their updates are too small."""

    def error_of(stored: str) -> float:
        return error(lambda them: LowBitAdamW(them, **OPTIONS, quantization="fp8", second_moment=stored), spread=2.0)

    assert error_of("sqrt_v") < 0.1 and error_of("v_e5m2") < 0.1
    assert 0.2 < error_of("v") < 0.6


@pytest.mark.parametrize("name", FORMATS)
def test_only_a_second_moment_of_zero_is_stored_as_zero(name: str) -> None:
    """In a matrix and in a stack of experts' matrices, with magnitudes from 1e-17 to 1 in a block."""
    magnitudes = torch.logspace(-17, 0, 128)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 128), (2, 3, 128))]
    optimizer = LowBitAdamW(parameters, **OPTIONS, **FORMATS[name])
    for parameter in parameters:
        parameter.grad = magnitudes.expand_as(parameter).clone()
        parameter.grad[0] = 0
    for _ in range(3):
        optimizer.step()
    for parameter in parameters:
        stored = optimizer._formats[parameter][1].read(optimizer.local_state(parameter))
        assert (stored[1:] > 0).all()
        assert (stored[0] == 0).all() or name == "AdamW4bit"


def largest_update(optimizer: torch.optim.Optimizer, gradients: torch.Tensor) -> float:
    """Largest number in the updates of its parameter, in learning rates. gradients: (steps, rows, columns)."""
    (weight,) = optimizer.param_groups[0]["params"]
    largest = 0.0
    for gradient in gradients:
        weight.data.zero_()
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
        largest = max(largest, float(weight.detach().abs().max()))
    return largest


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(0, 3),
    name=st.sampled_from(list(FORMATS)),
    gradient=st.sampled_from(["normal", "of one sign", "of one magnitude"]),
    eps=st.sampled_from([1e-8, 1e-15]),
)
def test_no_update_is_larger_than_one_and_a_half_times_adamws_largest(
    seed: int, spread: float, name: str, gradient: str, eps: float
) -> None:
    """With the default betas and the same gradients, which begin, stop and begin again at times of their own, and whose
    magnitudes differ within each block. Against float64."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = (torch.randn(2, 128, generator=generator) * spread).exp()
    numbers = torch.randn(60, 2, 128, generator=generator)
    numbers = {"normal": numbers, "of one sign": numbers.abs(), "of one magnitude": numbers.sign()}[gradient]
    times = torch.randint(-20, 80, (3, 2, 128), generator=generator).sort(dim=0).values  # begins, stops, begins
    step = torch.arange(60).view(-1, 1, 1)
    gradients = numbers * magnitudes * ((step >= times[0]) & (step < times[1]) | (step >= times[2]))
    gradients[:, :, 0] = numbers[:, :, 0] * magnitudes.max()  # The block's scale outlives the others' gradients.
    options: Any = {"lr": 1.0, "betas": (0.9, 0.95), "eps": eps, "weight_decay": 0.0}
    exact = torch.optim.AdamW([nn.Parameter(torch.zeros(2, 128, dtype=torch.float64))], **options)
    rounded = LowBitAdamW([nn.Parameter(torch.zeros(2, 128))], **options, **FORMATS[name])
    assert largest_update(rounded, gradients) <= 1.5 * largest_update(exact, gradients)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.95, 0.95), (0.9, 0.81), (0.9, 0.5)])
def test_the_largest_ratio_of_moments_is_that_of_the_worst_gradients(betas: tuple[float, float]) -> None:
    """Those by which the inequality is an equation: each in proportion to its weight in the first moment divided by
    that in the second."""
    beta1, beta2 = betas
    count = 40
    ages = torch.arange(count, dtype=torch.float64)
    first, second = (1 - beta1) * beta1**ages, (1 - beta2) * beta2**ages
    worst = first / second
    ratio = (first * worst).sum() / (second * worst.square()).sum().sqrt()
    limit = float(largest_ratio(*betas, torch.tensor(float(count))))
    assert float(ratio) <= limit * (1 + 1e-5)
    assert limit == pytest.approx(float(ratio), rel=0.02)


def test_a_second_moment_that_an_older_version_stored_as_zero_does_not_divide() -> None:
    weight = nn.Parameter(torch.zeros(1, 128))
    optimizer = LowBitAdamW([weight], **{**OPTIONS, "eps": 1e-15}, quantization="fp8")
    largest_update(optimizer, torch.ones(20, 1, 128))
    state: Any = optimizer.state[weight]
    state["exp_avg_sq.fp8"].view(torch.uint8)[0, 5] = 0
    gradient = torch.ones(1, 1, 128)
    gradient[..., 5] = 0
    assert largest_update(optimizer, gradient) < 1.5 * OPTIONS["lr"]


@pytest.mark.parametrize("stored", SECOND_MOMENTS)
@pytest.mark.parametrize("before", SECOND_MOMENTS)
def test_second_moments_are_converted(before: str, stored: str) -> None:
    """To half a code of either format; vectors to rounding."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 128), (7,))]
    optimizer = LowBitAdamW(parameters, **OPTIONS, quantization="fp8", second_moment=before)

    def moments() -> list[torch.Tensor]:
        read = [[form.read(optimizer.local_state(it)) for form in optimizer._formats[it]] for it in parameters]
        root = optimizer.second_moment.root
        return [moment for first, second in read for moment in (first, second if root else second.sqrt())]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter)
        optimizer.step()

    step()
    expected = [moment.clone() for moment in moments()]
    optimizer.convert_second_moments(stored)
    assert optimizer.state[parameters[0]]["step"] == 1
    names = set(optimizer.state[parameters[0]])
    assert names == {"step", "exp_avg.fp8", "exp_avg.scale", *optimizer.names_of_moments(parameters[0])}
    for actual, right, tolerance in zip(moments(), expected, (0, 0.13, 0, 1e-6), strict=True):
        torch.testing.assert_close(actual, right, rtol=tolerance if stored != before else 0, atol=0)
    step()
    assert optimizer.state[parameters[0]]["step"] == 2


@pytest.mark.parametrize(
    ("changes", "bytes_a_number"),
    [
        ({"state_dtype": "bfloat16"}, 4),
        ({"name": "AdamW8bit"}, 2 * (1 + 4 / 128)),
        ({"name": "AdamWFp8"}, 2 * (1 + 4 / 128)),
        ({"name": "AdamWFp8", "second_moment": "v"}, 2 * (1 + 4 / 128)),
        ({"name": "AdamWFp8", "second_moment": "v_e5m2"}, 2 * (1 + 4 / 128)),
        ({"name": "AdamW4bit"}, 2 * (1 / 2 + 4 / 128)),
    ],
    ids=str,
)
def test_bytes_of_the_state(changes: dict[str, Any], bytes_a_number: float) -> None:
    matrix, vector = nn.Parameter(torch.ones(64, 256)), nn.Parameter(torch.ones(512))
    optimizer = build_optimizer(nn.ParameterList([matrix, vector]), Optimizer(**changes))
    for parameter in (matrix, vector):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    sizes = [sum(tensor.nbytes for tensor in optimizer.state[parameter].values()) - 4 for parameter in (matrix, vector)]
    assert sizes == [64 * 256 * bytes_a_number, 512 * (4 if "state_dtype" in changes else 8)]


def test_blocks_lie_within_rows() -> None:
    assert [block_size(row) for row in (4096, 14336 // 8, 11008 // 4, 96, 80, 0)] == [128, 128, 64, 32, 0, 0]


def test_bfloat16_weights_take_updates_smaller_than_half_their_step() -> None:
    """With round-to-nearest they would stay at 1: 1 - 1e-4 is closer to 1 than to the next number below."""
    weight = nn.Parameter(torch.ones(100, 128, dtype=torch.bfloat16))
    optimizer = build_optimizer(nn.ParameterList([weight]), Optimizer(lr=1e-4, weight_decay=0.0), seed=1)
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert weight.float().mean().item() == pytest.approx(1 - 10 * 1e-4, abs=1e-4)


def test_bfloat16_moments_forget() -> None:
    """With beta2 = 0.999 a second moment decreases by 1/1000 per step, less than half of bfloat16's resolution."""
    weight = nn.Parameter(torch.ones(100, 128))
    optimizer = build_optimizer(nn.ParameterList([weight]), Optimizer(state_dtype="bfloat16", beta2=0.999))
    for step in range(101):
        weight.grad = torch.full_like(weight, 1.0 if step == 0 else 0.0)
        optimizer.step()
    second = optimizer.state[weight]["exp_avg_sq"]
    assert second.dtype == torch.bfloat16
    assert second.float().mean().item() == pytest.approx(0.001 * 0.999**100, rel=5e-3)


def test_rounding_is_a_function_of_the_seed() -> None:
    def of(seed: int) -> torch.Tensor:
        return train(lambda them: LowBitAdamW(them, **OPTIONS, seed=seed), dtype=torch.bfloat16)

    before = torch.get_rng_state()
    first, again, other = of(1), of(1), of(2)
    assert torch.equal(first, again)
    assert 0 < float((first - other).norm() / first.norm()) < 0.02
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gpus_noise_is_even_and_new_for_each_number() -> None:
    """Between steps, parameters, places and the tensors that are rounded; all are functions of the key."""
    count = 1 << 16
    keys, steps = (torch.tensor(range(7, 9)), torch.tensor([1.0, 2.0]))
    bits = torch.stack([random_bits(key, step, count) for key in keys for step in steps])
    noise = torch.stack(noise_of(bits, [True] * 4)).flatten(0, 1).float()  # type: ignore[arg-type]  # (16, count)
    assert bits.unique().numel() == 4 * count
    assert noise.min() == 0 and noise.max() == 65535
    torch.testing.assert_close(noise.mean(1), torch.full((16,), 32767.5), atol=500, rtol=0)
    correlations = torch.corrcoef(torch.cat([noise, noise.roll(1, 1)]))
    assert float((correlations - torch.eye(32)).abs().max()) < 0.03


def test_a_gpus_update_rounds_to_the_expected_value() -> None:
    """With other noise than on a CPU, since the device alone knows the number of the update, but as well."""
    exact = train(lambda them: LowBitAdamW(them, **OPTIONS))

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = LowBitAdamW(parameters, **OPTIONS)
        optimizer.defaults["fused"] = True
        return optimizer

    host = train(lambda them: LowBitAdamW(them, **OPTIONS), dtype=torch.bfloat16) - exact
    rounding = train(make, dtype=torch.bfloat16) - exact
    assert not torch.equal(rounding, host)
    assert float(rounding.norm()) == pytest.approx(float(host.norm()), rel=0.05)


def test_a_learning_rate_that_is_a_tensor_stays_one() -> None:
    """torchao's own optimizers, which a user may register, refuse a plain number."""
    weight = nn.Parameter(torch.ones(32, 256))
    optimizer = torchao.optim.AdamW8bit([weight], lr=0.1)
    set_learning_rate(optimizer, 0.0)
    weight.grad = torch.ones_like(weight)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    assert torch.equal(weight.detach(), torch.ones_like(weight))


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for CPU needs g++")
@pytest.mark.parametrize("quantization", QUANTIZED_OPTIMIZERS)
def test_compiled_as_on_a_gpu_it_is_the_same_and_compiled_once_for_each_shape(quantization: str) -> None:
    def eager(parameters: list[nn.Parameter]) -> LowBitAdamW:
        return LowBitAdamW(parameters, **OPTIONS, quantization=quantization)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = eager(parameters)
        optimizer._update = torch.compile(update, fullgraph=True, dynamic=False)
        return optimizer

    def make_with_rates(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        optimizer.register_step_pre_hook(lambda *_: set_learning_rate(optimizer, OPTIONS["lr"] * torch.rand(()).item()))
        return optimizer

    torch._dynamo.reset()
    torch.testing.assert_close(train(make), train(eager), atol=1e-3, rtol=0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    train(make_with_rates)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("quantization", ["", *QUANTIZED_OPTIMIZERS])
def test_gradients_multiplied_in_the_update_give_the_same_bits(quantization: str) -> None:
    """Of an update as on a GPU, and only of that one; gradients of bfloat16 weights, of moments in 4 bits, and of other
    optimizers are multiplied in place."""
    outcomes, takes = [], quantization != "4bit"
    for within in (True, False):
        generator = torch.Generator().manual_seed(0)
        draw: Callable[..., torch.Tensor] = functools.partial(torch.randn, generator=generator)
        ours = [nn.Parameter(draw(8, 128)), nn.Parameter(draw(8, 128).bfloat16())]
        others, unowned = nn.Parameter(draw(128)), nn.Parameter(draw(128))
        optimizer = LowBitAdamW(ours, **OPTIONS, quantization=quantization)
        optimizer.defaults["fused"] = True
        both = CombinedOptimizer([optimizer, torch.optim.SGD([others], lr=0.1)])
        for max_norm in (1.0, 1e9, math.inf):
            for parameter in (*ours, others, unowned):
                parameter.grad = draw(parameter.shape).to(parameter.dtype)
            before = [parameter.grad for parameter in (*ours, others, unowned)]
            unscaled = [grad.clone() for grad in before if grad is not None]
            clip_grad_norm([*ours, others, unowned], max_norm, both if within else None)
            kept = [torch.equal(grad, old) for grad, old in zip(before, unscaled, strict=True)]  # type: ignore[arg-type]
            assert kept == ([within and takes, False, False, False] if max_norm == 1.0 else [True] * 4)
            both.step()
        moments = [
            value.view(torch.uint8)
            for parameter in ours
            for value in optimizer.local_state(parameter).values()
            if value.ndim
        ]
        outcomes.append([*ours, others, unowned.grad, *moments])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def test_on_a_cpu_gradients_are_clipped_in_place() -> None:
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), 2.0)
    clip_grad_norm([weight], 1.0, LowBitAdamW([weight], **OPTIONS))
    torch.testing.assert_close(weight.grad, torch.full((4,), 0.5))
