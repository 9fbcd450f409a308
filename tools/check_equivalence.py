"""Trains each case on forked ranks and in one process, and prints how far the two are apart.

Every case is five steps of a tiny model on sequences from 3 to 700 tokens, with clipping and weight decay groups, under
fixed strategies and under strategies that change every step. The reference is plain Hugging Face in one process, one
sequence at a time. Differences are the largest of any entry, relative to the reference tensor's largest entry. FP32
gradients are compared from the same parameters in each step. In FP64 cases, norms and routers that Hugging Face
computes in FP32 compute in FP64 on both sides, and Gemma 2's reference has an FP64 softmax. An aim of "-" is printed
only: Adam magnifies FP32 rounding where a gradient is near zero.

"Shared tokens" says whether tensor parallel ranks shared the tokens between the blocks; in half of all rows that have
such ranks they must, of the quick ones too.

  python -m tools.check_equivalence [--quick] [--json FILE] [--only WORDS] # quick: few cases, shortened as in the suite
  python -m tools.check_equivalence --random 50 --seed 7 # families, strategies and options drawn together
  python -m tools.check_equivalence --strict blocking    # or connect, or lazy: under a transport with NCCL's rules
  python -m tools.check_equivalence --model CONFIG.json --ranks 4 --strategies "tp2pp2" "sp2 + 2*tp1"

Exits non-zero if an aim is missed or a case fails.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, replace

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import torch

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.commands.figures import figures_parser, finish, print_table
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.testing import Difference
from tests.support.case import FLOAT32, FLOAT64, Case
from tests.support.cases import CASES
from tests.support.equivalence import compare, num_ranks
from tests.support.random_cases import drawn
from tests.support.strict import Rules

QUICK = (  # none of which every test run trains
    "llama on 8 ranks",
    "gemma2",
    "hooks that hold other modules",
    "dropout",
    "noise on what is routed",
    "head in blocks",
    "slices tp2pp2sp2",
    "V of four stages",
    "mixed",
)
STRICT = ("connect", "lazy", "blocking")
WHAT = ("parameter", "moment", "gradient", "norm", "loss")


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    torch.set_num_threads(1)
    refused: Counter[str] = Counter()
    if options.random is None:
        cases = _own_cases(options) if options.model else _table(options)
    else:
        cases = _at_random(options.seed, options.random, refused)
    rows: list[list[object]] = []
    missed: list[str] = []
    figures: list[dict[str, object]] = []
    shared: list[tuple[bool, bool]] = []  # of each case: whether it has tensor parallelism, and shares tokens
    for number, case in enumerate(cases, start=1):
        began = time.perf_counter()
        try:
            found = compare(case, timeout=options.timeout, strict=_rules(options))
            short = found.missed(case.aims, case.name)
        except Exception as error:
            traceback.print_exc()
            found = Difference(math.nan, math.nan, math.nan, math.nan, math.nan)
            short = [f"{case.name}: {type(error).__name__}: {error}"]
        seconds = time.perf_counter() - began
        missed += short
        print(
            f"{number}/{len(cases)} {case.name}, {case.family}, {' | '.join(case.strategies)}: "
            f"{'; '.join(short) or 'ok'}, {seconds:.0f} s", file=sys.stderr, flush=True,
        )  # fmt: skip
        rows.append(_row(case, found, not short, seconds))
        shared.append((case.has_tp, found.shares_tokens))
        figures.append({"case": asdict(case), "found": asdict(found), "missed": short, "seconds": seconds})
    with_tp, sharing = (sum(one[i] for one in shared) for i in (0, 1))
    if (options.only, options.model, options.random) == (None, None, None) and 2 * sharing < with_tp:
        missed.append(f"{sharing} of {with_tp} rows with tensor parallelism share tokens (aim half)")
    headers = ["case", "family", "ranks", "type", "steps", *WHAT, "aims", "shared tokens", "ok", "s"]
    print_table(headers, rows)
    if refused:
        print_table(["cases", "drawn as well, and refused"], [[n, why] for why, n in refused.most_common()])
    done = sum(1 for row in rows if row[-2] == "yes")
    summary = f"{done} of {len(cases)} cases, {sharing} of {with_tp} with tensor parallelism share tokens"
    return finish("check_equivalence", summary, {"cases": figures}, missed, options.json)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = figures_parser(__doc__)
    parser.add_argument("--only", metavar="WORDS", help="cases whose name holds WORDS")
    parser.add_argument("--model", metavar="CONFIG.json", help="a Hugging Face config of a model of one's own")
    parser.add_argument("--random", type=int, metavar="N", help="N cases drawn at random, and not the table")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them (default 0)")
    parser.add_argument("--ranks", type=int, help="ranks for --model")
    parser.add_argument("--strategies", nargs="+", metavar="TEXT", help="strategies for --model, one per step in turn")
    parser.add_argument(
        "--strict", choices=STRICT, help="what more than order and memory the transport is strict about"
    )
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for one case")
    options = parser.parse_args(arguments)
    if (options.model is None) != (options.strategies is None):
        parser.error("--model and --strategies go together")
    for text in options.strategies or ():
        used = StrategyShape.parse(text).num_ranks
        if options.ranks not in (None, used):
            parser.error(f"strategy {text!r} uses {used} ranks, but --ranks is {options.ranks}")
    if options.model is None and options.random is None and not _table(options):
        parser.error(f"--only {options.only!r}: no case of the table has that in its name")
    return options


def _rules(options: argparse.Namespace) -> Rules | None:
    """How strict the transport is; a wait that lasts half a case's time counts as one for ever."""
    return Rules(**{options.strict: True}, stall_s=options.timeout / 2) if options.strict else None


def _table(options: argparse.Namespace) -> list[Case]:
    cases = list(CASES)
    if options.quick:
        cases = [case.shortened() for case in CASES if case.name in QUICK]
    return [case for case in cases if options.only is None or options.only in case.name]


def _at_random(first: int, count: int, refused: Counter[str]) -> list[Case]:
    """Cases of so many seeds; adds what their models' plans refuse, and in how many of them."""
    made = [drawn(seed) for seed in range(first, first + count)]
    refused.update(why for _, reasons in made for why in reasons)
    return [case for case, _ in made]


def _own_cases(options: argparse.Namespace) -> list[Case]:
    """FP64 throughout, and FP32 gradients, of the model of a config file."""
    case = Case("own", options.model, tuple(options.strategies), steps=max(2 if options.quick else 5, 1))
    sgd = replace(case, name="own fp32", dtype=FLOAT32, optimizer="SGD")
    return [replace(case, dtype=FLOAT64), sgd]


def _row(case: Case, found: Difference, ok: bool, seconds: float) -> list[object]:
    aims = case.aims
    values = [f"{getattr(found, what):.1e}" for what in WHAT]
    limits = "/".join("-" if (aim := getattr(aims, what)) is None else f"{aim:.0e}" for what in WHAT)
    kind = f"{case.dtype} {case.optimizer}"
    shared = "yes" if found.shares_tokens else "-"
    told = ["yes" if ok else "NO", seconds]
    return [case.name, case.family, num_ranks(case), kind, case.steps, *values, limits, shared, *told]


if __name__ == "__main__":
    sys.exit(main())
