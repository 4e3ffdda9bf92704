"""Importing and exporting weights, with `transformers` as the reference."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from runs import python
from safetensors.torch import load_file, save_file
from tiny import nontrivial, nontrivial_llama
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from torch import nn

from torchtitan.data import load_tokenizer
from torchtitan.data.byte_level import LLAMA3_SPLIT, llama3_special_tokens
from torchtitan.errors import CheckpointError, DataError
from torchtitan.models import MODELS
from torchtitan.models.afmoe import AfmoeArgs
from torchtitan.models.afmoe import windows_without_rope_in_the_fourth as nope_in_the_fourth
from torchtitan.models.deepseek_v3 import DeepseekV3Args
from torchtitan.models.gemma3 import Gemma3Args, windows_in_five_of_six
from torchtitan.models.glm4_moe import Glm4MoEArgs
from torchtitan.models.gpt_oss import GptOssArgs, windows_in_every_other
from torchtitan.models.gpt_oss import experts as with_biases
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.hf import LLAMA_NAMING, from_params
from torchtitan.models.moe import mixtures, reset_buffers
from torchtitan.models.naming import HuggingFaceNaming
from torchtitan.models.olmo3 import Olmo3Args, windows_in_three_of_four
from torchtitan.models.qwen3 import Qwen3Args, Qwen3MoEArgs
from torchtitan.models.rope import LinearScaling, Llama3Scaling, YarnScaling
from torchtitan.models.sparse_args import MoEArgs
from torchtitan.protocols import Decoder
from torchtitan.tools.generation.open import open_model
from torchtitan.tools.interchange.convert import find_model, import_weights, one_process, saved_model
from torchtitan.tools.interchange.exchange import Exchange, load_weights
from torchtitan.tools.interchange.export import export
from torchtitan.tools.interchange.model import PublishedModel
from torchtitan.tools.interchange.sources import find_source

QWEN = Qwen3Args(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=4096, head_dim=32)
SMALL = LlamaArgs(dim=64, n_layers=3, n_heads=4, n_kv_heads=4, ffn_dim=96, vocab_size=4096)
SPARSE = Qwen3MoEArgs(
    dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=4096, head_dim=32, moe=MoEArgs(6, 2, 48)
)
SIGMOID = MoEArgs(6, 2, 48, n_shared_experts=1, n_dense_layers=1, score="sigmoid", scale=2.5)
GLM = Glm4MoEArgs(64, 3, 4, 2, 96, 4096, head_dim=32, moe=SIGMOID)
TRINITY = AfmoeArgs(64, 4, 4, 2, 96, 4096, head_dim=32, pattern=nope_in_the_fourth(7), moe=SIGMOID)
GPT_OSS = GptOssArgs(64, 4, 4, 2, 48, 4096, head_dim=32, pattern=windows_in_every_other(7), moe=with_biases(6, 48, 2))
DEEPSEEK = DeepseekV3Args(
    64, 3, 4, 4, 96, 4096,
    q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    moe=replace(SIGMOID, n_groups=3, top_groups=2),
)  # fmt: skip
GEMMA = Gemma3Args(64, 7, 4, 2, 96, 4096, head_dim=32, query_pre_attn_scalar=20, pattern=windows_in_five_of_six(7))
OLMO3 = Olmo3Args(64, 5, 4, 2, 96, 4096, pattern=windows_in_three_of_four(7))
# With the options of DeepSeek-V3.
YARN = YarnScaling(factor=40.0, original=32, mscale=1.0, mscale_all_dim=0.5, beta_fast=16.0, truncate=False)
VARIANTS: dict[str, Any] = {
    "plain": SMALL,
    "gqa": replace(SMALL, n_kv_heads=2),
    "rope scaling": replace(SMALL, rope_theta=10000.0, rope_scaling=Llama3Scaling(factor=8.0, original=32)),
    "yarn": replace(SMALL, rope_theta=10000.0, rope_scaling=YARN),
    "linear": replace(SMALL, rope_scaling=LinearScaling(factor=3.0)),
    "tied": replace(SMALL, n_kv_heads=1, norm_eps=1e-3, tied_embeddings=True),
    "qwen3": QWEN,
    "qwen3 yarn": replace(QWEN, rope_scaling=YarnScaling(factor=4.0, original=32)),
    "qwen3 tied": replace(QWEN, head_dim=8, tied_embeddings=True),
    "glm4_moe": GLM,
    "afmoe": TRINITY,
    "gpt_oss": GPT_OSS,
    "gemma3": GEMMA,
    "gemma3, untied": replace(GEMMA, tied_embeddings=False, rope_scaling=LinearScaling(factor=4.0)),
    "gpt_oss, not scaled": replace(GPT_OSS, rope_scaling=None),
    "deepseek_v3": replace(DEEPSEEK, rope_scaling=YARN),
    "olmo3": OLMO3,
    "olmo3 yarn": replace(OLMO3, rope_scaling=YarnScaling(factor=4.0, original=32)),
    "qwen3_moe": SPARSE,
    "qwen3_moe, a dense layer": replace(SPARSE, moe=replace(SPARSE.moe, n_dense_layers=1, normalize=False)),
}
# Of logits up to 6. Each side is up to 1.3e-5 from float64, by its own attention kernel.
ROUNDING = 2e-5
FAMILIES: dict[type, str] = {
    LlamaArgs: "llama3",
    Qwen3Args: "qwen3",
    Qwen3MoEArgs: "qwen3_moe",
    Olmo3Args: "olmo3",
    Glm4MoEArgs: "glm4_moe",
    AfmoeArgs: "afmoe",
    GptOssArgs: "gpt_oss",
    DeepseekV3Args: "deepseek_v3",
    Gemma3Args: "gemma3",
}
FLAVORS = [
    (family, flavor)
    for family in MODELS.names()
    for flavor in MODELS.get(family).flavors
    if family != "tiny_capped" and (family != "sparse" or flavor == "narrow")  # transformers lacks parts of the others
]


@pytest.fixture(autouse=True)
def group(tokenizer_exported_once: None) -> Iterator[None]:
    with one_process(None):
        yield


def published(args: Any) -> PublishedModel:
    spec = MODELS.get(FAMILIES[type(args)])
    assert spec.naming is not None
    return PublishedModel(spec.naming, args, spec.build, None, 128)


def nontrivial_model(args: Any) -> Decoder:
    model = nontrivial(published(args).build(args))
    if published(args).naming.publishes_expert_bias:
        for number, mixture in enumerate(mixtures(model).values()):
            mixture.expert_bias.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(number))
    return model


def published_tensors(model: Decoder, args: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name in published(args).shapes}


def theirs_of(args: Any, naming: HuggingFaceNaming, **options: Any) -> Any:
    """transformers' model of these sizes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**naming.file.to_config(args), **options))


def published_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Of transformers' model, whose experts are stacked in memory but, except gpt-oss's, published one by one."""
    shapes: dict[str, tuple[int, ...]] = {}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict()]
    for name, weight in [*model.named_parameters(), *buffers]:
        if "mlp.experts." in name and model.config.model_type != "gpt_oss":
            experts, rows, columns = weight.shape
            projections = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            for projection in projections:
                names = [f"{name.rpartition('.')[0]}.{expert}.{projection}.weight" for expert in range(experts)]
                shapes |= dict.fromkeys(names, (rows // len(projections), columns))
        else:
            shapes[name] = tuple(weight.shape)
    return shapes


def exported(model: Decoder, folder: Path, dtype: torch.dtype = torch.float32, largest_file: int = 10**9) -> Path:
    weights = published_tensors(model, model.args)
    export(folder, {name: weight.shape for name, weight in weights.items()}, weights.__getitem__, published(model.args),
           dtype, largest_file)  # fmt: skip
    return folder


def loaded(folder: Path, args: Any) -> Decoder:
    model = published(args).build(args)
    source = find_source(folder, published(args).naming)
    assert source is not None
    published(args).check(source)
    reset_buffers(model)
    load_weights(published_tensors(model, args), source)
    return model


def judge(folder: Path, **options: Any) -> Any:
    """transformers' model, which must load without a warning."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
        model, report = loaded
    assert not any(report.values()), report
    return model.eval()


def tokens(seq_len: int = 100) -> torch.Tensor:
    return torch.randint(4096, (2, seq_len), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def greedy(model: nn.Module, ids: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize(("family", "flavor"), FLAVORS)
def test_every_flavor_states_all_its_weights(family: str, flavor: str) -> None:
    spec = MODELS.get(family)
    assert spec.naming is not None
    sizes: Any = spec.flavor(flavor)
    args = replace(sizes.with_vocab_size(4096), n_layers=max(4, len(sizes.pattern)))
    assert spec.naming.file.from_config(json.loads(json.dumps(spec.naming.file.to_config(args)))) == args
    model = PublishedModel(spec.naming, args, spec.build, None, 128)
    with torch.device("meta"):
        expected = published_shapes(theirs_of(args, spec.naming))
    ours: dict[str, tuple[int, ...]] = {}
    for name, shape in model.shapes.items():
        skipped = int(spec.naming.stacks_experts(name))
        parts = [torch.empty(model.shapes[part][skipped:], device="meta") for part in spec.naming.parts(name)]
        merged = spec.naming.to_transformers(name, parts, args)
        ours |= dict.fromkeys(spec.naming.names_of(name, shape), tuple(merged.shape))
    assert ours == expected


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_computes_the_same_from_an_export(variant: str, tmp_path: Path) -> None:
    ours = nontrivial_model(VARIANTS[variant])
    exported_model = judge(exported(ours, tmp_path / "out"), dtype=torch.float32)
    torch.testing.assert_close(ours(tokens()), exported_model(tokens()).logits, atol=ROUNDING, rtol=0)
    prompt = tokens(8)
    written = exported_model.generate(prompt, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(greedy(ours, prompt, 64), written)
    back = loaded(tmp_path / "out", VARIANTS[variant]).state_dict()
    assert all(torch.equal(weight, back[name]) for name, weight in ours.state_dict().items())
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=tmp_path / "out").returncode == 0


@torch.no_grad()
@pytest.mark.parametrize("variant", ["yarn", "qwen3 yarn"])
def test_yarn_equals_transformers(variant: str, tmp_path: Path) -> None:
    """In float64, where the two kernels of attention do not differ."""
    ours = nontrivial_model(VARIANTS[variant])
    exported_model = judge(exported(ours, tmp_path / "out"), dtype=torch.float32).double()
    torch.testing.assert_close(ours.double()(tokens()), exported_model(tokens()).logits, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_transformers_compute_the_same_here(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    args = VARIANTS[variant]
    torch.manual_seed(0)
    original = theirs_of(args, published(args).naming, initializer_range=0.1).to(dtype).eval()
    original.save_pretrained(tmp_path / "hf", max_shard_size="300KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    ours = loaded(tmp_path / "hf", args)
    expected = judge(tmp_path / "hf", dtype=torch.float32)(tokens()).logits
    torch.testing.assert_close(ours(tokens()), expected, atol=ROUNDING, rtol=0)
    again = exported(ours, tmp_path / "again", dtype, largest_file=200_000)
    for name, weight in judge(again, dtype=dtype).state_dict().items():
        assert torch.equal(weight, original.to(dtype).state_dict()[name]), name


@pytest.mark.parametrize("rows", [False, True], ids=["Llama 2", "Llama 3"])
def test_metas_files_are_joined(rows: bool, tmp_path: Path) -> None:
    args = replace(SMALL, n_kv_heads=2, ffn_dim=256, rope_theta=10000.0)
    weights = nontrivial_llama(args).state_dict()
    params = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 256, "norm_eps": 1e-5}
    (tmp_path / "params.json").write_text(json.dumps({**params, "vocab_size": -1}))
    for shard in range(2):
        divided = {"rope.freqs": torch.ones(8)}
        for name, weight in weights.items():
            columns = name.endswith(("wo.weight", "w2.weight")) or (name == "tok_embeddings.weight" and not rows)
            divided[name] = weight if weight.ndim == 1 else weight.chunk(2, int(columns))[shard].clone()
        torch.save(divided, tmp_path / f"consolidated.{shard:02d}.pth")
    joined = loaded(tmp_path, args).state_dict()
    assert all(torch.equal(weight, joined[name]) for name, weight in weights.items())
    (tmp_path / "consolidated.01.pth").rename(tmp_path / "consolidated.02.pth")
    with pytest.raises(CheckpointError, match=r"expected consolidated\.00\.pth, consolidated\.01\.pth"):
        find_source(tmp_path, LLAMA_NAMING)


def test_a_tied_model_that_is_stored_twice_loads_if_both_are_alike(tmp_path: Path) -> None:
    args = VARIANTS["tied"]
    path = exported(nontrivial_llama(args), tmp_path / "out") / "model.safetensors"
    (tmp_path / "out" / "SHA256SUMS").unlink()
    weights = load_file(path)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path)
    loaded(tmp_path / "out", args)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(CheckpointError, match=r"holds lm_head\.weight, which this model does not have"):
        loaded(tmp_path / "out", args)


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def rewrite(path: Path, **weights: torch.Tensor) -> None:
    save_file({**load_file(path), **weights}, path)


Q = "model.layers.1.self_attn.q_proj.weight"
FAULTS = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
    "another family": (lambda f: change(f, model_type="mistral"), "model_type is 'mistral'"),
    "biases": (lambda f: change(f, attention_bias=True), "attention_bias is True"),
    "another rope": (
        lambda f: change(f, rope_scaling={"type": "longrope"}),
        "RoPE scaling: type 'longrope' is not supported",
    ),
    "another width": (lambda f: change(f, intermediate_size=100), "its ffn_dim is 100, this run's is 96"),
    "another vocabulary": (lambda f: change(f, vocab_size=32000), "its vocab_size is 32000, this run's is 4096"),
    "a size is a word": (lambda f: change(f, hidden_size="big"), "config.json: "),
    "a size is missing": (lambda f: change(f, num_hidden_layers=None), "config.json: num_hidden_layers is missing"),
    "cut short": (lambda f: truncate(f / "model.safetensors"), "model.safetensors is damaged"),
    "a shape": (
        lambda f: rewrite(f / "model.safetensors", **{Q: torch.ones(8, 8)}),
        "layers.1.attention.wq.weight has shape",
    ),
    "a dtype": (
        lambda f: rewrite(f / "model.safetensors", **{Q: torch.ones(64, 64, dtype=torch.int64)}),
        "layers.1.attention.wq.weight is torch.int64",
    ),
    "one too many": (
        lambda f: rewrite(f / "model.safetensors", extra=torch.ones(1)),
        "holds extra, which this model does not have",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_does_not_fit_is_refused_in_a_sentence(fault: str, tmp_path: Path) -> None:
    damage, words = FAULTS[fault]
    folder = exported(nontrivial_llama(SMALL), tmp_path / "out")
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        loaded(folder, SMALL)
    assert words in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("args", [GLM, DEEPSEEK], ids=["GLM-4.5", "DeepSeek-V3"])
def test_a_layer_that_predicts_a_further_token_is_left_out(args: Any, tmp_path: Path) -> None:
    """The released models have one after the last; any other layer more is refused."""
    folder = exported(nontrivial_model(args), tmp_path / "out")
    further = {f"model.layers.{args.n_layers}.enorm.weight": torch.ones(64)}
    rewrite(folder / "model.safetensors", **further)
    (folder / "SHA256SUMS").unlink()
    model = loaded(folder, args)
    assert torch.equal(model(tokens(8)), nontrivial_model(args)(tokens(8)))
    rewrite(folder / "model.safetensors", **{f"model.layers.{args.n_layers + 1}.enorm.weight": torch.ones(64)})
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.4\.enorm\.weight, which this model does not have"):
        loaded(folder, args)


def test_the_refusal_comes_from_the_model_s_own_family(tmp_path: Path) -> None:
    folder = exported(nontrivial_model(QWEN), tmp_path / "out")
    (folder / "SHA256SUMS").unlink()
    change(folder, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(CheckpointError, match="RoPE scaling: type 'dynamic' is not supported; known are default, li"):
        find_model(folder)
    change(folder, model_type="mistral")
    with pytest.raises(CheckpointError, match="model_type is 'mistral'"):
        find_model(folder)


@pytest.mark.parametrize("fault", ["missing", "moved"])
def test_a_shard_that_is_not_there_is_named(fault: str, tmp_path: Path) -> None:
    folder = exported(nontrivial_llama(SMALL), tmp_path / "out", largest_file=300_000)
    second = sorted(folder.glob("*.safetensors"))[1]
    if fault == "missing":
        second.unlink()
    else:
        shutil.copy(sorted(folder.glob("*.safetensors"))[2], second)
    with pytest.raises(CheckpointError, match=second.name):
        find_source(folder, LLAMA_NAMING)


def test_an_export_that_was_interrupted_looks_like_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torchtitan.tools.interchange.export.save_file", fail)
        with pytest.raises(CheckpointError, match="No space left on device"):
            exported(nontrivial_llama(SMALL), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    exported(nontrivial_llama(SMALL), tmp_path / "out")  # leftovers do not prevent it
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(CheckpointError, match="already exists; move it away"):
        exported(nontrivial_llama(SMALL), tmp_path / "out")


def test_an_export_is_readable_as_other_files_are(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = exported(nontrivial_llama(SMALL), tmp_path / "out", largest_file=300_000)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}


@pytest.mark.parametrize(("value", "dtype"), [(1e5, torch.float16), (float("nan"), torch.float32)])
def test_a_weight_that_is_not_finite_in_the_export_s_dtype_is_named(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = nontrivial_llama(SMALL)
    model.norm.weight.data[3] = value
    with pytest.raises(CheckpointError, match=r"norm\.weight has numbers that are not finite in float\d\d"):
        exported(model, tmp_path / "out", dtype)
    assert [*tmp_path.iterdir()] == []
    if dtype == torch.float16:
        exported(model, tmp_path / "out", torch.bfloat16)


def test_experts_whose_config_does_not_say_the_width_of_a_head(tmp_path: Path) -> None:
    """As `transformers` saves them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 4096}
    original = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes, **experts))
    original.save_pretrained(tmp_path)
    assert "head_dim" not in json.loads((tmp_path / "config.json").read_bytes())
    _, source = find_model(tmp_path)
    assert cast(Any, source.args).head_dim == 16


def test_the_length_for_which_positions_are_scaled() -> None:
    args = MODELS.get("llama3").flavor("1B").with_vocab_size(4096)
    spec = MODELS.get("llama3")
    assert spec.naming is not None
    for seq_len, longest in ((0, 32 * 8192), (2048, 32 * 8192), (131072, 131072)):
        model = PublishedModel(spec.naming, args, spec.build, None, seq_len)
        config = json.loads(model.files(torch.bfloat16)["config.json"])
        assert config["max_position_embeddings"] == longest


def test_yarn_s_factor_is_also_in_the_two_lengths() -> None:
    """From which transformers before 4.56 takes it."""
    for seq_len in (0, 20, 100, 128):
        model = replace(published(VARIANTS["qwen3 yarn"]), seq_len=seq_len)
        assert json.loads(model.files(torch.bfloat16)["config.json"])["max_position_embeddings"] == 4 * 32


JUDGE = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
answers = {}
for folder in sys.argv[3:]:
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor(json.loads(sys.argv[1]))).logits
    answers[folder] = [logits.tolist(), [tokenizer(text)["input_ids"] for text in json.loads(sys.argv[2])]]
print("ANSWERS", transformers.__version__, json.dumps(answers))
"""
# The oldest that pyproject.toml allows, with what it needs, and the newest.
TRANSFORMERS = {
    "oldest": ("transformers==4.51.0", "tokenizers>=0.21,<0.22", "huggingface_hub>=0.30,<1.0"),
    "newest": ("transformers", "tokenizers", "huggingface_hub"),
}


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("age", TRANSFORMERS)
def test_the_oldest_and_the_newest_transformers_read_exports(age: str, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "library")]
    if (installed := subprocess.run([*install, *TRANSFORMERS[age]], capture_output=True, text=True)).returncode:
        pytest.skip(f"{' '.join(TRANSFORMERS[age])} cannot be installed: {installed.stderr[-300:]}")
    ids, expected = tokens(100)[:1], {}
    # The oldest ignores `truncate`.
    rounded = {"yarn": replace(SMALL, rope_scaling=replace(YARN, truncate=True))}
    for name in ("gqa", "rope scaling", "yarn", "linear", "tied", "qwen3 yarn", "qwen3_moe"):
        model = nontrivial_model({**VARIANTS, **rounded}[name])
        expected[str(exported(model, tmp_path / name.replace(" ", "-")))] = model
    # Of a tokenizer.json, with a class beside it whose splitting differs, and without a template.
    model_folder, own = next(iter(expected)), byte_level_json(tmp_path / "own", **JSON_FORMS["single digits"])
    (own / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    other = Path(shutil.copytree(model_folder, tmp_path / "other"))
    (other / "tokenizer.model").unlink()
    for file, content in replace(published(SMALL), tokenizer_path=str(own)).files(torch.float32).items():
        if file.startswith("tokenizer"):
            (other / file).write_bytes(content)
    expected[str(other)] = expected[model_folder]
    judge = subprocess.run(
        [sys.executable, "-c", JUDGE, json.dumps(ids.tolist()), json.dumps(TEXTS), *expected],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "library")},
        capture_output=True,
        text=True,
    )
    assert judge.returncode == 0, judge.stderr[-3000:]
    _, version, answers = judge.stdout[judge.stdout.index("ANSWERS ") :].split(" ", 2)
    assert age == "newest" or version == "4.51.0"
    for folder, (logits, texts) in json.loads(answers).items():
        with torch.no_grad():
            torch.testing.assert_close(expected[folder](ids), torch.tensor(logits), atol=ROUNDING, rtol=0)
        ours = load_tokenizer(folder)
        assert texts == [[ours.bos_id, *ours.encode(text)] for text in TEXTS]
    assert load_tokenizer(str(other)).ids_fingerprint == load_tokenizer(str(own)).ids_fingerprint


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path: Path) -> None:
    args = LlamaArgs(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=300)
    exported(nontrivial_llama(args), tmp_path / "out")
    with pytest.raises(CheckpointError, match="the tokenizer has 4,096 ids, but the model only 300 embeddings"):
        open_model(tmp_path / "out", torch.device("cpu"), torch.float32)


def test_a_small_tokenizer_does_not_fit_a_large_embedding(tmp_path: Path) -> None:
    """Such as the default one, where weights come without a tokenizer."""
    args = LlamaArgs(dim=8, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=8, vocab_size=9000)
    folder = exported(nontrivial_llama(args), tmp_path / "out")
    source = find_source(folder, published(args).naming)
    assert source is not None
    exchange = Exchange(published(args), load_tokenizer(None))
    exchange.load(source, {})  # the folder has the same
    other = str(tiktoken_file(tmp_path))
    with pytest.raises(CheckpointError, match=r"^model\.tokenizer_path: the weights in .* made with another tokenizer"):
        Exchange(published(args), load_tokenizer(other)).load(source, {})
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"model\.tokenizer_path: .* embeddings for 9000 tokens, but .* only 4096"
    ):
        exchange.load(source, {})


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_scripts_there_and_back(family: str, tmp_path: Path) -> None:
    """A published model becomes a checkpoint, which becomes a published model with the same bits."""
    model = MODELS.get(family).flavor("debugmodel").with_vocab_size(4096)
    first = exported(nontrivial_model(model), tmp_path / "first", torch.bfloat16)
    checkpoint = import_weights(first, tmp_path / "checkpoint", family if family == "llama3" else None, None)
    saved = saved_model(checkpoint.parent)
    assert saved.args == model
    with pytest.raises(CheckpointError, match=r"^--tokenizer-path: the weights in .* made with another tokenizer"):
        import_weights(first, tmp_path / "other", family, str(tiktoken_file(tmp_path)))
    command = ("-m", "torchtitan.tools.convert", "to-hf", checkpoint, tmp_path / "second")
    assert python(*command).returncode == 0
    left, right = load_file(first / "model.safetensors"), load_file(tmp_path / "second" / "model.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    first_config, config = (json.loads((tmp_path / name / "config.json").read_bytes()) for name in ("first", "second"))
    assert first_config == config and config["max_position_embeddings"] == 128
    result = python(*command)
    assert result.returncode == 2
    assert "already exists; move it away" in result.stderr
    assert "Traceback" not in result.stderr


TEXTS = ["def f(x):\n    return x + 1\n", "  two  spaces", "a", "", "été 日本 😀", "1234567 x'S"]
TEXTS += [
    "Gro\u0308ße ﬁn ½ \uff21 ™️ <0x0A> \uff76\uff9e\uff8a\uff9f",
    "a \t b \r\n",
    "x" * 60 + "  " * 30,
    *Path("LICENSE").read_text(encoding="utf-8").split("\n\n"),
]


def tiktoken_file(folder: Path) -> Path:
    """A small file in Llama 3's format: bytes, and pairs to merge."""
    import base64

    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [b"th", b"in", b" t", b"the", b"  ", b"de", b"def", b" f", b"ret", b"er", b"urn", b"123", b" the", b"re"]
    path = folder / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)))
    added = {str(id): {"content": name} for name, id in llama3_special_tokens(len(pieces)).items()}
    config = {"pat_str": LLAMA3_SPLIT, "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path


AS_WRITTEN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SENTENCEPIECE: dict[str, Any] = {
    "BPE with its defaults": {"model_type": "bpe"},
    "unigram with its defaults": {"model_type": "unigram"},
    "Llama 2": {"model_type": "bpe", "byte_fallback": True, "split_digits": True, **AS_WRITTEN},
    "T5": {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "byte_fallback": True},
    "no prefix, NFKC": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False},
    "case folding, pieces with blanks": {
        "model_type": "unigram",
        "normalization_rule_name": "nmt_nfkc_cf",
        "split_by_whitespace": False,
    },
    "symbols of its own": {"model_type": "bpe", "user_defined_symbols": ["<sep>", "def "], "control_symbols": ["<c>"]},
    "letters": {"model_type": "char"},
}


def sentencepiece_model(path: Path, settings: dict[str, Any]) -> Path:
    import sentencepiece

    texts = Path("LICENSE").read_text(encoding="utf-8").splitlines() + ["Größe été 日本 한국어 Привет ©"] * 9
    size = 100 if settings.get("model_type") == "char" else 500
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=(model := io.BytesIO()),
        minloglevel=2,
        hard_vocab_limit=False,
        **{"vocab_size": size, **settings},
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("form", ["shipped", "tiktoken", "tokenizers", *SENTENCEPIECE])
def test_transformers_gets_the_same_tokens(form: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from torchtitan.tools.interchange.tokenizer_files import tokenizer_files

    if form in SENTENCEPIECE:
        path: str | None = str(sentencepiece_model(tmp_path / "tokenizer.model", SENTENCEPIECE[form]))
    else:
        path = None if form == "shipped" else str(tiktoken_file(tmp_path))
    if form == "tokenizers":
        (tmp_path / "json").mkdir()
        for name, content in tokenizer_files(path).items():
            (tmp_path / "json" / name).write_bytes(content)
        path = str(tmp_path / "json")
    (tmp_path / "out").mkdir()
    for name, content in tokenizer_files(path).items():
        (tmp_path / "out" / name).write_bytes(content)
    (tmp_path / "out" / "config.json").write_text('{"model_type": "llama"}')  # beside it, as in an export
    ours, exported_tokenizer = load_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (exported_tokenizer.bos_token_id, exported_tokenizer.eos_token_id) == (ours.bos_id, ours.eos_id)
    for text in TEXTS:
        ids = ours.encode(text)
        assert exported_tokenizer(text)["input_ids"] == [*([] if ours.bos_id is None else [ours.bos_id]), *ids]
        if form not in SENTENCEPIECE or form == "Llama 2":
            assert exported_tokenizer.decode(ids) == text


def byte_level_json(folder: Path, **parts: Any) -> Path:
    """A folder with a tokenizer.json of bytes and a few merges. `parts` replace those of the file."""
    letters = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("t", "h"), ("th", "e"), ("1", "2"), ("12", "3"), ("Ġ", "f"), ("Ċ", "Ċ"), ("'", "S"), ("Ġ", "Ġ")]
    vocabulary = {**letters, **{left + right: 256 + at for at, (left, right) in enumerate(merges)}}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<s>", "</s>"])
    for name, part in parts.items():
        setattr(fast, name, part)
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    return folder


def template(pattern: str) -> Any:
    return processors.TemplateProcessing(single=pattern, special_tokens=[("<s>", 264), ("</s>", 265)])


# Forms of a tokenizer.json, some of which a class of transformers would replace.
JSON_FORMS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "a blank before the text": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    "single digits": {
        "pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    },
    "lower case": {"normalizer": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])},
    "template with BOS": {"post_processor": template("<s> $A")},
    "template with BOS and EOS": {"post_processor": template("<s> $A </s>")},
}
CLASSES = ("GPT2Tokenizer", "GPTNeoXTokenizerFast", "LlamaTokenizer", "GemmaTokenizerFast", None)


@pytest.mark.full
@pytest.mark.parametrize("form", JSON_FORMS)
def test_no_class_beside_a_tokenizer_json_changes_its_ids(form: str, tmp_path: Path) -> None:
    """transformers' classes would replace its normalizer and splitting, and its template may lack the BOS."""
    from transformers import AutoTokenizer

    from torchtitan.tools.interchange.tokenizer_files import tokenizer_files

    for number, name in enumerate(CLASSES):
        own, out = byte_level_json(tmp_path / f"own{number}", **JSON_FORMS[form]), tmp_path / f"out{number}"
        if name is not None:
            beside = {"tokenizer_class": name, "add_prefix_space": True, "auto_map": {"AutoTokenizer": ["a.B", None]}}
            (own / "tokenizer_config.json").write_text(json.dumps({**beside, "pad_token": "</s>"}))
        out.mkdir()
        for file, content in tokenizer_files(str(own)).items():
            (out / file).write_bytes(content)
        ours = load_tokenizer(str(own))
        assert ours.bos_id == 264
        (out / "config.json").write_text('{"model_type": "llama"}')
        exported_tokenizer = AutoTokenizer.from_pretrained(out)
        assert exported_tokenizer.pad_token == (None if name is None else "</s>")
        assert [exported_tokenizer(text)["input_ids"] for text in TEXTS] == [[264, *ours.encode(t)] for t in TEXTS]
        assert load_tokenizer(str(out)).ids_fingerprint == ours.ids_fingerprint


def test_a_tokenizer_json_that_needs_no_change_keeps_its_bytes(tmp_path: Path) -> None:
    from torchtitan.tools.interchange.tokenizer_files import tokenizer_files

    own = byte_level_json(tmp_path / "own", post_processor=template("<s> $A"))
    assert tokenizer_files(str(own))["tokenizer.json"] == (own / "tokenizer.json").read_bytes()
    with_limit = FastTokenizer.from_file(str(own / "tokenizer.json"))
    with_limit.enable_truncation(3)
    with_limit.save(str(own / "tokenizer.json"))
    assert json.loads(tokenizer_files(str(own))["tokenizer.json"])["truncation"] is None


@pytest.mark.parametrize("add_bos", [True, False])
def test_prompts_begin_as_documents_did(add_bos: bool, tmp_path: Path) -> None:
    """Where a key decides otherwise than the tokenizer's files, and generation_config.json has several EOS."""
    from transformers import AutoTokenizer

    from torchtitan.tools.interchange.tokenizer_files import tokenizer_files

    (tmp_path / "own").mkdir()
    (tmp_path / "out").mkdir()
    for name, content in tokenizer_files(None, add_bos=not add_bos).items():
        (tmp_path / "own" / name).write_bytes(content)
    (tmp_path / "own" / "tokenizer.model").unlink()
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": not add_bos}
    (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own" / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    model = replace(published(SMALL), tokenizer_path=str(tmp_path / "own"), add_bos=add_bos)
    for name, content in model.files(torch.float32).items():
        (tmp_path / "out" / name).write_bytes(content)
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("a")["input_ids"]
    assert ids == ([1] if add_bos else []) + load_tokenizer(None).encode("a")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 9]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "word"}, "transformers lacks its algorithm"),
        ({"model_type": "bpe", "treat_whitespace_as_suffix": True}, "transformers would give the text '.*' other ids"),
    ],
)
def test_a_tokenizer_that_transformers_cannot_have_is_not_exported(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    from torchtitan.tools.interchange.tokenizer_files import tokenizer_files

    path = sentencepiece_model(tmp_path / "tokenizer.model", settings)
    with pytest.raises(DataError, match=f"^model.tokenizer_path: .* cannot be exported, because {message}"):
        tokenizer_files(str(path))


def test_of_two_tokenizers_in_a_folder_the_one_in_use_is_exported(tmp_path: Path) -> None:
    """With the chat template, but not the class, that the folder names."""
    from torchtitan.tools.interchange.tokenizer_files import tokenizer_files

    sentencepiece_model(tmp_path / "tokenizer.model", SENTENCEPIECE["Llama 2"])
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_files(None)["tokenizer.json"])
    config = {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ x }}", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = tokenizer_files(str(tmp_path))
    assert len(json.loads(files["tokenizer.json"])["model"]["vocab"]) == 500
    written = json.loads(files["tokenizer_config.json"])
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (written["chat_template"], written["add_bos_token"]) == ("{{ x }}", False)


@pytest.mark.parametrize(
    ("params", "ffn_dim", "factor"),
    [
        ({"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 256}, 11008, None),  # Llama 2 7B
        ({"dim": 5120, "n_layers": 40, "n_heads": 40, "multiple_of": 256}, 13824, None),  # Llama 2 13B
        ({"dim": 8192, "n_layers": 80, "n_heads": 64, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 28672, None),
        (
            {"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}
            | {"n_kv_heads": 8, "rope_theta": 500000.0, "use_scaled_rope": True},
            14336,
            8.0,
        ),  # Llama 3.1 8B
        (
            {"dim": 2048, "n_layers": 16, "n_heads": 32, "multiple_of": 256, "ffn_dim_multiplier": 1.5}
            | {"n_kv_heads": 8, "rope_theta": 500000.0, "use_scaled_rope": True},
            8192,
            32.0,
        ),  # Llama 3.2 1B
    ],
)
def test_metas_params_have_the_published_sizes(params: dict[str, Any], ffn_dim: int, factor: float | None) -> None:
    """As in the `config.json` that Meta publishes beside them."""
    args = from_params(params, 32_000)
    assert args.ffn_dim == ffn_dim and args.n_kv_heads == params.get("n_kv_heads", params["n_heads"])
    assert (args.rope_scaling and args.rope_scaling.factor) == factor


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("variant", ["gqa", "tied", "qwen3_moe"])
def test_pytorch_model_bin(files: int, variant: str, tmp_path: Path) -> None:
    """The weights of a folder from before safetensors, in one file or several."""
    args = VARIANTS[variant]
    folder = exported(nontrivial_model(args), tmp_path / "out")
    expected = loaded(folder, args).state_dict()
    weights = load_file(folder / "model.safetensors")
    for name in ("model.safetensors", "SHA256SUMS"):
        (folder / name).unlink()
    names = [f"pytorch_model-{number + 1:05d}-of-{files:05d}.bin" for number in range(files)]
    names = names if files > 1 else ["pytorch_model.bin"]
    weight_map = {weight: names[at % files] for at, weight in enumerate(weights)}
    for name in names:
        torch.save({weight: weights[weight] for weight in weights if weight_map[weight] == name}, folder / name)
    if files > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = loaded(folder, args).state_dict()
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    (folder / names[0]).write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match=rf"{names[0]} is damaged"):
        loaded(folder, args)
    assert not ATTACKED.exists()


ATTACKED = Path("attacked")


class Attack:
    def __reduce__(self) -> Any:
        return Path.touch, (ATTACKED,)


def packed_experts(folder: Path, args: GptOssArgs) -> dict[str, torch.Tensor]:
    """Writes an export whose experts are in MXFP4, with random bytes. Returns their tensors under published names."""
    exported(nontrivial_model(args), folder)
    weights = load_file(folder / "model.safetensors")
    packed = {}
    for name in [name for name in weights if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = weights.pop(name).shape
        packed[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.randint(115, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
    save_file({**weights, **packed}, folder / "model.safetensors", metadata={"format": "pt"})
    return packed


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    args = replace(GPT_OSS, n_layers=1, dim=96, moe=with_biases(3, 64, 2), ffn_dim=64)
    packed = packed_experts(tmp_path / "packed", args)
    source = find_source(tmp_path / "packed", published(args).naming)
    assert source is not None
    published(args).check(source)
    up, down = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    both, w2 = (convert_moe_packed_tensors(packed[f"{n}_blocks"], packed[f"{n}_scales"]) for n in (up, down))
    expected = {"w1": both[..., 0::2].mT, "w3": both[..., 1::2].mT, "w2": w2.mT}
    for layer, weight in expected.items():
        name = f"layers.0.moe.experts.{layer}.weight"
        assert source.dtype(name) == torch.bfloat16 and torch.equal(source.read(name), weight)
        box = slice(1, 3), slice(5, 40), slice(20, 47)  # as a shard, not along blocks
        assert torch.equal(source.read(name, box), weight[box])


def test_experts_in_damaged_mxfp4_are_refused(tmp_path: Path) -> None:
    args = replace(GPT_OSS, n_layers=1, dim=96, moe=with_biases(3, 64, 2), ffn_dim=64)
    packed = packed_experts(tmp_path / "packed", args)
    file = tmp_path / "packed" / "model.safetensors"
    name = next(name for name in packed if name.endswith("_scales"))
    save_file({**load_file(file), name: packed[name][:, :-1].contiguous()}, file)
    source = find_source(tmp_path / "packed", published(args).naming)
    assert source is not None
    with pytest.raises(CheckpointError, match="which is not MXFP4"):
        published(args).check(source)


def test_weights_in_blocks_of_fp8_are_read_with_their_scales(tmp_path: Path) -> None:
    args = replace(DEEPSEEK, dim=160, n_layers=1, moe=replace(DEEPSEEK.moe, n_dense_layers=0, ffn_dim=144))
    exported(nontrivial_model(args), tmp_path / "fp8")
    file = tmp_path / "fp8" / "model.safetensors"
    weights, expected = load_file(file), {}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        rows, columns = weights[name].shape
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 128), -(-columns // 128))
        weights[f"{name}_scale_inv"] = scales
        whole = torch.kron(scales.double(), torch.ones(128, 128))[:rows, :columns]
        expected[name] = (weights[name].double() * whole).bfloat16()
    save_file(weights, file)
    naming = published(args).naming
    source = find_source(tmp_path / "fp8", naming)
    assert source is not None
    published(args).check(source)
    w2, kv = "layers.0.moe.experts.w2.weight", "layers.0.attention.wkv_b.weight"
    assert source.dtype(w2) == torch.bfloat16
    stack = torch.stack([expected[naming.name(w2, expert)] for expert in range(args.moe.n_experts)])
    torch.testing.assert_close(source.read(w2), stack, rtol=2**-7, atol=0)  # rounded from float32, and from float64
    for box in ((slice(1, 3), slice(100, 150), slice(5, 131)), (slice(1, 3), slice(160, 160), slice(0, 144))):
        assert torch.equal(source.read(w2, box), source.read(w2)[box])
    torch.testing.assert_close(source.read(kv), expected[naming.name(kv)], rtol=2**-7, atol=0)
    name = f"{naming.name(kv)}_scale_inv"
    save_file({**weights, name: torch.cat([weights[name]] * 2)}, file)
    source = find_source(tmp_path / "fp8", naming)
    assert source is not None
    with pytest.raises(CheckpointError, match="which is not FP8 in blocks of 128"):
        published(args).check(source)
    save_file({**weights, naming.name(kv): weights[naming.name(kv)].bfloat16()}, file)  # scaled, and the scales left
    source = find_source(tmp_path / "fp8", naming)
    assert source is not None
    with pytest.raises(CheckpointError, match=r"is torch\.bfloat16 beside scales for torch\.float8_e4m3fn"):
        published(args).check(source)
