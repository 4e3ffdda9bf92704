"""Families whose layers differ: logits and gradients of `transformers` with the same weights, and their sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import nontrivial

from torchtitan.models import MODELS
from torchtitan.models.olmo3.args import Olmo3Args, windows_in_three_of_four
from torchtitan.models.rope import YarnScaling
from torchtitan.models.transformer import Transformer

VOCABULARY, LENGTH, CUT = 101, 60, 25  # the first document of two ends at CUT
OLMO3 = Olmo3Args(64, 5, 4, 2, 96, VOCABULARY, pattern=windows_in_three_of_four(7))
VARIANTS: dict[str, tuple[str, Any]] = {
    "olmo3": ("olmo3", OLMO3),
    "olmo3, longer contexts": ("olmo3", replace(OLMO3, rope_scaling=YarnScaling(factor=4.0, original=32))),
}


def both(family: str, args: Any) -> tuple[Transformer, Any]:
    """Our model and that of `transformers`, with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = MODELS.get(family)
    naming = spec.naming
    assert naming is not None
    ours: Any = nontrivial(spec.build(args))
    config = AutoConfig.for_model(**naming.config(args), pad_token_id=None)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    weights = {naming.name(name): weight for name, weight in in_their_layout(family, args, ours).items()}
    assert not any(theirs.load_state_dict(weights, strict=False))
    return ours, theirs


def in_their_layout(family: str, args: Any, ours: Transformer, gradients: bool = False) -> dict[str, torch.Tensor]:
    naming = MODELS.get(family).naming
    assert naming is not None
    return {
        name: naming.to_transformers(name, weight.grad if gradients else weight.detach(), args.head_dim)  # type: ignore[arg-type]
        for name, weight in ours.named_parameters()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_transformers(variant: str) -> None:
    """With windows shorter than the text, which has two documents; `transformers` sees one after the other."""
    family, args = VARIANTS[variant]
    ours, theirs = both(family, args)
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(VOCABULARY, (2, LENGTH), generator=generator) for _ in range(2))
    ids = (torch.arange(LENGTH) >= CUT).long().expand(2, -1)
    logits = torch.cat([theirs(tokens[:, :CUT]).logits, theirs(tokens[:, CUT:]).logits], dim=1)
    torch.testing.assert_close(
        ours(tokens, document_ids=ids), logits, atol=1e-5 * float(logits.detach().abs().max()), rtol=0
    )
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    ours(tokens, labels, ids).backward()
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    naming = MODELS.get(family).naming
    assert naming is not None
    for name, gradient in in_their_layout(family, args, ours, gradients=True).items():
        expected = gradients[naming.name(name)]
        assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize(
    ("family", "flavor", "parameters"),
    [  # of the released checkpoints
        ("olmo3", "7B", 7_298_011_136),
        ("olmo3", "32B", 32_233_522_176),
    ],
)
def test_parameter_counts_of_published_models(family: str, flavor: str, parameters: int) -> None:
    spec = MODELS.get(family)
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in spec.build(spec.flavor(flavor)).parameters()) == parameters
