"""A picture of the search: layers x recipes, with the chosen cells marked."""

import math
from pathlib import Path

from torchtitan.precision_search.search import Assignment, LossModel, Table


def draw(table: Table, assignment: Assignment, model: LossModel | None, path: Path) -> None:
    """A heat map: one row per layer, one column per recipe, colored by the predicted loss that converting this layer
    adds (without a model: by its noise). Cells that cannot be converted are empty; chosen ones have a frame.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure  # needs no display and no global pyplot state
    from matplotlib.patches import Rectangle

    layers, names = list(table.cells), ["bf16", *(candidate.name for candidate in table.candidates)]
    values = [
        [math.nan, *(_value(cell.noise, model) if cell else math.nan for cell in row)] for row in table.cells.values()
    ]
    figure = Figure(figsize=(2.5 + 0.75 * len(names), 2 + 0.2 * len(layers)), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("0.93")
    found = [value for row in values for value in row if value > 0]
    image = axes.imshow(
        values, aspect="auto", cmap="viridis_r", norm=LogNorm(min(found), max(found)) if found else None
    )
    for row, fqn in enumerate(layers):
        index = assignment[fqn]
        column = 0 if index is None else index + 1
        axes.add_patch(Rectangle((column - 0.45, row - 0.4), 0.9, 0.8, fill=False, edgecolor="C3", linewidth=1.8))
    axes.set_xticks(range(len(names)), names, fontsize="x-small", rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(layers)), layers, fontsize="x-small")
    axes.tick_params(length=0)
    axes.set_title("chosen cells are framed", loc="left", fontsize="small")
    what = "noise" if model is None else "predicted loss above bf16's (%)"
    figure.colorbar(image, label=what)
    figure.savefig(path, dpi=150)


def _value(noise: float, model: LossModel | None) -> float:
    return noise if model is None else model.percent(noise)
