"""Whether README's gains, which `ds-hydra demo` shows, are what is computed, and over the best that others do.

  python -m tools.check_gains [--quick] [--write] [--json FILE]

The whole form proposes strategies and plans 60 steps for each row, as `ds-hydra preview` does it, and asks further
systems what they make of the same batches; `--write` keeps the figures. The quick form plans the first two steps of
each row by the strategies that are shipped with it. Both set all others up anew for these batches: what is printed as
the best of its kind must be about the fastest, and nothing that exists faster than all that is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from statistics import fmean

from ds_hydra.commands.demo import FIGURES, FIRST, MIXES, OURS, ROWS, Gain, computed, options, shipped_gains
from ds_hydra.commands.figures import figures_parser, finish, print_table, shipped
from ds_hydra.commands.preview import parse_arguments, prepared
from ds_hydra.rivals.costs import Setting
from ds_hydra.rivals.preview import BALANCED, FIXED, Messages, drawn_batches
from ds_hydra.rivals.systems import Configuration, balanced, hindsight, megatron
from ds_hydra.zero_hetero.errors import PlanError
from tools import aims
from tools.systems.cells import MIXES as CELLS
from tools.systems.cells import Cell
from tools.systems.measure import RIVALS

KINDS: dict[str, Callable[[Setting], Iterator[Configuration]]] = {FIXED: megatron, BALANCED: balanced}
MORE = ("batch_rebalance", "HotSPa", "Hetu-B", "FlexSP", "Hydraulis")
_FINALISTS = 16  # layouts of a kind that are compared on all batches


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 where a figure is another or no best one."""
    parser = figures_parser(__doc__, "python -m tools.check_gains")
    parser.add_argument("--write", action="store_true", help="ship what is computed")
    args = parser.parse_args(arguments)
    known = {(gain.model, gain.lengths): gain for gain in shipped_gains()}
    rows, missed, found = [], [], list[Gain]()
    for row in ROWS:
        gain = known.get(row)
        assert gain is not None or not args.quick, f"no figures for {row}; run with --write"
        new = computed(*row, FIRST, gain.strategies) if args.quick and gain else computed(*row)
        found.append(new)
        gain = new if gain is None or args.write else gain
        off = _off(gain, new, args.quick)
        rows.append((*row, f"{gain.mean_ms[OURS]:.0f}", f"{gain.gain:.2f}", f"{off:.1e}"))
        if off > aims.SHIPPED_OFF:
            missed.append(f"{' '.join(row)}: shipped figures are {off:.1%} off, not <= {aims.SHIPPED_OFF:.1%}")
        missed += _faster(gain, new) if args.quick else _others(gain)
        print(f"{' '.join(row)}: done", flush=True)
    print_table(("model", "lengths", "shipped ms", "gain over the best", "off what is computed"), rows)
    if args.write and not args.quick:
        FIGURES.write_text(json.dumps([one._asdict() for one in found], indent=1) + "\n")
    return finish("check_gains", f"{len(rows)} rows", {"rows": rows}, missed, args.json)


def _off(gain: Gain, new: Gain, quick: bool) -> float:
    """The largest relative difference of times: of the first steps of ours, or of all means."""
    pairs = list(zip(gain.first_ms[OURS], new.first_ms[OURS], strict=True))
    if not quick:
        pairs += [(ms, new.mean_ms.get(name, 0.0)) for name, ms in gain.mean_ms.items()]
    return max(abs(b / a - 1.0) for a, b in pairs)


def _faster(gain: Gain, new: Gain) -> Iterator[str]:
    """Systems that take less on the first steps, set up for these alone, than as they are printed."""
    for name, shown in gain.first_ms.items():
        ratio = new.mean_ms[name] / fmean(shown)
        if name != OURS and ratio < 1.0 - aims.FEW_STEPS_OFF:
            yield (
                f"{gain.model} {gain.lengths}: {new.layouts[name]} takes {ratio:.3f} of {gain.layouts[name]}, the best "
                f"of {name!r} as printed"
            )


def _others(gain: Gain) -> Iterator[str]:
    """What is faster on the previewed batches than what is printed as the best of its kind, or than all of it."""
    arguments = parse_arguments(options(gain.model, gain.lengths), "ds-hydra preview")
    given = prepared(arguments)
    batches = drawn_batches(given.lengths, given.setting, arguments.steps, arguments.seed)
    messages = Messages(given.cluster, arguments.tokens)

    def mean(configurations: Iterator[Configuration]) -> tuple[str, float]:
        chosen = hindsight(configurations, batches, messages.ms, finalists=_FINALISTS)
        table = chosen.configuration.table
        return chosen.configuration.text, fmean(messages.ms(plan, table) for plan in chosen.plans)

    best = min(ms for name, ms in gain.mean_ms.items() if not name.startswith(OURS))
    mix = next(name for name, source in CELLS.items() if _source(source) == _source(MIXES[gain.lengths]))
    cell = Cell(gain.model.removeprefix("a800-"), arguments.gpus, arguments.context, arguments.tokens, mix)
    for name, system in KINDS.items():
        text, ms = mean(system(given.setting))
        if ms < gain.mean_ms[name] * (1.0 - aims.SHIPPED_OFF):
            yield f"{gain.model} {gain.lengths}: {text} takes {ms:.0f} ms, {name!r} as printed {gain.mean_ms[name]:.0f}"
    for name in MORE:
        with suppress(PlanError):
            text, ms = mean(RIVALS[name](cell, batches))
            if ms < best * (1.0 - aims.SHIPPED_OFF):
                yield f"{gain.model} {gain.lengths}: {name} ({text}) takes {ms:.0f} ms, the best as printed {best:.0f}"


def _source(text: str) -> str:
    """A source of lengths, one spelling for each."""
    return shipped(text).replace("6.220", "6.22")


if __name__ == "__main__":
    sys.exit(main())
