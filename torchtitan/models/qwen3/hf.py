"""Qwen3 in Hugging Face `transformers`."""

from functools import partial
from typing import Any, Literal

from torchtitan.models.hf_config import CommonConfig, common_config
from torchtitan.models.naming import LAYER, NAMES, ROTARY, HuggingFaceNaming
from torchtitan.models.qwen3.args import Qwen3Args

NORMS = {
    f"{LAYER}.attention.q_norm.weight": f"model.{LAYER}.self_attn.q_norm.weight",
    f"{LAYER}.attention.k_norm.weight": f"model.{LAYER}.self_attn.k_norm.weight",
}


class Qwen3Config(CommonConfig):
    """What is read of `config.json`."""

    use_sliding_window: Literal[False] = False


def from_config(config: dict[str, Any]) -> Qwen3Args:
    """The sizes in a `config.json`. Raises a ValueError if the model is not a Qwen3 that this project supports."""
    read = Qwen3Config.read(config, "qwen3")
    return Qwen3Args(**read.sizes, head_dim=read.head_dim or 128)


HUGGING_FACE = HuggingFaceNaming(
    names=NAMES | NORMS,
    rotary=ROTARY | NORMS.keys(),  # the norms scale channels of queries and keys
    to_config=partial(common_config, model_type="qwen3", architecture="Qwen3ForCausalLM", use_sliding_window=False),
    from_config=from_config,
)
