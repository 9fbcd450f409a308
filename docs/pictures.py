"""The pictures of the pages, drawn by the code that they are about, when the pages are built."""

from __future__ import annotations

from pathlib import Path

from ds_hydra.commands import beside
from ds_hydra.commands.demo_cluster import draw_demo
from ds_hydra.commands.demo_preview import shipped_gains
from ds_hydra.report.plots import pyplot


def draw(folder: Path) -> None:
    """Write step.png and gains.png into a folder."""
    folder.mkdir(exist_ok=True)
    draw_demo(folder / "step.png", steps=4)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.0, 3.6), layout="constrained")
    gain = shipped_gains()[0]
    beside.draw_means(axes, {what: [ms] for what, ms in gain.bars})
    axes.set_title(gain.lengths)
    figure.savefig(folder / "gains.png", dpi=110)
    plt.close(figure)
