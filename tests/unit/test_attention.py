"""Causal attention on CPU: every kernel matches the formula."""

import functools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from runs import all_equal

from torchtitan.kernels import attention_cpu
from torchtitan.kernels.attention import attend, kernel_name
from torchtitan.kernels.attention_cpu import bfloat16_library, float32_library
from torchtitan.protocols import AttentionSpec

pytestmark = pytest.mark.usefixtures("two_threads")
PLAIN = AttentionSpec()
WAYS = ["bfloat16 GEMMs", "float32 arithmetic", "torch"]
Shape = tuple[int, int, int, int, int]  # batch, heads, key/value heads, sequence, head dimension


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def take(way: str) -> None:
        if way == "bfloat16 GEMMs":
            if bfloat16_library() is None:
                pytest.skip("needs a CPU with bfloat16 instructions (AMX or AVX-512) and a C++ compiler")
            return
        monkeypatch.setattr(attention_cpu, "bfloat16_library", lambda: None)
        if way == "torch":
            monkeypatch.setattr(attention_cpu, "float32_library", lambda: None)
        else:
            assert float32_library() is not None

    return take


def operands(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output, in the memory layout of projections."""
    batch, heads, kv_heads, seq, head_dim = shape
    torch.manual_seed(0)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(batch, seq, count, head_dim).to(dtype).transpose(1, 2) for count in counts]


def gradients(
    attention: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    return list(torch.autograd.grad(attention(*leaves), leaves, grad))


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(PLAIN, q, k, v, None)


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 4, 256, 16),
        (1, 4, 2, 300, 16),
        (2, 4, 1, 130, 64),
        (1, 2, 2, 128, 128),
        (8, 4, 2, 2, 8),
        (1, 4, 2, 77, 32),
    ],
    ids=str,
)
def test_output_and_gradients_are_the_formulas(shape: Shape, way: str, take: Callable[[str], None]) -> None:
    take(way)
    *inputs, grad = operands(shape)
    wide = [tensor.double() for tensor in inputs]
    actual = [causal_attention(*inputs), *gradients(causal_attention, inputs, grad)]
    exact = [formula(*wide), *gradients(formula, wide, grad.double())]
    torchs = [formula(*inputs), *gradients(formula, inputs, grad)]
    for mine, right, reference in zip(actual, exact, torchs, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == right.shape
        error, torchs_error = ((grad.double() - right).norm() / right.norm() for grad in (mine, reference))
        assert error < 1e-2 and error < 1.5 * torchs_error


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("shape", [(2, 4, 2, 200, 16), (1, 2, 1, 129, 72), (1, 1, 1, 1, 5)], ids=str)
def test_float32_tensors_keep_their_precision(shape: Shape, way: str, take: Callable[[str], None]) -> None:
    take(way)
    *inputs, grad = operands(shape, torch.float32)
    wide = [tensor.double() for tensor in inputs]
    actual = [causal_attention(*inputs), *gradients(causal_attention, inputs, grad)]
    exact = [formula(*wide), *gradients(formula, wide, grad.double())]
    for mine, right in zip(actual, exact, strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - right).norm() <= 1e-6 * right.norm().clamp(min=1)  # a single position has none


def within(window: int) -> Callable[..., torch.Tensor]:
    return functools.partial(attend, AttentionSpec(window=window), ids=None)


def masked_formula(window: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, (distance >= 0) & (distance < window), enable_gqa=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, 128, 199, 200, 10**6])
def test_windows_are_the_formulas(window: int, dtype: torch.dtype, way: str, take: Callable[[str], None]) -> None:
    take(way)
    *inputs, grad = operands((2, 4, 2, 200, 16), dtype)
    wide = [tensor.double() for tensor in inputs]
    right = functools.partial(masked_formula, window)
    actual = [within(window)(*inputs), *gradients(within(window), inputs, grad)]
    exact = [right(*wide), *gradients(right, wide, grad.double())]
    for mine, reference in zip(actual, exact, strict=True):
        size = reference.norm().clamp(min=10)  # in a window of one, gradients of q and k are zero
        error = (mine.double() - reference).norm() / size
        assert error < (2e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_comes_from_before_the_window(way: str, take: Callable[[str], None]) -> None:
    """Exactly: the output of a late position, and the effect of its gradient on early keys and values."""
    take(way)
    *inputs, grad = operands((1, 2, 2, 256, 16))
    late = within(70)(*inputs)[:, :, 169:]
    others = [torch.cat([7 * tensor[:, :, :100], tensor[:, :, 100:]], 2) for tensor in inputs]
    assert torch.equal(within(70)(*others)[:, :, 169:], late)
    assert not torch.equal(within(70)(*others)[:, :, 168], within(70)(*inputs)[:, :, 168])
    grad[:, :, :169] = 0
    _, k_grad, v_grad = gradients(within(70), inputs, grad)
    assert k_grad[:, :, 100].any() and not k_grad[:, :, :100].any() and not v_grad[:, :, :100].any()


def test_a_window_takes_its_part_of_the_time() -> None:
    torch.set_num_threads(1)  # a second one would count the time in which it waits
    *inputs, grad = operands((1, 4, 4, 4096, 64), torch.float32)

    def seconds(attention: Callable[..., torch.Tensor]) -> float:
        begun = time.process_time()
        gradients(attention, inputs, grad)
        return time.process_time() - begun

    # A sixth of the tiles of queries and keys; 0.2 of the time on a quiet machine.
    assert any(seconds(within(256)) < 0.25 * seconds(causal_attention) for _ in range(5))


@pytest.mark.parametrize("documents", [False, True])
def test_the_last_queries_attend_to_earlier_keys_of_their_documents(documents: bool) -> None:
    """As under context parallelism: all keys are there, and only the last queries."""
    *inputs, grad = operands((2, 4, 2, 60, 16), torch.float32)
    ids = (torch.arange(60) // torch.tensor([[7], [25]])) if documents else None
    places = torch.arange(60)
    mask = (places[:, None] >= places).expand(2, 1, 60, 60)
    if ids is not None:
        mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    first = 22

    def of_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[:, :, first:]

    def of_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        longer = None if ids is None else torch.cat([ids, ids[:, -1:] + 1], 1)  # ids may go on after the keys
        return attend(PLAIN, q[:, :, first:], k, v, longer, last=True)

    wide, grad = [tensor.double() for tensor in inputs], grad[:, :, first:]
    actual = [of_last(*inputs), *gradients(of_last, inputs, grad)]
    exact = [of_all(*wide), *gradients(of_all, wide, grad.double())]
    for mine, right in zip(actual, exact, strict=True):
        assert (mine.double() - right).norm() <= 1e-6 * right.norm()


@pytest.mark.parametrize("way", WAYS)
def test_nothing_comes_from_later_positions(way: str, take: Callable[[str], None]) -> None:
    """Exactly: the output of an early position, and the effect of its gradient on later keys and values."""
    take(way)
    *inputs, grad = operands((1, 2, 2, 256, 16))
    early = causal_attention(*inputs)[:, :, :100]
    others = [torch.cat([tensor[:, :, :100], 7 * tensor[:, :, 100:]], 2) for tensor in inputs]
    assert torch.equal(causal_attention(*others)[:, :, :100], early)
    grad[:, :, 100:] = 0
    _, k_grad, v_grad = gradients(causal_attention, inputs, grad)
    assert k_grad[:, :, :100].abs().sum() > 0
    assert not k_grad[:, :, 100:].any() and not v_grad[:, :, 100:].any()


@pytest.mark.parametrize("way", WAYS)
def test_large_scores_do_not_overflow_and_a_nan_shows(way: str, take: Callable[[str], None]) -> None:
    take(way)
    *inputs, grad = operands((1, 2, 2, 256, 16))
    inputs[0] *= 100
    inputs[0][:, :, 200:, 0] = 300  # with later keys, the largest scores of all
    assert all(gradient.isfinite().all() for gradient in gradients(causal_attention, inputs, grad))
    inputs[0][0, 0, 3, 0] = torch.nan
    assert causal_attention(*inputs)[0, 0, 3].isnan().all()
    assert all(gradient.isnan().any() for gradient in gradients(causal_attention, inputs, grad))


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("head_dim", [16, 24])
def test_large_scores_lose_no_accuracy(head_dim: int, way: str, take: Callable[[str], None]) -> None:
    take(way)
    q, k, v, grad = operands((1, 2, 2, 256, head_dim))
    inputs = [q * 1e3, k * 1e3, v]  # scores of 1e6, where float32 has a resolution of 0.06
    _, _, v_grad = gradients(causal_attention, inputs, grad)
    _, _, right = gradients(formula, [tensor.double() for tensor in inputs], grad.double())
    assert (v_grad - right).norm() < 3e-3 * right.norm()


@pytest.mark.parametrize("way", WAYS[:2])
def test_any_layout_in_memory_is_read_as_it_is(way: str, take: Callable[[str], None]) -> None:
    take(way)
    *inputs, grad = operands((2, 4, 2, 64, 16))
    right = gradients(causal_attention, inputs, grad)
    wide = torch.zeros(2, 4, 64, 17).bfloat16()[..., 1:]  # rows with odd offsets
    wide.copy_(grad)
    assert all_equal(gradients(causal_attention, inputs, wide), right)
    expanded = torch.ones(1).bfloat16().expand_as(grad)  # like the gradient of a sum
    right = gradients(causal_attention, inputs, expanded.clone(memory_format=torch.contiguous_format))
    assert all_equal(gradients(causal_attention, inputs, expanded), right)


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("shape", [(1, 1, 1, 600, 16), (1, 4, 2, 300, 24), (3, 4, 1, 130, 16)], ids=str)
def test_no_bit_depends_on_the_number_of_threads(shape: Shape, way: str, take: Callable[[str], None]) -> None:
    take(way)
    *inputs, grad = operands(shape)
    for attention in (causal_attention, within(90)):
        results = []
        for threads in (1, 2, 4, 16):
            torch.set_num_threads(threads)
            results.append([attention(*inputs), *gradients(attention, inputs, grad)])
        assert all(all_equal(some, results[0]) for some in results)


@pytest.mark.parametrize("way", WAYS[:2])
def test_both_threads_work_on_the_one_key_head_of_one_sequence(way: str, take: Callable[[str], None]) -> None:
    take(way)
    *inputs, grad = operands((1, 4, 1, 4096, 64))
    leaves = [tensor.requires_grad_() for tensor in inputs]
    out = causal_attention(*leaves)

    def this_threads_share(work: Callable[[], object]) -> float:
        here, everywhere = time.thread_time(), time.process_time()
        work()
        return (time.thread_time() - here) / (time.process_time() - everywhere)

    for work in (lambda: causal_attention(*inputs), lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)):
        # On a busy machine the other thread may come late; one without work waits in a loop for some milliseconds.
        assert any(0.3 < this_threads_share(work) < 0.7 for _ in range(20))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_compiler_calls_it(dtype: torch.dtype) -> None:
    *inputs, grad = operands((2, 4, 2, 64, 16), dtype)
    torch.compiler.reset()  # what earlier tests compiled counts towards a limit
    for attention in (causal_attention, within(9)):
        compiled = torch.compile(attention, fullgraph=True)
        assert all_equal(gradients(compiled, inputs, grad), gradients(attention, inputs, grad))


@pytest.mark.parametrize(("compiler", "reason"), [("no-such-compiler", "No such file"), ("false", "returned non-zero")])
def test_without_a_compiler_a_run_is_told_and_goes_on(
    compiler: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    for library in (bfloat16_library, float32_library):
        monkeypatch.setattr(attention_cpu, library.__wrapped__.__name__, functools.cache(library.__wrapped__))
    *inputs, grad = operands((1, 2, 2, 64, 16))
    with caplog.at_level(logging.WARNING, "torchtitan"):
        actual = gradients(causal_attention, inputs, grad)
    assert reason in caplog.text
    assert (actual[0].double() - gradients(formula, inputs, grad)[0].double()).norm() < 0.02 * actual[0].double().norm()
    assert not list(tmp_path.rglob("*.so"))


def test_instructions_that_may_not_be_used_are_left_alone(take: Callable[[str], None]) -> None:
    take("bfloat16 GEMMs")
    program = (
        "import torch; from torchtitan.kernels.attention_cpu import causal_attention_cpu as attend; "
        "q, k, v = torch.ones(3, 1, 2, 64, 16, dtype=torch.bfloat16); print(attend(q, k, v).mean().item())"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "1.0\n", done.stderr
    assert "oneDNN cannot use this CPU's bfloat16 instructions" in done.stderr


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("documents, context_parallel", [(False, False), (True, False), (False, True)])
def test_the_log_names_what_computes_attention(
    documents: bool, context_parallel: bool, way: str, take: Callable[[str], None]
) -> None:
    """`tests/cross` does the same for GPUs."""
    take(way)
    q = torch.empty(1, 4, 2, 16, dtype=torch.bfloat16)
    own = {"torch": "torch's for CPUs", "float32 arithmetic": "own kernel, float32 arithmetic"}
    expected = own.get(way, "own kernel, bfloat16 instructions")
    masked = documents or context_parallel
    assert kernel_name(PLAIN, q, 2, documents, context_parallel) == ("torch's, with a mask" if masked else expected)
