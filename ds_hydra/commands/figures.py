"""Shared by all commands and measuring tools: options, printed tables, error handling and exit codes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ds_hydra.costs.cost_table import TableFile
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError

FOLDER = Path(__file__).parent / "tables"
FILES = {
    "a800-7b": "llama_7b_a800.json",  # LLaMA 7B and 32B on A800-80GB, as Hydraulis published them
    "a800-32b": "llama_32b_a800.json",
    "pretraining": "pretraining_length_histogram.csv",  # lengths of 13 million documents
    "rollouts": "rollout_length_histogram.csv",  # of reasoning models, a distribution fitted to published quantiles
}

LITTLE = 1.05  # times as fast: of less than that little is to be gained


def shipped(name: str) -> str:
    """The path of the file shipped under `name`. Any other text is returned unchanged: it is the user's own path."""
    return str(FOLDER / FILES[name]) if name in FILES else name


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """What `links_of` reads."""
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--inside", type=read_speed, metavar="US,GB/S", help="latency and bandwidth inside a node")
    parser.add_argument("--between", type=read_speed, metavar="US,GB/S", help="the same between nodes")


def read_speed(text: str) -> Speed:
    """ "10,150": microseconds and 10^9 bytes a second."""
    try:
        latency, rate = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MICROSECONDS,GB/S, such as 10,150") from None
    return Speed(latency / 1e6, rate * 1e9)


def links_of(args: argparse.Namespace, found: TableFile) -> LinkModel:
    """The links that the options name; else those of the cost table, or what is assumed where it has none."""
    return LinkModel.of_table(
        found.links, args.gpus_per_node, inside=args.inside, between=args.between, place=f"links of {args.cost_table}"
    )


BAR = 40  # characters of the longest bar


class CommandParser(argparse.ArgumentParser):
    """Options have one spelling in all commands, with dashes; underscores and earlier names are read too."""

    earlier: ClassVar = {"--node-size": "--gpus-per-node", "--ranks": "--gpus"}  # where a command has the second only

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does it."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._spelled(text) for text in given], namespace)

    def _spelled(self, text: str) -> str:
        """An option as it is called here; all else as it is."""
        option, equals, value = text.partition("=")
        if not option.startswith("--") or option in self._option_string_actions:
            return text
        dashed = "--" + option[2:].replace("_", "-")
        known = next((o for o in (dashed, self.earlier.get(dashed, "")) if o in self._option_string_actions), option)
        return known + equals + value


def figures_parser(description: str | None, prog: str | None = None) -> CommandParser:
    """A parser with the options of every tool: `--quick` and `--json FILE`."""
    first_line = (description or "").strip().splitlines()[0]
    parser = CommandParser(prog=prog, description=first_line)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, within a minute")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="also write the figures to FILE")
    return parser


def new_file(text: str) -> Path:
    """A file to write to, from the command line; refused before any work if its folder is not there."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}: it is a folder; name a file in it")
    return path


def guarded(name: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit code. An error in the input is one line on stderr and 2, not a traceback."""
    try:
        return command()
    except (ConfigError, PlanError, CheckpointError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print columns: text to the left, numbers to the right."""
    cells = [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(headers), *cells]) for column in range(len(headers))]
    numeric = [all(isinstance(row[column], int | float) for row in rows) for column in range(len(headers))]

    def show(line: Sequence[str]) -> str:
        aligned = zip(line, widths, numeric, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in aligned).rstrip()

    print(show(headers))
    print("  ".join("-" * width for width in widths))
    for line in cells:
        print(show(line))


def finish(name: str, summary: str, figures: Mapping[str, Any], missed: Sequence[str], json_file: Path | None) -> int:
    """Print missed aims and a summary line, write the figures if asked to; return the exit code, 1 for missed aims."""
    of_user = name.startswith("ds-hydra ")  # who has set no aims
    for aim in missed:
        print(f"{'not as it should be' if of_user else 'missed'}: {aim}")
    ended = "" if of_user else f"; {len(missed)} aims missed" if missed else "; all aims met"
    print(f"{name}: {summary}{ended}")
    if json_file is not None:
        json_file.write_text(
            json.dumps({"name": name, "summary": summary, "missed": list(missed), **figures}, indent=1)
        )
    return 1 if missed else 0


Part = Callable[[bool, list[str]], list[dict[str, Any]]]
"""Whether in the quick form, and what is missed so far, to be added to; the rows of a table."""


def chosen_parts(
    name: str, description: str | None, parts: Collection[str], arguments: Sequence[str] | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """The options of a tool that has parts, and those that the command line names, all without one."""
    parser = figures_parser(description, f"python -m tools.{name}")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="run these parts only")
    parser.add_argument("--without", nargs="+", choices=parts, default=[], help="leave these parts out")
    options = parser.parse_args(arguments)
    return options, [part for part in options.only if part not in options.without]


def run_parts(name: str, description: str | None, parts: Mapping[str, Part]) -> int:
    """Run the parts that the command line names; the exit code: 0, or 1 if an aim was missed."""
    options, chosen = chosen_parts(name, description, parts)
    began = time.perf_counter()
    missed: list[str] = []
    record: dict[str, Any] = {}
    for part in chosen:
        rows = record[part] = parts[part](options.quick, missed)
        print(f"{part}:")
        print_table(list(rows[0]), [[f"{v:.3f}" if isinstance(v, float) else v for v in row.values()] for row in rows])
        print(flush=True)
    summary = f"{', '.join(chosen)} in {time.perf_counter() - began:.0f} s"
    return finish(name, summary, record, missed, options.json)


def print_bars(rows: Sequence[tuple[str, float]]) -> None:
    """A line and a bar for each mean time in ms; the last row is what the others are compared with."""
    longest, least = max(ms for _, ms in rows), rows[-1][1]
    for place, (what, ms) in enumerate(rows):
        times = "" if place == len(rows) - 1 else f"  {ms / least:.2f} times as long"
        print(f"{ms / 1e3:7.2f} s  {what}{times}")
        print(f"           {'#' * max(1, round(BAR * ms / longest))}")


OURS = "ds-hydra"  # as tables of several systems name it


def ours(mixed: float) -> str:
    """What ds-hydra did, by the share of the steps that mixed shapes."""
    return f"{OURS}: a layout for each step, of several shapes in {mixed:.0%} of them"
