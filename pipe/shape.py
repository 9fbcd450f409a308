"""What stages, pipelines and strategies look like, as values and as text; nothing here names a rank. Pure: no torch.

[Note: text of a strategy]
`tp4 + 2*tp2pp4` is one pipeline of a single stage with tp=4, and two pipelines of four stages with tp=2 each:

    strategy := term {"+" term}
    term     := [count "*"] pipeline ["/" schedule]
    pipeline := part | "(" part {">" part} ")"
    part     := degrees ["[" range {"," range} "]"] ["@" device]
    degrees  := any of "tpN", "ppN", "spN", "epN", each at most once, at least one of them
    range    := first ":" last                               layers first to last - 1, as in a Python slice
    schedule, device := letters, digits, "_", "." and "-"

A part `tp2pp3` is three stages with tp=2; a part that says which layers it holds is one stage. Either all stages of a
pipeline say so or none does, and then the layers are split evenly. Pipelines without a schedule run 1F1B. Spaces and
capitals do not matter. In `tp4ep4` each of four ranks holds a quarter of the experts, whole ones, in place of a quarter
of every expert's width; in `tp2sp4ep8` all eight ranks of the stage share them. Three pipelines that are not uniform,
each over four ranks:

    (sp2[0:1] > tp2[1:4])               stage 0 holds layer 0 with sp=2, stage 1 layers 1, 2 and 3 with tp=2
    (tp2[0:2,6:8] > tp2[2:4,4:6])/list  a V [Note: virtual stages]: stage 0 holds both ends of eight layers
    (tp2@h100 > pp2@l40)                one stage on two H100, then two stages on an L40 each

The schedule "v" makes a V of stages that do not say which layers they hold: tp2pp2/v is the second pipeline above, in
any model, and runs by the list order as that one does.

What is printed reads back as the same value, and prints the same again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from ds_hydra.pipe.schedules.registry import NAME, ranges_of
from ds_hydra.zero_hetero.errors import PlanError

DEFAULT_SCHEDULE = "1f1b"
V_SCHEDULE = "v"

_TERM = re.compile(rf"(?:(?P<count>\d+)\*)?(?P<pipeline>[^*/]+(?:/{NAME})?)")
_PART = re.compile(
    rf"(?P<degrees>(?:(?:tp|pp|sp|ep)\d+)+)(?:\[(?P<layers>\d+:\d+(?:,\d+:\d+)*)\])?(?:@(?P<device>{NAME}))?"
)
_GRAMMAR = (
    "a term is [count*] and then any of tpN, ppN, spN, epN, each once, e.g. 'tp4 + 2*tp1pp2 + sp2'; stages that differ "
    "are written '(sp2[0:1] > tp2[1:4])'"
)
_DATA_PARALLEL = re.compile(r"dp(?P<degree>\d+)(?P<rest>[a-z0-9]*)")


@dataclass(frozen=True, order=True, slots=True)
class ParallelScheme:
    """Shape <TP, PP, SP> of one pipeline whose stages are all alike (Hydraulis, section 2; SP is its CP), and among how
    many ranks of a stage whole experts are spread."""

    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.sp, self.ep) < 1:
            raise PlanError(
                f"scheme tp={self.tp} pp={self.pp} sp={self.sp} ep={self.ep}: every degree must be at least 1"
            )
        _check_ep(self.tp, self.sp, self.ep)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.sp

    @classmethod
    def parse(cls, text: str) -> ParallelScheme:
        """The scheme named by a text such as "tp2pp4"; PlanError for any other text."""
        scheme = PipelineShape.parse(text).scheme
        if scheme is None:
            raise PlanError(f"{text!r} names a pipeline that is not uniform where a scheme such as 'tp2pp4' is due")
        return scheme

    def __str__(self) -> str:
        named = (("tp", self.tp), ("pp", self.pp), ("sp", self.sp), ("ep", self.ep))
        return "".join(f"{name}{n}" for name, n in named if n > 1) or "tp1"


def _check_ep(tp: int, sp: int, ep: int) -> None:
    if ep not in (1, tp, tp * sp):
        some = ", ".join(str(n) for n in sorted({1, tp, tp * sp}))
        raise PlanError(
            f"ep={ep} beside tp={tp} and sp={sp}: a stage spreads whole experts over its tensor parallel ranks, or "
            f"over all of its ranks, so ep is one of {some} here"
        )


class LayerRange(NamedTuple):
    """Layers first, first + 1, ..., last - 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


@dataclass(frozen=True, slots=True)
class StageShape:
    """Degrees of one stage, the layers it holds, and the class of device that it needs.

    No layers: the pipeline's are split evenly over its stages. Two ranges: the rank holds both (the V shape holds
    one from each end of the model). No device: any will do.
    """

    tp: int = 1
    sp: int = 1
    layers: tuple[LayerRange, ...] = ()
    device: str = ""
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.sp, self.ep) < 1:
            raise PlanError(f"stage tp={self.tp} sp={self.sp} ep={self.ep}: every degree must be at least 1")
        _check_ep(self.tp, self.sp, self.ep)
        edges = [edge for layers in self.layers for edge in layers]
        # A range may begin where the one before it ends, but must not be empty.
        if any(first >= last for first, last in self.layers) or edges != sorted(edges) or min(edges, default=0) < 0:
            listed = ", ".join(map(str, self.layers))
            raise PlanError(f"stage with layers {listed}: each range first:last needs first < last, in rising order")
        if self.device and not re.fullmatch(NAME, self.device):
            raise PlanError(f"device class {self.device!r}: use lower-case letters, digits, '_', '.' and '-'")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.sp


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """The stages of one pipeline, in the order of the ranks, and the name of the schedule they run.

    `scheme` is the uniform shape that it is, if it is one that says no more than its degrees; else None.
    """

    stages: tuple[StageShape, ...]
    schedule: str = DEFAULT_SCHEDULE
    scheme: ParallelScheme | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("a pipeline needs at least one stage but has none")
        if not re.fullmatch(NAME, self.schedule):
            raise PlanError(f"schedule {self.schedule!r}: use lower-case letters, digits, '_', '.' and '-'")
        first, plain = self.stages[0], self.schedule == DEFAULT_SCHEDULE
        # Stages made from one scheme are one object, and `count` then compares no field.
        uniform = plain and not first.layers and not first.device and self.stages.count(first) == len(self.stages)
        scheme = ParallelScheme(first.tp, len(self.stages), first.sp, first.ep) if uniform else None
        object.__setattr__(self, "scheme", scheme)
        self._check_layers()

    def _check_layers(self) -> None:
        ranges = sorted(layers for stage in self.stages for layers in stage.layers)
        if not ranges:
            return
        if not all(stage.layers for stage in self.stages):
            raise PlanError(f"pipeline {self}: either every stage says which layers it holds, or none does")
        ends = [0, *(layers.last for layers in ranges)]
        if [layers.first for layers in ranges] != ends[:-1]:
            raise PlanError(f"pipeline {self}: its stages must hold layers 0:{ends[-1]} once each")

    @staticmethod
    def of(scheme: ParallelScheme) -> PipelineShape:
        """The pipeline of a uniform scheme."""
        return _uniform(scheme)

    @classmethod
    def parse(cls, text: str) -> PipelineShape:
        """The one pipeline that a text names; PlanError when it names more, or cannot be read."""
        pipelines = StrategyShape.parse(text).pipelines
        if len(pipelines) != 1:
            raise PlanError(f"{text!r} names {len(pipelines)} pipelines where one is due")
        return pipelines[0]

    @property
    def num_ranks(self) -> int:
        return sum(stage.num_ranks for stage in self.stages)

    @property
    def pp(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def parts(self) -> int:
        """Ranges of layers that each stage holds: 1, or 2 for a V [Note: virtual stages]. PlanError for others."""
        counts = {len(stage.layers) for stage in self.stages}
        if counts == {0}:
            return ranges_of(self.schedule)
        if counts == {1} and ranges_of(self.schedule) == 1:
            return 1
        first = [stage.layers[0] for stage in self.stages]
        last = [stage.layers[-1] for stage in reversed(self.stages)]
        if counts != {2} or [*first, *last] != sorted([*first, *last]):
            raise PlanError(
                f"pipeline {self}: where a stage holds several ranges of layers or the schedule is a V's, all "
                "must hold two and make a V: the first ranges from the first stage to the last, and the second ones "
                "back again"
            )
        return 2

    @property
    def cost_key(self) -> ParallelScheme | PipelineShape:
        """What a cost table keeps its costs by: the uniform scheme, or else the shape, whatever its schedule."""
        # A micro-batch costs a stage the same under any schedule.
        return self.scheme or (
            self if self.schedule == DEFAULT_SCHEDULE else _by_default_schedule(self.stages).cost_key
        )

    @property
    def anywhere(self) -> PipelineShape:
        """The same on devices of any class."""
        if not any(stage.device for stage in self.stages):
            return self
        return replace(self, stages=tuple(replace(stage, device="") for stage in self.stages))

    @property
    def num_layers(self) -> int | None:
        """Layers of the model that it was made for; None when it can be any number."""
        return max((layers.last for stage in self.stages for layers in stage.layers), default=None)

    def __str__(self) -> str:
        if self.scheme is not None:
            return str(self.scheme)
        parts = [_print_part(stage, len(list(run))) for stage, run in groupby(self.stages)]
        text = parts[0] if len(parts) == 1 else f"({' > '.join(parts)})"
        return text if self.schedule == DEFAULT_SCHEDULE else f"{text}/{self.schedule}"


@lru_cache(maxsize=1024)
def _uniform(scheme: ParallelScheme) -> PipelineShape:
    return PipelineShape((StageShape(scheme.tp, scheme.sp, ep=scheme.ep),) * scheme.pp)


_by_default_schedule = lru_cache(maxsize=1024)(PipelineShape)


def _print_part(stage: StageShape, count: int) -> str:
    layers = f"[{','.join(map(str, stage.layers))}]" if stage.layers else ""
    device = f"@{stage.device}" if stage.device else ""
    return f"{ParallelScheme(stage.tp, count, stage.sp, stage.ep)}{layers}{device}"


@dataclass(frozen=True, slots=True)
class StrategyShape:
    """The pipelines that share all ranks, in rank order. Read one from text with `parse` [Note: text of a strategy]."""

    pipelines: tuple[PipelineShape, ...]

    @classmethod
    def of(cls, schemes: Iterable[ParallelScheme]) -> StrategyShape:
        """One uniform pipeline for each scheme, in the order given."""
        return cls(tuple(_uniform(scheme) for scheme in schemes))

    @classmethod
    def parse(cls, text: str) -> StrategyShape:
        """A text such as "tp4 + 2*tp1pp2 + sp2" in, one pipeline for each that it names, in its order, out.

        Raises PlanError that shows the term that cannot be read.
        """
        pipelines: list[PipelineShape] = []
        for term in text.replace(" ", "").lower().split("+"):
            match = _TERM.fullmatch(term)
            shape = _parse_pipeline(match["pipeline"]) if match else None
            if match is None or shape is None:
                raise PlanError(f"cannot read the term {term!r} of strategy {text!r}: {_hint(term)}{_GRAMMAR}")
            count = int(match["count"] or 1)
            if count < 1:
                raise PlanError(
                    f"the term {term!r} of strategy {text!r} asks for no pipeline: count must be at least 1"
                )
            pipelines += [shape] * count
        return cls(tuple(pipelines))

    @property
    def num_ranks(self) -> int:
        return sum(pipeline.num_ranks for pipeline in self.pipelines)

    @property
    def devices(self) -> frozenset[str]:
        """The classes of devices that stages ask for."""
        return frozenset(stage.device for pipeline in self.pipelines for stage in pipeline.stages if stage.device)

    def __str__(self) -> str:
        """Runs of equal pipelines become one term."""
        terms = [(str(pipeline), len(list(run))) for pipeline, run in groupby(self.pipelines)]
        return " + ".join(f"{count}*{name}" if count > 1 else name for name, count in terms)


def _hint(term: str) -> str:
    """What was probably meant by a term that has data parallelism as a degree; "" for others."""
    count, _, pipeline = term.rpartition("*")
    found = _DATA_PARALLEL.search(pipeline)
    if found is None or not (count or "1").isdigit():
        return ""
    rest = pipeline[: found.start()] + found["rest"] or "tp1"
    return f"data parallelism is a count of pipelines, here '{int(found['degree']) * int(count or 1)}*{rest}'; "


def _parse_pipeline(text: str) -> PipelineShape | None:
    """A pipeline of a strategy's text without spaces; None when it does not follow the grammar."""
    body, _, schedule = text.partition("/")
    parts = body[1:-1].split(">") if body[:1] == "(" and body[-1:] == ")" else [body]
    stages: list[StageShape] = []
    for part in parts:
        read = list(_parse_part(part))
        if not read:
            return None
        stages += read
    return PipelineShape(tuple(stages), schedule or DEFAULT_SCHEDULE)


def _parse_part(text: str) -> Iterator[StageShape]:
    """The stages that a part stands for; none when it does not follow the grammar."""
    match = _PART.fullmatch(text)
    degrees = re.findall(r"(tp|pp|sp|ep)(\d+)", match["degrees"]) if match else []
    if match is None or len(dict(degrees)) != len(degrees):
        return
    scheme = ParallelScheme(**{name: int(n) for name, n in degrees})
    pairs = [pair.split(":") for pair in match["layers"].split(",")] if match["layers"] else []
    if pairs and scheme.pp > 1:
        return
    layers = tuple(LayerRange(int(first), int(last)) for first, last in pairs)
    stage = StageShape(scheme.tp, scheme.sp, layers, match["device"] or "", scheme.ep)
    for _ in range(scheme.pp):
        yield stage
