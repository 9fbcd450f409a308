"""The reports of all survivors in; what each does about the open step, and whose layout is taken, out. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ds_hydra.elastic.view import NormTable, Report


def table_to_apply(own: Report, reports: Iterable[Report]) -> NormTable | None:
    """The table by which this rank completes its open step, or None where it has nothing to complete [Note: the vote].

    A rank is at most one step behind another, and has the gradients of the step that it lacks.
    """
    reports = [report for report in reports if report.committed >= 0]
    newest = max(report.committed for report in reports)
    tables = [report.table for report in reports if report.committed == newest and report.table is not None]
    if own.committed < newest:
        assert own.committed == newest - 1, f"{own.committed} steps committed, others {newest}: more than one apart"
        return next(report.last for report in reports if report.last is not None and report.last.step == own.committed)
    return tables[0] if tables else None


def newest_layout(reports: Iterable[Report]) -> int:
    """The epoch of the cut from which all go on: who has taken it proves that all have their part of it."""
    return max(report.layout_epoch for report in reports)


def usable(table: NormTable | None) -> NormTable | None:
    """The table of a step that can be applied: the ranks have said the same of their models, and none refuses."""
    if table is None or len({word for _, word, _ in table.rows}) > 1 or any(word < 0 for _, word, _ in table.rows):
        return None
    return table
