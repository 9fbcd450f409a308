"""Losses of log-probabilities and of values: made-up rollouts, every loss written out for one process, and comparisons
of loss, gradients and scores under many strategies with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import torch
import torch.nn.functional as F
from torch import Tensor

import ds_hydra
from ds_hydra.losses import DPO, GSPO, Distillation, PolicyLoss, ValueLoss, dapo, dr_grpo, grpo, ppo
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.models.adapted import NAMES_OF_PEFT
from ds_hydra.planner import PhasedPlanner, StepPlan, parse_phases
from ds_hydra.testing import float64_throughout, rank_environment, run_ranks, whole_gradients
from tests.support.families import VALUED, VOCAB, base_family, build_model, reference_model
from tests.support.planner_cases import in_slices, num_slices, recomputing
from tests.support.small_job import QUIET, shared_source
from tests.support.strict import Rules, strict_world

PER_RANK = (4, 0, 8, 2)  # sequences that each rank hands in, in pairs
PROMPT, TOP = 3, 4


def rollouts(seed: int = 0, count: int = sum(PER_RANK)) -> list[dict[str, Any]]:
    """Sequences of 6 to 60 tokens, of which one in seven is long; the first tokens of each are a prompt.

    What is said of a token stands at its own place, with numbers that nothing may read at the prompt.
    """
    draw = torch.Generator().manual_seed(seed)
    made: list[dict[str, Any]] = []
    for number in range(count):
        length = int(
            torch.randint(40, 60, (), generator=draw) if number % 7 == 2 else torch.randint(6, 20, (), generator=draw)
        )
        tokens = torch.randint(3, VOCAB, (length,), generator=draw)
        labels = tokens.clone()
        labels[:PROMPT] = IGNORED
        likely = torch.stack([torch.randperm(VOCAB, generator=draw)[:TOP] for _ in range(length)])
        told = torch.randn(length, TOP + 1, generator=draw, dtype=torch.float64).log_softmax(dim=-1)[:, :TOP]
        values = torch.randn(
            2, length, generator=torch.Generator().manual_seed(1000 * seed + number), dtype=torch.float64
        )
        made.append(
            {
                "input_ids": tokens,
                "labels": labels,
                "advantages": torch.randn(length, generator=draw, dtype=torch.float64),
                "old_log_probs": -4.6 + 0.4 * torch.randn(length, generator=draw, dtype=torch.float64),
                "reference_log_probs": -4.6 + 0.4 * torch.randn(length, generator=draw, dtype=torch.float64),
                "teacher_ids": likely,
                "teacher_log_probs": told,
                "pair": number // 2,
                "chosen": int(number % 4 in (0, 3)),
                "returns": values[0],
                "old_values": 0.5 * values[1],
                "temperature": 0.7 + 0.1 * (number % 5),
            }
        )
    return made


def values_of(model: Any, item: dict[str, Any]) -> tuple[Tensor]:
    """By plain torch, with a gradient: the value before each token, (T,); 0 before the first."""
    found = model(input_ids=item["input_ids"][None], use_cache=False).logits[0, :-1, 0].double()
    return (torch.cat((found.new_zeros(1), found)),)


def share(rank: int, made: list[dict[str, Any]], per_rank: tuple[int, ...] = PER_RANK) -> list[dict[str, Any]]:
    """What a rank hands in."""
    begin = sum(per_rank[:rank])
    return made[begin : begin + per_rank[rank]]


def scores_of(model: Any, item: dict[str, Any], *, temperature: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """By plain torch, with a gradient: log p of each token, (T,), the entropy that it is drawn from, (T,), and log p of
    all words, (T, V); zeros at the first token."""
    logits = model(input_ids=item["input_ids"][None], use_cache=False).logits[0, :-1].double()
    log_p = torch.log_softmax(logits / (item["temperature"] if temperature else 1.0), dim=-1)
    log_p = torch.cat((torch.zeros(1, log_p.shape[1], dtype=log_p.dtype), log_p))
    own = log_p.gather(-1, item["input_ids"][:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    entropy = torch.cat((torch.zeros(1, dtype=entropy.dtype), entropy[1:]))
    return own, entropy, log_p


Item = dict[str, Any]
Scores = tuple[Tensor, ...]
"""Of one sequence: log p of its tokens (T,), entropies (T,), log p of all words (T, V); or values (T,)."""


class Compared(NamedTuple):
    """A loss as it is handed to the engine, and the loss of all sequences of all ranks that it has to be."""

    loss: Any
    plain: Callable[[list[Item], list[Scores]], Tensor]
    mixes: bool | None = None
    fields: tuple[str, ...] = ()  # the columns that it is given beside the temperature


def learnt(item: Item) -> Tensor:
    """Which tokens are learnt: not the first, which nothing predicts."""
    known = item["labels"] != IGNORED
    known[0] = False
    return known


def _clipped(item: Item, scores: Scores, low: float, high: float, kl: float = 0.0, bonus: float = 0.0) -> Tensor:
    """The losses of a sequence's learnt tokens."""
    known = learnt(item)
    own, entropy = scores[0][known], scores[1][known]
    ratio = torch.exp(own - item["old_log_probs"][known])
    advantage = item["advantages"][known]
    limited = torch.where(
        ratio > 1 + high, 1 + high + 0 * ratio, torch.where(ratio < 1 - low, 1 - low + 0 * ratio, ratio)
    )
    gained = torch.where(ratio * advantage < limited * advantage, ratio * advantage, limited * advantage)
    apart = item["reference_log_probs"][known] - own
    return -gained + kl * (torch.exp(apart) - apart - 1) - bonus * entropy


def _policy(average: str, low: float = 0.2, high: float = 0.2, **more: float) -> Callable[..., Tensor]:
    def loss(items: list[Item], scores: list[Scores]) -> Tensor:
        found = [_clipped(item, one, low, high, **more) for item, one in zip(items, scores, strict=True)]
        if average == "tokens":
            return torch.cat(found).mean()
        if average == "sequences":
            return torch.stack([one.mean() for one in found]).mean()
        return torch.stack([one.sum() / 64 for one in found]).mean()

    return loss


def _gspo(items: list[Item], scores: list[Scores]) -> Tensor:
    found = []
    for item, (own, _, _) in zip(items, scores, strict=True):
        known = learnt(item)
        ratio = torch.exp((own - item["old_log_probs"])[known].mean())
        advantage = item["advantages"][known].mean()
        found.append(-torch.min(ratio * advantage, torch.clamp(ratio, 0.95, 1.05) * advantage))
    return torch.stack(found).mean()


def _dpo(kind: str, smoothing: float) -> Callable[..., Tensor]:
    def loss(items: list[Item], scores: list[Scores]) -> Tensor:
        sums = [
            (own - item["reference_log_probs"])[learnt(item)].sum()
            for item, (own, _, _) in zip(items, scores, strict=True)
        ]
        found = []
        for first in range(0, len(items), 2):
            better, worse = (first, first + 1) if items[first]["chosen"] else (first + 1, first)
            margin = sums[better] - sums[worse]
            if kind == "ipo":
                found.append((margin - 1 / (2 * 0.1)) ** 2)
            else:
                found.append((1 - smoothing) * F.softplus(-0.1 * margin) + smoothing * F.softplus(0.1 * margin))
        return torch.stack(found).mean()

    return loss


def _distilled(direction: str, tail: bool) -> Callable[..., Tensor]:
    def loss(items: list[Item], scores: list[Scores]) -> Tensor:
        found = []
        for item, (_, _, log_p) in zip(items, scores, strict=True):
            for token in learnt(item).nonzero().flatten().tolist():
                p = [log_p[token, word].exp() for word in item["teacher_ids"][token]]
                q = [torch.exp(one) for one in item["teacher_log_probs"][token]]
                if tail:
                    p, q = [*p, 1 - torch.stack(p).sum()], [*q, 1 - torch.stack(q).sum()]
                left, right = (q, p) if direction == "forward" else (p, q)
                found.append(torch.stack([a * torch.log(a / b) for a, b in zip(left, right, strict=True)]).sum())
        return torch.stack(found).mean()

    return loss


def own_mixing(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss of a user's own that mixes the tokens of a group of sequences, entropies too."""
    group = fields["pair"] - fields["pair"].min()
    sums = torch.zeros(int(group.max()) + 1, dtype=log_probs.dtype).index_add(0, group, log_probs * entropy)
    return sums[torch.bincount(group) > 0].tanh()


def _own_mixing(items: list[Item], scores: list[Scores]) -> Tensor:
    found = []
    for first in range(0, len(items), 2):
        two = zip(items[first : first + 2], scores[first : first + 2], strict=True)
        both = [(own * entropy)[learnt(item)].sum() for item, (own, entropy, _) in two]
        found.append(torch.tanh(both[0] + both[1]))
    return torch.stack(found).mean()


def own_of_tokens(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss of a user's own of tokens."""
    return (entropy * fields["advantages"]).sin() * log_probs


def _own_of_tokens(items: list[Item], scores: list[Scores]) -> Tensor:
    found = [
        (torch.sin(entropy * item["advantages"]) * own)[learnt(item)]
        for item, (own, entropy, _) in zip(items, scores, strict=True)
    ]
    return torch.cat(found).mean()


def _value_loss(clip: float | None) -> Callable[..., Tensor]:
    def loss(items: list[Item], scores: list[Scores]) -> Tensor:
        found = []
        for item, (values,) in zip(items, scores, strict=True):
            for token in learnt(item).nonzero().flatten().tolist():
                value, target, old = values[token], item["returns"][token], item["old_values"][token]
                errors = [(value - target) ** 2]
                if clip is not None:
                    errors.append((torch.min(torch.max(value, old - clip), old + clip) - target) ** 2)
                found.append(0.5 * torch.stack(errors).max())
        return torch.stack(found).mean()

    return loss


def own_of_values(values: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss of a user's own that mixes the values of a sequence."""
    errors = values * fields["returns"]
    return (
        torch.zeros(int(fields["sequence"].max()) + 1, dtype=values.dtype)
        .index_add(0, fields["sequence"], errors)
        .tanh()
    )


def _own_of_values(items: list[Item], scores: list[Scores]) -> Tensor:
    found = [
        torch.tanh((values * item["returns"])[learnt(item)].sum())
        for item, (values,) in zip(items, scores, strict=True)
    ]
    return torch.stack(found).mean()


_POLICY = ("advantages", "old_log_probs")
_KL = (*_POLICY, "reference_log_probs")
_PAIRS = ("pair", "chosen", "reference_log_probs")
_TEACHER = ("teacher_ids", "teacher_log_probs")

LOSSES: dict[str, Compared] = {
    "PPO": Compared(ppo(entropy_bonus=0.3), _policy("tokens", bonus=0.3), fields=_POLICY),
    "GRPO": Compared(grpo(kl=0.1), _policy("sequences", kl=0.1), fields=_KL),
    "Dr. GRPO": Compared(dr_grpo(64), _policy("constant"), fields=_POLICY),
    "DAPO": Compared(dapo(), _policy("tokens", 0.2, 0.28), fields=_POLICY),
    "GSPO": Compared(GSPO(0.05, 0.05), _gspo, fields=_POLICY),
    "DPO": Compared(DPO(), _dpo("sigmoid", 0.0), fields=_PAIRS),
    "DPO, smoothed": Compared(DPO(label_smoothing=0.2), _dpo("sigmoid", 0.2), fields=_PAIRS),
    "IPO": Compared(DPO(kind="ipo"), _dpo("ipo", 0.0), fields=_PAIRS),
    "distillation": Compared(Distillation(), _distilled("forward", True), fields=_TEACHER),
    "distillation, reverse": Compared(Distillation("reverse"), _distilled("reverse", True), fields=_TEACHER),
    "distillation, no tail": Compared(Distillation(tail=False), _distilled("forward", False), fields=_TEACHER),
    "own, of tokens": Compared(own_of_tokens, _own_of_tokens, fields=("advantages",)),
    "own, mixing": Compared(own_mixing, _own_mixing, mixes=True, fields=("pair",)),
    "every option": Compared(
        PolicyLoss(0.1, 0.3, kl=0.2, entropy_bonus=0.1, average="sequences"),
        _policy("sequences", 0.1, 0.3, kl=0.2, bonus=0.1),
        fields=_KL,
    ),
}

_VALUES = ("returns", "old_values")
# Of models whose head has one output.
VALUE_LOSSES: dict[str, Compared] = {
    "values": Compared(ValueLoss(), _value_loss(0.2), fields=_VALUES),
    "values, not clipped": Compared(ValueLoss(None), _value_loss(None), fields=_VALUES),
    "values, mixing": Compared(own_of_values, _own_of_values, mixes=True, fields=_VALUES),
}
ALL_LOSSES = LOSSES | VALUE_LOSSES


RANKS = 4


class Layout(NamedTuple):
    """How a part of a step runs."""

    strategy: str
    slices: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        return self.strategy + ", slices" * self.slices + ", recomputed" * self.recompute


LAYOUTS = (
    Layout("4*tp1"),
    Layout("tp2 + 2*tp1", recompute=True),
    Layout("tp4"),
    Layout("2*pp2/v"),
    Layout("sp2 + tp2"),
    Layout("tp2pp2/v", recompute=True),
    Layout("pp2/list + 2*tp1", slices=True),
    Layout("sp2pp2/list", slices=True),
    Layout("2*tp1pp2 then tp4"),
    Layout("pp4/zb-h1"),
)


class Expected(NamedTuple):
    """What one process finds."""

    loss: float
    gradients: dict[str, Tensor]


def expected(model: Any, compared: Compared, items: list[dict[str, Any]]) -> Expected:
    """The loss of all sequences by plain torch, and its gradients by name."""
    model.zero_grad()
    of = values_of if compared in VALUE_LOSSES.values() else scores_of
    loss = compared.plain(items, [of(model, item) for item in items])
    loss.backward()
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    return Expected(float(loss.detach()), {name: torch.zeros_like(one) if one.grad is None else one.grad.clone()
                                           for name, one in named.items()})  # fmt: skip


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest entry of the first."""
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-12))


class Planned:
    """The pre-step callback of a job that is told how its next part runs."""

    def __init__(self) -> None:
        self.layout, self.slices = LAYOUTS[0], 0
        self.table: Any = None  # the engine's cost table, once there is one

    def __call__(self, step: int, ids: tuple[int, ...], lengths: tuple[int, ...]) -> StepPlan:
        phases = parse_phases(self.layout.strategy)
        longest = (20, 10**6) if len(phases) > 1 else None
        plan = PhasedPlanner(self.table, phases, longest=longest).plan(step, ids, lengths)
        if self.layout.slices:
            plan = in_slices(plan, self.table)
            self.slices += num_slices(plan)
        return recomputing(plan, self.table) if self.layout.recompute else plan


def engine_of(
    rank: int,
    family: str,
    planned: Planned,
    optimizer: dict[str, Any] | None = None,
    layouts: Sequence[Layout] = LAYOUTS,
) -> Any:
    """An engine of this rank that trains on what is handed in, under any of the layouts."""
    rank_environment(rank)
    shapes = dict.fromkeys(str(shape) for one in layouts for shape in parse_phases(one.strategy))
    block = QUIET | {"tokens_per_step": 400, "context_length": 128, "strategies": list(shapes)}
    config = {"optimizer": optimizer or {"type": "AdamW"}, "gradient_clipping": 1.0, "hydra": block}
    engine = ds_hydra.initialize(model=build_model(family, torch.float64), config=config, pre_step_callback=planned)[0]
    planned.table = engine.crew.plans.table
    return engine


def picked(items: list[dict[str, Any]], compared: Compared) -> list[dict[str, Any]]:
    """The columns that a loss is given."""
    tempered = () if compared in VALUE_LOSSES.values() else ("temperature",)
    names = ("input_ids", "labels", *tempered, *compared.fields)
    return [{name: item[name] for name in names} for item in items]


class Row(NamedTuple):
    """One loss under one layout: the largest relative differences."""

    family: str
    layout: str
    loss: str
    of_loss: float
    of_gradients: float


def compare(family: str, cases: Sequence[tuple[Layout, str]], strict: Rules | None = None) -> tuple[list[Row], int]:
    """A row for each layout and loss by its name, and how many spans were no whole sequences."""
    items = rollouts()
    model = reference_model(family, torch.float64)
    with float64_throughout(model), shared_source(build_model(family, torch.float64)):
        known = {name: expected(model, ALL_LOSSES[name], items) for name in dict.fromkeys(name for _, name in cases)}

        def on_ranks(rank: int) -> tuple[list[Row], int]:
            with strict_world(strict) if strict is not None else contextlib.nullcontext():
                planned = Planned()
                engine = engine_of(rank, family, planned)
                rows = [
                    _row(engine, planned, family, layout, name, known[name], share(rank, items))
                    for layout, name in cases
                ]
                return rows, planned.slices

        return run_ranks(on_ranks, RANKS, timeout=600)[0]  # type: ignore[no-any-return]


def _row(
    engine: Any, planned: Planned, family: str, layout: Layout, name: str, known: Expected, own: list[dict[str, Any]]
) -> Row:
    planned.layout, compared = layout, ALL_LOSSES[name]
    loss = float(engine.forward_backward(picked(own, compared), compared.loss, mixes_tokens=compared.mixes))
    told, gradients = engine.steps.parts.losses[0], whole_gradients(engine)
    assert abs(loss - told) <= 1e-6 * abs(told)
    engine.zero_grad()
    if not gradients:  # of another rank than the first
        return Row(family, str(layout), name, 0.0, 0.0)
    before = "" if next(iter(known.gradients)) in gradients else NAMES_OF_PEFT
    worst = max(apart(one, gradients[name.removeprefix(before)]) for name, one in known.gradients.items())
    return Row(family, str(layout), name, abs(told - known.loss) / abs(known.loss), worst)


def scores(
    layouts: Sequence[Layout], family: str = "llama", *, adapted: bool = True, strict: Rules | None = None
) -> list[tuple[str, float, float]]:
    """For each layout how far `log_probs` are from plain torch's: log-probabilities, entropies; or how far `values`.
    Without `adapted` the adapters of the family are switched off."""
    items, valued = rollouts(), family in VALUED
    model = reference_model(family if adapted else base_family(family), torch.float64)
    with float64_throughout(model), shared_source(build_model(family, torch.float64)):
        with torch.no_grad():
            known = [(values_of if valued else scores_of)(model, item)[:2] for item in items]

        def on_ranks(rank: int) -> list[tuple[str, float, float]]:
            with contextlib.nullcontext() if strict is None else strict_world(strict):
                return on_rank(rank)

        def on_rank(rank: int) -> list[tuple[str, float, float]]:
            planned, rows = Planned(), list[tuple[str, float, float]]()
            engine = engine_of(rank, family, planned, layouts=layouts)
            own = slice(sum(PER_RANK[:rank]), sum(PER_RANK[: rank + 1]))
            for planned.layout in layouts:
                off = contextlib.nullcontext() if adapted else engine.module.disable_adapter()
                with once_by(engine, planned), off:
                    found = [engine.values(items[own])] if valued else engine.log_probs(items[own], entropy=True)
                of_ranks = [tuple(column * (item["labels"] != -100) for column in one)
                            for one, item in zip(known[own], items[own], strict=True)]  # fmt: skip
                worst = [0.0, 0.0]
                for column, tensors in enumerate(found):
                    for right, one in zip(of_ranks, tensors, strict=True):
                        worst[column] = max(worst[column], float((one - right[column]).abs().max()))
                rows.append((str(planned.layout), worst[0], worst[1]))
            return rows

        by_rank = run_ranks(on_ranks, RANKS, timeout=600)
    return [(of[0][0], max(one[1] for one in of), max(one[2] for one in of)) for of in zip(*by_rank, strict=True)]


@contextlib.contextmanager
def once_by(engine: Any, planned: Planned) -> Iterator[None]:
    """Within it, plans outside of steps are made as those of steps."""
    plans = engine.crew.plans
    plans.plan_once = lambda ids, lengths: plans.given(0, lengths)
    try:
        yield
    finally:
        del plans.plan_once


def splits(
    layouts: Sequence[Layout], names: Sequence[str] = ("PPO", "GRPO", "DPO")
) -> list[tuple[str, str, float, float]]:
    """For each layout and some losses: gradients of one call against those of three, whose parts stand on other ranks,
    with an evaluation between them, and both against one process."""
    items = rollouts()
    model = reference_model("llama", torch.float64)
    with float64_throughout(model), shared_source(build_model("llama", torch.float64)):
        known = {name: expected(model, LOSSES[name], items) for name in names}

        def on_ranks(rank: int) -> list[tuple[str, str, float, float]]:
            planned, rows = Planned(), []
            engine = engine_of(rank, "llama", planned)
            for planned.layout in layouts:
                for name in names:
                    whole = _whole(engine, share(rank, items), name)
                    parts = _in_parts(engine, rank, items, name)
                    if rank == 0:
                        by_one = max(apart(one, parts[of]) for of, one in whole.items())
                        against = max(apart(one, parts[of]) for of, one in known[name].gradients.items())
                        rows.append((str(planned.layout), name, by_one, against))
            return rows

        return run_ranks(on_ranks, RANKS, timeout=600)[0]  # type: ignore[no-any-return]


def _whole(engine: Any, own: list[dict[str, Any]], name: str) -> dict[str, Tensor]:
    engine.forward_backward(picked(own, LOSSES[name]), LOSSES[name].loss)
    found = whole_gradients(engine)
    engine.zero_grad()
    return found


def _in_parts(engine: Any, rank: int, items: list[dict[str, Any]], name: str) -> dict[str, Tensor]:
    compared = LOSSES[name]
    known = {"tokens": sum(int((one["labels"][1:] != -100).sum()) for one in items), "sequences": len(items),
             "pairs": len(items) // 2}  # fmt: skip
    normaliser = known[getattr(compared.loss, "normaliser", "pairs")]
    for part, per_rank in ((items[:6], (0, 4, 2, 0)), (items[6:8], (2, 0, 0, 0)), (items[8:], (0, 0, 2, 4))):
        engine.forward_backward(picked(share(rank, part, per_rank), compared), compared.loss, normaliser=normaliser)
        engine.log_probs([[5, 6, 7, 8]])
    found = whole_gradients(engine)
    engine.zero_grad()
    return found
