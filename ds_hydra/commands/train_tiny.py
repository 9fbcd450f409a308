"""Train a tiny Llama on Python's own sources, on CPU ranks of this machine: is everything in place?

  ds-hydra train-tiny [--ranks 4] [--steps 20] [--strategies "tp4 + 2*pp2" ...] [--steps-file FILE]

The ranks are forked; each step runs the next of the strategies. `ds-hydra report` draws the steps file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ds_hydra.commands.figures import CommandParser, guarded, new_file
from ds_hydra.commands.on_cpus import on_cpus
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.zero_hetero.errors import ConfigError

_USUAL = {  # strategies by the number of ranks
    1: ("tp1",),
    2: ("tp2", "2*tp1", "pp2", "sp2"),
    4: ("tp2 + 2*tp1", "2*pp2", "tp2pp2", "sp2 + tp2"),
    8: ("tp4 + 2*pp2", "sp4 + tp2 + 2*tp1", "2*tp2pp2", "tp2sp2 + 4*tp1"),
}


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra train-tiny") -> int:
    """Train and print each step's line; 1 when the loss has not fallen."""
    parser = CommandParser(prog=name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="forked on this machine (default 4)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--strategies", nargs="+", metavar="TEXT", help="of as many ranks, run in turn")
    parser.add_argument("--steps-file", type=new_file, metavar="FILE", help="write each step's record there")
    args = parser.parse_args(arguments)
    return guarded(name, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """What `main` does once its options are read. ConfigError or PlanError for what is refused."""
    if args.steps < 2:
        raise ConfigError(f"--steps must be at least 2 but is {args.steps}: the first and the last loss are compared")
    strategies = tuple(args.strategies or _USUAL.get(args.ranks, (f"{args.ranks}*tp1",)))
    for text in strategies:
        ranks = StrategyShape.parse(text).num_ranks
        if ranks != args.ranks:
            raise ConfigError(f"the strategy {text!r} is of {ranks} ranks; give --ranks {ranks}, or others")
    on_cpus()
    from ds_hydra.commands.tiny import TinyJob, train  # imports torch, which has to know the device first

    told = None if args.steps_file is None else str(args.steps_file)
    losses = train(args.ranks, TinyJob(strategies, args.steps, told=True, steps_file=told))
    fell = losses[-1] < losses[0]
    print(f"train-tiny: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps on {args.ranks} ranks"
          f"{'' if fell else '; it has not fallen'}")  # fmt: skip
    return 0 if fell else 1


if __name__ == "__main__":
    sys.exit(main())
