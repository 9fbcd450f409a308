"""What planning with images is worth: strategies per step by text and tower together, beside layouts that stay.

  python -m tools.bench_images [--quick] [--json FILE]

Image-text models on A800s, by predicted times, three steps a cell: text as the published 7B and 32B tables have it, and
a tower of 0.45e9 weights (Qwen3-VL's) or 5.5e9 (InternViT-6B) by its FLOPs at 150 TFLOP/s, its attention at 206,
forward and backward. "Documents" are pages as images, text with a long tail, pictures and videos; "chats" are mostly
one picture and some text: 16 cells of 32 and 64 GPUs with 4K and 16K tokens each. In 8 more there are 16 or 128 GPUs,
or other mixes, of many small pictures or of few large ones.

The planner chooses each step's strategy by the total. Beside it stand the best layout of one shape in all steps, by
the total; the best strategy of any kind in all steps, by the total; the first with its images shared evenly by all
ranks of a pipeline, which no stage does; with the tower whole on each rank of the first stage, as Hugging Face's models
and plain tensor parallelism have it; with each image whole on a rank, per step; and plans by text alone, of one layout
and per step. All are plans of the same search, pay nothing for transfers, and have memory for the tower.

A step waits for an image where it would be done sooner if ranks shared all of them for nothing.

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ds_hydra.commands.figures import figures_parser, finish, print_table, shipped
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.loads import Lengths, Load, Loads, first_ranks, loads_of
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.pipelines import loaded
from ds_hydra.simulate.links import INSIDE
from ds_hydra.zero_hetero.errors import PlanError
from tools import aims

CONTEXT, STEPS = 32_768, 3
_MIXED = 16  # strategies of two shapes, the best ones for the first step
_OPTIONS = PlannerOptions(kernels="compiled", highs="off")
DENSE, ATTENTION = 150e12, 206e12  # FLOP/s, as the published tables imply


class Model(NamedTuple):
    """A text model's table, and its tower."""

    table: str
    weights: float  # of the tower, with which a patch is multiplied
    layers: int
    width: int
    behind: float  # of the weights, the share that stands behind the layers
    gathers: int  # layers behind which rows come together that ranks share
    tiles: bool  # whether images are cut into tiles of 1,024 patches

    def load(self, patches: int) -> Load:
        """Of a unit on one rank, forward and backward, and of each that shares it."""
        dense, attending = 6 * self.weights * patches / DENSE, 14 * self.layers * self.width * patches**2 / ATTENTION
        moved = 2 * (self.layers + self.gathers) * self.width * 2 * patches / INSIDE.bytes_per_s
        sent = 2 * (2 * self.layers + self.gathers) * INSIDE.latency_s
        us = round(1e6 * (dense + attending))
        return Load(us, min(us, round(1e6 * (self.behind * dense + moved + sent))))


MODELS = {
    "qwen3-vl-8b": Model("a800-7b", 4.51e8, 27, 1152, 0.09, 4, tiles=False),
    "internvl-32b": Model("a800-32b", 5.5e9, 45, 3200, 0.01, 1, tiles=True),
}
# Shares of sequences: with several pages or pictures, one picture, a video, and text alone.
MIXES = {"documents": (0.45, 0.15, 0.05, 0.35), "chats": (0.08, 0.60, 0.02, 0.30),
         "small pictures": (0.30, 0.50, 0.0, 0.20), "large pictures": (0.02, 0.28, 0.0, 0.70)}  # fmt: skip
PICTURES = {"small pictures": (5.0, 0.5), "large pictures": (7.6, 0.5)}  # of their tokens' logarithms; else 6.2, 0.7
Cell = tuple[str, str, int, int]  # model, mix, GPUs, tokens of each in a step
CELLS: list[Cell] = [
    *((model, mix, gpus, each) for each in (4096, 16_384) for model in MODELS for mix in ("documents", "chats")
      for gpus in (32, 64)),
    *((model, mix, gpus, 8192) for model, gpus in (("qwen3-vl-8b", 32), ("internvl-32b", 64))
      for mix in ("small pictures", "large pictures")),
    ("qwen3-vl-8b", "documents", 128, 8192), ("internvl-32b", "chats", 128, 8192),
    ("qwen3-vl-8b", "chats", 16, 2048), ("internvl-32b", "documents", 16, 16_384),
]  # fmt: skip
QUICK = CELLS[:8:4]  # the first one of each model


class Batch(NamedTuple):
    """A step's sequences, and the loads of their units."""

    lengths: list[int]
    loads: Loads

    def as_equal(self, parts: int, shared_by: int) -> Sequence[int]:
        """With so many equal units in place of each sequence's, which so many ranks share."""
        each = (Load.whole(round(sum(one.us for one in units) / shared_by)) for units in self.loads)
        return Lengths.of(self.lengths, [(one,) * parts if one.us else () for one in each])


def batches(cell: Cell) -> list[Batch]:
    """Steps of a cell; of the first 16 the very sequences that images were first weighed by."""
    model, mix, gpus, each = cell
    rng = np.random.default_rng([*MIXES].index(mix) + 1 + gpus)
    return [_batch(MODELS[model], mix, gpus * each, rng) for _ in range(STEPS)]


def _batch(model: Model, mix: str, tokens: int, rng: np.random.Generator) -> Batch:
    def units_of(kind: str) -> list[int]:
        if model.tiles:
            tiles = {"page": (6, 14), "picture": (1, 8)}.get(kind)
            return [1024] * int(rng.integers(*tiles) if tiles else 1)
        if kind == "picture":
            return [4 * int(np.clip(rng.lognormal(*PICTURES.get(mix, (6.2, 0.7))), 64, 4096))]
        return [4 * int(rng.integers(700, 2600) if kind == "page" else rng.integers(64, 257))]

    lengths, loads = list[int](), list[tuple[Load, ...]]()
    pages = mix == "documents"
    while sum(lengths) < tokens:
        kind, units = rng.choice(4, p=MIXES[mix]), list[int]()
        if kind == 0:
            count = int(np.clip(rng.lognormal(1.4, 0.9), 1, 30)) if pages else int(rng.integers(2, 6))
            units = [unit for _ in range(count) for unit in units_of("page" if pages else "picture")]
            text = int(rng.integers(10, 1500))
        elif kind == 1:
            units = units_of("picture")
            text = int(np.clip(rng.lognormal(5.8, 0.9), 30, 6000))
        elif kind == 2:
            units = [unit for _ in range(int(rng.integers(8, 65))) for unit in units_of("frame")]
            text = int(rng.integers(50, 600))
        else:
            text = int(np.clip(rng.lognormal(6.6 if pages else 6.2, 1.5), 30, CONTEXT))
        while units and text + sum(units) // 4 > CONTEXT:
            units.pop()
        lengths.append(min(text, CONTEXT - sum(units) // 4) + sum(units) // 4)
        loads.append(tuple(map(model.load, units)))
    return Batch(lengths, tuple(loads))


def strategies(table: CostTable, gpus: int) -> tuple[list[StrategyShape], list[StrategyShape]]:
    """Layouts of one shape, and some of two."""
    ranks = {scheme: scheme.num_ranks for scheme in table.schemes}
    alone = [StrategyShape.of([one] * (gpus // n)) for one, n in ranks.items() if gpus % n == 0]
    mixed = [
        StrategyShape.of([first] * count + [second] * (rest // ranks[second]))
        for pair in combinations(ranks, 2) for first, second in (pair, pair[::-1]) for count in (1, 2, 4)
        if (rest := gpus - count * ranks[first]) > 0 and rest % ranks[second] == 0
    ]  # fmt: skip
    return alone, list(dict.fromkeys(mixed))


Known = Callable[[Batch, int, int], Sequence[int]]
# A step's sequences, ranks of a pipeline's first stage and of all of it in, lengths with loads out.
DEALT: Known = lambda batch, first, every: Lengths.of(batch.lengths, batch.loads)  # noqa: E731 (as images are run)
ALONE: Known = lambda batch, first, every: Lengths.of(  # noqa: E731 (each image whole on a rank)
    batch.lengths, [[Load.whole(one.us) for one in units] for units in batch.loads])  # fmt: skip
EVERYWHERE: Known = lambda batch, first, every: batch.as_equal(first, 1)  # noqa: E731 (on each rank of the first stage)
SHARED: Known = lambda batch, first, every: batch.as_equal(first, every)  # noqa: E731 (by all ranks of the pipeline)
TEXT: Known = lambda batch, first, every: batch.lengths  # noqa: E731 (nothing is known of them)


class Steps:
    """The steps of a cell, and what they take, in predicted ms."""

    def __init__(self, cell: Cell):
        self.table, self.batches = CostTable.load(shipped(MODELS[cell[0]].table)), batches(cell)
        self.alone, mixed = strategies(self.table, cell[2])
        self._planners: dict[tuple[StrategyShape, ...], Planner] = {}
        ranked = sorted((ms, str(one), one) for one in mixed if (ms := self.of([one], DEALT, 1)[0]) < math.inf)
        self.every = [*self.alone, *(one for _, _, one in ranked[:_MIXED])]

    def of(self, chosen: Sequence[StrategyShape], of: Known, count: int = STEPS) -> tuple[float, str, float, float]:
        """The mean step where the planner chooses among these, what it chose, the share of images, and the most that a
        step is over the same plan with images shared for nothing; infinite where they do not hold all sequences. Plans
        by text take for images what those take."""
        key, total, layouts, beside = tuple(chosen), 0.0, list[str](), 0.0
        if key not in self._planners:
            self._planners[key] = Planner(self.table, chosen, _OPTIONS)
        scheme, waits = chosen[0].pipelines[0], 1.0
        for step, batch in enumerate(self.batches[:count]):
            given = of(batch, first_ranks(scheme), scheme.num_ranks)
            try:
                plan = self._planners[key].plan(step, range(len(given)), given)
            except PlanError:
                return math.inf, "", 0.0, math.inf
            again = loaded(plan.phases[0], batch.loads, self.table, batch.lengths)[1] if of is TEXT else 0.0
            total, beside = total + (again or plan.predicted_ms), beside + plan.beside
            layouts.append(plan.strategy)
            free = tuple(tuple(one._replace(more=0) for one in units) for units in loads_of(given))
            if free:
                waits = max(waits, plan.predicted_ms / loaded(plan.phases[0], free, self.table, batch.lengths)[1])
        return total / count, ", ".join(dict.fromkeys(layouts)), beside / count, waits

    def least(self, among: Sequence[StrategyShape], of: Known) -> tuple[float, str]:
        """The best of these in all steps."""
        return min(self.of([one], of)[:2] for one in among)


def row(cell: Cell) -> tuple[tuple[str, ...], dict[str, float]]:
    """Figures of a cell: times over ours, and the share that strategies per step have of what is gained."""
    steps = Steps(cell)
    ours, layouts, beside, waits = steps.of(steps.every, DEALT)
    alone, *_, waits_alone = steps.of(steps.every, ALONE)
    static, layout = steps.least(steps.alone, DEALT)
    ms = {
        "static": static,
        "alone": alone,
        "one": steps.least(steps.every, DEALT)[0],
        "shared": steps.least(steps.alone, SHARED)[0],
        "everywhere": steps.least(steps.alone, EVERYWHERE)[0],
        "static text": steps.least(steps.alone, TEXT)[0],
        "text": steps.of(steps.every, TEXT)[0],
    }
    over = {name: taken / ours for name, taken in ms.items()} | {"waits": waits, "waits alone": waits_alone}
    model, mix, gpus, each = cell
    shown = (f"{model} {mix}", str(gpus), f"{each // 1024}K", f"{ours:,.0f}", f"{beside:.0%}")
    return (*shown, *(f"{value:.2f}" for value in over.values()), layout, layouts), over


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 where an aim is missed."""
    args = figures_parser(__doc__, "python -m tools.bench_images").parse_args(arguments)
    cells = QUICK if args.quick else CELLS
    rows, found = zip(*map(row, cells), strict=True)
    headers = ("cell", "GPUs", "tokens", "ms", "images", *found[0], "static layout", "ours")
    print_table(headers, rows)
    print("times over ours; static: best layout of one shape, by the total; one: best strategy in all steps")
    print("alone: each image whole on a rank; waits: the longest step over it with images shared for nothing")
    print("shared: static, all ranks of a pipeline share images; everywhere: static, images on each rank")
    print("text: balanced and chosen by text alone")
    mean = {name: fmean(over[name] for over in found) for name in found[0]}
    worst, share = min(over["static"] for over in found), (mean["one"] - 1.0) / max(1e-9, mean["static"] - 1.0)
    waits = max(over["waits"] for over in found)
    bounds = {
        "the best static layout, in the mean": (mean["static"], aims.IMAGES_STATIC),
        "the best static layout, in the worst cell": (worst, aims.IMAGES_WORST),
        "a tower on each rank, in the mean": (mean["everywhere"], aims.IMAGES_EVERYWHERE),
    }
    missed = [f"a step waits for an image: {waits:.3f}, not <= {aims.IMAGES_WAIT}"] * (waits > aims.IMAGES_WAIT)
    missed += [f"over {of} {ratio:.3f}, not >= {aim}" for of, (ratio, aim) in bounds.items() if ratio < aim]
    summary = (
        f"{len(rows)} cells: static by total {mean['static']:.3f} (worst {worst:.3f}), {share:.0%} of the gain by "
        f"strategies per step, static with ideal sharing {mean['shared']:.3f}, tower on each rank "
        f"{mean['everywhere']:.2f}, images whole on a rank {mean['alone']:.3f} (up to "
        f"{max(over['alone'] for over in found):.3f}), a step waits for images {waits:.3f} at most, and "
        f"{max(over['waits alone'] for over in found):.3f} with each whole on a rank, "
        f"by text static {mean['static text']:.3f}, per step {mean['text']:.3f}"
    )
    return finish("bench_images", summary, {"rows": rows, "over": found}, missed, args.json)


if __name__ == "__main__":
    sys.exit(main())
