"""Which blocks a GPU's attention looks at, checked against the dense mask."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from torchtitan.kernels import attention_gpu
from torchtitan.kernels.attention_gpu import BLOCK, Backend, block_mask


def random_documents(rows: int, length: int, documents: int) -> torch.Tensor:
    """(rows, length) ids of about as many documents a row."""
    begins = torch.rand(rows, length, generator=torch.Generator().manual_seed(documents)) < documents / length
    return begins.cumsum(1)


def dense_mask(ids: torch.Tensor, queries: int, window: int | None = None) -> torch.Tensor:
    """(rows, queries, keys) of the last queries."""
    keys = ids.shape[1]
    positions = torch.arange(keys - queries, keys)
    distance = positions[:, None] - torch.arange(keys)
    return (ids[:, positions, None] == ids[:, None, :]) & (distance >= 0) & (distance < (window or keys))


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300, 10**6])
@pytest.mark.parametrize("documents", [1, 3, 30])
@pytest.mark.parametrize("keys, queries", [(512, 512), (700, 700), (1024, 256), (640, 130)])
def test_blocks_match_the_dense_mask(keys: int, queries: int, documents: int, window: int | None) -> None:
    """Each block with something to see is listed once, as full only if nothing in it is masked."""
    ids = random_documents(2, keys, documents)
    mask = block_mask(ids, queries, window)
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    padding = (0, columns * BLOCK - keys, 0, rows * BLOCK - queries)

    def blocks(dense: torch.Tensor) -> torch.Tensor:
        return F.pad(dense, padding).view(2, rows, BLOCK, columns, BLOCK).transpose(2, 3).flatten(3)

    dense = dense_mask(ids, queries, window)
    seen, unmasked = blocks(dense).any(-1), (blocks(dense) | ~blocks(torch.ones_like(dense))).all(-1)
    counts = torch.zeros(2, rows, columns, dtype=torch.int)
    for batch in range(2):
        for row in range(rows):
            full = mask.full_kv_indices[batch, 0, row, : mask.full_kv_num_blocks[batch, 0, row]]  # type: ignore[index]
            partial = mask.kv_indices[batch, 0, row, : mask.kv_num_blocks[batch, 0, row]]
            assert unmasked[batch, row, full].all()
            counts[batch, row] += torch.bincount(torch.cat([full, partial]), minlength=columns)
    assert torch.equal(counts, seen.int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries, log_sum_exp", [(96, (2, 4, 96)), (32, (2, 4, 32)), (32, (2, 4, 32, 1))])
@pytest.mark.parametrize("sinks", [False, True])
def test_two_parts_are_attention_of_the_whole(
    sinks: bool, queries: int, log_sum_exp: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and gradients, by an operator of the CPU. flash's log-sum-exp has three dimensions, cuDNN's four."""
    aten = torch.ops.aten

    def forward(q, k, v, causal):  # type: ignore[no-untyped-def]
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse.view(log_sum_exp), torch.empty(0), torch.empty(0)

    def backward(grad, q, k, v, saved, causal):  # type: ignore[no-untyped-def]
        out, lse = saved[0], saved[1].view(log_sum_exp[:3])
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)

    monkeypatch.setitem(attention_gpu.BACKENDS, "FLASH_ATTENTION", Backend(forward, backward))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 32).to(dtype).requires_grad_() for n in (queries, 96, 96))
    grad = torch.randn(q.shape)
    inputs = [q, k, v, *([torch.randn(4).requires_grad_()] if sinks else [])]
    out = attention_gpu.causal_attention_gpu(q, k, v, None, None, *inputs[3:])
    actual = [out, *torch.autograd.grad(out, inputs, grad.to(dtype))]
    exact = [t.detach().float().requires_grad_() for t in inputs]
    logits = exact[0] @ exact[1].mT / 32**0.5
    logits = logits.masked_fill(torch.ones(queries, 96, dtype=torch.bool).triu(97 - queries), -torch.inf)
    further = [of_heads.view(1, 4, 1, 1).expand(2, 4, queries, 1) for of_heads in exact[3:]]
    expected = torch.cat([logits, *further], -1).softmax(-1)[..., :96] @ exact[2]
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for tensor, right in zip(actual, [expected, *torch.autograd.grad(expected, exact, grad)], strict=True):
        torch.testing.assert_close(tensor.float(), right, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 140])
def test_attention_within_documents_matches_the_dense_mask(window: int | None) -> None:
    torch.manual_seed(0)
    ids, queries = random_documents(2, 300, 4), 200
    q = torch.randn(2, 4, queries, 32)
    k, v = (torch.randn(2, 2, 300, 32) for _ in range(2))
    out = flex_attention(q, k, v, block_mask=block_mask(ids, queries, window), enable_gqa=True)
    mask = dense_mask(ids, queries, window)[:, None]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("major, kv_heads, cudnn", [(10, 4, False), (10, 8, True), (9, 4, True)])
def test_no_kernel_is_taken_that_is_known_to_be_wrong(
    major: int, kv_heads: int, cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    with attention_gpu.right_kernels(torch.device("cuda"), kv_heads):
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("keys, by_cudnn", [(192, False), (256, True)])
def test_cudnn_gets_no_part_of_a_block_of_keys_before_the_queries(
    keys: int, by_cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward pass would give NaN there."""
    called = []
    monkeypatch.setattr(attention_gpu, "torchs_choice", lambda *_: "CUDNN_ATTENTION")
    monkeypatch.setattr(attention_gpu._InTwoParts, "apply", lambda *_: called.append("cudnn"))
    monkeypatch.setattr(attention_gpu, "_compiled", lambda: lambda *_, **__: called.append("flex"))
    q, k = torch.empty(1, 2, 128, 32), torch.empty(1, 2, keys, 32)
    attention_gpu.causal_attention_gpu(q, k, k)
    assert called == (["cudnn"] if by_cudnn else ["flex"])
