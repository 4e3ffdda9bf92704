"""RoPE and its scaling: as in `transformers`, in config.json, wrong tables, changes in place."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan.checkpoint.choose import check_model_identity
from torchtitan.config import ConfigManager, to_toml
from torchtitan.config.training import Model
from torchtitan.engine.model_args import sizes_of
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.models import MODELS
from torchtitan.models.hf_config import published_scaling
from torchtitan.models.llama.args import LLAMA3_1, LlamaArgs
from torchtitan.models.rope import YarnScaling, read_scaling, rope_frequencies
from torchtitan.tools.interchange.convert import recorded_args

TABLES: list[dict[str, Any]] = [
    {"type": "linear", "factor": 4},
    {"type": "llama3", "factor": 8, "original": 8192},
    {"type": "llama3", "factor": 32.0, "original": 64, "low_freq_factor": 0.5, "high_freq_factor": 8.0},
    {"type": "yarn", "factor": 8, "original": 4096},
    {"type": "yarn", "factor": 1, "original": 4},
    {"type": "yarn", "factor": 4.0, "original": 32768, "beta_fast": 16.0, "beta_slow": 2.5, "attention_factor": 1.3},
    {"type": "yarn", "factor": 40.0, "original": 4096, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
]
SMALL = LlamaArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=101)
YARN = YarnScaling(factor=4.0, original=32)


@pytest.mark.parametrize("head_dim", [8, 128])
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_frequencies_and_attention_factor_equal_transformers(table: dict[str, Any], head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = read_scaling(table)
    assert scaling is not None
    published = published_scaling(scaling)
    assert read_scaling(published) == read_scaling(asdict(scaling)) == scaling
    for theta in (1e4, 5e6):
        config = LlamaConfig(  # type: ignore[call-arg]
            hidden_size=2 * head_dim, num_attention_heads=2, rope_theta=theta, rope_scaling=dict(published or {})
        )
        expected, factor = ROPE_INIT_FUNCTIONS[table["type"]](config, torch.device("cpu"))
        torch.testing.assert_close(rope_frequencies(head_dim, theta, scaling), expected, rtol=1e-6, atol=0)
        assert scaling.amplitude == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("family", ["llama3", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "entries",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "finetuned": True}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 7.0, "beta_fast": None}},
        {
            "rope_scaling": {"rope_type": "yarn", "type": "mrope", "factor": 4},
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 128,
        },
    ],
)
def test_config_json_says_it_in_several_ways(family: str, entries: dict[str, Any]) -> None:
    """Without the original length, it is max_position_embeddings, as in `transformers`."""
    hf = MODELS.get(family).naming
    assert hf is not None
    config = hf.file.to_config(MODELS.get(family).flavor("debugmodel").with_vocab_size(101))
    config |= {"max_position_embeddings": 32, "rope_theta": 7.0} | entries
    args: Any = hf.file.from_config(config)
    assert (args.rope_scaling, args.rope_theta) == (YARN, 7.0)
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        hf.file.from_config({**config, "rope_scaling": {"partial_rotary_factor": 0.5}})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"factor": 8}, "no type is given; known are default, linear, llama3 and yarn"),
        ({"type": "yarm", "factor": 8}, r"type 'yarm' is not supported \(did you mean yarn\?\); known are"),
        ({"type": "dynamic", "factor": 8}, "type 'dynamic' is not supported; known are default, linear, llama3 and y"),
        ({"type": "longrope", "factor": 8}, "type 'longrope' is not supported; known"),
        ({"type": ["yarn"]}, ".* is not supported .*; known"),
        ({"type": "yarn", "factor": 0.5, "original": 32}, "factor is 0.5 .*greater than or equal to 1"),
        ({"type": "linear", "factor": float("inf")}, "factor is inf .*finite"),
        ({"type": "linear", "factor": "8"}, "factor is '8' .*valid number"),
        ({"type": "yarn", "factor": 8}, "original is missing, for type yarn"),
        ({"type": "llama3", "factor": 8}, "original is missing, for type llama3"),
        (
            {"type": "yarn", "factor": 8, "original": 32, "betafast": 2},
            r"unknown key 'betafast' \(did you mean beta_fast\?\): type yarn has only factor, original, att",
        ),
        ({"type": "linear", "factor": 8, "original": 32}, "unknown key 'original': type linear has only factor"),
        ({"type": "default", "factor": 8}, "unknown key 'factor': type default has no keys"),
        ({"type": "yarn", "factor": 8, "original": 32, "beta_slow": 32}, "beta_slow is 32.0, but must be below beta_f"),
    ],
    ids=str,
)
def test_a_wrong_table_is_one_sentence(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.rope_scaling: {message}.*\.$") as error:
        sizes_of(Model(rope_scaling=table))
    assert len(error.value.problems) == 1


def test_the_keys_win_over_the_flavor_in_files_and_flags(tmp_path: Path) -> None:
    flag = '--model.rope_scaling={type = "yarn", factor = 4, original = 32}'
    llama = ("--model.name=llama3.1", "--model.flavor=8B")
    config = ConfigManager().parse_args([*llama, flag, "--model.rope_theta=5e6"])
    assert sizes_of(config.model) == replace(LLAMA3_1["8B"], rope_theta=5e6, rope_scaling=YARN)
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    file = f"--job.config_file={tmp_path / 'resolved.toml'}"
    assert ConfigManager().parse_args([file]).model == config.model
    unscaled = ConfigManager().parse_args([file, "--model.rope_scaling={type = 'default'}", "--model.rope_theta=none"])
    assert sizes_of(unscaled.model) == replace(LLAMA3_1["8B"], rope_scaling=None)
    for text, words in (("yarn", "not 'yarn'"), ('{"type": "yarn"}', "Expected")):
        with pytest.raises(ConfigError, match=rf"^--model\.rope_scaling .*must be a table such as .*{words}") as error:
            ConfigManager().parse_args([f"--model.rope_scaling={text}"])
        assert len(error.value.problems) == 1


def test_checkpoints_of_before_and_with_another_rope_fit() -> None:
    former = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_len": 8192}
    identity = {**asdict(LLAMA3_1["8B"]), "rope_scaling": former}
    assert recorded_args(identity, MODELS.get("llama3.1")) == LLAMA3_1["8B"]
    mine = asdict(replace(LLAMA3_1["8B"], rope_theta=5e6, rope_scaling=YARN))
    check_model_identity(Path("step-1"), identity, mine)
    with pytest.raises(CheckpointError, match="its n_layers is 32, this run's is 31"):
        check_model_identity(Path("step-1"), identity, {**mine, "n_layers": 31})
