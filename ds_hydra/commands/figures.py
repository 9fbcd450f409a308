"""Shared by all commands and measuring tools: their options, printed tables, error handling and exit codes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError


def figures_parser(description: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser with the options of every tool: `--quick` and `--json FILE`."""
    first_line = (description or "").strip().splitlines()[0]
    parser = argparse.ArgumentParser(prog=prog, description=first_line)
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
    for aim in missed:
        print(f"missed: {aim}")
    print(f"{name}: {summary}; {f'{len(missed)} aims missed' if missed else 'all aims met'}")
    if json_file is not None:
        json_file.write_text(
            json.dumps({"name": name, "summary": summary, "missed": list(missed), **figures}, indent=1)
        )
    return 1 if missed else 0
