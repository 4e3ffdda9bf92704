"""Attention is declared: every implementation does what a layer needs, or refuses it with a sentence."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest.mock import patch

import pytest
import torch
from tiny import CappedArgs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan.config.system import ActivationCheckpoint, Parallelism
from torchtitan.config.training import Training
from torchtitan.errors import CheckpointError, ConfigError, UserError
from torchtitan.kernels.attention import OF_ALL, OF_LAST, attend
from torchtitan.kernels.dispatch import KERNELS, Kernel
from torchtitan.metrics.flops import flops_per_token
from torchtitan.models.args import LayerArgs
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.hf import LLAMA_NAMING
from torchtitan.models.llama.model import Llama
from torchtitan.models.olmo3 import NAMING, OLMO3
from torchtitan.models.parallelize import parallelize
from torchtitan.models.transformer import Attention
from torchtitan.parallel.context import context_parallel_attention
from torchtitan.parallel.pipeline import layer_costs
from torchtitan.protocols import AttentionSpec
from torchtitan.tools.generation.cache import cached
from torchtitan.tools.interchange.model import PublishedModel
from torchtitan.tools.plan.kernel_substitutes import kernel_substitutes
from torchtitan.tools.plan.step_model import causal_flops

WINDOW, SOFTCAP = AttentionSpec(window=3), AttentionSpec(softcap=2.0)
SPECS = {
    "causal": AttentionSpec(causal=False),
    "window": WINDOW,
    "scale": AttentionSpec(scale=0.5),
    "softcap": SOFTCAP,
    "sinks": AttentionSpec(sinks=True),
}
# No kernel here does these.
UNKNOWN = [SPECS["causal"], replace(WINDOW, softcap=2.0), SPECS["scale"], SOFTCAP]
SEQ, KEYS = 24, torch.arange(24)


@dataclass(frozen=True)
class WindowArgs(LlamaArgs):
    """Every second layer has a window."""

    def attention_spec(self, layer: int) -> AttentionSpec:
        return AttentionSpec(window=3 if layer % 2 else None)


@dataclass(frozen=True)
class SoftcapArgs(LlamaArgs):
    """Every second layer has a softcap."""

    def attention_spec(self, layer: int) -> AttentionSpec:
        return SOFTCAP if layer % 2 else AttentionSpec()


@dataclass(frozen=True)
class HalfRotated(LlamaArgs):
    """RoPE rotates half of a head's channels, as no Llama of `transformers` does."""

    rope_share: ClassVar[float] = 0.5


ARGS = WindowArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=50)
CAPPED = SoftcapArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=50)


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """Rows that a test adds are gone afterwards."""
    with patch.dict(KERNELS):
        yield


def formula(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ids: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a declaration means, with a dense mask; queries are the last positions of the keys."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    places = torch.arange(k.shape[2])
    distance = places[-q.shape[2] :, None] - places
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if spec.causal:
        allowed = allowed & (distance >= 0)
    if spec.window is not None:
        allowed = allowed & (distance.abs() < spec.window)
    if ids is not None:
        allowed = allowed & (ids[:, None, -q.shape[2] :, None] == ids[:, None, None, :])
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if spec.scale is None else spec.scale)
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logits = logits.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    return logits.softmax(-1)[..., : k.shape[2]] @ v


def check(kernel: Kernel, operation: str) -> None:
    """Compares output and gradients of a kernel with the formula's: plain, and for each need that it says it meets."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, SEQ, 16) for heads in (4, 2, 2))
    q = q[:, :, 10:] if operation == OF_LAST else q
    ids = (KEYS // torch.tensor([[7], [10]])) if "documents" in kernel.does else None
    for spec in [AttentionSpec(), *(SPECS[need] for need in kernel.does if need in SPECS)]:
        inputs = [tensor.requires_grad_() for tensor in (q.detach(), k, v, *([torch.randn(4)] if spec.sinks else []))]
        exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
        grad = torch.randn(q.shape, dtype=torch.float64)
        out = kernel.run(spec, *inputs[:3], ids, *inputs[3:])
        right = formula(spec, exact[0], exact[1], exact[2], ids, *exact[3:])
        gradients = torch.autograd.grad(out, inputs, grad.float()), torch.autograd.grad(right, exact, grad)
        for mine, reference in zip((out, *gradients[0]), (right, *gradients[1]), strict=True):
            torch.testing.assert_close(mine.double(), reference, atol=1e-5, rtol=1e-5)


def of_cpu() -> list[Any]:
    q = torch.empty(1, 1, 1, 16)
    rows = [(kernel, operation) for operation in (OF_ALL, OF_LAST) for kernel in KERNELS[operation]]
    return [pytest.param(*row, id=f"{row[0].name}: {row[1]}") for row in rows if row[0].applies(q)]


@pytest.mark.parametrize(("kernel", "operation"), of_cpu())
def test_a_kernel_does_what_it_says(kernel: Kernel, operation: str) -> None:
    check(kernel, operation)


def test_a_kernel_that_ignores_a_window_is_found_out() -> None:
    honest = Kernel("honest", formula, does=["window"])
    check(honest, OF_ALL)
    ignorant = replace(honest, run=lambda spec, *inputs: formula(AttentionSpec(), *inputs))
    with pytest.raises(AssertionError, match="not close"):
        check(ignorant, OF_ALL)


def test_a_package_adds_a_kernel() -> None:
    """The layers that need it get it, under either operation; the others keep theirs."""
    called = []

    def capped(spec: AttentionSpec, *inputs: Any) -> torch.Tensor:
        called.append(spec)
        return formula(spec, *inputs)

    torch.manual_seed(0)
    model = Llama(CAPPED)
    tokens = torch.randint(50, (2, SEQ))
    with pytest.raises(
        UserError,
        match=r"softcap = 2.0, which is not supported by the kernels for attention in torch.float32 on cpu",
    ):
        model(tokens)
    KERNELS[OF_ALL] = [*KERNELS[OF_ALL], Kernel("mine", capped, lambda q: q.device.type == "cpu", ["softcap"])]
    out = model(tokens)
    assert called == [SOFTCAP]
    for layer in model.layers.values():
        cast(Attention, layer.attention).spec = SOFTCAP
    assert not torch.equal(model(tokens), out) and called == 3 * [SOFTCAP]


def test_a_model_sees_as_far_as_its_windows_reach() -> None:
    torch.manual_seed(0)
    model = Llama(ARGS)
    for layer in model.layers.values():
        cast(Attention, layer.attention).spec = WINDOW
    tokens = torch.randint(50, (2, SEQ))
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 50
    assert torch.equal(model(tokens)[:, 5:], model(changed)[:, 5:])  # two windows of three reach four positions back
    assert not torch.equal(model(tokens)[:, 4], model(changed)[:, 4])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("operation", [OF_ALL, OF_LAST])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("spec", UNKNOWN, ids=lambda spec: " and ".join(spec.needs()))
def test_no_built_in_kernel_takes_what_it_does_not_do(
    spec: AttentionSpec, documents: bool, operation: str, device: str
) -> None:
    """On neither device, and not in a plan of it."""
    declared = " = .*, ".join(spec.needs(documents))
    message = rf"attention declares {declared} = .*, which is not supported by the kernels for {operation} in .* on "
    with FakeTensorMode():
        q = torch.empty(1, 2, SEQ, 16, device=device)
        ids = torch.zeros(1, SEQ, dtype=torch.long, device=device) if documents else None
        with pytest.raises(UserError, match=message):
            attend(spec, q, q, q, ids, operation == OF_LAST)
        with kernel_substitutes(device), pytest.raises(UserError, match=message):
            attend(spec, q.cpu(), q.cpu(), q.cpu(), ids, operation == OF_LAST)


def test_documents_are_refused_by_a_layer_without_them() -> None:
    q = torch.ones(1, 2, SEQ, 16)
    spec = AttentionSpec(documents=False)
    attend(spec, q, q, q, None)
    with pytest.raises(UserError, match=r"documents = False, which is not supported by the kernels"):
        attend(spec, q, q, q, KEYS[None])


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_context_parallelism_refuses_a_softcap(method: Any) -> None:
    group = SimpleNamespace(group_name="group")
    mesh: Any = SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 2, get_group=lambda: group)
    layer = Attention(ARGS)
    layer.use(context_parallel_attention(mesh, method))
    layer.spec = SOFTCAP
    with pytest.raises(
        UserError, match=rf"softcap = 2.0, which is not supported by context parallelism by {method}\.$"
    ):
        layer.use(context_parallel_attention(mesh, method))


def test_generation_refuses_a_softcap() -> None:
    model = Llama(CAPPED)
    with (
        pytest.raises(UserError, match=r"softcap = 2.0, which is not supported by the cache of generation\.$"),
        cached(model, 8, torch.zeros(1, dtype=torch.long)),
    ):
        pass
    KERNELS[OF_ALL] = [Kernel("mine", formula, does=["softcap"])]
    model(torch.zeros(1, 8, dtype=torch.long))  # every layer is what it was


def test_attention_of_another_kind_is_not_passed_over() -> None:
    """Each rank, and each new token, would attend to its own part of the context alone."""
    model = Llama(LlamaArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=50))
    cast(Any, model.layers["1"]).attention = nn.Identity()
    with (
        pytest.raises(ConfigError, match=r"^the cache of generation .* layer 1 has none"),
        cached(model, 8, torch.zeros(1, dtype=torch.long)),
    ):
        pass
    group = SimpleNamespace(group_name="group")
    one, two = (SimpleNamespace(size=lambda n=n: n, get_local_rank=lambda: 0, get_group=lambda: group) for n in (1, 2))
    with pytest.raises(ConfigError, match=r"^parallelism\.context_parallel_degree above 1 .* layer 1 has none"):
        parallelize(
            model, {}, cast(Any, {"tp": one}), cast(Any, two), None, Parallelism(), ActivationCheckpoint(), Training()
        )


@pytest.mark.parametrize("seq_len", [1, 2, 3, SEQ])
def test_pairs_inside_windows_are_counted(seq_len: int) -> None:
    """A layer without a window counts all pairs, one with a window those less than three positions apart."""
    inside = sum(abs(i - j) < 3 for i in range(seq_len) for j in range(seq_len))
    attention = 12 * ARGS.n_heads * ARGS.head_dim * (seq_len**2 + inside) / seq_len
    assert flops_per_token(7, ARGS, seq_len) == pytest.approx(6 * 7 + attention)
    assert causal_flops(attention, ARGS, seq_len) == pytest.approx(attention / 2)


def test_a_pipeline_weighs_layers_by_their_windows() -> None:
    model = Llama(ARGS)
    full, window = layer_costs(model, 1000)
    assert full - (window - 50 * 32) == 32 * (1000 - WINDOW.positions(1000))  # the last one has the output layer


def test_a_window_holds_at_least_the_position_itself() -> None:
    with pytest.raises(UserError, match=r"declares window = 0, but a window has at least one position"):
        AttentionSpec(window=0)


def test_an_export_refuses_what_its_format_cannot_say() -> None:
    with pytest.raises(ValueError, match=r"declares window = 3, which is not supported by the published format\.$"):
        LLAMA_NAMING.config(ARGS)
    with pytest.raises(CheckpointError, match=r"cannot be exported: .* window = 3, .* by the published format\.$"):
        PublishedModel(LLAMA_NAMING, ARGS, Llama, None, 0).files(torch.float32)
    plain = LlamaArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=50)
    assert LLAMA_NAMING.config(plain) == LLAMA_NAMING.file.to_config(plain)
    with pytest.raises(ValueError, match=r"does not support rope_share = 0\.5$"):
        LLAMA_NAMING.config(HalfRotated(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=50))
    with pytest.raises(ValueError, match=r"does not support logit_softcap = 0\.5$"):
        LLAMA_NAMING.config(CappedArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=50))
    of_layers = replace(OLMO3["debugmodel"], vocab_size=50, pattern=(LayerArgs(8), LayerArgs(9)))
    with pytest.raises(ValueError, match=r"one window for all layers, not \[8, 9\]"):
        NAMING.config(of_layers)
    with pytest.raises(ValueError, match=r"does not support pattern = \[LayerArgs\(window=8, rope=True"):
        NAMING.config(replace(of_layers, pattern=(LayerArgs(8), LayerArgs())))


def test_a_plan_counts_only_causal_attention() -> None:
    model: Any = replace(ARGS)
    object.__setattr__(model, "attention_spec", lambda layer: AttentionSpec(causal=False))
    with pytest.raises(UserError, match=r"causal = False, which is not supported by the plan's count of FLOPs\.$"):
        causal_flops(1.0, model, SEQ)
