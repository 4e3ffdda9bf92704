"""A user's module, `--experimental.custom_import=tiny`: models so small that a run is dominated by start-up, and one
for GPUs."""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from torchtitan.models import MODELS, ModelSpec
from torchtitan.models.afmoe import AfmoeArgs
from torchtitan.models.afmoe import windows_without_rope_in_the_fourth as nope_in_the_fourth
from torchtitan.models.args import TransformerArgs
from torchtitan.models.deepseek_v3 import DeepseekV3Args
from torchtitan.models.gemma3 import Gemma3Args, windows_in_five_of_six
from torchtitan.models.glm4_moe import Glm4MoEArgs
from torchtitan.models.gpt_oss import GptOssArgs, windows_in_every_other
from torchtitan.models.gpt_oss import experts as with_biases
from torchtitan.models.llama.args import LLAMA3, LlamaArgs
from torchtitan.models.llama.hf import LLAMA_NAMING
from torchtitan.models.llama.model import Llama
from torchtitan.models.olmo3 import Olmo3Args
from torchtitan.models.olmo3 import windows_in_three_of_four as windows
from torchtitan.models.qwen3 import Qwen3Args, Qwen3MoEArgs
from torchtitan.models.rope import YarnScaling
from torchtitan.models.sparse_args import MoEArgs

TINY = LlamaArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=None)

MODELS.register(
    "tiny",
    ModelSpec(
        {
            "narrow": TINY,
            "slim": replace(TINY, dim=32, n_layers=1, ffn_dim=64),
            "wide": replace(TINY, dim=128),
            "blocks": replace(TINY, dim=256, ffn_dim=256),
            "shallow": replace(TINY, n_layers=1),
            "deep": replace(TINY, n_layers=4),
            "tied": replace(TINY, tied_embeddings=True),
            "few_words": replace(TINY, vocab_size=100),
            "eight": LlamaArgs(dim=8, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=24, vocab_size=None),
            "half_debugmodel": replace(LLAMA3["debugmodel"], dim=128, n_layers=4, ffn_dim=384),
            "gibibytes": LlamaArgs(dim=2048, n_layers=8, n_heads=16, n_kv_heads=8, ffn_dim=5632, vocab_size=None),
        },
        hf=LLAMA_NAMING,
    ),
)


@dataclass(frozen=True)
class CappedArgs(LlamaArgs):
    """Sizes of a Llama whose logits are capped so far below its usual ones that all of them notice."""

    logit_softcap: float | None = 0.5  # type: ignore[misc]  # a class variable of TransformerArgs


CAPPED = CappedArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=None)
MODELS.register(
    "tiny_capped",
    ModelSpec({"narrow": CAPPED, "deep": replace(CAPPED, n_layers=4)}, hf=LLAMA_NAMING),
)

QWEN = Qwen3Args(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=None, head_dim=32)

MODELS.register(
    "tiny_qwen3",
    replace(
        MODELS.get("qwen3"),
        flavors={"narrow": QWEN, "deep": replace(QWEN, n_layers=4), "tied": replace(QWEN, tied_embeddings=True)},
    ),
)

SPARSE = Qwen3MoEArgs(
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=128,
    vocab_size=None,
    head_dim=32,
    moe=MoEArgs(n_experts=8, top_k=2, ffn_dim=32),
)
EVERYTHING = MoEArgs(8, 2, 32, n_shared_experts=1, n_dense_layers=1, score="sigmoid", scale=2.0)

# Every token goes to every expert.
EVEN = replace(
    MODELS.get("qwen3_moe").flavor("debugmodel"),
    n_layers=4,
    moe=MoEArgs(n_experts=4, top_k=4, ffn_dim=128, n_shared_experts=1, n_dense_layers=1),
)

MODELS.register(
    "sparse",
    replace(
        MODELS.get("qwen3_moe"),
        flavors={
            "narrow": SPARSE,
            "many": replace(SPARSE, moe=replace(SPARSE.moe, n_experts=16)),
            "deep": replace(SPARSE, n_layers=4, moe=EVERYTHING),
            "mixed": replace(SPARSE, moe=EVERYTHING),
            "even": EVEN,
        },
    ),
)


def register(family: str, deep: TransformerArgs, narrow: TransformerArgs, **others: TransformerArgs) -> None:
    MODELS.register(f"tiny_{family}", replace(MODELS.get(family), flavors={"deep": deep, "narrow": narrow, **others}))


OLMO3 = Olmo3Args(64, 4, 4, 2, 128, None, rope_scaling=YarnScaling(factor=4.0, original=32), pattern=windows(22))
register("olmo3", OLMO3, replace(OLMO3, n_layers=2, pattern=OLMO3.pattern[2:]))
GLM = Glm4MoEArgs(64, 4, 4, 2, 128, None, head_dim=32, qk_norm="head", moe=EVERYTHING)
register("glm4_moe", GLM, replace(GLM, n_layers=2))
TRINITY = AfmoeArgs(64, 4, 4, 2, 128, None, head_dim=32, pattern=nope_in_the_fourth(22), moe=EVERYTHING)
ROUTED = replace(EVERYTHING, n_dense_layers=0)
SHORT_TRINITY = replace(TRINITY, n_layers=2, pattern=TRINITY.pattern[2:])
register("afmoe", TRINITY, SHORT_TRINITY, alike=replace(SHORT_TRINITY, pattern=TRINITY.pattern[3:], moe=ROUTED))
DEEPSEEK = DeepseekV3Args(
    64, 4, 4, 4, 128, None, rope_scaling=YarnScaling(factor=4.0, original=32, mscale=1.0, mscale_all_dim=1.0),
    q_lora_rank=96, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
    moe=replace(EVERYTHING, ffn_dim=64, n_groups=4, top_groups=2),
)  # fmt: skip
NARROW = replace(DEEPSEEK, n_layers=2)
ALIKE = replace(NARROW, moe=replace(DEEPSEEK.moe, n_dense_layers=0))
register("deepseek_v3", DEEPSEEK, NARROW, whole_queries=replace(NARROW, q_lora_rank=None), alike=ALIKE)
GPT_OSS = GptOssArgs(
    64, 4, 4, 2, 32, None, rope_scaling=None, head_dim=32, pattern=windows_in_every_other(22), moe=with_biases(8, 32, 2)
)
GEMMA = Gemma3Args(64, 4, 4, 2, 128, None, head_dim=32, pattern=windows_in_five_of_six(22)[-2:])
UNTIED = replace(GEMMA, n_layers=2, tied_embeddings=False)
register("gemma3", GEMMA, replace(GEMMA, n_layers=2), untied=UNTIED)
register("gpt_oss", GPT_OSS, replace(GPT_OSS, n_layers=2))

Model = TypeVar("Model", bound=nn.Module)


def nontrivial_llama(args: LlamaArgs) -> Llama:
    """A Llama with `nontrivial` weights."""
    return nontrivial(Llama(args))


def nontrivial(model: Model) -> Model:
    """The model, with weights that make every part matter: non-uniform attention, norms other than 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator).sub_(getattr(model.args, "norm_offset", 0.0))
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return model
