"""The pictures of the pages, drawn by the code that they are about, when the pages are built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ds_hydra.commands import pages
from ds_hydra.commands.demo import shipped_gains
from ds_hydra.commands.demo_cluster import FIXED, STRATEGIES, draw_both, planned
from ds_hydra.costs.analytic import ModelShape
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.schedules.batches import Batches, Work
from ds_hydra.pipe.schedules.registry import orders
from ds_hydra.pipe.schedules.simulate import simulate
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.report.plots import _COLOUR_OF, pyplot
from ds_hydra.report.plots import COLOURS as RANKS
from ds_hydra.simulate.job import SimulatedJob, llama_plan
from ds_hydra.zero_hetero.buddies import held_layout, shift_of
from ds_hydra.zero_hetero.layout import Layout, even_layout
from ds_hydra.zero_hetero.transfer_plan import plan_transfer

_STEPS = 12
_MIXES = ("tp4 + 2*pp2", "sp4 + tp2 + 2*tp1")
_LAYER = ModelShape(hidden=64, layers=4, heads=8, kv_heads=4, intermediate=176, vocab=256, params=1)
_HOSTS = ("a", "a", "b", "b", "c", "c")
_LOST = 2
_LONG, _SHORT, _CUTS = 1200, 300, 4  # us of a forward; a long sequence, short ones, and slices of the long one
_KINDS = {"forward": "forward", "input_gradient": "backward", "backward": "backward", "weight_gradient": "optimizer"}


def draw(folder: Path) -> None:
    """Write all pictures into a folder."""
    folder.mkdir(exist_ok=True)
    job, _, fixed, ours = planned(_STEPS)
    draw_both(job, fixed[:4], ours[:4], folder / "step.png")
    plt = pyplot()
    for name, drawing, size in (
        ("gains", _gains, (8.0, 3.6)),
        ("choice", lambda figure: _choice(figure, job, ours), (8.0, 3.8)),
        ("packing", lambda figure: _packing(figure, ours), (8.0, 4.0)),
        ("masters", _masters, (8.0, 5.0)),
        ("schedules", _schedules, (8.0, 7.2)),
        ("slices", _slices, (8.0, 5.6)),
        ("copies", _copies, (8.0, 4.6)),
    ):
        figure = plt.figure(figsize=size, layout="constrained")
        drawing(figure)
        figure.savefig(folder / f"{name}.png", dpi=110)
        plt.close(figure)


def _gains(figure: Any) -> None:
    axes, gain = figure.subplots(), shipped_gains()[0]
    pages.draw_means(axes, {what: [ms] for what, ms in gain.mean_ms.items()})
    axes.set_title(gain.lengths)


def _choice(figure: Any, job: SimulatedJob, ours: Sequence[StepPlan]) -> None:
    """What each step would take under each candidate alone, and which one was taken."""
    axes, steps = figure.subplots(), range(len(ours))
    for text, colour in zip(dict.fromkeys((*STRATEGIES, str(FIXED))), RANKS, strict=False):
        planner = Planner(job.table, [StrategyShape.parse(text)], PlannerOptions(layers=32))
        found = [planner.plan(one.step, one.sequence_ids, one.lengths).predicted_ms for one in ours]
        axes.plot(steps, found, ".-", color=colour, linewidth=1, label=text)
    axes.plot(steps, [plan.predicted_ms for plan in ours], "o", mfc="none", mec="black", ms=11, label="taken")
    axes.set(xlabel="step", ylabel="predicted ms", title="What each step takes under each")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _packing(figure: Any, ours: Sequence[StepPlan]) -> None:
    """A row for each micro-batch of a step, its sequences as bars as long as they are."""
    plan = max(ours, key=lambda one: len(set(map(str, (each.shape for each in one.pipelines)))))
    axes, row = figure.subplots(), 0
    palette = pyplot().get_cmap("viridis_r")
    top = np.log(max(plan.lengths))
    for name, pipeline in plan.named_pipelines():
        first = row
        for batch in pipeline.microbatches:
            left = 0
            for tokens in sorted(batch.lengths, reverse=True):
                axes.barh(row, tokens, left=left, height=0.8, color=palette(np.log(tokens) / top), ec="white", lw=0.4)
                left += tokens
            row += 1
        axes.text(-0.01, (first + row - 1) / 2, name, ha="right", va="center", fontsize=8,
                  transform=axes.get_yaxis_transform())  # fmt: skip
        axes.axhline(row - 0.5, color="#AAAAAA", linewidth=0.6)
    axes.set(ylim=(row - 0.5, -0.5), xlabel="tokens of a micro-batch", yticks=[],
             title=f"{len(plan.lengths)} sequences of one step on {plan.strategy}")  # fmt: skip
    axes.spines[["top", "right", "left"]].set_visible(False)


def _masters(figure: Any) -> None:
    """Which elements of a layer each rank holds: of the masters, and in two layouts, coloured by whose masters."""
    plan = llama_plan(_LAYER)
    bucket = plan.buckets[1]
    held = even_layout(bucket.numel, 8)
    panels = figure.subplots(1, 1 + len(_MIXES), sharey=True)
    _pieces(panels[0], held, held, "masters: 1/8 each, for ever")
    for axes, text in zip(panels[1:], _MIXES, strict=True):
        strategy = place_strategy(StrategyShape.parse(text), 8, _LAYER.layers)
        _pieces(axes, held, plan.pull_layout(bucket, strategy), f"pulled for {text}")
    panels[0].set(ylabel="rank", yticks=range(8))


def _pieces(axes: Any, source: Layout, target: Layout, title: str) -> None:
    """A row for each rank: what it holds in one layout, coloured by the rank from which it comes in another."""
    moved, starts = plan_transfer(source, target).slices, [pieces[0].start if pieces else 0 for pieces in source.pieces]
    for src, dst, offset, length in zip(moved.src, moved.dst, moved.src_offset, moved.length, strict=True):
        axes.broken_barh([(starts[src] + offset, length)], (dst - 0.4, 0.8), facecolors=RANKS[src % len(RANKS)])
    axes.set(xlim=(0, source.numel), ylim=(target.num_ranks - 0.5, -0.5), xticks=[], xlabel="elements of one layer")
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _schedules(figure: Any) -> None:
    """Six micro-batches that differ, on four stages, by each schedule."""
    works = tuple(_work(us) for us in (900, 500, 700, 400, 800, 500))
    for axes, name in zip(figure.subplots(4, 1, sharex=True), ("1f1b", "zb-h1", "list", "v"), strict=True):
        parts = 2 if name == "v" else 1
        batches = Batches((-1,) * len(works), parts, tuple(_half(one, parts) for one in works), room=4 * parts * 1000)
        _timeline(axes, name, batches, 4, name)
    axes.set_xlabel("ms")
    _legend(figure)


def _slices(figure: Any) -> None:
    """A long sequence and four short ones on four stages: whole by two schedules, and in slices."""
    panels = figure.subplots(3, 1, sharex=True)
    short, chain = (_work(_SHORT),) * 4, (-1, *range(_CUTS - 1), *(-1,) * 4)
    whole = Batches((-1,) * 5, 1, (_work(_LONG), *short), room=8000)
    cut = Batches(chain, 1, (*(_work(_LONG // _CUTS),) * _CUTS, *short), room=8000)
    for axes, name in zip(panels, ("1f1b", "list"), strict=False):
        _timeline(axes, name, whole, 4, f"the long sequence, 0, whole, by {name}")
    _timeline(panels[2], "list", cut, 4, f"in {_CUTS} slices, 0 to {_CUTS - 1}, by list")
    panels[2].set_xlabel("ms")
    _legend(figure)


def _work(forward: int) -> Work:
    """A micro-batch whose two gradients take as long as its forward each."""
    return Work(forward, forward, forward, kept=1000, until_weight=900)


def _half(work: Work, parts: int) -> Work:
    return Work(*(max(1, each // parts) for each in work[:3]), *work[3:])


def _timeline(axes: Any, name: str, batches: Batches, stages: int, title: str) -> None:
    """What each stage computes when, by the simulation of its order."""
    done = simulate(
        orders(name, batches, stages), batches, lambda _, one: batches.works[one.microbatch].takes(one.kind)
    )
    for stage, timed in enumerate(done.stages):
        for action, start, stop in timed:
            colour = _COLOUR_OF[_KINDS[action.kind]]  # type: ignore[index]
            axes.barh(stage, (stop - start) / 1e3, left=start / 1e3, height=0.8, color=colour, ec="white", lw=0.6)
            axes.text((start + stop) / 2e3, stage, str(action.microbatch), ha="center", va="center", fontsize=7)
    axes.set(ylim=(stages - 0.5, -0.5), yticks=range(stages), ylabel="stage")
    axes.set_title(f"{title}: {done.total / 1e3:.1f} ms", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any) -> None:
    told = {"forward": "forward", "backward": "backward, or gradients of inputs", "weight_gradient": "of weights"}
    handles = [pyplot().Rectangle((0, 0), 1, 1, color=_COLOUR_OF[_KINDS[kind]]) for kind in told]  # type: ignore[index]
    figure.legend(handles, list(told.values()), loc="outside upper right", ncols=3, fontsize=8, frameon=False)


def _copies(figure: Any) -> None:
    """Six ranks of three nodes: what each holds, what is left when one is lost, and the new cut."""
    ranks = list(range(len(_HOSTS)))
    shift, left = shift_of(_HOSTS), [rank for rank in ranks if rank != _LOST]
    numel = 600
    before, after = even_layout(numel, len(ranks)), held_layout(numel, ranks, left, shift)
    panels = figure.subplots(1, 3)
    _shares(panels[0], before, ranks, shift)
    panels[0].set_title("masters, and copies in another node (pale)", fontsize=9)
    for axes, layout, title in ((panels[1], after, f"rank {_LOST} is lost: its copy counts"),
                                (panels[2], even_layout(numel, len(left)), "cut anew, 1/5 each")):  # fmt: skip
        for row, pieces in enumerate(layout.pieces):
            for piece in pieces:
                _owned(axes, row, piece.start, piece.stop, before)
        axes.set_title(title, fontsize=9)
        axes.set(yticks=range(len(left)), yticklabels=[f"{rank} ({_HOSTS[rank]})" for rank in left])
    panels[0].set(yticks=ranks, yticklabels=[f"{rank} ({_HOSTS[rank]})" for rank in ranks], ylabel="rank (node)")
    for axes, layout in zip(panels, (before, after, after), strict=True):
        axes.set(xlim=(0, numel), xticks=[], xlabel="elements", ylim=(layout.num_ranks - 0.5, -0.5))
        axes.spines[["top", "right"]].set_visible(False)


def _shares(axes: Any, layout: Layout, ranks: Sequence[int], shift: int) -> None:
    for rank in ranks:
        (own,), (copied,) = layout.pieces[rank], layout.pieces[(rank - shift) % len(ranks)]
        _owned(axes, rank, own.start, own.stop, layout)
        _owned(axes, rank, copied.start, copied.stop, layout, alpha=0.35)


def _owned(axes: Any, row: int, start: int, stop: int, before: Layout, alpha: float = 1.0) -> None:
    """An interval on a row, in the colours of the ranks that had it before."""
    for rank, pieces in enumerate(before.pieces):
        for piece in pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                axes.broken_barh([(low, high - low)], (row - 0.4, 0.8), facecolors=RANKS[rank], alpha=alpha)
