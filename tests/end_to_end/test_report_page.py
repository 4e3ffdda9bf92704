"""The report of a real run, and its page in a real browser."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Page, browser
from dump_folders import add_everything, dump_folder
from runs import CHECKPOINTS, TINY, into, lines_of, train

from torchtitan.tools.report.page import render, write_page
from torchtitan.tools.report.run import read_runs

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps with validation, checkpoints and a restart; the second start writes its report."""
    folder = tmp_path_factory.mktemp("real") / "run"
    flags = (*TINY, *CHECKPOINTS, into(folder), "--validation.enabled", "--validation.freq=2", "--validation.steps=1")
    train(*flags, "--training.steps=4")
    assert not (folder / "report.html").exists()
    train(*flags, "--training.steps=6", "--metrics.report")
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def written(folder: Path, *runs: Path) -> Path:
    write_page(render(*read_runs(runs)), folder / "report.html")
    return folder / "report.html"


def assert_drawn_in_silence(page: Page, charts: int) -> None:
    """All charts have curves, the browser reports no problem, and no network request is made."""
    drawn = page.evaluate(
        "[...document.querySelectorAll('.chart, .heat')].map((div) =>"
        " div.querySelectorAll('.scatterlayer .trace path, .heatmaplayer image').length)"
    )
    assert len(drawn) == charts and all(drawn), drawn
    assert page.complaints() == []
    urls = page.requests()
    assert urls and all(url.startswith(("file:", "data:")) for url in urls), urls
    assert sum(url.startswith("file:") for url in urls) == 1  # the page itself


def background(page: Page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.mark.full
def test_a_run_records_its_starts_and_checkpoints(real_run: Path) -> None:
    events = [(event["event"], event["step"]) for event in lines_of(real_run / "events.jsonl")]
    assert events == [
        *(("start", 0), ("checkpoint", 2), ("checkpoint", 4)),
        *(("start", 4), ("checkpoint", 6)),
    ]


def test_a_report_that_cannot_be_written_is_a_warning_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "run" / "report.html" / "in the way").mkdir(parents=True)
    output = train(*TINY, into(tmp_path / "run"), "--training.steps=1", "--metrics.report")
    assert output.count("metrics.report: report.html could not be written") == 1
    assert "training finished after step 1" in output


@pytest.mark.full
@needs_chromium
def test_the_report_at_the_end_of_a_run_is_drawn(real_run: Path, page: Page) -> None:
    page.open(real_run / "report.html")
    assert_drawn_in_silence(page, charts=8)
    assert page.evaluate("runs[0].checkpoints") == [2, 4, 6]
    assert page.evaluate("document.querySelector('.tiles').innerText.replace(/\\s+/g, ' ')").endswith(
        "Restarts 1 from step 4: training.steps = 6 (was 4); from step 4: metrics.report = true (was false)"
    )


@pytest.mark.full
@needs_chromium
def test_every_section_is_drawn_in_light_and_dark(page: Page, tmp_path: Path) -> None:
    report = written(tmp_path, add_everything(dump_folder(tmp_path / "run")))
    page.open(report, dark=False)
    light = background(page)
    assert_drawn_in_silence(page, charts=9)
    paper = "document.querySelector('.chart').layout.paper_bgcolor"
    light_paper = page.evaluate(paper)
    page.evaluate("document.getElementById('theme').click()")
    dark = background(page)
    page.wait_for(f"{paper} !== '{light_paper}'")
    assert light != dark
    page.open(report, dark=True)  # the system's theme
    assert background(page) == dark
    assert_drawn_in_silence(page, charts=9)
    page.set_dark(False)  # changed while the page is open
    page.wait_for(f"getComputedStyle(document.body).backgroundColor === '{light}'")


@pytest.mark.full
@needs_chromium
def test_seeds_have_a_band_and_can_be_hidden(page: Page, tmp_path: Path) -> None:
    seeds = [dump_folder(tmp_path / f"bf16-seed{seed}", seed) for seed in range(3)]
    page.open(written(tmp_path, *seeds, dump_folder(tmp_path / "short", seq_len=128)))
    assert_drawn_in_silence(page, charts=9)
    loss = "document.querySelector('[data-key=loss]')"
    names = [trace["name"] for trace in page.evaluate(f"{loss}.data") if trace.get("yaxis") != "y2"]
    assert names == ["bf16 (3 seeds)"] * 3 + ["short"] * 2  # the band's edges and its mean; raw and smoothed
    assert page.evaluate(f"{loss}.querySelectorAll('.fills path').length") > 0
    page.evaluate("document.querySelector('#legend button').click()")
    page.wait_for(f"{loss}.data.filter((trace) => trace.visible === false).length === 3")
    assert page.complaints() == []


@pytest.mark.full
@needs_chromium
def test_a_zoom_in_one_chart_is_a_zoom_in_all_and_controls_redraw(page: Page, tmp_path: Path) -> None:
    page.open(written(tmp_path, dump_folder(tmp_path / "run")))
    ranges = "[...divs.values()].map((div) => div.layout.xaxis.range.map(Math.round).join(' '))"
    page.evaluate("Plotly.relayout(document.querySelector('[data-key=lr]'), {'xaxis.range': [20, 40]}).then(() => 0)")
    page.wait_for(f"{ranges}.every((range) => range === '20 40')")
    page.evaluate("document.getElementById('reset').click()")
    page.wait_for(f"{ranges}.every((range) => range === '-1 61')")
    page.evaluate("{ axis.value = 'tokens'; axis.onchange(); }")
    page.wait_for(f"{ranges}.every((range) => range === '-307 31027')")  # 512 tokens a step
    page.evaluate("{ document.getElementById('log').click(); }")
    page.wait_for("document.querySelector('[data-key=loss]').layout.yaxis.type === 'log'")
    assert page.complaints() == []


@pytest.mark.full
@needs_chromium
def test_runs_are_ranked_and_equal_losses_can_be_told_apart(page: Page, tmp_path: Path) -> None:
    runs = [dump_folder(tmp_path / f"run{number}", seq_len=128 * (number + 1)) for number in range(3)]
    for number, run in enumerate(runs):
        lines = lines_of(run / "metrics.jsonl")
        for line in lines:  # the last step of each says the contrary
            if "loss" in line:
                line["loss"] += 0.001 * number * (-9 if line["step"] == 60 else 1)
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    with (runs[2] / "events.jsonl").open("a") as events:
        events.write('{"step": 7, "event": "busy", "threads_waiting": 1.5}\n')
    page.open(written(tmp_path, *reversed(runs)))
    assert_drawn_in_silence(page, charts=9)
    page.evaluate("{ state.smoothing = 0; draw().then(() => 0); }")
    assert page.evaluate("[...document.querySelectorAll('.figures tbody th')].map((th) => th.innerText)") == [
        "run0",
        "run1",
        "run2",
    ]
    difference = page.evaluate("document.querySelector('[data-key=difference]').data.map((trace) => trace.y[30])")
    assert difference == pytest.approx([-0.001, -0.002], abs=1e-5)  # from run2
    assert "run2: other processes used the cores of this run (first in step 7)" in page.evaluate(
        "document.querySelector('.notes').innerText"
    )
    assert page.evaluate("[...divs.values()].every((div) => div.layout.yaxis.fixedrange)")


@pytest.mark.full
@needs_chromium
def test_a_smoothed_curve_of_a_constant_is_that_constant(page: Page, tmp_path: Path) -> None:
    page.open(written(tmp_path, dump_folder(tmp_path / "run")))
    page.evaluate("{ state.smoothing = 0.9; }")
    assert page.evaluate("smoothed([3, 3, null, 3])") == pytest.approx([3, 3, None, 3])
    assert page.evaluate("smoothed([0, 0, 1, 0, 0])[2]") == max(page.evaluate("smoothed([0, 0, 1, 0, 0])"))


@pytest.mark.full
@needs_chromium
def test_a_run_called_script_does_not_execute(page: Page, tmp_path: Path) -> None:
    evil = "<img src=x onerror=hacked=1><script>hacked=1<"
    folders = [dump_folder(tmp_path / f"{number}{evil}" / "script>", seq_len=128 * number) for number in (1, 2)]
    for folder in folders:
        add_everything(folder)
        (folder / "samples.jsonl").write_text(
            '{"step": 1, "prompt": "</script><script>hacked=1</script>", "text": ""}\n'
        )
    page.open(written(tmp_path, *folders))
    assert_drawn_in_silence(page, charts=11)
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.evaluate("document.querySelectorAll('script').length") == 4
    assert evil in page.evaluate("document.getElementById('legend').innerText")


@pytest.mark.full
@needs_chromium
def test_a_narrow_window_has_no_sideways_scroll(page: Page, tmp_path: Path) -> None:
    page.open(written(tmp_path, add_everything(dump_folder(tmp_path / ("long name " * 20)))), width=420)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
