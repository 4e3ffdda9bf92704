"""A rank that is slower than the others is named, with what it costs them."""

import platform
import re
from pathlib import Path

import pytest
from runs import TINY, into, reports, train

from torchtitan.tools.report.page import render
from torchtitan.tools.report.run import read_run

LAYOUTS = {
    "FSDP": (),
    "TP": ("--parallelism.tensor_parallel_degree=2",),
    "PP": ("--parallelism.pipeline_parallel_degree=2",),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", ["FSDP", "TP", "PP"])
def test_the_slow_rank_is_named(layout: str, tmp_path: Path) -> None:
    slow = ("--experimental.custom_import=one_slow_rank", "--training.steps=6", "--training.local_batch_size=2")
    output = train(*TINY, *LAYOUTS[layout], *slow, into(tmp_path), processes=2)
    entries = reports(tmp_path)
    assert [line["slowest_rank"] for line in entries] == [1] * 6
    for line in entries[1:]:  # the first step has what both ranks do once
        assert line["slowest_rank_ratio"] > 1.3
        assert 0.1 < line["slowest_rank_wait_share"] < 1
    host = re.escape(platform.node())
    assert re.search(rf"step 6/6 .* slowest rank 1 \({host}\) \d+\.\d\dx, others wait \d+%", output), output
    (warning,) = re.findall(r".*times slower.*", output)  # once
    assert re.search(rf"step [2-6] \| rank 1 on {host} has been \d+\.\d times slower than", warning)
    run = read_run(tmp_path)
    assert run.series["slowest_rank_ratio"].steps.tolist() == [1, 2, 3, 4, 5, 6]
    if layout == "FSDP":
        assert "Slowest rank" in render([run])
