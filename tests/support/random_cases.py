"""Training cases drawn by a seed, which nobody thought of: any family of the table, strategies and options together.

Which families there are, and what is to be known of each, the table of cases says; what a model cannot be cut by, its
own plan. A draw that it refuses is drawn again, and told with its refusal.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.shape_costs import class_rows
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StageShape, StrategyShape
from ds_hydra.plan.step_plan import THEN
from ds_hydra.plan.validate import check_shape
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.case import BFLOAT16, FLOAT32, FLOAT64, OWN, Case
from tests.support.cases import APART, CASES, EIGHT, HALVES, THREE
from tests.support.equivalence import MIXED_COSTS, plan_of
from tests.support.families import BALANCED, FAMILIES, LAYER_LIST, OTHER_SIZES

_ROUTED = ("mixtral", "qwen3_moe", "gpt_oss")
_ALSO_ROUNDED = (*(name for name in FAMILIES if name not in OTHER_SIZES), LAYER_LIST)  # drawn in FP32 and BF16 too
_BY_FAMILY = {case.family: case for case in reversed(CASES)}  # the first row of each
_AMPLIFYING = {case.family for case in CASES if case.amplifies and case.dtype == FLOAT64}
_FROZEN = (("embed_tokens", "layers.0."), ("q_proj", "norm"), ("mlp",), ("layers.2.", "layers.3."))
_SCHEDULES = ("", "", "/list", "/zb-h1", "/v")
_MOST_STAGES = 4


def random_case(seed: int) -> Case:
    """One or two strategies in turn on 2 to 8 ranks, and each option with a chance of its own."""
    return drawn(seed)[0]


def drawn(seed: int) -> tuple[Case, list[str]]:
    """A case, and why its model's plan refuses what was drawn before, each reason once."""
    rng = random.Random(seed)
    row = rng.choice(list(_BY_FAMILY.values()))
    case = Case(
        f"random {seed}", row.family, (), steps=3, drawn=True, draws=row.draws, amplifies=row.family in _AMPLIFYING,
        cluster=rng.choice((HALVES, APART, THREE, EIGHT)) if rng.random() < 0.1 else (),
        frozen=(*row.frozen, *(rng.choice(_FROZEN) if rng.random() < 0.2 else ())),
        lengths=tuple(_lengths(rng)),
        tokens_per_step=rng.choice((40, 200, 400)),
        clip=rng.choice((0.0, 0.1)),
        loss_norm=rng.choice(("token", "token", "sequence", "micro_batch")),
        masked_labels=rng.random() < 0.3,
        weighted=rng.random() < 0.2,
        own_loss=rng.choice((*[""] * 12, *OWN)),
        activation_checkpointing=rng.random() < 0.25,
        recompute=rng.random() < 0.25,
        slices=rng.random() < 0.45,
        token_sharding=rng.random() < 0.7,
        sp_overlap=rng.random() < 0.8,
        sp_groups=rng.choice((8, 8, 3, 2)),
        logits_at_once=rng.choice((None, None, None, 1500)),
        functions=rng.choice(("auto", "recompute", "off")),
    )  # fmt: skip
    case = _rounded(rng, case)
    if case.family in BALANCED and case.loss_norm == "micro_batch":  # refused, by what these cases do not run
        case = replace(case, loss_norm="sequence")
    if case.family == LAYER_LIST:  # has a loss and wrapped layers of its own, and is refused with others
        case = replace(case, own_loss="", activation_checkpointing=False)
    ranks = sum(n for n, _ in case.cluster) or rng.choice((2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 5, 6, 6, 8))
    if not case.cluster:
        case = replace(case, node_size=rng.choice((None, None, 2, 3, 4)))
    draw = _Draw(rng, plan_of(case, spread=(spreads := rng.random() < 0.5)), spreads, case.cluster or ((ranks, ""),))
    if case.slices and draw.plan.no_slices:
        draw.refused.append(f"slices: {draw.plan.no_slices}")
        case = replace(case, slices=False)
    strategies = tuple(draw.strategy() for _ in range(rng.choice((1, 1, 2))))
    if rng.random() < 0.2:
        first = THEN.join(draw.strategy() for _ in range(rng.randint(1, 2)))
        strategies = (*strategies[1:], f"{first}{THEN}{strategies[0]}")
        case = replace(case, tokens_per_step=400, lengths=tuple(_few_or_many(rng)))  # some of each phase in each step
    return replace(case, strategies=strategies), list(dict.fromkeys(draw.refused))


def _rounded(rng: random.Random, case: Case) -> Case:
    """Some in FP32 and BF16. In BF16 rounding sends a token to other experts, and gradients of routers differ by a
    fifth; and a layer list's own loss is rounded to 0.4 % for each sequence."""
    if case.family not in _ALSO_ROUNDED:
        return case
    kind = rng.choice((FLOAT64, FLOAT64, FLOAT32, FLOAT32 if case.family in (*_ROUTED, LAYER_LIST) else BFLOAT16))
    if kind == FLOAT32:
        # A target of a sequence that has few of them can weigh as much as all of a long one's, and its rounding too.
        return replace(case, dtype=FLOAT32, optimizer="SGD", amplifies=min(case.lengths) < 4)
    if kind == BFLOAT16:
        return replace(case, dtype=BFLOAT16, wire=rng.choice((None, "fp32")), grad_accum=rng.choice((None, "bf16")))
    return case


def _lengths(rng: random.Random) -> list[int]:
    """Of 60 sequences: a long tail; a few tokens beside long ones; many alike."""
    kind, alike = rng.randrange(4), rng.choice((12, 16, 33, 64))
    if kind == 0:
        return _few_or_many(rng)
    if kind == 1:
        return [rng.choice((*[alike] * 5, 130)) for _ in range(60)]
    return [min(260, 2 + int(rng.lognormvariate(3, 1.2))) for _ in range(60)]


def _few_or_many(rng: random.Random) -> list[int]:
    return [rng.choice((1, 1, 2, 3, 3, rng.randint(61, 200))) for _ in range(60)]


@dataclass(frozen=True)
class _Pipeline:
    """One pipeline as text: its parts, none of them with layers if others may be put beside them."""

    parts: tuple[str, ...]
    schedule: str

    def __str__(self) -> str:
        body = self.parts[0] if len(self.parts) == 1 else f"({' > '.join(self.parts)})"
        return body + self.schedule


@dataclass
class _Draw:
    """Draws strategies that a model's plan admits, and notes what it refuses."""

    rng: random.Random
    plan: ModelPlan
    spreads: bool  # whole experts
    cluster: Sequence[tuple[int, str]]
    refused: list[str] = field(default_factory=list)

    def strategy(self) -> str:
        """Pipelines that share the ranks out."""
        while True:
            by_class: dict[str, list[_Pipeline]] = {}
            for device in dict.fromkeys(device for _, device in self.cluster):
                left = sum(ranks for ranks, other in self.cluster if other == device)
                by_class[device] = list(self._share_out(left, device))
            pipelines = [pipeline for some in by_class.values() for pipeline in some]
            ends = [some.pop() for some in by_class.values() if not any("[" in part for part in some[-1].parts)]
            if len(ends) > 1 and self.rng.random() < 0.7:  # one pipeline on devices of several classes
                whole = _Pipeline(tuple(part for end in ends for part in end.parts), ends[0].schedule)
                pipelines = [*(pipeline for some in by_class.values() for pipeline in some), whole]
            text = " + ".join(map(str, pipelines))
            if self._admits(text):
                return str(StrategyShape.parse(text))

    def _share_out(self, left: int, device: str) -> list[_Pipeline]:
        found: list[_Pipeline] = []
        while left:
            ranks = self.rng.choice((left, self.rng.randint(1, left)))
            pipeline = self._uneven(ranks) if self.rng.random() < 0.15 else self._uniform(ranks)
            at = f"@{device}" if device else ""
            pipeline = replace(pipeline, parts=tuple(part + at for part in pipeline.parts))
            if self._admits(str(pipeline)):
                found.append(pipeline)
                left -= ranks
        return found

    def _uniform(self, ranks: int) -> _Pipeline:
        pp = self.rng.choice([n for n in range(1, _MOST_STAGES + 1) if ranks % n == 0])
        return _Pipeline((f"{self._degrees(ranks // pp)}pp{pp}",), self.rng.choice(_SCHEDULES))

    def _uneven(self, ranks: int) -> _Pipeline:
        """Stages that differ in their ranks and layers."""
        of_stages = self._cut(ranks, self.rng.randint(1, min(ranks, _MOST_STAGES)))
        twice = self.rng.random() < 0.4 and 2 * len(of_stages) <= self.plan.num_layers
        count = len(of_stages) * (2 if twice else 1)
        if count > self.plan.num_layers:
            return self._uniform(ranks)
        ends = pairwise(accumulate(self._cut(self.plan.num_layers, count), initial=0))
        ranges = [f"{first}:{last}" for first, last in ends]
        held = [f"{one},{ranges[-1 - at]}" if twice else one for at, one in enumerate(ranges[: len(of_stages)])]
        parts = (f"{self._degrees(n)}[{layers}]" for n, layers in zip(of_stages, held, strict=True))
        return _Pipeline(tuple(parts), "/list" if twice else self.rng.choice(("", "/list", "/zb-h1")))

    def _degrees(self, ranks: int) -> str:
        """Of a stage."""
        tp = self.rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
        ep = self.rng.choice((1, tp, ranks)) if self.spreads else 1
        return f"tp{tp}sp{ranks // tp}ep{ep}"

    def _cut(self, total: int, count: int) -> list[int]:
        """So many parts of a number, none of them zero."""
        inner = sorted(self.rng.sample(range(1, total), count - 1))
        return [stop - start for start, stop in pairwise([0, *inner, total])]

    def _admits(self, text: str) -> bool:
        """Whether the model's plan does; the classes of devices are not its concern."""
        try:
            shape = StrategyShape.parse(text)
            check_shape(shape)
            anywhere = StrategyShape(tuple(pipeline.anywhere for pipeline in shape.pipelines))
            self.plan.check(place_strategy(anywhere, shape.num_ranks, self.plan.num_layers))
            self._check_classes(shape)
        except PlanError as error:
            self.refused.append(str(error))
            return False
        return True

    def _check_classes(self, shape: StrategyShape) -> None:
        """PlanError for a stage on devices of a class of which the made-up costs know no such stages."""
        known = class_rows(CostTable.load(MIXED_COSTS))
        for stage in (stage for pipeline in shape.pipelines for stage in pipeline.stages if stage.device):
            if StageShape(stage.tp, stage.sp, (), stage.device) not in known:
                raise PlanError(f"the costs of made-up devices know no tp{stage.tp} sp{stage.sp}")
