"""A rank that becomes slow on an emulated cluster: what a step takes until plans give it less, and then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.analytic import analytic_cost_table
from ds_hydra.costs.cost_table import TableFile
from ds_hydra.data.lengths import read_lengths, sample_batches
from ds_hydra.emulate.cluster import EmulatedJob, EmulatedStep, emulate
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.simulate.job import SHIPPED, SimulatedJob, llama_plan
from ds_hydra.simulate.links import LinkModel
from tools import aims

_TOKENS = {"16*tp1": 6250, "8*tp2": 6250, "4*pp4": 25000}  # of a rank: four pipelines of few would not be even anyway
_QUICK = {"8*tp1": 6250}
_LAYERS, _LONGEST = 4, 4096
_NEAR = 0.02  # a pace that is that of the rank
_SLOW = 5  # the rank
_PACES = (1.2, 2.0, 1.0)
# Steps from which the rank has these paces: each time it takes up to a window of steps until plans follow.
_FROM = (2, 18, 32)
_STEPS = 46


class Course(NamedTuple):
    """A job's steps, and which pace its plans counted with in each."""

    steps: list[EmulatedStep]
    known: list[float]

    def rate(self, step: int) -> float:
        """Tokens per second of one rank."""
        done = self.steps[step]
        return done.plan.num_tokens / done.step_s / len(done.ended_s)


def slow(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Tokens per second and rank before, while nobody knows, and after; steps until plans follow; what is won back."""
    return [row for text, tokens in (_QUICK if quick else _TOKENS).items() for row in _rows(text, tokens, missed)]


def _rows(text: str, tokens: int, missed: list[str]) -> Iterator[dict[str, Any]]:
    course, pipelines = _course(text, tokens), len(StrategyShape.parse(text).pipelines)
    before = course.rate(_FROM[0] - 1)
    for pace, first, last in zip(_PACES, _FROM, (*_FROM[1:], _STEPS), strict=True):
        unknown, after = course.rate(first), course.rate(last - 1)
        follows = next((at - first for at in range(first, last) if abs(course.known[at] - pace) < _NEAR), _STEPS)
        if follows > aims.FOLLOWS_SLOW:
            missed.append(f"{text}: plans do not count with a pace of {pace} within {aims.FOLLOWS_SLOW} steps")
        row: dict[str, Any] = {
            "strategy": text, "a rank at": f"1/{pace:g}", "before": f"{before:.0f}", "unknown": f"{unknown:.0f}",
            "after": f"{after:.0f}", "plans follow after": follows, "won back": "", "aim": "",
        }  # fmt: skip
        if pace > 1.0:
            won, aim = (after - unknown) / (before - unknown), aims.WON_BACK * (1.0 - 1.0 / pipelines)
            row |= {"won back": won, "aim": aim}
            if won < aim:
                missed.append(f"{text}, one rank at 1/{pace:g}: {won:.3f} of the loss is won back, less than {aim:.3f}")
        elif after < aims.RECOVERED_RATE * before:
            missed.append(f"{text}: {after / before:.3f} of the throughput before when the rank has recovered")
        yield row


def job(strategy: StrategyShape) -> SimulatedJob:
    """A model of few layers, whose steps are emulated sooner, on nodes of eight; costs follow from FLOPs."""
    shape = replace(SHIPPED["a800-7b"].shape, layers=_LAYERS)
    schemes = sorted({one.scheme for one in strategy.pipelines if one.scheme})
    table = analytic_cost_table(shape, schemes, 4 * _LONGEST)
    return SimulatedJob(llama_plan(shape), shape.hidden, TableFile(table), LinkModel(8), strategy.num_ranks)


def _course(text: str, tokens: int) -> Course:
    """Each step has the same sequences in another order, so that its time tells of nothing but plan and rank."""
    cluster = job(StrategyShape.parse(text))
    lengths = read_lengths(shipped("pretraining"), _LONGEST, count=20_000).lengths.tolist()
    batch = tuple(sample_batches(lengths, tokens * cluster.num_ranks, 1, 0, _LONGEST)[0].tolist())
    slowed = tuple((first, _SLOW, pace) for first, pace in zip(_FROM, _PACES, strict=True))
    steps = emulate(EmulatedJob(cluster, (text,), batch, sum(batch), slow=slowed), _STEPS)[0]
    faults = [step.fault for step in steps if step.fault]
    assert not faults, faults[0]
    known = [max(max(one.paces, default=1.0) for one in step.plan.pipelines) for step in steps]
    return Course(steps, known)
