"""Each script of `benchmarks/` runs, with shapes too small for measurements."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import ROOT, TINY, failure, losses, python

from benchmarks import copies, gpu_model, kept_activations
from torchtitan.device import find_device


def bench(*arguments: object) -> str:
    done = python("-m", "benchmarks", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_name_all_are_listed() -> None:
    lines = bench().splitlines()
    listed = {line.split()[0] for line in lines[1:]}
    scripts = [path for path in (ROOT / "benchmarks").glob("*.py") if path.stem[0] != "_"]
    assert listed == {path.stem for path in scripts if 'if __name__ == "__main__"' in path.read_text()}
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("thruput", " (did you mean throughput?)."), ("busy", ": it is finished, and docs/ has its result.")],
)
def test_a_name_that_is_not_there(name: str, remedy: str) -> None:
    done = python("-m", "benchmarks", name)
    assert done.returncode == 2 and f"unknown benchmark '{name}'{remedy}" in done.stderr


@pytest.mark.full
def test_throughput_beside_another_trainer(tmp_path: Path) -> None:
    other = "for n in range(1, 4): print(f'step: {n:2} tps: {1000 * n:,}')"
    output = bench(
        "throughput", "--rounds=1", "--warmup=1", "--steps=2", "--gemm-sizes=64,99", f"--json={tmp_path / 'x.json'}",
        f'--against=NAME=1 {sys.executable} -c "{other}"',
        "--variant=plain:", "--", *TINY, "--training.global_batch_size=2",
    )  # fmt: skip
    assert "| the other | 2,500 |" in output
    figures = json.loads((tmp_path / "x.json").read_text())
    (ours,) = figures["results"]["plain"]
    (other_result,) = figures["results"]["the other"]
    assert other_result["step_rates"] == [2000, 3000] and len(ours["step_rates"]) == 2
    assert other_result["first_step"] < ours["first_step"]
    assert ours["memory"] > other_result["memory"] > 0
    assert 0 < figures["machines"][0]["gemm_rate"] == figures["machines"][0]["gemm_rates"][max_of(figures)]
    split = figures["splits"]["plain"]
    assert split["backward"] > 0 < split["forward"] < split["step"] and split["communication_wait"] < split["step"]
    assert figures["model"]["plain"]["full"] > figures["model"]["plain"]["causal"] > 0


def max_of(figures: dict[str, Any]) -> str:
    rates = figures["machines"][0]["gemm_rates"]
    return max(rates, key=rates.__getitem__)


RECOMPILING = '''
"""A model whose blocks see another number in each step, for which the compiler must compile again."""
import tiny
from torchtitan.models import MODELS, ModelSpec
from torchtitan.models.transformer import Attention
from torchtitan.models.llama.model import Llama
from torchtitan.models.transformer import FeedForward, TransformerBlock


class Block(TransformerBlock):
    step = 1

    def forward(self, x, rope, document_ids):
        return super().forward(x, rope, document_ids) * (1 + 0 * self.step)


class Changing(Llama):
    def make_block(self, args, layer):
        return Block(args, Attention(args), FeedForward(args.dim, args.ffn_dim))

    def forward(self, *inputs, **others):
        self.layers["0"].step += 1
        return super().forward(*inputs, **others)


MODELS.register("changing", ModelSpec({"one": tiny.replace(tiny.TINY, n_layers=1)}, build=Changing))
'''


@pytest.mark.full
def test_throughput_fails_where_a_steady_run_compiles_again(tmp_path: Path) -> None:
    (tmp_path / "recompiling.py").write_text(RECOMPILING)
    path = f"{ROOT}:{ROOT / 'tests' / 'helpers'}:{tmp_path}"
    status, output = failure(
        *("--rounds=1", "--warmup=1", "--steps=2", "--gemm-sizes=64", "--no-split", "--", *TINY),
        *("--training.compile", "--training.global_batch_size=2", "--experimental.custom_import=recompiling"),
        *("--model.name=changing", "--model.flavor=one"),
        command=[sys.executable, str(ROOT / "benchmarks" / "throughput.py")],
        PYTHONPATH=path,
    )
    assert status == 1
    assert "ours: after 1 steps of warm-up the compiler was still running (forward in" in output


@pytest.mark.full
def test_scaling_draws_what_it_measures(tmp_path: Path) -> None:
    import matplotlib.image

    flags = ["--axes=processes", "--processes=1", "--steps=1", "--gemm-sizes=64", f"--json={tmp_path / 'x.json'}"]
    output = bench("scaling", *flags, f"--output={tmp_path / 'x.png'}", "--", "--training.seq_len=64")
    (point,) = json.loads((tmp_path / "x.json").read_text())["axes"]["processes"]
    assert point["x"] == 1 and point["rate"] > 0 and point["memory"] > 1e8 and point["first_step"] > 0
    assert f"| 1 | {point['rate']:,.0f} |" in output
    assert matplotlib.image.imread(tmp_path / "x.png").std() > 0


@pytest.mark.full
def test_kernels(tmp_path: Path) -> None:
    output = bench(
        "kernels", "--models=debug", "--tokens=32", "--rounds=1", "--no-compile", f"--json={tmp_path / 'x.json'}",
        "--recipes=float8 rowwise,mx mxfp8",
    )  # fmt: skip
    shapes = [(row["k"], row["n"]) for row in json.loads((tmp_path / "x.json").read_text())["rows"]]
    assert shapes == [(256, 256), (256, 768), (768, 256)]
    assert "failed" not in output and output.count("| mx mxfp8 |") == 3


@pytest.mark.full
def test_gemms_beside_the_filter(tmp_path: Path) -> None:
    output = bench("gemms", "--smoke", "--recipes=float8 rowwise,int8 rowwise", f"--output={tmp_path / 'x.jsonl'}")
    machine, *shapes = map(json.loads, (tmp_path / "x.jsonl").read_text().splitlines())
    assert "device" in machine["machine"] and len(shapes) == 17
    assert all(shape["seconds"][name]["both"] > 0 for shape in shapes for name in ("float8 rowwise", "int8 rowwise"))
    assert output.count("| float8 rowwise |") == output.count("| int8 rowwise |") == 17


def test_copies_of_gradients_write_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = bench("copies", "--smoke", f"--output={tmp_path / 'x.jsonl'}")
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert len(rows) == output.count("| equal |") == 2 * len(copies.SHARDS) * (len(copies.WAYS) + 1)
    assert all(row["equal"] and row["bytes_per_second"] > 0 for row in rows)
    monkeypatch.setitem(copies.WAYS, "copy_ each", lambda buffer, gradients: buffer.zero_())
    results = copies.measure(find_device(0), [torch.Size([8, 4])], shards=8, smoke=True)
    assert [name for name, (_, equal) in results.items() if not equal] == ["copy_ each"]


@pytest.mark.full
def test_errors_of_block_formats_against_float64() -> None:
    normal, outliers = bench("block_formats").split("With outliers")
    for recipe, most in (("mx mxint8, rceil", 0.03), ("float8 blockwise", 0.05), ("mx nvfp4", 0.2)):
        for table in (normal, outliers):
            (row,) = (line for line in table.splitlines() if line.startswith(f"| {recipe} |"))
            assert all(most / 10 < float(error) < most for error in row.split("|")[2:5])


@pytest.mark.full
def test_gpu_on_tiny_shapes(tmp_path: Path) -> None:
    rows = "--rows=bf16 compiled,float8 rowwise auto_filter_small_kn,bf16 eager"
    bench("gpu", "--smoke", "--models=1B", "--steps=2", rows, f"--output={tmp_path}")
    first, filtered, eager = json.loads((tmp_path / "smoke.json").read_text())["rows"]
    assert first["rate"] > 0 < eager["rate"] and len(first["step_seconds"]) == 2
    assert first["split"]["forward"] > 0 < first["device_seconds"]["optimizer"]
    assert "would convert no layer" in filtered["failed"]  # the next row still ran
    page = (tmp_path / "smoke.md").read_text()
    assert "2 of 16" in page and "- 1B, float8 rowwise, auto_filter_small_kn: ConfigError" in page


@pytest.mark.full
def test_what_the_compiler_made_is_carried_to_the_next_run(tmp_path: Path) -> None:
    flags = ("--smoke", "--models=1B", "--rows=bf16 compiled", "--steps=2", f"--output={tmp_path}")
    for number, said in enumerate(("is not there yet", "MiB of compiled code")):
        assert said in bench("gpu", *flags, f"--name={number}", f"--cache={tmp_path / 'cache'}")
    (empty,), (carried,) = (json.loads((tmp_path / f"{number}.json").read_text())["rows"] for number in range(2))
    assert carried["compiled"] and empty["graphs"]["cached"] == carried["graphs"]["compiled"] == 0
    assert carried["graphs"]["cached"] == empty["graphs"]["compiled"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {"0.json", "0.md", "1.json", "1.md", "cache"}


@pytest.mark.full
def test_generation_beside_transformers() -> None:
    output = bench("generation", "--rounds=1", "--new=2", "--prompt=3", "--batches=1,2", "--dtype=float32")
    rows = [line.split("|") for line in output.splitlines() if line.startswith(("| 1 ", "| 2 "))]
    assert len(rows) == 2 and all(float(row[3]) > 0 for row in rows)


def test_peak_memory() -> None:
    memory = json.loads(bench("peak_memory", *TINY).splitlines()[-1])
    assert memory["peak"] > memory["states"] > memory["gradients"] > 0


@pytest.mark.full
def test_kept_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(command: list[str]) -> None:
        done = python(*command[1:])
        assert done.returncode == 0, done.stderr

    monkeypatch.setattr(kept_activations, "finish", planned)  # or two interpreters start
    few = {name: kept_activations.VARIANTS[name] for name in ("bf16", "int8, SwiGLU int8")}
    monkeypatch.setattr(kept_activations, "VARIANTS", few)
    rows = {line.split(" | ")[0][2:]: line for line in kept_activations.memory("cpu", ["debug"]).splitlines()}
    assert rows["bf16"].count("1.00") == 2 and "1.00" not in rows["int8, SwiGLU int8"]


@pytest.mark.full
def test_steps_beside_a_graph_of_them(tmp_path: Path) -> None:
    """On a CPU both are the step itself, from the same weights and states."""
    output = bench("cuda_graph", "--smoke", "--models=1B", f"--output={tmp_path / 'x.jsonl'}")
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [row["equal"] for row in rows] == [True, True] and output.count("| equal |") == 2
    assert rows[0]["losses"][-1] < rows[0]["losses"][0]


@pytest.mark.full
def test_a_model_is_trained_in_two_recipes_and_another_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_model, "RECIPES", dict(list(gpu_model.RECIPES.items())[:2]))
    monkeypatch.setattr(gpu_model, "TIMED", 3)
    where, output = f"--folder={tmp_path}", tmp_path / "output"

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["gpu_model", *arguments, where])
        gpu_model.main()

    train = ("train", "--smoke", "--minutes=0.9", f"--output={output}")  # too few for more than the fewest steps
    with pytest.raises(SystemExit, match="shards is missing; `gpu_model tokens SOURCE` makes it"):
        call(*train)
    call("tokens", str(ROOT / "docs" / "*.md"), str(ROOT / "torchtitan" / "**" / "*.py"), "--vocabulary=600")
    call(*train)
    metrics = {name: list(losses(output / name)) for name in ("bf16", "float8_tensorwise")}
    assert metrics == {"bf16": [1, 10], "float8_tensorwise": [1, 10]}
    call(*train)
    metrics = {name: list(losses(output / name)) for name in metrics}
    assert metrics == {"bf16": [1, 10, 20], "float8_tensorwise": [1, 10, 20]}
    page = tmp_path / "report.html"
    assert python("-m", "torchtitan.tools.report", *map(str, output.glob("*/")), "-o", page).returncode == 0
    lines = (output / "gpu_model.md").read_text().splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| bf16", "20"], ["| float8 tensorwise", "20"]]
    assert capsys.readouterr().out.count(lines[0]) == 2
