"""Llama: the logits of `transformers` with the same weights, names, sizes, causality, document masks."""

from dataclasses import replace

import pytest
import torch
from tiny import nontrivial_llama
from torch import nn

from torchtitan.models.llama.args import LLAMA2, LLAMA3, LLAMA3_1, LLAMA3_2, LlamaArgs
from torchtitan.models.llama.hf import LLAMA_NAMING
from torchtitan.models.llama.model import Llama
from torchtitan.models.rope import Llama3Scaling, YarnScaling

SMALL = LlamaArgs(dim=64, n_layers=3, n_heads=4, n_kv_heads=4, ffn_dim=96, vocab_size=101)
SCALED = replace(SMALL, rope_theta=10000.0, rope_scaling=Llama3Scaling(factor=8.0, original=32))
VARIANTS = {
    "plain": SMALL,
    "gqa": replace(SMALL, n_kv_heads=2),
    "one_kv_head": replace(SMALL, n_kv_heads=1, norm_eps=1e-3),
    "rope_scaling": SCALED,
    "yarn": replace(SMALL, rope_theta=10000.0, rope_scaling=YarnScaling(factor=8.0, original=32)),
    "tied": replace(SMALL, n_kv_heads=2, tied_embeddings=True),
}
SEQ_LEN = 100  # three times the original context of SCALED


def tokens(batch: int = 2, seq_len: int = SEQ_LEN) -> torch.Tensor:
    return torch.randint(101, (batch, seq_len), generator=torch.Generator().manual_seed(3))


def transformers_llama(args: LlamaArgs) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA_NAMING.file.to_config(args), max_position_embeddings=512)).eval()


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str) -> None:
    args = VARIANTS[variant]
    ours, reference = nontrivial_llama(args), transformers_llama(args)
    weights = {
        LLAMA_NAMING.name(name): LLAMA_NAMING.to_transformers(name, [weight], args)
        for name, weight in ours.state_dict().items()
    }
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if args.tied_embeddings else [], [])
    expected = reference(tokens()).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(tokens()), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_rope_scaling_matters() -> None:
    scaled, plain = nontrivial_llama(SCALED), nontrivial_llama(replace(SCALED, rope_scaling=None))
    assert (scaled(tokens()) - plain(tokens())).abs().max() > 1e-2


def test_module_names_that_filter_lists_use() -> None:
    names = {name for name, _ in Llama(replace(SMALL, n_layers=2)).named_modules()}
    block = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "attention_norm", "ffn_norm"]
    block += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "attention", "feed_forward"]
    expected = {"", "layers", "tok_embeddings", "norm", "output", "layers.0", "layers.1"}
    assert names == expected | {f"layers.{layer}.{name}" for layer in (0, 1) for name in block}
    tied = Llama(replace(SMALL, n_layers=2, tied_embeddings=True))
    assert {name for name, _ in tied.named_modules()} == names
    assert "output.weight" not in dict(tied.named_parameters())


@pytest.mark.parametrize(
    ("args", "parameters"),
    [  # as published in the model cards and released checkpoints
        (LLAMA2["7B"], 6_738_415_616),
        (LLAMA2["13B"], 13_015_864_320),
        (LLAMA2["70B"], 68_976_648_192),
        (LLAMA3["8B"], 8_030_261_248),
        (LLAMA3["70B"], 70_553_706_496),
        (LLAMA3["405B"], 405_853_388_800),
        (LLAMA3["1B"], 1_235_814_400),
        (LLAMA3["3B"], 3_212_749_824),
        (LLAMA3_1["8B"], 8_030_261_248),
        (LLAMA3_1["70B"], 70_553_706_496),
        (LLAMA3_1["405B"], 405_853_388_800),
        (LLAMA3_2["1B"], 1_235_814_400),
        (LLAMA3_2["3B"], 3_212_749_824),
    ],
)
def test_parameter_counts_of_published_models(args: LlamaArgs, parameters: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Llama(args).parameters()) == parameters


def test_rope_of_published_models() -> None:
    assert LLAMA2["7B"].rope_theta == 10000.0 and LLAMA3["8B"].rope_theta == 500000.0
    assert LLAMA3["8B"].rope_scaling is None
    published = Llama3Scaling(factor=8.0, original=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert LLAMA3_1["8B"].rope_scaling == published
    assert LLAMA3_2["1B"].rope_scaling == replace(published, factor=32.0)


def test_vocabulary_comes_from_the_tokenizer_where_the_flavor_has_none() -> None:
    debug = LLAMA3["debugmodel"]
    assert debug.with_vocab_size(4096).vocab_size == 4096
    assert LLAMA3["8B"].with_vocab_size(4096).vocab_size == 128256
    with pytest.raises(ValueError, match="with_vocab_size"):
        Llama(debug)


@torch.no_grad()
def test_a_position_sees_only_itself_and_those_before_it() -> None:
    model = nontrivial_llama(VARIANTS["gqa"])
    changed = tokens()
    changed[:, 60] = (changed[:, 60] + 1) % 101
    before, after = model(tokens()), model(changed)
    assert torch.equal(before[:, :60], after[:, :60])
    assert ((before - after).abs().amax(-1)[:, 60:] > 0).all()


@torch.no_grad()
@pytest.mark.parametrize("variant", ["gqa", "rope_scaling"])
def test_document_mask_equals_separate_sequences(variant: str) -> None:
    """RoPE is relative, so a document deep in a sequence gets the same logits as on its own."""
    model = nontrivial_llama(VARIANTS[variant])
    ids = torch.zeros(2, SEQ_LEN, dtype=torch.long)
    ids[0, 30:70], ids[0, 70:], ids[1, 50:] = 5, 2, 1
    packed = model(tokens(), document_ids=ids)
    for row, start, end in [(0, 0, 30), (0, 30, 70), (0, 70, 100), (1, 0, 50), (1, 50, 100)]:
        alone = model(tokens()[row : row + 1, start:end])
        torch.testing.assert_close(packed[row : row + 1, start:end], alone, atol=1e-5, rtol=0)
    assert (packed - model(tokens()))[0, 30:].abs().max() > 1e-2  # without the mask the result differs


@torch.no_grad()
def test_one_document_is_no_mask() -> None:
    model = nontrivial_llama(SMALL)
    torch.testing.assert_close(
        model(tokens(), document_ids=torch.full((2, SEQ_LEN), 7)), model(tokens()), atol=1e-5, rtol=0
    )


def test_sequence_length_may_change_from_call_to_call() -> None:
    model = nontrivial_llama(SMALL)
    first = model(tokens())
    torch.testing.assert_close(model(tokens()[:, :10]), first[:, :10])
    assert torch.equal(model(tokens()), first)


def test_bfloat16_computation_stays_close_to_float32() -> None:
    model = nontrivial_llama(VARIANTS["gqa"])
    exact = model(tokens())
    rounded = model.to(torch.bfloat16)(tokens())
    assert rounded.dtype == torch.bfloat16
    assert (rounded - exact).norm() / exact.norm() < 0.03


def test_the_output_layer_runs_as_often_as_the_model_says() -> None:
    """Low-precision GEMMs of a step are counted by it."""
    model = Llama(LlamaArgs(dim=8, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=8, vocab_size=2**15))
    runs: list[int] = []
    model.output.register_forward_hook(lambda *_: runs.append(1))
    for length, expected in ((100, 1), (512, 1), (600, 2)):
        runs.clear()
        model(torch.zeros(1, length, dtype=torch.long), torch.zeros(1, length, dtype=torch.long))
        assert len(runs) == model.passes(length)["output"] == expected


@pytest.mark.parametrize("variant", ["gqa", "tied"])
def test_loss_and_gradients_follow_from_the_logits(variant: str) -> None:
    model, plain = nontrivial_llama(VARIANTS[variant]), nontrivial_llama(VARIANTS[variant])
    labels = tokens().roll(-1, 1)
    loss = model(tokens(), labels)
    loss.backward()
    expected = nn.functional.cross_entropy(plain(tokens()).flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for (name, mine), right in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, right.grad, atol=1e-4, rtol=1e-4)
