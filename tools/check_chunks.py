"""Chunks, split backward and the V shape: what their schedules promise, each figure against its aim.

python -m tools.check_chunks [--quick] [--json FILE] [--only PART ...]

schedules  random micro-batches under the list order: none stands still, memory is never above a stage's room, and no
           time below the bound or other than the order was made with
mutations  schedules with one dependency broken: each is refused
overheads  time over pure work by schedule and scheme, for batches of the planner's benchmark
memory     predicted memory of stages under slices and split backward against the allocator's peak, small models
recompute  layers to compute again where a sequence has no room otherwise: the fast method against HiGHS
contexts   strategies proposed and steps planned for contexts that no scheme holds whole

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import sys
from typing import Any

from ds_hydra.commands.figures import guarded, run_parts
from tools import aims
from tools.chunks.contexts import long_contexts
from tools.chunks.overheads import overheads
from tools.chunks.recompute import recompute_gaps
from tools.chunks.sweep import FAULTS, sweep_cases, sweep_mutations

CASES, QUICK_CASES = 100_000, 2_000
MUTATIONS, QUICK_MUTATIONS = 100_000, 4_000


def check_schedules(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Random cases by ranges of layers in a stage, with their faults."""
    rows = sweep_cases(QUICK_CASES if quick else CASES).rows()
    for row in rows:
        missed += [f"{row['ranges']} ranges: {row[f]} of {row['cases']} {f}" for f in FAULTS if row[f]]
    return rows


def check_mutations(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Broken schedules by kind, and how many of them were refused."""
    found = sweep_mutations(QUICK_MUTATIONS if quick else MUTATIONS)
    missed += [f"not refused: {what}" for what in found.passed[:10]]
    rows: list[dict[str, Any]] = [{"mutation": kind, "made": count} for kind, count in sorted(found.made.items())]
    return [*rows, {"mutation": "not refused", "made": len(found.passed)}]


def check_overheads(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Time over pure work."""
    rows = overheads(quick)
    for row in rows:
        for (name, scheme), aim in aims.CHUNKED_WORK.items():
            if row["schedule"] == name and row[scheme] > aim:
                missed.append(f"{name} on {scheme}: {row[scheme]:.3f} of pure work, not <= {aim}")
    return rows


def check_memory(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Predicted and measured memory."""
    from tools.chunks.memory import predicted_and_measured  # imports all that trains

    return predicted_and_measured(quick, missed)


PARTS = {
    "schedules": check_schedules,
    "mutations": check_mutations,
    "overheads": check_overheads,
    "memory": check_memory,
    "recompute": recompute_gaps,
    "contexts": long_contexts,
}


def main() -> int:
    """The exit code: 0, or 1 if an aim was missed."""
    return run_parts("check_chunks", __doc__, PARTS)


if __name__ == "__main__":
    sys.exit(guarded("check_chunks", main))
