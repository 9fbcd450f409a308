"""What ds-hydra is for, in two minutes on two CPU cores: a preview, an emulated cluster, and equal losses.

  ds-hydra demo [--quick] [--recompute] [--picture FILE.png] [--json FILE]      (in a checkout: make demo)

1. Steps of a 32B model on 64 GPUs by published costs: the best fixed layouts, other systems, ds-hydra. These figures
   come with the package, at once; `--recompute` computes them here, in minutes.
2. The engine on 16 emulated GPUs: a balanced fixed layout and ds-hydra on the same sequences, and a picture of both.
3. Real training on one rank and on eight ranks in four layouts: equal losses.

Exits non-zero if ds-hydra is not faster, or a loss differs in the digits that are printed.

The figures are shipped, as computing them takes minutes; `python -m tools.check_gains` says whether they are still what
is computed, and writes them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ds_hydra.commands.figures import FOLDER, OURS, figures_parser, finish, guarded, ours, print_bars
from ds_hydra.commands.moving import moving
from ds_hydra.commands.train_tiny import equal, on_cpus

FIGURES = FOLDER / "demo_gains.json"
TOKENS, CONTEXT = 200_000, 32_768
CLUSTERS = {"a800-32b": 64, "a800-7b": 32}  # GPUs
# In words, and as `ds-hydra preview --lengths` takes it; other lengths are in `tools.bench_systems`.
MIXES = {"web pages, as CommonCrawl (log-normal, median 500)": "lognormal:6.22,1.233"}
ROWS = tuple((model, lengths) for model in CLUSTERS for lengths in MIXES)
LINKS = (12.0, 25.0, 50.0, 100.0)  # GB/s between nodes
FIRST = 2  # steps that are shipped one by one


class Gain(NamedTuple):
    """A model and lengths of README's tables. Times in ms: means of 60 steps by what runs them, as `ds-hydra preview`
    names it, ours last; and the first few by themselves."""

    model: str  # a shipped cost table
    lengths: str  # in words
    strategies: tuple[str, ...]
    layouts: Mapping[str, str]
    mean_ms: Mapping[str, float]
    first_ms: Mapping[str, Sequence[float]]
    mixed: float  # share of the steps in which ours ran pipelines of several shapes
    over_links: Mapping[str, Sequence[float]]  # GB/s: over the best fixed layout, and over Megatron-Core's schedule

    def times(self, name: str) -> float:
        """How many times as long as ours a system takes."""
        return self.mean_ms[name] / self.mean_ms[OURS]

    @property
    def gain(self) -> float:
        """Over the best of the others: not of ours on one layout."""
        return min(self.times(name) for name in self.mean_ms if not name.startswith(OURS))


def shipped_gains() -> list[Gain]:
    """The rows that come with the package."""
    return [Gain(**{**row, "strategies": tuple(row["strategies"])}) for row in json.loads(FIGURES.read_text())]


def span(values: Iterable[float]) -> str:
    """A range of figures as pages show it: "1.11 to 1.23"."""
    several = sorted(f"{value:.2f}" for value in values)
    low, high = several[0], several[-1]
    return low if low == high else f"{low} to {high}"


def options(model: str, lengths: str) -> tuple[str, ...]:
    """What `ds-hydra preview` is given for a row."""
    return ("--cost-table", model, "--lengths", MIXES[lengths], "--gpus", str(CLUSTERS[model]), "--tokens", str(TOKENS),
            "--context", str(CONTEXT), "--tp-across-nodes")  # fmt: skip


def computed(model: str, lengths: str, steps: int = 60, strategies: Sequence[str] = ()) -> Gain:
    """A row, computed: with these strategies, or with proposed ones; over other links too, for the first lengths."""
    from ds_hydra.commands.preview import LINK_STEPS, over_links, parse_arguments, previewed
    from ds_hydra.report.record import is_heterogeneous

    named = ("--strategies", *strategies) if strategies else ()
    links = ("--links", *(f"{speed:g}" for speed in LINKS))
    arguments = (*options(model, lengths), "--steps", str(steps), *named, *links)
    args = parse_arguments(arguments, "ds-hydra preview")
    done = previewed(args, told_lengths=False)
    preview = done.preview
    taken = {name: one.step_ms for name, one in preview.rivals.items()} | {OURS: preview.step_ms}
    return Gain(
        model, lengths, tuple(map(str, done.strategies)),
        {name: one.layout for name, one in preview.rivals.items()},
        {name: float(ms.mean()) for name, ms in taken.items()},
        {name: ms[:FIRST].tolist() for name, ms in taken.items()},
        fmean(is_heterogeneous(plan.strategy) for plan in preview.plans),
        {} if steps <= FIRST or lengths != next(iter(MIXES))
        else {f"{speed:g}": row for speed, row in over_links(args, done.strategies, LINK_STEPS).items()},
    )  # fmt: skip


def print_gain(gain: Gain, how: str) -> dict[str, Any]:
    """Print the comparison; returns mean ms of a step by what runs it."""
    size = gain.model.partition("-")[2].upper()
    print(f"\n1. LLaMA {size} on {CLUSTERS[gain.model]} A800 GPUs, simulated steps of {TOKENS:,} tokens, context 32K:")
    print(f"   {how}. Lengths of {gain.lengths}; costs as published, 25 GB/s for each GPU")
    print("   between nodes. Other systems are set up in hindsight, as suits these very steps best.\n")
    print_bars([(f"{name}: {gain.layouts[name]}" if name in gain.layouts else ours(gain.mixed), ms)
                for name, ms in gain.mean_ms.items()])  # fmt: skip
    return {**gain.mean_ms, "gain": gain.gain}


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra demo") -> int:
    """Show the three parts; 1 when something does not hold."""
    parser = figures_parser(__doc__, name)
    parser.add_argument("--picture", type=Path, default=Path("runs/demo.png"), help="of one step")
    parser.add_argument("--recompute", action="store_true", help="compute the figures of part 1 too, in minutes")
    args = parser.parse_args(arguments)

    def run() -> int:
        on_cpus()
        began = time.perf_counter()
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        times = _first_part(args.recompute)
        with moving("loading torch and DeepSpeed"):  # which have to know the device first
            from ds_hydra.commands.demo_cluster import STEPS, cluster
        rates = cluster(args.picture, 4 if args.quick else STEPS)
        losses = equal()
        fixed, ours = rates.values()
        missed = []
        if times["gain"] <= 1 or fixed >= ours:
            missed.append("another system is as fast as ds-hydra")
        one, other = ([f"{loss:.4f}" for loss in run] for run in (losses["one_rank"], losses["eight_ranks"]))
        if one != other:
            missed.append(f"losses on one rank {one} and on eight ranks {other} differ")
        summary = (
            f"{times['gain']:.2f} times as fast as the best of the others in the preview, {ours / fixed:.2f} as the "
            f"balanced fixed layout of TP on the emulated cluster; equal losses: {'yes' if one == other else 'no'}; "
            f"{time.perf_counter() - began:.0f} s"
        )
        print()
        return finish(name, summary, {"preview_ms": times, "tokens_per_second": rates, **losses}, missed, args.json)

    return guarded(name, run)


def _first_part(recompute: bool) -> dict[str, Any]:
    """Print the preview as shipped, or computed anew."""
    gain = shipped_gains()[0]
    if not recompute:
        return print_gain(gain, "shipped figures (--recompute computes them)")
    with moving("planning 60 steps, ours and those of others; the first time also compiling the planner", 300.0):
        gain = computed(gain.model, gain.lengths)
    return print_gain(gain, "computed now")
