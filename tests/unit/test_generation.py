"""Text generation: a cache that changes no result, sampling, and the script."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from runs import CHECKPOINTS, TINY, into, python, train

from torchtitan.models.afmoe import AfmoeArgs
from torchtitan.models.afmoe import windows_without_rope_in_the_fourth as nope_in_the_fourth
from torchtitan.models.args import TransformerArgs
from torchtitan.models.deepseek_v3 import DeepseekV3, DeepseekV3Args
from torchtitan.models.gemma3 import Gemma3Args, windows_in_five_of_six
from torchtitan.models.glm4_moe import Glm4MoEArgs
from torchtitan.models.gpt_oss import GptOssArgs, experts, windows_in_every_other
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.moe import SparseTransformer
from torchtitan.models.olmo3 import Olmo3Args, windows_in_three_of_four
from torchtitan.models.qwen3 import Qwen3Args
from torchtitan.models.rope import Llama3Scaling
from torchtitan.models.sparse_args import MoEArgs
from torchtitan.models.transformer import Transformer
from torchtitan.tools.generation.command import TextStream, _read_prompts
from torchtitan.tools.generation.sample import Sampling, generate
from torchtitan.tools.interchange.convert import one_process

SMALL = LlamaArgs(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=211)
SIGMOID = MoEArgs(6, 2, 48, n_shared_experts=1, n_dense_layers=1, score="sigmoid")
VARIANTS: dict[str, Any] = {
    "gqa": SMALL,
    "tied, one head": replace(SMALL, n_kv_heads=1, tied_embeddings=True),
    "qwen3": Qwen3Args(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=211, head_dim=32),
    "afmoe": AfmoeArgs(64, 4, 4, 2, 96, 211, head_dim=32, pattern=nope_in_the_fourth(7), moe=SIGMOID),
    "deepseek_v3": DeepseekV3Args(64, 2, 4, 4, 96, 211, moe=SIGMOID, q_lora_rank=48, kv_lora_rank=32, v_head_dim=12),
    "glm4_moe": Glm4MoEArgs(64, 2, 4, 2, 96, 211, head_dim=32, moe=SIGMOID),
    "gemma3": Gemma3Args(64, 6, 4, 2, 96, 211, head_dim=32, pattern=windows_in_five_of_six(7)),
    "gpt_oss": GptOssArgs(64, 2, 4, 2, 48, 211, head_dim=32, pattern=windows_in_every_other(7), moe=experts(6, 48, 2)),
    "olmo3": Olmo3Args(64, 4, 4, 2, 96, 211, pattern=windows_in_three_of_four(7)),
    "rope scaling": replace(SMALL, rope_theta=1e4, rope_scaling=Llama3Scaling(factor=8.0, original=16)),
}
EOS = 210


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with one_process(None):
        yield


def llama(args: TransformerArgs) -> Transformer:
    torch.manual_seed(0)
    latents = isinstance(args, DeepseekV3Args)
    model = (DeepseekV3 if latents else Transformer if args.moe is None else SparseTransformer)(args)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return model


def prompts(*lengths: int) -> list[list[int]]:
    return [
        torch.randint(EOS, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in lengths
    ]


@torch.no_grad()
def greedy(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """With the model only."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_several_lengths_get_what_the_model_alone_gives_each(variant: str, use_cache: bool) -> None:
    model = llama(VARIANTS[variant])
    rows = prompts(3, 17, 1, 9)
    generated = generate(model, rows, Sampling(40), [EOS], use_cache)
    assert generated == [greedy(model, row, 40) for row in rows]
    assert generated[0] is not None and greedy(model, rows[0], 5) == generated[0][:5]  # the model is restored


def test_a_row_that_has_ended_says_no_more() -> None:
    model = llama(SMALL)
    (row,) = prompts(5)
    ends_at = greedy(model, row, 40)[3]
    shown: list[tuple[int, int]] = []
    other, mine = prompts(7)[0], generate(model, [row], Sampling(40), [EOS, ends_at])[0]
    assert mine == greedy(model, row, 40)[: mine.index(ends_at) + 1]
    both = generate(model, [row, other], Sampling(40), [EOS, ends_at], emit=lambda *token: shown.append(token))
    assert both[0] == mine
    assert [[id for index, id in shown if index == row] for row in (0, 1)] == both


def test_sampling_follows_the_probabilities_it_is_told_to() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log().expand(4000, -1)

    def shares(**options: Any) -> list[float]:
        uniform = torch.rand(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        drawn = Counter(Sampling(**{"temperature": 1.0, **options}).choose(logits, uniform).tolist())
        return [drawn[token] / 4000 for token in range(5)]

    assert shares() == pytest.approx([0.5, 0.25, 0.125, 0.0625, 0.0625], abs=0.03)
    assert shares(top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0], abs=0.03)
    assert shares(top_p=0.6) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0], abs=0.03)
    assert shares(top_p=0.5) == [1, 0, 0, 0, 0]
    assert shares(temperature=0.5)[0] == pytest.approx(0.25 / (0.25 + 0.0625 + 0.015625 + 2 * 0.00390625), abs=0.03)
    assert shares(temperature=0.0) == [1, 0, 0, 0, 0]


def test_the_smallest_temperatures_pick_the_likeliest_token() -> None:
    model, rows = llama(SMALL), prompts(4, 6)
    for temperature in (1e-30, 1e-40, 1e-300):
        chosen = generate(model, rows, Sampling(5, temperature=temperature), [EOS])
        assert chosen == generate(model, rows, Sampling(5), [EOS])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_follows_from_logits_that_are_not_finite(temperature: float) -> None:
    model = llama(SMALL)
    model.tok_embeddings.weight.data[17] = float("nan")
    rows = [[1, 2, 17, 3], [1, 2, 3]]
    generated = generate(model, rows, Sampling(3, temperature=temperature), [EOS])
    assert generated[0] is None and len(generated[1] or []) == 3


def test_a_seed_gives_a_text() -> None:
    model, rows = llama(SMALL), prompts(4)
    texts = [generate(model, rows, Sampling(20, temperature=2.0, seed=seed), [EOS]) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_largest_random_number_draws_no_token_that_is_left_out() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    drawn = Sampling(temperature=1.0, top_k=5).choose(logits, torch.tensor([1 - 2**-53], dtype=torch.float64))
    assert drawn.item() == logits.topk(5).indices.max()


def test_a_text_depends_on_no_other_prompt() -> None:
    """Neither a text nor, beyond rounding, its logits change with other prompts, their order, or more samples."""
    model, rows = llama(SMALL), prompts(3, 17, 1, 9)
    logits: list[torch.Tensor] = []

    class Recording(Sampling):
        def choose(self, given: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
            logits.append(given)
            return super().choose(given, uniform)

    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 2.0, "seed": 5}
    together = generate(model, rows, Recording(**options), [])
    batch = torch.stack(logits, 1)
    for place, number in enumerate((1, 3, 0, 2)):  # the longest prompt is the first row
        logits.clear()
        assert generate(model, [rows[number]], Recording(**options), []) == [together[number]]
        torch.testing.assert_close(batch[place], torch.stack(logits, 1)[0], rtol=1e-4, atol=1e-4)
    assert generate(model, rows[::-1], Sampling(**options), []) == together[::-1]
    several = generate(model, rows[:2], Sampling(**options, num_samples=3), [])
    assert several[::3] == together[:2]
    assert len({tuple(text or ()) for text in several}) == 6


def test_batches_are_bounded_and_texts_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = llama(SMALL), prompts(3, 60, 5, 4, 90, 6, 61)
    given: list[tuple[int, ...]] = []
    with model.register_forward_pre_hook(lambda _, inputs: given.append(tuple(inputs[0].shape))):
        generate(model, rows, Sampling(1), [])
        assert given == [(3, 90), (4, 6)]  # the short ones are not padded to the long ones
        row_bytes = 91 * (2 * 3 * 2 * 16 * 4 + 5 * 91)
        monkeypatch.setattr("torchtitan.tools.generation.sample.BATCH_BYTES", 2 * row_bytes)
        given.clear()
        texts = generate(model, rows, Sampling(1), [])
        assert given == [(2, 90), (1, 60), (4, 6)]
    assert texts == [greedy(model, row, 1) for row in rows]
    monkeypatch.setattr("torchtitan.tools.generation.sample.BATCH_BYTES", 1)
    assert generate(model, rows, Sampling(1), []) == texts  # a row that exceeds the bound alone


def test_letters_of_several_tokens_are_shown_when_they_are_whole() -> None:
    out = StringIO()
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), "> ", out)
    for byte in "é日".encode():
        stream.add(byte)
        assert "\ufffd" not in out.getvalue()
    stream.add(None)
    stream.end()
    assert out.getvalue() == "> é日\n"


@pytest.mark.full
def test_the_script_writes_what_transformers_writes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = (*TINY[:-2], "--model.name=llama3", "--model.flavor=debugmodel", *CHECKPOINTS, into(tmp_path / "run"))
    train(*run, "--training.steps=2", "--checkpoint.last_save_in_hf")
    folder = tmp_path / "run" / "checkpoint" / "step-2-hf"
    (tmp_path / "prompts").write_text('\ufeffimport os\n"def f(x):\\n    "\n', encoding="utf-8")
    flags = ("--prompts-file", tmp_path / "prompts", "--max-new-tokens", 24, "--dtype", "float32")
    results = {}
    for name, where in {
        "dump folder": tmp_path / "run",
        "checkpoint": folder.with_name("step-2"),
        "hf": folder,
    }.items():
        result = python(
            "-m", "torchtitan.tools.generate", "--checkpoint", where, *flags, "--out", tmp_path / "out.jsonl"
        )
        assert result.returncode == 0, result.stderr
        assert "Warning" not in result.stderr  # torch's own
        results[name] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert all(row["prompt"] + row["text"] in result.stdout for row in results[name])
    assert results["dump folder"] == results["checkpoint"] == results["hf"]
    assert [row["prompt"] for row in results["hf"]] == ["import os", "def f(x):\n    "]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row in results["hf"]:
        inputs = tokenizer(row["prompt"], return_tensors="pt")
        expected = judge.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert expected[0, inputs["input_ids"].shape[1] :].tolist() == row["tokens"]
    # Any token in the list of generation_config.json ends the text.
    listed = {"eos_token_id": [2, results["hf"][0]["tokens"][3]]}
    (folder / "generation_config.json").write_text(json.dumps(listed))
    (folder / "SHA256SUMS").unlink()
    # Samples at so low a temperature are the likeliest text.
    samples = ("--temperature", 1e-30, "--num-samples", 2, "--max-new-tokens", 100)
    result = python(
        "-m", "torchtitan.tools.generate", "--checkpoint", folder, *flags, *samples, "--out", tmp_path / "out.jsonl"
    )
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    row = rows[0]
    assert [(row["prompt"], row["sample"]) for row in rows] == [
        (p, n) for p in ("import os", "def f(x):\n    ") for n in (1, 2)
    ]
    assert (
        rows[1]["text"] == row["text"]
        and result.stdout.count(f"[sample 2 of 2]\n{row['prompt']}{row['text']}\n---") == 1
    )
    assert "--max-new-tokens 100 make 1" in result.stderr and "that the model was trained on" in result.stderr
    first = results["hf"][0]["tokens"].index(listed["eos_token_id"][1])
    assert row["tokens"] == results["hf"][0]["tokens"][: first + 1]


@pytest.mark.full
def test_a_blank_before_the_first_new_word_is_written(tmp_path: Path) -> None:
    """By sentencepiece's own decoder it would not be: Llama 2's model puts one in front of each text."""
    sentence = "the cat sat on the mat and the dog sat on the cat "
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([sentence] * 9), model_writer=model, model_type="bpe", vocab_size=30, minloglevel=2
    )
    (tmp_path / "llama2.model").write_bytes(model.getvalue())
    (tmp_path / "text.jsonl").write_text((json.dumps({"text": sentence * 9}) + "\n") * 1000)
    (tmp_path / "config.toml").write_text('[validation]\nsample_prompts = ["the cat sat"]')
    train(f"--job.config_file={tmp_path / 'config.toml'}", *TINY, *CHECKPOINTS, into(tmp_path / "run"),
          f"--model.tokenizer_path={tmp_path / 'llama2.model'}", f"--training.dataset_path={tmp_path / 'text.jsonl'}",
          "--training.steps=20", "--optimizer.lr=1e-2", "--validation.enabled", "--validation.freq=20",
          "--validation.steps=1")  # fmt: skip
    (sample,) = (json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines())
    assert sample["text"].startswith(" on the")
    flags = ("--max-new-tokens", 4, "--dtype", "float32", "--out", tmp_path / "out.jsonl", "--custom-import=tiny")
    done = python(
        "-m", "torchtitan.tools.generate", "--checkpoint", tmp_path / "run", "--prompt", "the cat sat", *flags
    )
    assert done.returncode == 0 and done.stdout.startswith("the cat sat on the"), done.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text())["text"].startswith(" on the")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--checkpoint", "/nowhere", "--prompt", "a"), "/nowhere does not exist"),
        (("--checkpoint", "docs", "--prompt", "a"), "docs holds neither config.json"),
        (("--checkpoint", "docs"), "there is no prompt"),
        (("--checkpoint", "docs", "--prompt", "a", "--seed", str(10**30)), "--seed must be a 64-bit integer"),
        (("--checkpoint", "docs", "--prompt", "a", "--max-new-tokens", str(10**9)), "--max-new-tokens must be 1 to"),
        (("--checkpoint", "docs", "--prompt", "a", "--top-p", "0"), "--top-p must be above 0"),
        (("--checkpoint", "docs", "--prompt", "a", "--num-samples", "2"), "--num-samples must be 1, or with --temp"),
        (("--checkpoint", "docs", "--prompt", "a\udcff"), "'a\\udcff' holds half of a surrogate pair"),
        (("--checkpoint", "docs", "--prompts-file", "/nowhere"), "/nowhere cannot be read (No such file"),
        (("--checkpoint", "docs", "--prompts-file", "/dev/zero"), "/dev/zero cannot be read (it is a device"),
    ],
)
def test_mistakes_are_told_in_a_sentence(flags: tuple[str, ...], words: str) -> None:
    result = python("-m", "torchtitan.tools.generate", *flags)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_of_prompts_has_one_on_each_line(tmp_path: Path) -> None:
    """JSON strings may hold characters at which str.splitlines splits."""
    strange = "a\u2028b\x85c"
    (tmp_path / "prompts").write_bytes(f'"{strange}"\r\nplain {strange}\x0cd\n\n"e\\nf"\n'.encode())
    assert _read_prompts(tmp_path / "prompts") == [strange, f"plain {strange}\x0cd", "e\nf"]
