"""Draws results: each row's figure over what it has to reach, so that 1 is the line to stay below."""

from pathlib import Path
from typing import Any

OURS, MISSED, LINE = "#9fd3b8", "#eba9a2", "#333333"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG. A race's whisker is its confidence interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.5 * len(results)), layout="constrained")
    for position, found in enumerate(results):
        value = found["ratio"] if "ratio" in found else found["value"]
        low, high = found.get("confidence", (value, value))
        limit = found["limit"]
        colour = OURS if found["reached"] else MISSED
        axes.barh(position, value / limit, height=0.6, color=colour)
        axes.plot([low / limit, high / limit], [position, position], color=LINE, linewidth=2)
        unit = "" if "ratio" in found else f" {found['unit']}"
        text = f"{value:.3g}{unit} of {limit:g}" + (f", against {found['against']}" if "against" in found else "")
        axes.text(0.02, position, text, va="center", fontsize=8)
    axes.axvline(1.0, color=LINE, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(results)), [found["row"] for found in results])
    axes.invert_yaxis()
    axes.set_xlim(left=0.0)
    axes.set_xlabel("measured / to reach (ratios: ours / theirs, whisker: 95 % interval)")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
