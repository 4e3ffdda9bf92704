"""Families whose layers differ: logits and gradients of `transformers` with the same weights, and their sizes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import nontrivial
from torch import nn

from torchtitan.models import MODELS
from torchtitan.models.afmoe import AfmoeArgs
from torchtitan.models.afmoe import windows_without_rope_in_the_fourth as nope_in_the_fourth
from torchtitan.models.deepseek_v3 import DeepseekV3Args
from torchtitan.models.gemma3 import Gemma3Args, windows_in_five_of_six
from torchtitan.models.glm4_moe import Glm4MoEArgs
from torchtitan.models.gpt_oss import GptOssArgs, experts, windows_in_every_other
from torchtitan.models.moe import mixtures
from torchtitan.models.olmo3 import Olmo3Args, windows_in_three_of_four
from torchtitan.models.rope import LinearScaling, YarnScaling
from torchtitan.models.sparse_args import MoEArgs
from torchtitan.models.transformer import Transformer

VOCABULARY, LENGTH, CUT = 101, 60, 25  # the first document of two ends at CUT
SIGMOID = MoEArgs(6, 2, 48, n_shared_experts=1, n_dense_layers=1, score="sigmoid")
OLMO3 = Olmo3Args(64, 5, 4, 2, 96, VOCABULARY, pattern=windows_in_three_of_four(7))
GLM = Glm4MoEArgs(64, 3, 4, 2, 96, VOCABULARY, head_dim=32, moe=SIGMOID)
TRINITY = AfmoeArgs(64, 5, 4, 2, 96, VOCABULARY, head_dim=32, pattern=nope_in_the_fourth(7), moe=SIGMOID)
GROUPED = replace(SIGMOID, n_experts=8, top_k=3, n_groups=4, top_groups=2, scale=2.5)
DEEPSEEK = DeepseekV3Args(
    64, 3, 4, 4, 96, VOCABULARY,
    q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, moe=GROUPED,
)  # fmt: skip
LONGER = YarnScaling(factor=4.0, original=32, mscale=1.0, mscale_all_dim=0.7)
GPT_OSS = GptOssArgs(64, 3, 4, 2, 48, VOCABULARY, head_dim=32, pattern=windows_in_every_other(7), moe=experts(6, 48, 2))
LOCAL = windows_in_five_of_six(7)
GEMMA = Gemma3Args(64, 7, 4, 2, 96, VOCABULARY, head_dim=32, query_pre_attn_scalar=20, pattern=LOCAL)
VARIANTS: dict[str, tuple[str, Any]] = {
    "olmo3": ("olmo3", OLMO3),
    "olmo3, longer contexts": ("olmo3", replace(OLMO3, rope_scaling=YarnScaling(factor=4.0, original=32))),
    "glm4_moe": ("glm4_moe", GLM),
    "glm4_moe, normalized, groups": ("glm4_moe", replace(GLM, qk_norm="head", moe=GROUPED)),
    "afmoe": ("afmoe", TRINITY),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gemma3": ("gemma3", GEMMA),
    "gemma3, longer contexts": ("gemma3", replace(GEMMA, n_layers=6, rope_scaling=LinearScaling(factor=4.0))),
    "afmoe, tied": ("afmoe", replace(TRINITY, tied_embeddings=True, scaled_embeddings=False)),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3, longer contexts": ("deepseek_v3", replace(DEEPSEEK, rope_scaling=LONGER)),
    "deepseek_v3, no latent of queries": ("deepseek_v3", replace(DEEPSEEK, q_lora_rank=None, moe=SIGMOID)),
}


def in_their_layout(family: str, args: Any, ours: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Our tensors under their published names; those of experts one by one."""
    naming = MODELS.get(family).naming
    assert naming is not None
    there: dict[str, torch.Tensor] = {}
    for name, tensor in ours.items():
        if name.endswith(".expert_bias") and not naming.publishes_expert_bias:
            continue
        parts = [ours[part] for part in naming.parts(name)]
        stacks = zip(*(part.unbind() if naming.stacks_experts(name) else [part] for part in parts), strict=True)
        merged = [naming.to_transformers(name, weights, args) for weights in stacks]
        there |= zip(naming.names_of(name, tensor.shape), merged, strict=True)
    return there


def published(theirs: nn.Module, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Views of their tensors, or of gradients, under the published names; in memory they stack experts."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in [*theirs.named_parameters(), *theirs.named_buffers()]:
        tensor: Any = parameter.grad if gradients else parameter.data
        if tensor is None or "inv_freq" in name or name.endswith("embed_scale"):
            continue
        if name.endswith("experts.gate_up_proj") and theirs.config.model_type != "gpt_oss":
            for expert, both in enumerate(tensor):
                names = [name.replace("gate_up_proj", f"{expert}.{part}_proj.weight") for part in ("gate", "up")]
                tensors |= zip(names, both.chunk(2), strict=True)
        elif name.endswith("experts.down_proj") and theirs.config.model_type != "gpt_oss":
            tensors |= {name.replace("down_proj", f"{e}.down_proj.weight"): part for e, part in enumerate(tensor)}
        else:
            tensors[name] = tensor
    return tensors


def both(family: str, args: Any) -> tuple[Transformer, Any]:
    """Our model and that of `transformers`, with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = MODELS.get(family)
    assert spec.naming is not None
    ours: Any = nontrivial(spec.build(args))
    for number, mixture in enumerate(mixtures(ours).values() if spec.naming.publishes_expert_bias else ()):
        mixture.expert_bias.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(number))
    config = AutoConfig.for_model(**spec.naming.config(args), pad_token_id=None)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    left = published(theirs)
    for name, tensor in in_their_layout(family, args, ours.state_dict()).items():
        left.pop(name).copy_(tensor)
    assert set(left) <= {"lm_head.weight"}
    return ours, theirs


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_transformers(variant: str) -> None:
    """With windows shorter than the text, which has two documents; `transformers` sees one after the other."""
    family, args = VARIANTS[variant]
    ours, theirs = both(family, args)
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(VOCABULARY, (2, LENGTH), generator=generator) for _ in range(2))
    ids = (torch.arange(LENGTH) >= CUT).long().expand(2, -1)
    logits = torch.cat([theirs(tokens[:, :CUT]).logits, theirs(tokens[:, CUT:]).logits], dim=1)
    assert (ours(tokens, document_ids=ids) - logits).abs().max() <= 1e-5 * logits.abs().max()
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    ours(tokens, labels, ids).backward()
    expected = published(theirs, gradients=True)
    for name, gradient in in_their_layout(family, args, {n: p.grad for n, p in ours.named_parameters()}).items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name


WRONG: dict[str, dict[str, tuple[Any, str]]] = {  # entries of a config.json, and what the sentence says
    "olmo3": {
        "sliding_window": (None, "sliding_window is missing"),
        "layer_types": (["full_attention"], "layer_types has 1 entries, but num_hidden_layers is 5"),
        "head_dim": (8, "head_dim is 8, but only"),
        "rope_parameters": (
            {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 2e4}},
            "has another base than that of full_attention",
        ),
    },
    "glm4_moe": {
        "attention_bias": (False, "Input should be True"),
        "partial_rotary_factor": (0.0, "partial_rotary_factor is 0.0, but only 0.5 is supported"),
        "n_group": (4, "6 experts cannot be in 4 equal groups of two or more"),
    },
    "gemma3": {
        "model_type": ("gemma3", "model_type is 'gemma3', not 'gemma3_text'"),
        "hidden_activation": ("silu", "Input should be 'gelu_pytorch_tanh'"),
        "attn_logit_softcapping": (50.0, "Input should be None"),
        "rope_parameters": (
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            "RoPE of sliding_attention is scaled, which is not supported",
        ),
    },
    "gpt_oss": {
        "attention_bias": (False, "Input should be True"),
        "swiglu_limit": (5.0, "Input should be 7.0"),
        "num_local_experts": (None, "num_local_experts"),
        "layer_types": (["chunked_attention"] * 3, "Input should be 'full_attention' or 'sliding_attention'"),
    },
    "afmoe": {
        "rope_parameters": (
            {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 2e4}},
            "RoPE differs for full_attention and sliding_attention, which is not supported for afmoe",
        ),
        "score_func": ("softmax", "Input should be 'sigmoid'"),
        "route_norm": (False, "Input should be True"),
    },
    "deepseek_v3": {
        "attention_bias": (True, "Input should be False"),
        "rope_interleave": (False, "Input should be True"),
        "kv_lora_rank": (None, "Field required"),
        "num_key_value_heads": (2, "4 heads have 2 keys and values, but each has its own"),
        "v_head_dim": (32, "values of 32 channels are wider than keys, which have 24"),
        "head_dim": (24, "head_dim is 24, but only qk_rope_head_dim, which RoPE rotates, is supported"),
        "n_group": (3, "8 experts cannot be in 3 equal groups of two or more"),
        "topk_group": (1, "a token cannot have 3 experts from 1 of 4 groups of 2"),
    },
}


@pytest.mark.parametrize(("family", "entry"), [(family, entry) for family in WRONG for entry in WRONG[family]])
def test_files_of_unsupported_models_are_refused(family: str, entry: str) -> None:
    naming = MODELS.get(family).naming
    assert naming is not None
    value, words = WRONG[family][entry]
    config = naming.config(VARIANTS[family][1])
    if entry == "rope_parameters":
        config["rope_scaling"] = None
    with pytest.raises(ValueError) as caught:
        naming.file.from_config({**config, entry: value})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("family", "flavor", "parameters"),
    [  # as transformers counts those of the released configurations, without layers for a further token
        ("olmo3", "7B", 7_298_011_136),
        ("olmo3", "32B", 32_233_522_176),
        ("glm4_moe", "Air-106B-A12B", 106_852_245_504),
        ("glm4_moe", "355B-A32B", 352_797_814_784),
        ("afmoe", "Nano-6B-A1B", 6_119_996_416),
        ("afmoe", "Mini-26B-A3B", 26_123_970_560),
        ("deepseek_v3", "Moonlight-16B-A3B", 15_960_108_544),
        ("deepseek_v3", "671B-A37B", 671_026_404_352),  # and 58 x 256 biases: 671,026,419,200 published numbers
        ("gemma3", "270M", 268_098_176),
        ("gemma3", "1B", 999_885_952),
        ("gemma3", "4B", 3_880_263_168),
        ("gemma3", "12B", 11_766_034_176),
        ("gemma3", "27B", 27_009_346_304),
        ("gpt_oss", "20B-A4B", 20_914_757_184),
        ("gpt_oss", "120B-A5B", 116_829_156_672),
    ],
)
def test_parameter_counts_of_published_models(family: str, flavor: str, parameters: int) -> None:
    spec = MODELS.get(family)
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in spec.build(spec.flavor(flavor)).parameters()) == parameters
