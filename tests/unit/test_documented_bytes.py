"""The bytes of a block that the documents give are those that the compiler counts (tests/cross/figures.json)."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIGURES = json.loads((ROOT / "tests" / "cross" / "figures.json").read_text(encoding="utf-8"))
SECTION = re.search(
    r"\n### Bytes of a block\n(.*?)\n### ",
    (ROOT / "docs" / "measurements" / "performance.md").read_text(encoding="utf-8"),
    re.DOTALL,
)
# Rows whose names are not those of the figures; tensorwise int8 without the all-gather has no figure.
NAMES = {
    "float8 delayed, after the first step": ["float8 delayed"],
    "float8 rowwise, int8 rowwise": ["float8 rowwise", "int8 rowwise"],
    "mxfp8": ["mx, sm_100"],
    "nvfp4": ["nvfp4, sm_100"],
    "experts, float8 rowwise or int8 rowwise": ["experts, float8 rowwise", "experts, int8 rowwise"],
    "rowwise": ["int8 rowwise"],
    "tensorwise": [],
    "rowwise, `int8.enable_fsdp_int8_all_gather`": ["int8 rowwise, gathered"],
    "tensorwise, the same": ["int8 tensorwise, gathered"],
    "rowwise, the same": ["int8 all-gather"],
    "experts, the same": ["experts, int8 gathered"],
    "experts and 8 GPUs, the same": ["experts, int8 all-gather"],
}


def figure(case: dict[str, Any]) -> str:
    return f"{case['GB of a block']:.2f}"


def test_tables_of_bytes_equal_the_figures() -> None:
    assert SECTION is not None
    rows = [
        line.strip("|").split("|") for line in SECTION[1].splitlines() if re.match(r"\| (?!-|block|int8 \| w)", line)
    ]
    assert len(rows) == 17
    for name, *cells in ([cell.strip() for cell in row] for row in rows):
        for case in NAMES.get(name, [name]):
            ours = FIGURES["cases"][case]
            bf16 = FIGURES["cases"]["experts" if case.startswith("experts") else "bf16"]
            if len(cells) == 5:
                other = FIGURES["torchtitan 0.1.0"]["cases"][name]
                kernels = str(other["kernels of a block"]), str(ours["kernels of a block"])
                share = ours["GB of a block"] / other["GB of a block"]
                assert cells == [kernels[0], figure(other), kernels[1], figure(ours), f"{share:.2f}"], name
            else:
                share = ours["GB of a block"] / bf16["GB of a block"]
                assert cells[-2:] == [figure(ours), f"{share:.2f}"], name


def test_sentences_of_bytes_equal_the_figures() -> None:
    assert SECTION is not None
    assert f"Qwen3 30B-A3B, {figure(FIGURES['cases']['experts'])} GB in bf16" in SECTION[1]
    text = " ".join((ROOT / "docs" / "low_precision.md").read_text(encoding="utf-8").split())
    with_swiglu, without = (FIGURES["cases"][name]["GB of a block"] for name in ("SwiGLU in int8", "int8 rowwise"))
    assert f"moves {with_swiglu:.1f} GB instead of {without:.1f} (`tests/cross/figures.json`)" in text
