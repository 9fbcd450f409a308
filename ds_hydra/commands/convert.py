"""Convert checkpoints: one of DeepSpeed, as it is or universal, into one of ds-hydra, or the other way round.

    ds-hydra convert from-deepspeed RUN/global_step100 OUT --tag step_100
    ds-hydra convert from-universal RUN/global_step100_universal OUT --tag step_100
    ds-hydra convert to-universal RUN OUT --tag global_step100

Only read checkpoints of DeepSpeed that you trust: they are pickles. Universal ones are read by torch's restricted
loader; from-deepspeed runs DeepSpeed's own converter (ds_to_universal), which reads without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ds_hydra.commands.figures import CommandParser, guarded


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra convert") -> int:
    """Convert and print the new folder; 2 for a checkpoint that is refused."""
    parser = CommandParser(prog=name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("direction", choices=("from-deepspeed", "from-universal", "to-universal"))
    parser.add_argument("source", type=Path, help="DeepSpeed's: its tag's folder; ds-hydra: the folder with the tags")
    parser.add_argument("target", type=Path, help="folder in which the new tag appears")
    parser.add_argument("--tag", help="ds-hydra's tag; to-universal: the one that latest names by default")
    parser.add_argument("--step", type=int, help="from-*: the step, where the model states cannot be read")
    args = parser.parse_args(arguments)
    return guarded(name, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Run the command with its parsed options. CheckpointError if the checkpoint is refused."""
    from ds_hydra.checkpoint import universal  # torch, which --help does not need

    if args.direction == "to-universal":
        print(universal.to_universal(args.source, args.tag, args.target))
    else:
        tag = args.tag or args.source.resolve().name
        convert = universal.from_deepspeed if args.direction == "from-deepspeed" else universal.from_universal
        print(convert(args.source, args.target, tag, step=args.step))
    return 0
