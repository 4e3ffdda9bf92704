"""Names and layout of a family's weights in other projects, defined once; import and export both derive from it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchtitan.errors import CheckpointError
from torchtitan.protocols import ModelArgs

LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
LAYER = "layers.*"
NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    f"{LAYER}.attention.wq.weight": f"model.{LAYER}.self_attn.q_proj.weight",
    f"{LAYER}.attention.wk.weight": f"model.{LAYER}.self_attn.k_proj.weight",
    f"{LAYER}.attention.wv.weight": f"model.{LAYER}.self_attn.v_proj.weight",
    f"{LAYER}.attention.wo.weight": f"model.{LAYER}.self_attn.o_proj.weight",
    f"{LAYER}.feed_forward.w1.weight": f"model.{LAYER}.mlp.gate_proj.weight",
    f"{LAYER}.feed_forward.w2.weight": f"model.{LAYER}.mlp.down_proj.weight",
    f"{LAYER}.feed_forward.w3.weight": f"model.{LAYER}.mlp.up_proj.weight",
    f"{LAYER}.attention_norm.weight": f"model.{LAYER}.input_layernorm.weight",
    f"{LAYER}.ffn_norm.weight": f"model.{LAYER}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""The modules of `attention.py` and `transformer.py`: names here, and in `transformers` ("*" is a number)."""

QK_NORMS = {
    f"{LAYER}.attention.q_norm.weight": f"model.{LAYER}.self_attn.q_norm.weight",
    f"{LAYER}.attention.k_norm.weight": f"model.{LAYER}.self_attn.k_norm.weight",
}
"""The same for norms of queries and keys, which scale channels that RoPE rotates."""

QKV_BIASES = {
    ours.replace("weight", "bias"): theirs.replace("weight", "bias")
    for ours, theirs in NAMES.items()
    if ours.endswith((".wq.weight", ".wk.weight", ".wv.weight"))
}
"""The same for biases of queries, keys and values."""

EXPERTS = {
    f"{LAYER}.moe.experts.w1.weight": f"model.{LAYER}.mlp.experts.*.gate_proj.weight",
    f"{LAYER}.moe.experts.w2.weight": f"model.{LAYER}.mlp.experts.*.down_proj.weight",
    f"{LAYER}.moe.experts.w3.weight": f"model.{LAYER}.mlp.experts.*.up_proj.weight",
}
"""The same for routed experts, one by one."""

SHARED_EXPERTS = {
    f"{LAYER}.moe.shared_experts.w1.weight": f"model.{LAYER}.mlp.shared_experts.gate_proj.weight",
    f"{LAYER}.moe.shared_experts.w2.weight": f"model.{LAYER}.mlp.shared_experts.down_proj.weight",
    f"{LAYER}.moe.shared_experts.w3.weight": f"model.{LAYER}.mlp.shared_experts.up_proj.weight",
}
"""The same for shared experts."""

NORMALIZED_SPARSE = NAMES | QK_NORMS | EXPERTS | SHARED_EXPERTS
"""All of a model with norms of queries and keys, and mixtures of experts, but for the router's."""

ROUTER, EXPERT_BIAS = f"{LAYER}.moe.router.gate.weight", f"{LAYER}.moe.expert_bias"

GATES = {
    ROUTER: f"model.{LAYER}.mlp.gate.weight",
    EXPERT_BIAS: f"model.{LAYER}.mlp.gate.e_score_correction_bias",
}
"""The router of DeepSeek-V3, and of families after it."""

ROTARY = frozenset(
    f"{LAYER}.attention.{name}"
    for name in ("wq.weight", "wk.weight", "q_norm.weight", "k_norm.weight", "wq.bias", "wk.bias")
)
"""Weights among these whose rows are channels that RoPE rotates in pairs."""


AFTER_THE_LAST = r"model\.layers\.N_LAYERS\..*"
"""Weights of a layer that predicts a further token."""


class ConfigFile(Protocol):
    """What a `config.json` says of a family's models (`hf_config.CommonConfig`)."""

    def to_config(self, args: Any) -> dict[str, Any]:
        """From model sizes, except for what depends on the tokenizer and the dtype."""

    def from_config(self, config: dict[str, Any]) -> ModelArgs:
        """The inverse. Raises a ValueError, with the reason, if the model is not of this family."""


@dataclass(frozen=True)
class HuggingFaceNaming:
    """A family's weights under the names and in the layout of `transformers`.

    Attributes:
        names: maps each parameter name here to its name in `transformers`, with * for layer numbers. If that has one *
            more, it names one expert, and the parameter here is the stack of all experts. Parameters with the same
            name there are one, in which their last dimensions take turns, in the order of this mapping.
        rotary: weights in `names` whose rows are channels that RoPE rotates in pairs. Of the R channels of a head that
            it rotates, `transformers` pairs i with i + R / 2; this project pairs 2i with 2i + 1 (Meta's layout).
        file: between model sizes and `config.json`.
        ignored: regular expression of names that a folder may contain but no model needs; N_LAYERS in it is their
            number, so that of a layer after the last one.
        transposed: weights in `names` whose last two dimensions are swapped.
        from_params: from Meta's `params.json` and the vocabulary size to model sizes; None if the family is not Meta's.
    """

    names: Mapping[str, str]
    rotary: frozenset[str]
    file: ConfigFile
    ignored: str = r"(?!)"
    transposed: frozenset[str] = frozenset()
    from_params: Callable[[dict[str, Any], int], ModelArgs] | None = None

    @property
    def publishes_expert_bias(self) -> bool:
        """Whether biases that balance experts are among the weights."""
        return EXPERT_BIAS in self.names

    def config(self, args: ModelArgs) -> dict[str, Any]:
        """`config.json`. A ValueError if who reads the file would have another model."""
        config = self.file.to_config(args)
        read = self.file.from_config(config)
        for layer in range(args.n_layers):
            spec, there = args.attention_spec(layer), read.attention_spec(layer)
            if lost := [need for need in spec.needs() if getattr(spec, need) != getattr(there, need)]:
                raise ValueError(str(spec.refusal(lost, "the published format")))
        for field in args.__dataclass_fields__:  # class variables too: what holds for all models of a family
            value, there = (declared(sizes, field) for sizes in (args, read))
            if value != there:
                raise ValueError(f"the published format does not support {field} = {value}")
        return config

    def ignores(self, name: str, args: ModelArgs) -> bool:
        """Whether a model of these sizes needs no weight that `transformers` calls by this name."""
        return re.fullmatch(self.ignored.replace("N_LAYERS", str(args.n_layers)), name) is not None

    def name(self, ours: str, expert: int = 0) -> str:
        """The name in `transformers`: 'layers.0.attention.wq.weight' to 'model.layers.0.self_attn.q_proj.weight'.
        `expert`: which, for a stack of experts. Raises a CheckpointError if the parameter is not in `names`."""
        numbers, pattern = LAYER_NUMBER.findall(ours), LAYER_NUMBER.sub("*", ours)
        if pattern not in self.names:
            raise CheckpointError(f"{ours}: the model family's ModelSpec.hf has no name for this weight.")
        filled = iter([*numbers, str(expert)])
        return re.sub(r"\*", lambda _: next(filled), self.names[pattern])

    def stacks_experts(self, ours: str) -> bool:
        """Whether the parameter is a stack of weights that `transformers` publishes one by one."""
        pattern = LAYER_NUMBER.sub("*", ours)
        return self.names.get(pattern, "").count("*") > pattern.count("*")

    def names_of(self, ours: str, shape: Sequence[int]) -> list[str]:
        """All names in `transformers` of a parameter of this shape: one, or one for each expert."""
        return [self.name(ours, expert) for expert in range(shape[0] if self.stacks_experts(ours) else 1)]

    def parts(self, ours: str) -> list[str]:
        """The parameters that are one with this one there, itself included."""
        numbers, pattern = LAYER_NUMBER.findall(ours), LAYER_NUMBER.sub("*", ours)
        name = self.names.get(pattern)
        together = [other for other, there in self.names.items() if there == name] or [pattern]
        return [other.replace("*", "{}").format(*numbers) for other in together]

    def is_transposed(self, ours: str) -> bool:
        return LAYER_NUMBER.sub("*", ours) in self.transposed

    def rows_there(self, ours: str, rows: int, args: ModelArgs) -> torch.Tensor | None:
        """(rows,) int64: the `transformers` row of each row here; None if they are the same."""
        if LAYER_NUMBER.sub("*", ours) not in self.rotary:
            return None
        heads, rotated = torch.arange(rows).view(-1, args.head_dim), getattr(args, "rope_dim", args.head_dim)
        pairs = heads[:, :rotated].view(-1, 2, rotated // 2).transpose(1, 2).flatten(1)
        return torch.cat([pairs, heads[:, rotated:]], 1).flatten()

    def to_transformers(self, ours: str, weights: Sequence[torch.Tensor], args: ModelArgs) -> torch.Tensor:
        """The full weights of `parts`, or of one expert of each, in the layout of `transformers`."""
        if self.is_transposed(ours):
            weights = [weight.mT for weight in weights]
        if len(weights) > 1:
            return torch.stack(list(weights), -1).flatten(-2)
        (weight,) = weights
        rows = self.rows_there(ours, weight.shape[0], args)
        return weight if rows is None else weight[rows.argsort().to(weight.device)]


def declared(args: Any, field: str) -> Any:
    """A field of sizes. Patterns, which may be as good as shorter ones, become what they say of each layer."""
    value = getattr(args, field, None)
    return [args.layer(number) for number in range(args.n_layers)] if field == "pattern" and value else value
