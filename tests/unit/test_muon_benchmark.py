"""The losses that `benchmarks/muon.py` compares."""

import json
from pathlib import Path

from benchmarks import muon


def finished(folder: Path, name: str, steps: int, loss: float) -> None:
    """What a finished run leaves behind."""
    dump = folder / name.replace(" ", "_").replace(",", "")
    dump.mkdir()
    entries = [{"step": 1, "loss": 8}, *({"step": at, "validation_loss": loss + steps - at} for at in (4, steps))]
    (dump / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_the_best_of_muon_is_compared_with_the_best_of_adamw(tmp_path: Path) -> None:
    import matplotlib.image

    for place, rate in enumerate(muon.RATES["AdamW"]):
        finished(tmp_path, f"AdamW {rate:g} 12 steps", 12, 4 + 0.1 * abs(place - 1))
    for place, rate in enumerate(muon.RATES["Muon"]):
        finished(tmp_path, f"Muon {muon.TUNED} {rate:g} 9 steps", 9, 3.96 + 0.1 * abs(place - 3))
    text = muon.tuned(12, tmp_path, tmp_path / "muon.png")
    assert f"| AdamW | {muon.RATES['AdamW'][1]:g} | 12 | **4.0000** |" in text
    assert f"| Muon | {muon.RATES['Muon'][3]:g} | 9 | **3.9600** |" in text
    assert text.count("**") == 4 and text.endswith("Muon's best is -1.00% from AdamW's best.")
    assert matplotlib.image.imread(tmp_path / "muon.png").std() > 0


def test_what_each_setting_changes(tmp_path: Path) -> None:
    for place, settings in enumerate(muon.PARTS):
        finished(tmp_path, f"Muon {settings} {muon.PARTS_RATE:g} 9 steps", 9, 4 - 0.1 * place)
    rows = muon.settings_table(12, tmp_path).splitlines()[2:]
    assert rows[0] == "| defaults | 4.0000 |" and rows[-1] == f"| {muon.TUNED} | {4 - 0.1 * (len(rows) - 1):.4f} |"
