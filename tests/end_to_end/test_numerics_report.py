"""scripts/numerics_report.py: the effect of a recipe on each GEMM of a model in training."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from runs import TINY, python


def report(folder: Path, *flags: str) -> tuple[dict[str, Any], str]:
    flags = ("--steps=2", *TINY, "--training.mixed_precision_param=bfloat16", *flags)
    done = python("scripts/numerics_report.py", "--output", folder / "numerics_0.5", *flags)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "numerics_0.5.json").read_text()), done.stdout


@pytest.mark.full
def test_products_in_high_precision_stand_out_and_layers_are_all_there(tmp_path: Path) -> None:
    users = tmp_path / "checkpoints"
    saving = ("--checkpoint.enable_checkpoint", f"--checkpoint.folder={users}")
    measured, table = report(tmp_path, "--model.converters=float8", "--float8.recipe_name=rowwise_with_gw_hp", *saving)
    assert not users.exists()
    assert len(measured["layers"]) == 15
    for gemms in measured["layers"].values():
        assert 20 < gemms["output"]["sqnr_db"] < 35  # 3 bits after the point: .037 is 28.6 dB
        assert gemms["grad_weight"]["sqnr_db"] > 45  # bfloat16: .003 is 50 dB
    assert measured["loss"]["bf16"] != measured["loss"]["recipe"]
    assert all(gemms["grad_weight"]["flushed"] == 0 for gemms in measured["layers"].values())  # nothing is rounded
    assert "layers.1.feed_forward.w2" in table
    assert (tmp_path / "numerics_0.5.png").read_bytes().startswith(b"\x89PNG")


def test_small_gradients_beside_large_ones_are_flushed_to_zero_in_int8(tmp_path: Path) -> None:
    measured, _ = report(tmp_path, "--model.converters=int8")
    # The gradient of the logits has one large number in each row, and vocabulary - 1 small ones.
    assert measured["layers"]["output"]["grad_input"]["flushed"] > 0.5
    assert measured["layers"]["layers.0.attention.wq"]["output"]["flushed"] < 0.1
    assert all(gemms["output"]["saturated"] == 0 for gemms in measured["layers"].values())


@pytest.mark.full
def test_layers_without_gemms_of_their_size_are_left_out(tmp_path: Path) -> None:
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"word{number}" for number in range(999)]),
        model_writer=model,
        vocab_size=20,
        minloglevel=2,
    )
    (tmp_path / "odd.model").write_bytes(model.getvalue())
    measured, _ = report(
        tmp_path, "--model.converters=mx", "--mx.emulate", f"--model.tokenizer_path={tmp_path / 'odd.model'}"
    )
    assert len(measured["layers"]) == 14 and "output" not in measured["layers"]


@pytest.mark.full
def test_exact_products_are_null_in_json_and_no_output_is_one_sentence(tmp_path: Path) -> None:
    high = ("--model.converters=float8", "--float8.recipe_name=rowwise_with_gw_hp")
    report(tmp_path, *high, "--training.mixed_precision_param=float32")
    text = (tmp_path / "numerics_0.5.json").read_text()
    measured = json.loads(text, parse_constant=pytest.fail)
    assert all(gemms["grad_weight"]["sqnr_db"] is None for gemms in measured["layers"].values())
    done = python("scripts/numerics_report.py", "--output", "/dev/null/x", *TINY, *high)
    assert done.returncode == 2 and "--output: /dev/null/x cannot be written" in done.stderr


@pytest.mark.full
def test_experts_are_measured_and_the_router_is_not(tmp_path: Path) -> None:
    measured, table = report(tmp_path, "--model.name=sparse", "--model.converters=mx", "--mx.emulate")
    experts = {fqn: gemms for fqn, gemms in measured["layers"].items() if ".moe.experts." in fqn}
    assert len(experts) == 6
    for gemms in experts.values():
        assert all(20 < of_gemm["sqnr_db"] < 35 and of_gemm["saturated"] == 0 for of_gemm in gemms.values())
    assert "router" not in table
