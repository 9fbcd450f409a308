"""A simulated step in, the spans of its ranks' streams out, for a trace or a picture. Pure: no torch."""

from __future__ import annotations

from collections.abc import Container, Iterator

from ds_hydra.plan.phase import PipelinePlan
from ds_hydra.report.trace import Kind, Span, Stream
from ds_hydra.simulate.outcome import PhaseTimes, SimulatedStep
from ds_hydra.simulate.pipeline import StageTimes
from ds_hydra.simulate.wires import Exchanged


def step_spans(step: SimulatedStep, ranks: Container[int] | None = None) -> Iterator[Span]:
    """What every stream of these ranks (default: of all) does. A wait for a pull may lie within a forward."""
    for number, phase in enumerate(step.phases):
        of = f" of phase {number}" if len(step.phases) > 1 else ""
        for plan, times, _ in phase.stages():
            for rank in times.stage.ranks:
                if ranks is None or rank in ranks:
                    yield from _computing(rank, phase, plan, times, of)
                    yield from _messages(rank, times, of)
                    yield from _links(rank, phase, of)
    for rank in range(step.num_ranks):
        if ranks is None or rank in ranks:
            yield Span(rank, "compute", "control", "agree on the plan", 0.0, step.agreed_s)
            yield Span(rank, "compute", "norm", "norm", float(step.pushed_s[rank]), step.norm_s)
            yield Span(rank, "compute", "optimizer", "optimizer", step.norm_s, step.step_s)


def _computing(rank: int, phase: PhaseTimes, plan: PipelinePlan, times: StageTimes, of: str) -> Iterator[Span]:
    """What the rank itself does or waits for, from its pulls to its pushes."""
    yield Span(rank, "compute", "pull", f"start pulls{of}", float(phase.begin[rank]), float(phase.started[rank]))
    for action, start, stop in times.actions:
        kind: Kind = "forward" if action.kind == "forward" else "backward"
        again = plan.microbatches[action.microbatch].recompute and action.kind in ("backward", "input_gradient")
        yield Span(rank, "compute", kind, f"{action}{' recomputed' if again else ''}{of}", start, stop)
    for start, stop in times.waits:
        yield Span(rank, "compute", "pull", f"wait for parameters{of}", start, stop)
    pulled = times.stop if times.armed is not None else max(times.stop, float(phase.pulled[rank]))
    yield Span(rank, "compute", "pull", f"finish pulls{of}", times.stop, pulled)
    stop = float(phase.stop[rank])
    waited = max(pulled, min(phase.slowest_s, stop))
    yield Span(rank, "compute", "wait", f"wait for the slowest pipeline{of}", pulled, waited)
    yield Span(rank, "compute", "push", f"finish pushes{of}", waited, stop)


def _messages(rank: int, times: StageTimes, of: str) -> Iterator[Span]:
    """The messages between stages, while they hold the rank's ports."""
    for action, start, stop in times.out:
        yield Span(rank, "stages out", "send", f"{action}{of}", start, stop)
    for action, start, stop in times.into:
        yield Span(rank, "stages in", "receive", f"{action}{of}", start, stop)


def _links(rank: int, phase: PhaseTimes, of: str) -> Iterator[Span]:
    """Pulls, pushes and copies of sums, while they hold the rank's ports."""
    for bucket, hops in enumerate(phase.pulls):
        for number, hop in enumerate(hops):
            yield from _ports(rank, "pull", f"pull {bucket}{_step(number)}{of}", hop, among_twins=number > 0)
    for bucket, hops in phase.pushes.items():
        for number, hop in enumerate(hops):
            among_twins = number < len(hops) - 1
            yield from _ports(rank, "push", f"push {bucket}{_step(number)}{of}", hop, among_twins=among_twins)
    for bucket, hop in phase.copies.items():
        yield from _ports(rank, "push", f"copy {bucket}{of}", hop, among_twins=False)


def _step(number: int) -> str:
    return f", step {number + 1}" if number else ""


def _ports(rank: int, kind: Kind, name: str, moved: Exchanged, *, among_twins: bool) -> Iterator[Span]:
    out: Stream = "twins out" if among_twins else "links out"
    into: Stream = "twins in" if among_twins else "links in"
    yield Span(rank, out, kind, name, float(moved.left_from[rank]), float(moved.left[rank]))
    yield Span(rank, into, kind, name, float(moved.came_from[rank]), float(moved.came[rank]))
