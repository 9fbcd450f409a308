"""The command line `ds-hydra COMMAND ...`, also as `python -m ds_hydra.commands COMMAND ...`.

A command is a module of this folder with a `main`. It is imported when it is called, so that `ds-hydra --help`
loads neither torch nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from ds_hydra import __version__

COMMANDS = {
    "demo": "what ds-hydra is for, in minutes: a comparison, an emulated cluster, equal losses; without a GPU",
    "train-tiny": "train a tiny model on CPU ranks of this machine; without a GPU",
    "init": "write the block for a job that runs on DeepSpeed now, and say what gain to expect",
    "lengths": "lengths and patches of a data set with pictures, for init and preview",
    "preview": "what a job would do: strategies, step times, gains; without a device",
    "simulate": "what a step would do on every rank: times, waits, memory, a trace; without a device",
    "memory": "what each parallel scheme of a model needs on a rank",
    "layout": "which rank holds which interval of a parameter, as masters, as copies, and under strategies",
    "check": "whether a model trains under strategies as in one process",
    "settings": 'all settings of the block "hydra", a sentence each, or as a JSON Schema',
    "profile": "measure a cost table on this machine",
    "warm-up": "compile the planner's kernels before jobs need them, as in the build of an image",
    "emulate": "a job on a cluster that is not there: the real engine, on virtual time",
    "launch": "start a job whose survivors live on when a rank dies, with the options of deepspeed",
    "report": "draw the figures of a run from its step records",
    "convert": "checkpoints from DeepSpeed's universal form, and to it",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command: 0 when all is well, 1 when an aim is missed, 2 for input that is refused, 130 for Ctrl-C."""
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="ds-hydra",
        description="Commands around a training job.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
        + "\n\nBegin with demo, which needs no GPU; then run init on the job that you have.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ds-hydra {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the names below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its options; COMMAND --help lists them")
    args = parser.parse_args(arguments)
    return import_module(f"ds_hydra.commands.{args.command.replace('-', '_')}").main(args.rest)


if __name__ == "__main__":
    sys.exit(main())
