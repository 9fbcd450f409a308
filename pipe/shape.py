"""The shape of a pipeline and of a strategy, as text and as values; nothing here names a rank. Pure: no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from ds_hydra.zero_hetero.errors import PlanError

_TERM = re.compile(r"(?:(?P<count>\d+)\*)?(?P<degrees>(?:(?:tp|pp|sp)\d+)+)")


@dataclass(frozen=True, order=True, slots=True)
class ParallelScheme:
    """Shape <TP, PP, SP> of one pipeline whose stages are all alike (Hydraulis, section 2; SP is its CP)."""

    tp: int = 1
    pp: int = 1
    sp: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.sp) < 1:
            raise PlanError(f"scheme tp={self.tp} pp={self.pp} sp={self.sp}: every degree must be at least 1")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.sp

    def __str__(self) -> str:
        degrees = [f"{name}{n}" for name, n in (("tp", self.tp), ("pp", self.pp), ("sp", self.sp)) if n > 1]
        return "".join(degrees) or "tp1"


def parse_strategy(text: str) -> tuple[ParallelScheme, ...]:
    """Schemes named by a string such as "tp4 + 2*tp1pp2 + sp2", one per pipeline, in the order given.

    Raises PlanError that shows the term that cannot be read.
    """
    schemes: list[ParallelScheme] = []
    for term in text.replace(" ", "").lower().split("+"):
        match = _TERM.fullmatch(term)
        degrees = re.findall(r"(tp|pp|sp)(\d+)", match["degrees"]) if match else []
        if match is None or len(dict(degrees)) != len(degrees):
            raise PlanError(
                f"cannot read the term {term!r} of strategy {text!r}: a term is [count*] and then any of "
                "tpN, ppN, spN, each once, e.g. 'tp4 + 2*tp1pp2 + sp2'"
            )
        scheme = ParallelScheme(**{name: int(n) for name, n in degrees})
        count = int(match["count"] or 1)
        if count < 1:
            raise PlanError(f"the term {term!r} of strategy {text!r} asks for no pipeline: count must be at least 1")
        schemes += [scheme] * count
    return tuple(schemes)


def format_strategy(schemes: Iterable[ParallelScheme]) -> str:
    """Inverse of `parse_strategy`: runs of equal schemes become one term."""
    terms = [(str(scheme), len(list(run))) for scheme, run in groupby(schemes)]
    return " + ".join(f"{count}*{name}" if count > 1 else name for name, count in terms)
