"""lm-evaluation-harness as the judge: on a model exported for `transformers` it gets the same results from the same
files. `pip install "lm_eval[hf]"` is needed, into an environment that has this project's packages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from equality import degrees
from runs import CHECKPOINTS, TINY, into, lines_of, python, train
from task_files import KINDS, write_lm_eval

pytestmark = pytest.mark.full
OURS = {"hellaswag": "hellaswag", "arc": "arc_easy", "piqa": "piqa", "lambada": "lambada_standard"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the format of `transformers`."""
    folder = tmp_path_factory.mktemp("exported")
    train(*TINY, *CHECKPOINTS, "--checkpoint.interval=15", into(folder), "--training.steps=15", "--optimizer.lr=3e-3",
          "--training.seq_len=256", "--checkpoint.last_save_in_hf")  # fmt: skip
    return folder / "checkpoint" / "step-15-hf"


@pytest.mark.parametrize("shots", [0, 2])
def test_lm_eval_gets_the_same(shots: int, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason='lm_eval is not installed (pip install "lm_eval[hf]")')
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = [task for task in KINDS if shots == 0 or task != "lambada"]
    for task in tasks:
        lines = [KINDS[task](2 * number) for number in range(40)]  # the odd lines of ARC have another form
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        where = Path(lm_eval.__file__).parent / "tasks"
        (task_file,) = where.glob(f"*/{OURS[task]}.yaml")
        (tmp_path / f"{task}.yaml").write_text(
            f"include: {task_file}\ntask: judge_{task}\ndataset_path: json\ndataset_name: null\n"
            f"dataset_kwargs:\n  data_files:\n    validation: {tmp_path / task}.jsonl\n"
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
        tasks.append("text")
    results: dict[str, Any] = {}
    for begins, named in ((True, [task for task in tasks if task != "text"]), (False, ["text"] if shots == 0 else [])):
        if named:  # of whole texts, lm_eval puts BOS in front in any case; asked to, it also predicts one
            results |= lm_eval.simple_evaluate(
                model="hf",
                model_args={"pretrained": str(exported), "dtype": "float32", "add_bos_token": begins, "device": "cpu"},
                tasks=[f"judge_{task}" for task in named],
                num_fewshot=shots,
                task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
                bootstrap_iters=0,
            )["results"]
    entries = [f"text:{text}" if task == "text" else str(tmp_path / f"{task}.jsonl") for task in tasks]
    flags = ("--tasks", *entries, "--num-fewshot", str(shots), "--dtype", "float32", "--dump-folder", str(tmp_path))
    done = python("-m", "torchtitan.tools.evaluate", exported, *flags)
    assert done.returncode == 0, done.stderr
    (ours,) = lines_of(tmp_path / "metrics.jsonl")
    compared = 0
    for task in tasks:
        for metric, tolerance in (("acc", 1e-6), ("acc_norm", 1e-6), ("perplexity", 1e-4), ("bits_per_byte", 1e-5)):
            expected = results[f"judge_{task}"].get(f"{metric},none")
            if expected is not None:
                assert ours[f"{task}/{metric}"] == pytest.approx(expected, rel=tolerance, abs=1e-6), (task, metric)
                print(f"{shots} solved examples, {task} {metric}: {ours[f'{task}/{metric}']} here, {expected} there")
                compared += 1
    assert compared == (9 if shots == 0 else 6)


RUN = (*TINY, "--training.seq_len=128", "--training.global_batch_size=16", "--training.local_batch_size=4",
       "--validation.local_batch_size=4", "--model.flavor=deep")  # fmt: skip


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """The folder of a run in one process that evaluates lm_eval's tasks, and these."""
    pytest.importorskip("lm_eval", reason='lm_eval is not installed (pip install "lm_eval[hf]")')
    folder = tmp_path_factory.mktemp("evaluated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder / "cache"))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        tasks = write_lm_eval(folder, 20)
        train(*RUN, *CHECKPOINTS, "--checkpoint.interval=5", into(folder), "--training.steps=10", "--optimizer.lr=3e-3",
              "--evaluation.freq=5",
              f"--training.dataset_path={folder}/data.jsonl", "--checkpoint.last_save_in_hf",
              f"--evaluation.tasks={','.join(tasks)}")  # fmt: skip
        yield folder, tasks


def evaluations(folder: Path) -> list[dict[str, float]]:
    """The metrics of each evaluation."""
    lines = [line for line in lines_of(folder / "metrics.jsonl") if any(key.startswith("lm_eval/") for key in line)]
    return [{key: value for key, value in line.items() if "/" in key} for line in lines]


def test_its_own_tasks_get_the_same_from_our_model(evaluated: tuple[Path, list[str]], tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder, tasks = evaluated
    reference: dict[str, Any] = {"results": {}, "samples": {}}
    for begins, names in ((True, ["both", "continue"]), (False, ["whole_text"])):
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args={
                "pretrained": str(folder / "checkpoint" / "step-10-hf"),
                "dtype": "float32",
                "add_bos_token": begins,
                "device": "cpu",
                "max_length": 128,
            },
            tasks=names,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=1000,
        )
        for section, whole in reference.items():
            whole |= results[section]
    after = (python("-m", "torchtitan.tools.evaluate", folder, "--tasks", *tasks, "--dtype", "float32",
                    "--dump-folder", tmp_path, "--out", tmp_path / "details.jsonl"))  # fmt: skip
    assert after.returncode == 0, after.stderr
    expected = {
        f"lm_eval/{task}/{key.removesuffix(',none')}": value
        for task, values in reference["results"].items()
        for key, value in values.items()
        if "," in key and isinstance(value, float)
    }
    assert len(expected) == 14
    _, last = evaluations(folder)
    (afterwards,) = evaluations(tmp_path)
    for ours in (last, afterwards):
        assert ours.keys() == expected.keys()
        for key, value in expected.items():
            assert ours[key] == pytest.approx(value, rel=1e-5), key
    written = [line for line in lines_of(tmp_path / "details.jsonl") if line["task"] == "lm_eval/continue"]
    assert [line["resps"] for line in written] == [sample["resps"] for sample in reference["samples"]["continue"]]
    assert len({line["resps"][0][0] for line in written}) > 5


LAYOUTS = {
    "FSDP 2 x TP 2": (4, degrees(tp=2)),
    "PP 2": (2, degrees(pp=2)),
    "CP 2": (2, degrees(cp=2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gets_the_same(layout: str, evaluated: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, tasks = evaluated
    processes, flags = LAYOUTS[layout]
    train(*RUN, into(tmp_path), "--training.steps=1", "--optimizer.lr=1e-12", "--checkpoint.enable_checkpoint",
          f"--checkpoint.initial_load_path={folder / 'checkpoint' / 'step-10'}",
          f"--evaluation.tasks={','.join(tasks)}", *flags, processes=processes)  # fmt: skip
    (ours,) = evaluations(tmp_path)
    assert ours == pytest.approx(evaluations(folder)[-1], rel=1e-6)


def test_experts_over_two_ranks_get_the_same(evaluated: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, tasks = evaluated
    alone, two = tmp_path / "one", tmp_path / "two"
    sparse = (*RUN, "--model.name=sparse", f"--evaluation.tasks={','.join(tasks)}", "--checkpoint.enable_checkpoint",
              f"--training.dataset_path={folder}/data.jsonl")  # fmt: skip
    train(*sparse, into(alone), "--training.steps=10", "--optimizer.lr=3e-3")
    start = f"--checkpoint.initial_load_path={alone / 'checkpoint' / 'step-10'}"
    train(*sparse, into(two), "--training.steps=1", "--evaluation.at_start", start, *degrees(ep=2), processes=2)
    before_a_step, _ = evaluations(two)  # which also moves the router's biases, whatever the learning rate
    assert before_a_step == pytest.approx(evaluations(alone)[-1], rel=1e-6)
