"""python -m torchtitan.tools.report: the content of the page, and the messages about runs that cannot be shown."""

import html.parser
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dump_folders import STEPS, add_everything, dump_folder, layer, write_lines

from torchtitan.config.compare import default_values, differing, flat, seed_groups
from torchtitan.tools.report.page import render
from torchtitan.tools.report.run import CURVES, Run, read_run, read_runs
from torchtitan.tools.report.series import Series, downsample, on_one_grid

ROOT = Path(__file__).parents[2]
MILLION = 1_000_000


class Elements(html.parser.HTMLParser):
    """The elements of a page as a browser would see them, and the text of the one with id "data"."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.data: list[str] = []
        self._in: tuple[str, bool] = ("", False)
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)
        self._in = (tag, ("id", "data") in attrs)

    def handle_data(self, data: str) -> None:
        tag, is_data = self._in
        if is_data:
            self.data.append(data)
        elif tag not in ("script", "style"):
            self.text.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in = ("", False)


def data_of(page: str) -> Any:
    return json.loads("".join(Elements(page).data))


def text_of(page: str) -> str:
    page = page.replace("<wbr>", "")  # allows a line break
    return " ".join(" ".join(Elements(page).text).split())


def report(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchtitan.tools.report", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


# Curves


def test_a_spike_of_one_step_in_a_million_is_on_a_page_below_10_megabytes() -> None:
    steps = np.arange(1, MILLION + 1)
    noise = np.random.default_rng(0).normal(0, 0.1, MILLION)
    series = {key: Series(steps, 5 + noise) for key in CURVES}
    up, down = 5 + noise, 5 + noise
    up[654_320], down[123_456] = 1000.0, -1000.0
    series |= {"grad_norm": Series(steps, up), "loss": Series(steps, down)}
    page = render([Run(Path("run"), "run", series)])
    assert len(page.encode()) < 10e6
    curves = data_of(page)["runs"][0]["series"]
    assert dict(zip(curves["grad_norm"]["x"], curves["grad_norm"]["y"], strict=True))[654_321] == 1000
    assert dict(zip(curves["loss"]["x"], curves["loss"]["y"], strict=True))[123_457] == -1000
    assert curves["loss"]["x"][0] == 1 and curves["loss"]["x"][-1] == MILLION
    assert all(len(curve["x"]) <= 4002 for curve in curves.values())


@pytest.mark.full
def test_many_long_runs_share_the_room() -> None:
    steps = np.arange(1, 100_001)
    series = {key: Series(steps, np.random.default_rng(0).normal(5, 1, len(steps))) for key in CURVES}
    page = render([Run(Path(f"run{number}"), f"run{number}", series) for number in range(20)])
    assert len(page.encode()) < 10e6


def test_short_curves_are_whole_and_have_gaps_where_values_were_not_finite() -> None:
    curve = downsample(Series(np.array([1, 5, 9]), np.array([2.5, np.nan, 1 / 3])), points=3)
    assert curve == {"x": [1, 5, 9], "y": [2.5, None, 0.333333]}


def test_the_smooth_curve_is_of_means_not_of_extremes() -> None:
    values = np.ones(100_000)
    values[::100] = 101.0  # the mean is 2, halfway between the extremes 51
    curve = downsample(Series(np.arange(len(values)), values), points=400)
    assert curve["mean_y"] == [2.0] * len(curve["mean_y"])
    assert len(curve["mean_x"]) == len(curve["mean_y"]) <= 200
    assert set(curve["y"]) == {1.0, 101.0}


def test_a_stretch_without_a_finite_value_is_left_out_of_the_means() -> None:
    values = np.ones(1000)
    values[:500] = np.nan
    curve = downsample(Series(np.arange(1000), values), points=100)
    assert min(curve["mean_x"]) > 490 and None not in curve["mean_y"]


def test_seeds_are_compared_at_the_steps_that_all_have() -> None:
    members = [Series(np.arange(10), np.arange(10.0)), Series(np.arange(0, 20, 2), np.full(10, 7.0))]
    assert on_one_grid(members, 100) == {"x": [0, 2, 4, 6, 8], "rows": [[0, 2, 4, 6, 8], [7] * 5]}
    assert on_one_grid([members[0], Series(np.array([50]), np.array([1.0]))], 100) is None


# Configurations


def test_runs_that_differ_in_their_seed_alone_are_one_line(tmp_path: Path) -> None:
    folders = [dump_folder(tmp_path / f"bf16-seed{seed}", seed) for seed in range(3)]
    folders += [dump_folder(tmp_path / "short", seq_len=128), dump_folder(tmp_path / "bf16-again")]
    page = render(read_runs(folders)[0])
    lines = data_of(page)["lines"]
    assert [(line["name"], line["members"]) for line in lines] == [
        ("bf16 (3 seeds)", [0, 1, 2]),
        ("short", [3]),
        ("bf16-again", [4]),  # same seed as an existing run, so not another sample
    ]
    band = lines[0]["bands"]["loss"]
    assert band["x"] == list(range(1, STEPS + 1)) and len(band["rows"]) == 3
    assert not lines[1]["bands"]


def test_the_difference_names_the_keys_that_differ_and_no_other(tmp_path: Path) -> None:
    runs, _ = read_runs([dump_folder(tmp_path / "a"), dump_folder(tmp_path / "b", seed=3, seq_len=128)])
    assert differing([run.config for run in runs]) == ["training.seq_len", "training.seed"]
    page = text_of(render(runs))
    difference = page[page.index("Configurations differ in") : page.index("Configuration ")]
    assert "training.seq_len 2048 128" in difference
    assert "training.seed 0 3" in difference
    assert "training.steps" not in difference


def test_what_differs_from_the_defaults_is_told_with_the_default(tmp_path: Path) -> None:
    page = text_of(render([read_run(dump_folder(tmp_path / "a", seq_len=128))]))
    keys = page[page.index("keys are not at their defaults") : page.index("All keys")]
    assert "training.seq_len 128 2048" in keys
    assert "training.compile" not in keys and "training.compile" in page


def test_tables_and_keys_of_ones_own_are_shown() -> None:
    config = flat({"mine": {"key": [1, "two"]}, "no section": 3})
    assert config == {"mine.key": [1, "two"]}
    assert "mine.key" not in default_values()
    assert seed_groups([config, config, None]) == [[0], [1], [2]]  # an unknown configuration has no known seed


# The page


def test_the_weights_of_all_experts_count(tmp_path: Path) -> None:
    folder = dump_folder(tmp_path / "run")
    layers = [{**layer("layers.0.moe.experts.w1", True), "experts": 8}, layer("layers.0.attention.wk", False)]
    (folder / "conversion.json").write_text(json.dumps(layers))
    assert "1 of 2 linear layers in low precision, 89% of their weights" in text_of(render([read_run(folder)]))


def test_everything_a_run_has_left_is_there(tmp_path: Path) -> None:
    page = render([read_run(add_everything(dump_folder(tmp_path / "run")))])
    text, data = text_of(page), data_of(page)["runs"][0]
    assert "float8 rowwise to step 40: 6 of 9 linear layers in low precision, 67% of their weights" in text
    assert "layers.*.attention.wk 3 512 \u00d7 256 \u00d7 256 bf16 float8.filter_fqns has attention.wk" in text
    assert "Proposed filter_fqns: layers.0.feed_forward.w1" in text
    assert text.index("x): # 60") < text.index("x): # 30")
    assert data["checkpoints"] == [30, 60]
    assert [start["step"] for start in data["starts"]] == [0, 30]
    assert data["stages"] == [{"step": 1, "name": "stage <b>"}, {"step": 41, "name": "batches of 16"}]
    assert [(phase["name"], phase["from"], phase["to"]) for phase in data["phases"]] == [
        ("float8 rowwise", 0, 40),
        ("bf16", 40, 60),
    ]
    assert data["numerics"]["rows"] == ["layers.0", "layers.1", "layers.2"]
    assert data["numerics"]["columns"] == ["attention.wq", "attention.wk", "feed_forward.w1"]
    assert "Restarts 1" in text


def test_stages_are_part_of_the_configuration(tmp_path: Path) -> None:
    config = '[training]\nsteps = 60\n[[stage]]\nname = "long"\nuntil = 0.5\n[stage.training]\nseq_len = {}\n'
    for name, length in (("a", 128), ("b", 256)):
        (dump_folder(tmp_path / name) / "config.toml").write_text(config.format(length))
    runs, _ = read_runs([tmp_path / "a", tmp_path / "b"])
    text = text_of(render(runs))
    assert "Configurations differ in a b stage.long.training.seq_len 128 256" in text
    assert "stage.long.until 0.5 0.5 the run's" in text


def test_what_a_run_did_not_leave_has_no_section(tmp_path: Path) -> None:
    page = text_of(render([read_run(dump_folder(tmp_path / "run"))]))
    for title in ("Precision of layers", "Signal to quantization noise", "Samples", "missing"):
        assert title not in page


def test_of_many_sampled_steps_some_are_shown_the_first_and_the_last_among_them(tmp_path: Path) -> None:
    run = dump_folder(tmp_path / "run")
    write_lines(run / "samples.jsonl", [{"step": step, "prompt": "", "text": "x" * 9000} for step in range(100)])
    text = text_of(render([read_run(run)]))
    assert "20 of 100 sampled steps are shown" in text
    assert "after step 0 " in text and "after step 99 " in text and "(9,000 characters)" in text


EVIL = "</script><script>hacked()</script><img src=x onerror=hacked()>\"'&{{ 7*7 }}"


def evil_folder(folder: Path) -> Path:
    """A run with markup in every text field."""
    dump_folder(folder)
    config = f"[job]\ndescription = {json.dumps(EVIL)}\n[training]\n{json.dumps(EVIL)} = {json.dumps(EVIL)}\n"
    (folder / "config.toml").write_text(config)
    (folder / "conversion.json").write_text(json.dumps([{**layer(EVIL, True), "reason": EVIL, "recipe": EVIL}]))
    write_lines(folder / "samples.jsonl", [{"step": 1, "prompt": EVIL, "text": EVIL}])
    products = {EVIL: {"sqnr_db": 1.0, "saturated": 0, "flushed": 0}}
    numerics = {"recipe": EVIL, "steps": EVIL, "layers": {EVIL: products}, "proposed_filter_fqns": [EVIL]}
    (folder / "numerics.json").write_text(json.dumps(numerics))
    write_lines(folder / "events.jsonl", [{"step": step, "event": "start", "device": EVIL} for step in (0, 5)])
    return folder


@pytest.mark.parametrize("count", [1, 2])
def test_text_from_files_is_text(count: int, tmp_path: Path) -> None:
    folders = [evil_folder(tmp_path / f"{number}<script>hacked()<" / "script>") for number in range(count)]
    elements = Elements(render(read_runs(folders)[0], notes=[EVIL]))
    assert elements.tags.count("script") == 4  # the theme, the data, plotly and our own
    assert "img" not in elements.tags and "onerror" not in elements.attributes
    text = "".join(elements.text)
    assert text.count(EVIL) >= 8 * count  # and it is displayed verbatim


# Damaged input


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("metrics.jsonl", b'{"step": 61, "lo', "metrics.jsonl: 1 line is damaged or truncated, and skipped."),
        ("metrics.jsonl", b"[" * 100_000 + b"\n\xff\n", "metrics.jsonl: 2 lines are damaged"),
        ("metrics.jsonl", b'{"step": "a", "loss": 1}\n{"loss": 1}\n{"step": -1}\n{"step": 1' + b"0" * 400 + b"}\n", ""),
        ("metrics.jsonl", b'{"step": 61, "loss": [], "lr": 1' + b"0" * 400 + b', "mfu": NaN}\n', ""),
        ("config.toml", None, "config.toml is missing: the configuration is omitted."),
        ("config.toml", b"[[[", "config.toml is damaged"),
        ("events.jsonl", None, "events.jsonl is missing: restarts are unknown"),
        ("events.jsonl", b'{"step": 70, "event": "start", "processes": [1]}\n7\n', "events.jsonl: 1 line is damaged"),
        ("conversion.json", b'{"layers": 3}', "conversion.json is damaged: the table of layers is omitted."),
        ("conversion.json", b'[{"fqn": "a", "m": 1}]', "conversion.json is damaged"),
        ("conversion.json", b"[]", ""),
        ("numerics.json", b'{"layers": {"a": {"output": {"sqnr_db": 3}}}}', "numerics.json is damaged"),
        ("numerics.json", b'{"layers": {}}', "numerics.json is damaged"),
        ("samples.jsonl", b'{"step": 1, "text": 3}\n{', "samples.jsonl: 1 line is damaged"),
        ("skipped_updates.jsonl", b"\0\0\0", "skipped_updates.jsonl: 1 line is damaged"),
    ],
)
def test_a_damaged_part_is_left_out_with_a_note(name: str, content: bytes | None, note: str, tmp_path: Path) -> None:
    folder = dump_folder(tmp_path / "run")
    path = folder / name
    if content is None:
        path.unlink()
    else:
        added_to = path.read_bytes() if path.suffix == ".jsonl" and path.exists() else b""
        path.write_bytes(added_to + content)
    run = read_run(folder)
    page = render([run])
    assert note in text_of(page)
    assert bool(run.notes) == bool(note)
    assert data_of(page)["runs"][0]["series"]["loss"]["x"][:STEPS] == list(range(1, STEPS + 1))


def test_without_events_the_checkpoints_on_disk_are_marked(tmp_path: Path) -> None:
    folder = dump_folder(tmp_path / "run")
    (folder / "events.jsonl").unlink()
    for name in ("step-20", "step-9", "step-30.tmp", "step-x"):
        (folder / "checkpoint" / name).mkdir(parents=True)
    assert data_of(render([read_run(folder)]))["runs"][0]["checkpoints"] == [9, 20]


def test_steps_that_are_there_twice_count_once(tmp_path: Path) -> None:
    folder = dump_folder(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 70.0}\n')
    loss = data_of(render([read_run(folder)]))["runs"][0]["series"]["loss"]
    assert loss["x"] == list(range(1, STEPS + 1)) and loss["y"][6] == 70


# The command


def test_the_command_writes_a_page_and_imports_no_torch(tmp_path: Path) -> None:
    run, output = dump_folder(tmp_path / "run"), tmp_path / "new" / "page.html"
    done = report(run, "-o", output)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {output}\n", "")
    assert output.read_text().startswith("<!doctype html>")
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]
    check = "import sys, torchtitan.tools.report.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "run: no such folder; give the dump folder of a run."),
        (lambda path: path.mkdir(), "run is empty, so it has no run to show"),
        (lambda path: path.touch(), "run is a file; give the dump folder of a run."),
        (lambda path: (path / "src").mkdir(parents=True), "run holds no metrics.jsonl, so it has no run to show"),
        (lambda path: (path / "metrics.jsonl").mkdir(parents=True), "holds no metrics yet"),
        (lambda path: (dump_folder(path) / "metrics.jsonl").write_text("{\n"), "metrics.jsonl holds no metrics yet"),
    ],
)
def test_what_is_no_run_is_one_sentence_and_status_2(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "run")
    done = report(tmp_path / "run", "-o", tmp_path / "page.html")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("Error: ") and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_what_is_no_run_beside_a_run_is_left_out_and_said(tmp_path: Path) -> None:
    run = dump_folder(tmp_path / "run")
    done = report(run, tmp_path / "none", run, "-o", tmp_path / "page.html")
    assert done.returncode == 0
    assert done.stderr == f"Warning: {tmp_path / 'none'}: no such folder; give the dump folder of a run.\n"
    page = (tmp_path / "page.html").read_text()
    assert "no such folder" in text_of(page) and len(data_of(page)["runs"]) == 1  # a duplicate run counts once


def test_a_page_that_cannot_be_written_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    run = dump_folder(tmp_path / "run")
    done = report(run, "-o", tmp_path / "run" / "config.toml" / "page.html")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr and "--output" in done.stderr and done.stderr.count("\n") == 1


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = add_everything(dump_folder(tmp_path / "run"))
    for name in ("config.toml", "events.jsonl", "numerics.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    notes = "\n".join(read_run(folder).notes)
    assert all(
        f"{name} cannot be read (it is a named pipe, not a file)" in notes for name in ("config.toml", "events.jsonl")
    )
    assert "numerics.json cannot be read" in notes
