"""Qwen3: the logits of `transformers` with the same weights, names, sizes. What Llama shares is tested there."""

from dataclasses import replace

import pytest
import torch
from tiny import nontrivial

from torchtitan.models.qwen3 import NAMING, QWEN3, Qwen3Args
from torchtitan.models.transformer import Transformer

SMALL = Qwen3Args(dim=64, n_layers=3, n_heads=4, n_kv_heads=4, ffn_dim=96, vocab_size=101, head_dim=32)
VARIANTS = {
    "plain": SMALL,
    "heads as wide as the model": replace(SMALL, n_kv_heads=2, head_dim=64),
    "narrow heads": replace(SMALL, n_kv_heads=1, head_dim=8, norm_eps=1e-3),
    "tied": replace(SMALL, n_kv_heads=2, tied_embeddings=True),
}


def tokens() -> torch.Tensor:
    return torch.randint(101, (2, 100), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    args = VARIANTS[variant]
    ours, reference = (
        nontrivial(Transformer(args)),
        Qwen3ForCausalLM(Qwen3Config(**NAMING.file.to_config(args))).eval(),
    )
    weights = {
        NAMING.name(name): NAMING.to_transformers(name, [weight], args) for name, weight in ours.state_dict().items()
    }
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if args.tied_embeddings else [], [])
    expected = reference(tokens()).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(tokens()), expected, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_channels_of_the_norms_matter(norm: str) -> None:
    """So that the comparison above would notice a wrong order of channels."""
    model = nontrivial(Transformer(SMALL))
    before = model(tokens())
    weight = model.get_parameter(f"layers.0.attention.{norm}.weight")
    weight.copy_(weight.flip(0))
    assert (model(tokens()) - before).abs().max() > 1e-2


@torch.no_grad()
def test_document_mask_equals_separate_sequences() -> None:
    model = nontrivial(Transformer(VARIANTS["tied"]))
    ids = (torch.arange(100) >= 40).long().expand(2, -1)
    alone = [model(tokens()[:, :40]), model(tokens()[:, 40:])]
    torch.testing.assert_close(model(tokens(), document_ids=ids), torch.cat(alone, 1), atol=1e-5, rtol=0)


def test_module_names_that_filter_lists_use() -> None:
    names = {name.removeprefix("layers.0.") for name, _ in Transformer(SMALL).named_modules() if "layers.0.a" in name}
    assert names == {"attention_norm", "attention"} | {
        f"attention.{name}" for name in ("wq", "wk", "wv", "wo", "q_norm", "k_norm")
    }


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    [  # of the released checkpoints, the tied weight counted once
        ("0.6B", 596_049_920),
        ("1.7B", 1_720_574_976),
        ("4B", 4_022_468_096),
        ("8B", 8_190_735_360),
        ("14B", 14_768_307_200),
        ("32B", 32_762_123_264),
    ],
)
def test_parameter_counts_of_published_models(flavor: str, parameters: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Transformer(QWEN3[flavor]).parameters()) == parameters


def test_norms_of_queries_and_keys_start_at_one() -> None:
    model = Transformer(SMALL)
    assert [model.init_std(f"layers.1.attention.{norm}.weight") for norm in ("q_norm", "k_norm")] == [None, None]
    assert model.init_std("layers.0.attention.wo.weight") == (2 * 4 * 32) ** -0.5  # fan-in is heads x head_dim
