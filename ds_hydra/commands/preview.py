"""Dry run of the planner: which strategies a job would use, how fast its steps would be, and why.

  ds-hydra preview --cost-table a800-32b --lengths lognormal:6.22,1.233 --gpus 64 --tokens 200000 --context 32768 \\
      [--tp-across-nodes] [--strategies "4*tp16" ...] [--plot out.png] [--html page.html]

Needs numpy, numba and highspy (and matplotlib for --plot); no GPU, no torch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ds_hydra.commands.figures import (
    BAR,
    FILES,
    LITTLE,
    CommandParser,
    add_link_options,
    guarded,
    links_of,
    new_file,
    ours,
    print_bars,
    print_table,
    shipped,
)
from ds_hydra.costs.cost_table import CostTable, TableFile, read_table_file, told
from ds_hydra.costs.loads import loaded
from ds_hydra.data.lengths import LengthSample, read_lengths
from ds_hydra.pipe.schedules.registry import proposed_schedules, weighs
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import THEN
from ds_hydra.planner import PlannerOptions
from ds_hydra.planner.fixed_layout import layouts_by_length
from ds_hydra.planner.kernels.problem import Floats
from ds_hydra.planner.propose import THOROUGH, Wider, propose_strategies, usable_schemes, wider_shapes
from ds_hydra.report.record import is_heterogeneous
from ds_hydra.rivals.costs import JobSetting, OwnModel, RivalModel, with_ulysses
from ds_hydra.rivals.preview import BALANCED, FIXED, SCHEDULED, Messages, Preview, length_histogram, preview_steps
from ds_hydra.simulate.hosts import DEALT
from ds_hydra.simulate.job import SHIPPED, SimulatedJob, shipped_cluster
from ds_hydra.simulate.links import BETWEEN, Speed
from ds_hydra.zero_hetero.errors import ConfigError

LINK_STEPS = 6


def parse_arguments(arguments: Sequence[str] | None, name: str) -> argparse.Namespace:
    """Read the command line; tables and lengths are files, or names of shipped ones."""
    tables = ", ".join(key for key, file in FILES.items() if file.endswith(".json"))
    parser = CommandParser(prog=name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cost-table", required=True, help=f"a file that ds-hydra profile wrote, or one of {tables}")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--lengths",
        help="lognormal:MU,SIGMA, a file of lengths (text, .csv, .json, .npy) or a histogram (.csv), pretraining",
    )
    source.add_argument(
        "--rollouts", nargs="?", const="rollouts", metavar="LENGTHS",
        help="lengths of answers in reinforcement learning, as for --lengths (default: of reasoning models, shipped); "
        "what its hosts do with them is shown beside ours",
    )  # fmt: skip
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="tokens of a step")
    parser.add_argument("--context", type=int, required=True, help="longest sequence, in tokens")
    parser.add_argument(
        "--strategies",
        nargs="+",
        metavar="TEXT",
        help="use these instead of proposing some; those of several phases, '4*tp1 then tp4', are rivals",
    )
    parser.add_argument("--count", type=int, default=20, help="strategies to propose")
    parser.add_argument("--steps", type=int, default=60, help="steps to plan")
    parser.add_argument("--thorough", action="store_true", help="propose with more samples")
    add_link_options(parser)
    parser.add_argument("--links", type=float, nargs="+", metavar="GB/S",
                        help="speeds between nodes for which the gain is shown too, by the first steps")  # fmt: skip
    parser.add_argument("--tp-across-nodes", action="store_true")
    parser.add_argument("--chunks", default="auto", choices=("auto", "off"), help="whether sequences may be cut")
    parser.add_argument("--schedules", nargs="+", default=proposed_schedules(), choices=proposed_schedules(),
                        help="of proposed strategies; v: list on stages of two ranges of layers")  # fmt: skip
    parser.add_argument("--layers", type=int, help="of the model; plans may compute some of them again (default: those "
                        "of a shipped table's model, else 32)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=new_file, metavar="FILE.png")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write one page that shows all of it")
    parser.add_argument("--json", type=new_file, metavar="FILE")
    args = parser.parse_args(arguments)
    args.lengths = args.lengths or args.rollouts
    if args.layers is None:
        args.layers = SHIPPED[args.cost_table].shape.layers if args.cost_table in SHIPPED else 32
    return args


def print_lengths(sample: LengthSample, table: CostTable, context: int) -> None:
    """Histogram by sequences (#) and by tokens (=), with the most tokens that each replica holds where they fall."""
    rows = length_histogram(sample.lengths, context)
    tokens = max(1, sum(row[2] for row in rows))
    left_out = f"; {sample.too_long} longer ones are left out, up to {sample.longest:,}" if sample.too_long else ""
    print(f"{len(sample.lengths)} lengths of up to {context} tokens{left_out}; # sequences, = tokens")
    low = 0
    for high, count, held in rows:
        share, weight = count / len(sample.lengths), held / tokens
        limits = [f"{c.scheme}:{c.max_length}" for c in table.costs if low < c.max_length <= high]
        bar, note = "#" * round(BAR * share), f"max tokens {' '.join(limits)}" if limits else ""
        print(f"{high:>9} {share:>6.1%} {bar:<{BAR}}  {note}".rstrip())
        print(f"{'':>9} {weight:>6.1%} {'=' * round(BAR * weight)}")
        low = high
    above = [f"{c.scheme}:{c.max_length}" for c in table.costs if c.max_length > context]
    if above:
        print(f"{'above':>9}        {'':<{BAR}}  max tokens {' '.join(above)}")
    print()


def print_preview(preview: Preview, strategies: Sequence[str]) -> None:
    """Steps won by each strategy, how sure the plans are, and step times beside those of fixed layouts, as bars."""
    won = [(text, preview.wins[text]) for text in strategies if preview.wins.get(text)]
    print_table(("layout", "steps that took it"), won)
    if len(won) < len(strategies):
        print(f"{len(strategies) - len(won)} other candidates were taken in no step")
    p10, p50, p90 = np.percentile(preview.step_ms, [10, 50, 90])
    mean = preview.step_ms.mean()
    print(f"\nstep time, simulated: p10 {p10:.0f}  p50 {p50:.0f}  p90 {p90:.0f}  mean {mean:.0f} ms")
    print(
        f"the slowest replica of a step takes {np.median(preview.balance):.3f} times the mean one, in the median step"
    )
    g50, g90 = np.percentile(preview.gaps, [50, 90])
    print(f"no other plan of these layouts is faster by more than {g50:.1%} in the median step, {g90:.1%} at p90\n")
    print_bars([(what, float(ms.mean())) for what, ms in _rows(preview)])
    if any(plan.beside for plan in preview.plans):
        print("images are in these times; other systems, which have no price for them, are left out")
    elif FIXED not in preview.rivals:
        print("no fixed layout holds the context")


def after(preview: Preview) -> str:
    """What to do next, for the last line: what is gained over the best fixed layout decides."""
    best = preview.rivals.get(BALANCED)
    gain = None if best is None else best.step_ms.mean() / preview.step_ms.mean()
    if gain is not None and gain < LITTLE:
        return (
            f"little is to be gained on these lengths: the best fixed layout, balanced, takes {gain:.2f} as long; "
            "next: try fewer --tokens, a longer --context or other --gpus, or stay with what you run"
        )
    most = max(preview.wins, key=lambda text: preview.wins[text])
    return f'next: ds-hydra init writes the block for your job; in it "strategies" are "auto", or begin with "{most}"'


def _rows(preview: Preview) -> list[tuple[str, Floats]]:
    """(what, ms of each step), in that order."""
    rows = [(f"{name}: {one.layout}", one.step_ms) for name, one in preview.rivals.items()]
    rows += [(f"{text}, each sequence in the first phase that holds it", ms) for text, ms in preview.phased_ms.items()]
    rows += [(f"{way.layout} in every step, rollouts placed as {name} does" if name in DEALT
              else f"{name}: {way.layout}", way.step_ms) for name, way in preview.hosts.items()]  # fmt: skip
    rows.append((_ours(preview), preview.step_ms))
    return rows


def _ours(preview: Preview) -> str:
    """What ds-hydra did in these steps."""
    one, *others = preview.wins
    return (
        ours(fmean(map(is_heterogeneous, (plan.strategy for plan in preview.plans))))
        if others
        else (f"ds-hydra: {one} in every step")
    )


def plot(path: Path, sample: LengthSample, table: CostTable, preview: Preview) -> None:
    """Lengths by sequences and by tokens with every MaxLen; step times of the plans and of the fixed layout."""
    from ds_hydra.commands.pages import draw_lengths, draw_steps
    from ds_hydra.report.plots import pyplot

    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    draw_lengths(left, sample.lengths.tolist(), table)
    draw_steps(right, {what: ms.tolist() for what, ms in _rows(preview)}, range(1, len(preview.plans) + 1))
    left.set_title("Lengths, and the most tokens that a replica holds")
    right.set_title("Predicted step time")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def setting_of(args: argparse.Namespace, found: TableFile) -> JobSetting:
    """What other systems are set up for."""
    links = links_of(args, found)
    model: RivalModel = OwnModel.of(found, links)
    if args.cost_table in SHIPPED:
        model = RivalModel.of_shipped(args.cost_table, found, links.inside, args.gpus_per_node)
    return JobSetting(model, args.gpus, args.context, args.tokens, between=links.between.bytes_per_s / 1e9)


def _counted(cluster: SimulatedJob | None) -> str:
    if cluster is None:
        return (
            "not in these times, nor those of rings and gathers of others: the table does not say which model it is for"
        )
    inside, between = (speed.bytes_per_s / 1e9 for speed in (cluster.links.inside, cluster.links.between))
    return f"in these times: {inside:g} GB/s for each GPU inside a node, {between:g} GB/s between nodes"


class Prepared(NamedTuple):
    """What a command line asks about."""

    sample: LengthSample
    lengths: Sequence[int]  # of it, in another order, or with what their images take
    measured: CostTable  # as it was read
    table: CostTable  # of all schemes that ours has
    setting: JobSetting
    cluster: SimulatedJob | None


class Previewed(NamedTuple):
    """The same, computed."""

    given: Prepared
    strategies: tuple[StrategyShape, ...]
    preview: Preview


def prepared(args: argparse.Namespace) -> Prepared:
    """Read the files. ConfigError or PlanError if the input is refused."""
    found = told(read_table_file(shipped(args.cost_table)))
    setting = setting_of(args, found)
    sample = read_lengths(shipped(args.lengths), args.context, seed=args.seed)
    usable_schemes(found.table, args.gpus, args.gpus_per_node, args.tp_across_nodes)
    lengths = np.random.default_rng(args.seed).permutation(sample.lengths)[:200_000].tolist()
    if sample.patches and found.images is not None:
        lengths = loaded(sample.lengths.tolist(), sample.patches, found.images["a"], found.images["b"])
    elif sample.patches:
        print("the cost table says nothing of images, so that plans leave them out: profile a job with hydra.images")
    if args.cost_table not in SHIPPED:
        return Prepared(sample, lengths, found.table, found.table, setting, None)
    table = with_ulysses(setting, lengths)
    cluster = shipped_cluster(args.cost_table, replace(found, table=table), links_of(args, found), args.gpus)
    return Prepared(sample, lengths, found.table, table, setting, cluster)


def previewed(args: argparse.Namespace, told_lengths: bool = True) -> Previewed:
    """Propose strategies if none are named, and plan the steps. ConfigError or PlanError if the input is refused."""
    given = prepared(args)
    sample, lengths, measured, table, setting, cluster = given
    options = PlannerOptions(seed=args.seed, kernels="compiled", layers=args.layers,
                             no_slices='--chunks is "off"' if args.chunks == "off" else "")  # fmt: skip
    if told_lengths:
        print_lengths(sample, measured, args.context)
    phased = [text for text in args.strategies or () if THEN in text]
    if args.html and not phased and (switched := layouts_by_length(measured, args.gpus, args.context)):
        phased.append(THEN.join(map(str, switched)))
    strategies = tuple(StrategyShape.parse(text) for text in args.strategies or () if text not in phased)
    if not strategies:
        began = time.perf_counter()
        shapes = wider_shapes(table, args.schedules, args.layers)
        wider = Wider(shapes, args.chunks == "auto", args.layers, plain=not all(map(weighs, args.schedules)))
        strategies = propose_strategies(
            table, args.gpus, lengths, args.tokens, args.context, node_size=args.gpus_per_node,
            tp_across_nodes=args.tp_across_nodes, count=args.count, effort=THOROUGH if args.thorough else None,
            seed=args.seed, wider=wider, exposed=Messages(cluster, args.tokens).exposed_ms,
        )  # fmt: skip
        if told_lengths:
            print(f"{len(strategies)} layouts proposed in {time.perf_counter() - began:.1f} s")
    preview = preview_steps(
        table, strategies, lengths, setting, args.steps, options, phased, cluster, hosts=args.rollouts is not None
    )
    return Previewed(given, strategies, preview)


def over_links(args: argparse.Namespace, strategies: Sequence[StrategyShape], steps: int) -> dict[float, list[float]]:
    """By GB/s between nodes: how many times as long as ours the first steps take under the best fixed layout with
    balanced sequences, and by Megatron-Core's schedule; other systems are set up anew for each, ours has these
    strategies."""
    found: dict[float, list[float]] = {}
    for speed in args.links:
        one = argparse.Namespace(**vars(args))
        one.steps, one.strategies, one.html, one.rollouts = steps, [str(each) for each in strategies], None, None
        one.between = Speed(BETWEEN.latency_s, 1e9 * speed)
        preview = previewed(one, told_lengths=False).preview
        ours_ms = preview.step_ms.mean()
        found[speed] = [preview.rivals[name].step_ms.mean() / ours_ms for name in (BALANCED, SCHEDULED)
                        if name in preview.rivals]  # fmt: skip
    return found


def run(args: argparse.Namespace) -> int:
    """Run the command with its parsed options. ConfigError or PlanError if the input is refused."""
    if args.links and args.cost_table not in SHIPPED:
        raise ConfigError("--links needs a shipped cost table, whose model is known: else no messages are in the times")
    (sample, _, measured, table, _, cluster), strategies, preview = previewed(args)
    print_preview(preview, [str(strategy) for strategy in strategies])
    print("\ncosts: " + (measured.source or "the table does not say where from"))
    print("all-gathers, reduce-scatters and messages between stages are " + _counted(cluster))
    if args.links:
        gains = over_links(args, strategies, min(args.steps, LINK_STEPS))
        print(f"\ntimes as long as ds-hydra in {min(args.steps, LINK_STEPS)} steps, by GB/s between nodes:")
        print_table(("GB/s", "best fixed, balanced", "Megatron-Core's schedule"),
                    [(f"{speed:g}", *(f"{gain:.2f}" for gain in row)) for speed, row in gains.items()])  # fmt: skip
    if args.html:
        from ds_hydra.commands.pages import write_preview

        write_preview(
            args.html,
            sample.lengths.tolist(),
            table,
            {what: ms.tolist() for what, ms in _rows(preview)},
            preview.plans,
            preview.wins,
        )
        print(f"{args.html}: the page")
    if args.plot:
        plot(args.plot, sample, measured, preview)
    if args.json:
        record = {
            "strategies": [str(s) for s in strategies], "wins": preview.wins,
            "step_ms": preview.step_ms.tolist(), "gaps": preview.gaps.tolist(),
            "rivals": {name: {"layout": one.layout, "step_ms": one.step_ms.tolist()}
                       for name, one in preview.rivals.items()},
            "phased_ms": {text: times.tolist() for text, times in preview.phased_ms.items()},
            "hosts_ms": {name: way.step_ms.tolist() for name, way in preview.hosts.items()},
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1))
    print(after(preview))
    return 0


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra preview") -> int:
    """Plan and print; return 2 for input that is refused."""
    args = parse_arguments(arguments, name)
    return guarded(name, lambda: run(args))
