"""The chunked loss compared with plain cross-entropy over all logits."""

import inspect
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import CAPPED, nontrivial_llama
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.engine.source_losses import SourceLosses
from torchtitan.models import loss
from torchtitan.models.loss import chunked_cross_entropy, cross_entropy
from torchtitan.models.loss_gpu import fused_cross_entropy
from torchtitan.protocols import IGNORE_INDEX

BATCH, SEQ, DIM, VOCAB = 3, 50, 16, 40


@pytest.fixture(params=[1, 3, 15], ids=lambda chunks: f"{chunks}_chunks")
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of chunks for BATCH * SEQ tokens; the last one is shorter if they do not divide evenly."""
    tokens = BATCH * SEQ // request.param if request.param > 1 else 160
    monkeypatch.setattr(loss, "CHUNK_MULTIPLE", 10)
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", tokens * VOCAB)
    monkeypatch.setattr(loss, "GPU_CHUNK_ELEMENTS", tokens * VOCAB)
    return request.param


def make(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """An output layer, hidden states, and labels, some of which are ignored."""
    torch.manual_seed(0)
    output = nn.Linear(DIM, VOCAB, bias=False, dtype=dtype)
    nn.init.normal_(output.weight)
    labels = torch.randint(VOCAB, (BATCH, SEQ))
    labels[0, 3:9] = labels[2, 40:] = IGNORE_INDEX
    return output, torch.randn(BATCH, SEQ, DIM, dtype=dtype, requires_grad=True), labels


def plain(output: nn.Linear, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = output(hidden).float().flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def gradients(value: torch.Tensor, output: nn.Linear, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(value / 7, [hidden, output.weight])  # the trainer divides by the number of tokens


def test_the_loss_of_each_source_is_that_of_its_rows(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks end within rows; the gradient is the same; of a source without counted tokens there is none."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)  # of one process
    output, hidden, labels = make()
    labels[1] = IGNORE_INDEX
    stage = SimpleNamespace()
    engine: Any = SimpleNamespace(device=SimpleNamespace(torch_device="cpu"), pipeline_stages={0: stage})
    losses = SourceLosses(engine, ["a", "b", "c"])
    batch: Any = SimpleNamespace(sources=[2, 1, 0])
    for _ in range(2):
        total = chunked_cross_entropy(output, output.weight, hidden, labels, stage.by_row(cross_entropy, labels))
        assert losses([batch], due=False) == {}
    expected = chunked_cross_entropy(output, output.weight, hidden, labels)
    torch.testing.assert_close(total, expected)
    for mine, right in zip(gradients(total, output, hidden), gradients(expected, output, hidden), strict=True):
        assert torch.equal(mine, right)
    wide = F.linear(hidden.double(), output.weight.double())
    means = [F.cross_entropy(wide[row], labels[row], ignore_index=IGNORE_INDEX).item() for row in (2, 0)]
    assert losses([], due=True) == pytest.approx({"loss/a": means[0], "loss/c": means[1]}, rel=1e-6)
    assert losses([], due=True) == {}


def test_equals_plain_cross_entropy_in_float32(chunks: int) -> None:
    output, hidden, labels = make()
    calls = []
    counted = output.register_forward_hook(lambda module, inputs, result: calls.append(len(result)))
    total = chunked_cross_entropy(output, output.weight, hidden, labels)
    counted.remove()
    assert len(calls) == chunks and sum(calls) == BATCH * SEQ
    expected = plain(output, hidden, labels)
    assert total.dtype == torch.float32 and total.shape == ()
    torch.testing.assert_close(total, expected)
    for mine, right in zip(gradients(total, output, hidden), gradients(expected, output, hidden), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-6, rtol=1e-5)


def test_bfloat16_is_as_close_to_float32_as_plain_cross_entropy(chunks: int) -> None:
    output, hidden, labels = make(torch.bfloat16)
    precise = nn.Linear(DIM, VOCAB, bias=False)
    precise.weight.data.copy_(output.weight)
    exact_hidden = hidden.detach().float().requires_grad_()
    expected = plain(precise, exact_hidden, labels)
    total = chunked_cross_entropy(output, output.weight, hidden, labels)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, expected, rtol=2e-3, atol=0)
    exact = gradients(expected, precise, exact_hidden)
    usual = gradients(plain(output, hidden, labels), output, hidden)
    for mine, other, truth in zip(gradients(total, output, hidden), usual, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - truth).norm() <= 1.1 * (other - truth).norm()


def test_as_computed_on_a_gpu(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused softmax; the GEMM of a chunk adds to the weight gradient."""
    monkeypatch.setattr(loss, "device_type", lambda x: "cuda")
    output, hidden, labels = make()
    total = chunked_cross_entropy(output, output.weight, hidden, labels, linear=output.weight)
    expected = plain(output, hidden, labels)
    torch.testing.assert_close(total, expected)
    for mine, right in zip(gradients(total, output, hidden), gradients(expected, output, hidden), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-6, rtol=1e-5)


def test_a_gpu_compiles_the_loss_once_for_a_vocabulary_and_any_number_of_tokens() -> None:
    """The vocabulary is a constant of the code, where a kernel would divide by it for each logit; the last chunk and
    those of an evaluation have other numbers of tokens."""
    graphs = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(inspect.unwrap(fused_cross_entropy), dynamic=True, backend=record)
    with torch.no_grad():
        for tokens, vocabulary, number in ((64, 48, 1), (40, 48, 1), (16, 48, 1), (64, 32, 2)):
            logits, labels = torch.randn(tokens, vocabulary), torch.randint(vocabulary, (tokens,))
            expected = F.cross_entropy(logits, labels, reduction="sum")
            torch.testing.assert_close(compiled(logits, labels, None, None), expected)
            assert len(graphs) == number


def test_the_logits_of_a_model_are_capped() -> None:
    """As the likelihoods of evaluation are (tests/unit/test_evaluation.py)."""
    model, tokens = nontrivial_llama(replace(CAPPED, vocab_size=VOCAB)), torch.arange(8).view(1, 8)
    raw: list[torch.Tensor] = []
    model.output.register_forward_hook(lambda module, inputs, logits: raw.append(logits))
    with torch.no_grad():
        capped, total = model(tokens), model(tokens, tokens)
    assert raw[0].abs().max() > 1 > 0.5 >= capped.abs().max()
    torch.testing.assert_close(capped, 0.5 * torch.tanh(raw[0] / 0.5))
    torch.testing.assert_close(total, F.cross_entropy(capped[0], tokens[0], reduction="sum"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("z_loss", "softcap"), [(0.1, None), (None, 3.0), (0.1, 3.0)])
def test_z_loss_and_softcap_have_the_gradients_of_their_formulas(
    z_loss: float | None, softcap: float | None, device: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, written out. The z-loss is not part of the returned loss."""
    monkeypatch.setattr(loss, "device_type", lambda x: device)
    output, hidden, labels = make()
    terms = partial(loss.cross_entropy, z_loss=z_loss, softcap=softcap)
    total = chunked_cross_entropy(output, output.weight, hidden, labels, terms, output.weight)
    exact_hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, output.weight))
    logits = (exact_hidden @ weight.T).flatten(0, 1)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    counted, log_sums = labels.flatten() != IGNORE_INDEX, logits.exp().sum(-1).log()
    of_label = logits.gather(-1, labels.flatten().clamp(min=0).unsqueeze(-1))[:, 0]
    expected = (log_sums - of_label)[counted].sum()
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    whole = expected + (z_loss or 0) * log_sums[counted].square().sum()
    exact = torch.autograd.grad(whole / 7, [exact_hidden, weight])
    for mine, right in zip(gradients(total, output, hidden), exact, strict=True):
        assert (mine - right).norm() < 1e-6 * right.norm()


def test_without_gradients(chunks: int) -> None:
    output, hidden, labels = make()
    with torch.no_grad():
        total = chunked_cross_entropy(output, output.weight, hidden, labels)
    assert not total.requires_grad
    torch.testing.assert_close(total, plain(output, hidden, labels).detach())


def test_gradients_add_up_over_microbatches(chunks: int) -> None:
    output, hidden, labels = make()
    for _ in range(2):
        chunked_cross_entropy(output, output.weight, hidden, labels).backward()
    expected = torch.autograd.grad(plain(output, hidden, labels), output.weight)[0]
    assert output.weight.grad is not None
    torch.testing.assert_close(output.weight.grad, 2 * expected, atol=1e-5, rtol=1e-5)


def test_all_labels_ignored(chunks: int) -> None:
    output, hidden, labels = make()
    total = chunked_cross_entropy(output, output.weight, hidden, torch.full_like(labels, IGNORE_INDEX))
    assert total == 0
    assert all((gradient == 0).all() for gradient in gradients(total, output, hidden))


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("grad", [True, False])
def test_full_logits_are_never_held(grad: bool) -> None:
    """With the real chunk size, and a vocabulary size like Llama 3's."""
    tokens, vocab, dim = 1024, 100_000, 4
    weight = nn.Parameter(torch.ones(vocab, dim))
    hidden = torch.ones(2, tokens // 2, dim, requires_grad=True)
    labels = torch.zeros(2, tokens // 2, dtype=torch.long)
    with LargestTensor() as largest, torch.set_grad_enabled(grad):
        total = chunked_cross_entropy(lambda x: F.linear(x, weight), weight, hidden, labels)
        if grad:
            total.backward()
    assert total.item() == pytest.approx(tokens * torch.tensor(float(vocab)).log().item(), rel=1e-4)
    assert largest.elements <= 512 * vocab  # the smallest chunk
