"""lm-evaluation-harness as the judge: on a model exported for `transformers` it gets the same results from the same
files. `pip install "lm_eval[hf]"` is needed, into an environment that has this project's packages."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import CHECKPOINTS, TINY, into, lines_of, python, train
from task_files import KINDS

pytestmark = pytest.mark.full
OURS = {"hellaswag": "hellaswag", "arc": "arc_easy", "piqa": "piqa", "lambada": "lambada_standard"}


@pytest.mark.parametrize("shots", [0, 2])
def test_lm_eval_gets_the_same(shots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason='lm_eval is not installed (pip install "lm_eval[hf]")')
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    train(*TINY, *CHECKPOINTS, into(tmp_path / "run"), "--training.steps=30", "--optimizer.lr=3e-3",
          "--training.seq_len=256", "--checkpoint.last_save_in_hf")  # fmt: skip
    kinds = [kind for kind in KINDS if shots == 0 or kind != "lambada"]
    for kind in kinds:
        lines = [KINDS[kind](2 * number) for number in range(40)]  # the odd lines of ARC have another form
        (tmp_path / f"{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        where = Path(lm_eval.__file__).parent / "tasks"
        (theirs,) = where.glob(f"*/{OURS[kind]}.yaml")
        (tmp_path / f"{kind}.yaml").write_text(
            f"include: {theirs}\ntask: judge_{kind}\ndataset_path: json\ndataset_name: null\n"
            f"dataset_kwargs:\n  data_files:\n    validation: {tmp_path / kind}.jsonl\n"
            "training_split: null\nvalidation_split: validation\ntest_split: validation\nfewshot_split: validation\n"
            "fewshot_config:\n  sampler: first_n\n"
        )
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"def f{n}(x):\n    return é{n}\n" * (9 * n + 1)}) + "\n" for n in range(9))
    )
    if shots == 0:
        (tmp_path / "text.yaml").write_text(
            "task: judge_text\ndataset_path: json\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\n"
            f"doc_to_target: '{{{{text}}}}'\ndataset_kwargs:\n  data_files:\n    validation: {text}\n"
            "validation_split: validation\nmetric_list:\n  - metric: bits_per_byte\n"
        )
        kinds.append("text")
    folder = tmp_path / "run" / "checkpoint" / "step-30-hf"
    results: dict[str, Any] = {}
    for begins, named in ((True, [kind for kind in kinds if kind != "text"]), (False, ["text"] if shots == 0 else [])):
        if named:  # of whole texts, lm_eval puts BOS in front in any case; asked to, it also predicts one
            results |= lm_eval.simple_evaluate(
                model="hf",
                model_args={"pretrained": str(folder), "dtype": "float32", "add_bos_token": begins, "device": "cpu"},
                tasks=[f"judge_{kind}" for kind in named],
                num_fewshot=shots,
                task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
                bootstrap_iters=0,
            )["results"]
    entries = [f"text:{text}" if kind == "text" else str(tmp_path / f"{kind}.jsonl") for kind in kinds]
    flags = ("--tasks", *entries, "--num-fewshot", str(shots), "--dtype", "float32", "--dump-folder", str(tmp_path))
    done = python("-m", "torchtitan.evaluate", folder, *flags)
    assert done.returncode == 0, done.stderr
    (ours,) = lines_of(tmp_path / "metrics.jsonl")
    compared = 0
    for kind in kinds:
        for metric, tolerance in (("acc", 1e-6), ("acc_norm", 1e-6), ("perplexity", 1e-4), ("bits_per_byte", 1e-5)):
            theirs = results[f"judge_{kind}"].get(f"{metric},none")
            if theirs is not None:
                assert ours[f"{kind}/{metric}"] == pytest.approx(theirs, rel=tolerance, abs=1e-6), (kind, metric)
                print(f"{shots} solved examples, {kind} {metric}: {ours[f'{kind}/{metric}']} here, {theirs} there")
                compared += 1
    assert compared == (9 if shots == 0 else 6)
