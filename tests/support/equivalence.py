"""Runs a case on forked ranks and in the reference; how far they are apart.

The ranks' parameters before every step, and their gradients, come back with the results: FP32 gradients are compared
from the same parameters, so that rounding of earlier steps does not count.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from ds_hydra.engine.models import model_source
from ds_hydra.pipe import head_loss, loss
from ds_hydra.pipe.dropout import sequence_key, step_key, token_keys
from ds_hydra.pipe.models.adapted import NAMES_OF_PEFT
from ds_hydra.pipe.stage import ModelSource, from_flat
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.plan.phase import THEN
from ds_hydra.planner import PhasedPlanner, Span, parse_phases, save_plans
from tests.support.case import BFLOAT16, FLOAT32, FLOAT64, SHARES, Case
from tests.support.cut_plans import in_slices, num_slices, recomputing, replaying
from tests.support.families import LAYER_LIST, build_model, reference_model, vocab_size
from tests.support.losses import OWN
from tests.support.ranks import run_ranks
from tests.support.reference import (
    IGNORED,
    Reference,
    Sample,
    Step,
    decay_groups,
    float64_throughout,
    freeze,
    token_weights,
)
from tests.support.strict import Rules
from tests.support.strict_world import strict_world

# At larger rates the tiny models soon attend to everything alike; FP32 then rounds away gradients of queries and keys.
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.01}
MOMENTS = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}
MIXED_COSTS = Path(__file__).with_name("mixed_costs.json")
_APART = 1.5  # two runs with independent roundings are about sqrt(2) times as far apart as each is from a wider type


@dataclass(frozen=True)
class RankStep:
    """One step as the ranks saw it; tensors by parameter name."""

    strategy: str
    ids: tuple[int, ...]
    microbatches: tuple[tuple[Span, ...], ...]
    before: dict[str, Tensor]  # parameters
    result: Step


@dataclass(frozen=True)
class RankRun:
    """What rank 0 brings home of a run."""

    steps: tuple[RankStep, ...]
    parameters: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    shares_tokens: bool  # whether tensor parallel ranks did, where there were any


@dataclass
class Difference:
    """The largest differences of a run, relative to the largest entry of the reference's tensor, and where."""

    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    moment: float = 0.0
    worst: dict[str, str] = field(default_factory=dict)  # what -> name of the worst tensor
    shares_tokens: bool = False  # whether tensor parallel ranks did in the run
    rounding: float = 0.0  # the largest difference of the reference's gradients from those of a wider type, if any

    def missed(self, case: Case) -> list[str]:
        """Aims of the case that are not met, in words."""
        aims = case.aims
        if aims.gradient is not None:
            aims = replace(aims, gradient=max(aims.gradient, _APART * self.rounding))
        return [
            f"{case.name}: {what} differs by {value:.1e} (aim {aim:.0e}) in {self.worst.get(what, 'all')}"
            for what in ("loss", "norm", "gradient", "parameter", "moment")
            if (aim := getattr(aims, what)) is not None and not (value := getattr(self, what)) <= aim
        ]

    def take(self, what: str, name: str, value: Tensor, reference: Tensor) -> None:
        """Note the difference of two tensors."""
        if value.shape != reference.shape:
            raise AssertionError(f"{what} {name} has shape {tuple(value.shape)}, not {tuple(reference.shape)}")
        ratio = relative(value, reference)
        if not ratio <= getattr(self, what):  # a NaN is the worst there is
            setattr(self, what, ratio)
            self.worst[what] = name


def relative(value: Tensor, reference: Tensor) -> float:
    """The largest difference of two tensors, over the reference's largest entry."""
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    apart = float((value - reference).abs().max()) if reference.numel() else 0.0
    return apart / largest if largest > 0 else (0.0 if apart == 0 else math.inf)


def samples_of(case: Case) -> list[Sample]:
    """The data of a case, without the token 0 (some models treat it as padding)."""
    random = np.random.default_rng(3)
    size = vocab_size(case.family)
    samples: list[Sample] = []
    for index, length in enumerate(case.lengths):
        tokens = torch.from_numpy(random.integers(3, size, length))
        labels = tokens.clone()
        if case.masked_labels:
            labels[: length // 3] = IGNORED
            if index % 7 == 0:
                labels[:] = IGNORED
        weight = {"sequence_weight": torch.tensor(0.5 + index % 3)} if case.weighted else {}
        samples.append({"input_ids": tokens, "labels": labels, **weight})
    return samples


def optimizer_of(case: Case) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """A case's optimizer over parameter groups."""
    if case.optimizer == "AdamW":
        return lambda groups: torch.optim.AdamW(groups, **ADAMW)  # type: ignore[arg-type]
    return lambda groups: torch.optim.SGD(groups, **SGD)  # type: ignore[arg-type]


def config_of(case: Case) -> dict[str, Any]:
    """The config a user would write for a case."""
    settings = ADAMW | {"torch_adam": True} if case.optimizer == "AdamW" else SGD
    return {
        "optimizer": {"type": case.optimizer, "params": dict(settings)},
        "gradient_clipping": case.clip,
        **({"bf16": {"enabled": True}} if case.dtype == BFLOAT16 else {}),
        **({"communication_data_type": case.wire} if case.wire else {}),
        **({"data_types": {"grad_accum_dtype": case.grad_accum}} if case.grad_accum else {}),
        "hydra": {
            "tokens_per_step": case.tokens_per_step,
            "strategies": list(dict.fromkeys(part for text in case.strategies for part in text.split(THEN))),
            "choose": "cycle",
            "loss_norm": case.loss_norm,
            "activation_checkpointing": case.activation_checkpointing,
            "fast_paths": case.options.as_paths(),
            "node_size": case.node_size,
            **(_mixed(case.cluster) if case.cluster else {}),
            "timeout_seconds": 60,
            "self_check": "off",  # these cases are the check
            "steps_file": None,
            "planner": {"ahead": 0},
        },
    }


def _mixed(cluster: Sequence[tuple[int, str]]) -> dict[str, Any]:
    nodes = [{"ranks": ranks, "device": device} for ranks, device in cluster]
    return {"cluster": nodes, "cost_table": str(MIXED_COSTS)}


def model_dtype(case: Case) -> torch.dtype:
    """Dtype of the model that the user hands over: FP32 for BF16 training."""
    return torch.float64 if case.dtype == FLOAT64 else torch.float32


def make_engine(case: Case, data: Sequence[Sample]) -> Any:
    """The engine of a case on this rank."""
    import ds_hydra

    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    model = build_model(case.family, model_dtype(case))
    freeze(model, case.frozen)
    engine, *_ = ds_hydra.initialize(
        model=model, model_parameters=decay_groups(model), training_data=data, config=config_of(case),
        loss_fn=OWN.get(case.own_loss),
    )  # fmt: skip
    if case.slices or case.recompute or any(THEN in text for text in case.strategies):
        _replay(engine, case)
    return engine


def _replay(engine: Any, case: Case) -> None:
    """Let the engine replay the plans of a case that the planner does not make: of several phases, with slices, or with
    shares of layers to compute again."""
    plans, sampler = engine.crew.plans, engine.job.sampler
    planners = []
    for text in case.strategies:
        phases = parse_phases(text)
        planners.append(PhasedPlanner(plans.table, phases, longest=SHARES[len(phases)]))
    made = [
        planners[step % len(planners)].plan(step, sampler.batch(step), sampler.batch_lengths(step))
        for step in range(case.steps)
    ]
    if any(THEN in text for text in case.strategies):
        assert any(len(plan.phases) > 1 for plan in made), "sequences are short and long"
    if case.slices:
        made = [in_slices(plan, plans.table) for plan in made]
        assert any(map(num_slices, made)), "some sequences are long"
    if case.recompute:
        made = [recomputing(plan, plans.table) for plan in made]
        assert any(pipeline.recomputes for plan in made for pipeline in plan.pipelines), "shares are drawn"
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "plans.jsonl"))
        save_plans(made, file)
        engine.crew.plans = replaying(engine, file)


def num_ranks(case: Case) -> int:
    """Ranks that a case needs."""
    return parse_phases(case.strategies[0])[0].num_ranks


def whole_gradients(engine: Any) -> dict[str, Tensor]:
    """The last step's gradients by parameter name, as the optimizer got them; on rank 0. All ranks must call it."""
    return _whole(engine, engine.crew.masters.trained.grads)


def _whole(engine: Any, source: Sequence[Tensor]) -> dict[str, Tensor]:
    flat = engine.crew.masters.trained.gather_full(engine.crew.world.links, source=source, ranks=[0])
    specs = [param for bucket in engine.job.source.plan.buckets for param in bucket.params if param.name in flat]
    return {p.name: from_flat(flat[p.name], p.shape, p.rule.dim, p.rule.parts).contiguous() for p in specs}


def train(rank: int, case: Case, data: Sequence[Sample], strict: Rules | None = None) -> RankRun | None:
    """One rank's whole run, under a strict transport with these rules; rank 0 returns what is compared."""
    with contextlib.nullcontext() if strict is None else strict_world(strict), _in_blocks(case.logits_at_once):
        return _train(rank, case, data)


@contextlib.contextmanager
def _in_blocks(logits_at_once: int | None) -> Iterator[None]:
    """Within it, heads compute so many logits at once."""
    if logits_at_once is None:
        yield
        return
    with (
        mock.patch.object(loss, "LOGITS_AT_ONCE", logits_at_once),
        mock.patch.object(head_loss, "HEAD_LOGITS_AT_ONCE", logits_at_once),
        mock.patch.object(head_loss, "LOGITS_AT_ONCE", logits_at_once // 3),
    ):
        yield


def _train(rank: int, case: Case, data: Sequence[Sample]) -> RankRun | None:
    from ds_hydra.planner import StepPlan

    engine = make_engine(case, data)
    steps: list[RankStep] = []
    for _ in range(case.steps):
        before = _whole(engine, engine.crew.masters.trained.shards)
        engine.train_batch()
        record = engine.last_step
        plan = StepPlan.from_json(record.plan, "the step's plan")
        microbatches = tuple(batch.spans for pipeline in plan.pipelines for batch in pipeline.microbatches)
        result = Step(record.loss, record.grad_norm, whole_gradients(engine), record.router_loss)
        steps.append(RankStep(plan.strategy, plan.sequence_ids, microbatches, before, result))
    masters, optimizer = engine.crew.masters.trained, engine.optimizer
    moments = {key: _whole(engine, masters.optimizer_state(optimizer, key)) for key in MOMENTS[case.optimizer]}
    parameters = {name.removeprefix(NAMES_OF_PEFT): value for name, value in engine.fp32_state_dict().items()}
    assert not any(torch.isnan(value).any() for value in parameters.values()), "parameters are finite"
    shares = case.has_tp and engine.job.source.plan.token_sharding
    return RankRun(tuple(steps), parameters, moments, shares) if rank == 0 else None


@contextlib.contextmanager
def traced_once(case: Case) -> Iterator[None]:
    """Ranks that are forked meanwhile share one source of stages: to trace the model takes each of them half its time,
    and all find the same."""
    from ds_hydra.engine.engine import HydraEngine

    if case.family == LAYER_LIST:  # DeepSpeed makes one within a process group only
        yield
        return
    options = case.options
    source = _source(case.family, model_dtype(case), case.frozen, options, case.own_loss)
    with mock.patch.object(HydraEngine, "source_of", return_value=source):
        yield


@functools.cache
def _source(
    family: str, dtype: torch.dtype, frozen: tuple[str, ...], options: StageOptions, own_loss: str
) -> ModelSource:
    """The source of all cases with this model and these settings: ranks change copies of their own."""
    model = build_model(family, dtype)
    freeze(model, frozen)
    source = model_source(model, options, loss_fn=OWN.get(own_loss))
    source.overlap = source.overlap._replace(least_tokens=0)
    return source


def compare(case: Case, timeout: float = 120, strict: Rules | None = None) -> Difference:
    """Train a case on ranks, as `train`, and in the reference, and compare all there is to compare."""
    data = samples_of(case)
    exact = contextlib.nullcontext()
    if case.dtype == FLOAT64:
        exact = float64_throughout(reference_model(case.family, torch.float64))  # type: ignore[assignment]
    with exact, traced_once(case):
        run: RankRun = run_ranks(train, num_ranks(case), case, data, strict, timeout=timeout)[0]
        return difference(case, data, run)


def difference(case: Case, data: Sequence[Sample], run: RankRun) -> Difference:
    """A run's largest differences from the reference's run over the same steps."""
    found = Difference(shares_tokens=run.shares_tokens)
    reference = _reference(case)
    initial = {name: parameter.detach() for name, parameter in reference.masters.items()}
    _take_all(found, "parameter", run.steps[0].before, initial)
    follow = (
        _reference(case) if case.dtype != FLOAT64 or case.amplifies else None
    )  # takes the ranks' parameters before each step
    wider = {BFLOAT16: FLOAT32, FLOAT32: FLOAT64 if case.amplifies else None}.get(case.dtype)
    exact = _reference(replace(case, dtype=wider)) if wider and case.aims.gradient else None
    for number, step in enumerate(run.steps, start=1):
        samples = [data[i] for i in step.ids]
        weights = token_weights(samples, step.microbatches, case.loss_norm)
        if case.weighted:
            weights = [weight * float(s["sequence_weight"]) for weight, s in zip(weights, samples, strict=True)]
        keys = _token_keys(number, step.ids, samples) if case.draws else None
        expected = reference.step(samples, weights, keys)
        if follow is not None:
            follow.load(step.before)
            expected = follow.gradients(samples, weights, keys)
        if exact is not None:
            own = torch.bfloat16 if case.dtype == BFLOAT16 else torch.float32
            exact.load({name: value.to(own).to(getattr(torch, str(wider))) for name, value in step.before.items()})
            unrounded = exact.gradients(samples, weights, keys).gradients
            apart = (relative(value, unrounded[name]) for name, value in expected.gradients.items())
            found.rounding = max(found.rounding, *apart)
        _take_step(found, step, expected)
    whole = reference.masters is reference.parameters
    state = dict(reference.model.named_parameters(remove_duplicate=False) if whole else reference.masters)
    _take_all(found, "parameter", {name: run.parameters[name] for name in state}, state)
    for key, values in run.moments.items():
        _take_all(found, "moment", values, reference.moments(key))
    return found


def _token_keys(step: int, ids: Sequence[int], samples: Sequence[Sample]) -> list[Tensor]:
    """What the random numbers of each sample follow from in a step of a job with the seed 0."""
    key = step_key(0, step)
    return [
        token_keys([len(sample["input_ids"])], [sequence_key(key, number)])
        for number, sample in zip(ids, samples, strict=True)
    ]


def _take_step(found: Difference, step: RankStep, expected: Step) -> None:
    wide = torch.float64
    for what, value, reference in (
        ("loss", step.result.loss, expected.loss),
        ("loss", step.result.router_loss, expected.router_loss),
        ("norm", step.result.norm, expected.norm),
    ):
        found.take(what, step.strategy, torch.tensor(value, dtype=wide), torch.tensor(reference, dtype=wide))
    _take_all(found, "gradient", step.result.gradients, expected.gradients)


def _take_all(found: Difference, what: str, values: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
    if set(values) != set(reference):
        raise AssertionError(f"{what}s of {sorted(set(values) ^ set(reference))} are on one side only")
    for name, value in values.items():
        found.take(what, name, value.double(), reference[name].detach().double())


def _reference(case: Case) -> Reference:
    compute = {FLOAT64: torch.float64, FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}[case.dtype]
    return Reference(
        case.family, compute, optimizer_of(case), clip=case.clip, frozen=case.frozen, masters=model_dtype(case),
        token_loss=OWN.get(case.own_loss),
    )  # fmt: skip
