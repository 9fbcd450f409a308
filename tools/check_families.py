"""Trains a tiny model of every causal language model class of transformers under four shapes, or sees it refused.

For each class a step and an evaluation are run in one process under TP 3, PP 3, SP 3 and a pipeline of a TP 3 and an
SP 3 stage (6 ranks), and compared with the plain model, one sequence at a time, in FP64. A committed list says what
each class is to come to: equal, or refused for one of a few reasons. A class that differs from the plain model, that
crashes or that comes to something else than the list says, is missed.

  python -m tools.check_families [--quick] [--only WORDS] [--json FILE] [--write]

`--quick` takes a few of the classes, drawn by a fixed seed, and the tables of unusual models and of models that
their users changed. `--write` writes the list anew. Exits non-zero if a class is missed.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_hydra.commands.figures import figures_parser, finish, print_table
from tests.support.tiny_families import (
    CRASHES,
    DIFFERS,
    EQUAL,
    EXPECTED,
    ROWS,
    SHAPES,
    class_names,
    drawn_names,
    entry,
    expected,
    judge,
    short,
)
from tools import aims

_WIDE = 44  # characters of a verdict in the table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = figures_parser(__doc__)
    parser.add_argument("--only", metavar="WORDS", help="classes whose name holds one of these words")
    parser.add_argument("--write", action="store_true", help="write the list anew from what is found")
    parser.add_argument("--processes", type=int, default=2, help="classes at once")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    names = [*list(drawn_names())[::6], *ROWS] if options.quick else list(class_names())
    if options.only:
        names = [name for name in names if any(word in name for word in options.only.split())]
    found = dict(_judged(names, options.processes))
    print_table(["class", *SHAPES, "s"], [[name, *_columns(verdicts)] for name, verdicts in found.items()])
    listed = expected()
    if options.write:
        listed |= {name: entry(verdicts) for name, verdicts in found.items() if name not in ROWS}
        EXPECTED.write_text(json.dumps(listed, indent=1, sort_keys=True) + "\n")
    missed = [line for name, verdicts in found.items() for line in _missed(name, verdicts, listed)]
    equal = sum(entry(verdicts) == EQUAL for verdicts in found.values())
    if not options.quick and not options.only and equal < aims.FAMILIES_EQUAL:
        missed.append(f"{equal} classes are equal under all shapes, fewer than {aims.FAMILIES_EQUAL}")
    entries = [entry(verdicts) for verdicts in found.values()]
    counts = Counter(each if isinstance(each, str) else "refused under some shapes" for each in entries)
    print("\n".join(f"{count:4d} {reason}" for reason, count in counts.most_common()))
    summary = f"{equal} of {len(found)} equal under all shapes, {time.perf_counter() - began:.0f} s"
    return finish("check_families", summary, {"families": found}, missed, options.json)


def _judged(names: Sequence[str], processes: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Verdicts by class, as they come, from processes that do not live long enough to fill up."""
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=20) as pool:
        yield from pool.imap(judge, names)


def _missed(name: str, verdicts: Mapping[str, str], listed: Mapping[str, Any]) -> Iterator[str]:
    for shape, verdict in verdicts.items():
        if short(verdict) in (DIFFERS, CRASHES):
            yield f"{name} under {shape} {verdict}"
    wanted = EQUAL if name in ROWS else listed.get(name)
    if entry(verdicts) != wanted:
        yield f"{name}: {entry(verdicts)}, but the list says {wanted}"


def _columns(verdicts: Mapping[str, str]) -> list[object]:
    shapes = [short(verdict)[:_WIDE] for shape, verdict in verdicts.items() if shape != "seconds"]
    return [*shapes, *[""] * (len(SHAPES) - len(shapes)), float(verdicts["seconds"])]


if __name__ == "__main__":
    sys.exit(main())
