"""Runs a case on forked ranks and in the reference, of the same config and values; how far they are apart."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from ds_hydra import testing
from ds_hydra.engine import job as jobs
from ds_hydra.engine import prepare
from ds_hydra.engine.job import model_source
from ds_hydra.pipe import loss, recomputed
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.experts import for_strategies, spreading_experts
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.plan.step_plan import THEN
from ds_hydra.planner import PhasedPlanner, PlannerOptions, parse_phases, save_plans
from ds_hydra.step import host_states
from ds_hydra.testing import Difference, OneProcess, RankRun, Sample, float64_throughout, note_training, run_ranks
from tests.support.case import BFLOAT16, FLOAT32, FLOAT64, OWN, SHARES, Case
from tests.support.families import LAYER_LIST, build_model, reference_model, vocab_size
from tests.support.planner_cases import in_slices, num_slices, recomputing, replaying
from tests.support.strict import Rules, strict_world

# At larger rates the tiny models soon attend to everything alike; FP32 then rounds away gradients of queries and keys.
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.01}
MOMENTS = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}
# Optimizers of capabilities by the name that a case has: their block of a config, and the same of a model; without a
# block the engine is given that one.
OTHERS: dict[str, tuple[dict[str, Any] | None, Callable[[nn.Module], torch.optim.Optimizer]]] = {}
MIXED_COSTS = Path(__file__).with_name("mixed_costs.json")


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


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two parameter groups: no weight decay for norms and biases."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


def freeze(model: nn.Module, words: Sequence[str]) -> None:
    """No gradient for the parameters whose name holds one of `words`."""
    for name, parameter in model.named_parameters():
        if any(word in name for word in words):
            parameter.requires_grad_(False)


def optimizer_of(case: Case) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """A case's optimizer of a model."""
    if case.optimizer in OTHERS:
        return OTHERS[case.optimizer][1]
    if case.optimizer == "AdamW":
        return lambda model: torch.optim.AdamW(decay_groups(model), **ADAMW)  # type: ignore[arg-type]
    return lambda model: torch.optim.SGD(decay_groups(model), **SGD)  # type: ignore[arg-type]


def config_of(case: Case) -> dict[str, Any]:
    """The config a user would write for a case."""
    settings = ADAMW | {"torch_adam": True} if case.optimizer == "AdamW" else SGD
    plain = {"type": case.optimizer, "params": dict(settings)}
    block = OTHERS[case.optimizer][0] if case.optimizer in OTHERS else plain
    return {
        **({"optimizer": block} if block else {}),
        "gradient_clipping": case.clip,
        **({"bf16": {"enabled": True}} if case.dtype == BFLOAT16 else {}),
        **({"communication_data_type": case.wire} if case.wire else {}),
        **({"data_types": {"grad_accum_dtype": case.grad_accum}} if case.grad_accum else {}),
        "hydra": {
            "tokens_per_step": case.tokens_per_step,
            "strategies": list(dict.fromkeys(part for text in case.strategies for part in text.split(THEN))),
            "choose": "cycle",
            "loss_norm": case.loss_norm,
            "activation_checkpointing": _recomputed(case),
            "fast_paths": case.options.as_paths(),
            "offload": ["activations"] * case.fetched + ["optimizer"] * (case.run > 0),
            "node_size": case.node_size,
            **(_mixed(case.cluster) if case.cluster else {}),
            "timeout_seconds": 150,  # under the strict transport some ranks are that far behind
            "self_check": "off",  # these cases are the check
            "steps_file": None,
            "planner": {"ahead": 0},
        },
    }


def _recomputed(case: Case) -> str | bool:
    return "keep_attention" if case.attention_kept else "all" if case.activation_checkpointing else False


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
    given = optimizer_of(case)(model) if case.optimizer in OTHERS and OTHERS[case.optimizer][0] is None else None
    engine, *_ = ds_hydra.initialize(
        model=model, model_parameters=decay_groups(model), training_data=data, config=config_of(case),
        loss_fn=OWN.get(case.own_loss), optimizer=given,
    )  # fmt: skip
    assert engine.crew.masters.trained.on_host == (case.run > 0)
    assert any(one.owners for one in engine.crew.masters.buckets) == bool(case.owned_by)
    if case.slices or case.recompute or any(THEN in text for text in case.strategies):
        _replay(engine, case)
    return engine


def _replay(engine: Any, case: Case) -> None:
    """Let the engine replay the plans of a case that the planner does not make: of several phases, with slices, or with
    shares of layers to compute again."""
    plans, sampler = engine.crew.plans, engine.job.sampler
    planners, options = [], PlannerOptions(no_slices=engine.job.source.plan.no_slices)
    for text in case.strategies:
        phases = parse_phases(text)
        planners.append(PhasedPlanner(plans.table, phases, options, longest=SHARES[len(phases)]))
    made = [
        planners[step % len(planners)].plan(step, sampler.batch(step), sampler.batch_lengths(step))
        for step in range(case.steps)
    ]
    if any(THEN in text for text in case.strategies):
        assert case.drawn or any(len(plan.phases) > 1 for plan in made), "sequences are short and long"
    if case.slices:
        made = [in_slices(plan, plans.table) for plan in made]
        assert case.drawn or any(map(num_slices, made)), "some sequences are long"
    if case.recompute:
        made = [recomputing(plan, plans.table) for plan in made]
        shares = any(pipeline.recomputes for plan in made for pipeline in plan.pipelines)
        assert case.drawn or shares, "shares are drawn"
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "plans.jsonl"))
        save_plans(made, file)
        engine.crew.plans = replaying(engine, file)


def num_ranks(case: Case) -> int:
    """Ranks that a case needs."""
    return parse_phases(case.strategies[0])[0].num_ranks


def train(rank: int, case: Case, data: Sequence[Sample], strict: Rules | None = None) -> RankRun | None:
    """One rank's whole run, under a strict transport with these rules; rank 0 returns what is compared."""
    with contextlib.nullcontext() if strict is None else strict_world(strict), _in_blocks(case):
        run = note_training(make_engine(case, data), case.steps, MOMENTS.get(case.optimizer, ()))
        shares = case.has_tp and run.shares_tokens
        return replace(run, shares_tokens=shares) if rank == 0 else None


@contextlib.contextmanager
def _in_blocks(case: Case) -> Iterator[None]:
    """Within it, heads compute so many logits at once, MLPs so many rows, updates so many elements, and the case's
    strategy tells who owns which masters."""
    logits_at_once = case.logits_at_once
    run = mock.patch.object(host_states, "RUN", case.run or host_states.RUN)
    owners = StrategyShape.parse(case.owned_by) if case.owned_by else None
    chosen = mock.patch.object(prepare, "_owners_by", return_value=owners)
    with run, chosen, recomputed.of_rows(case.tile_rows or recomputed.TILE_ROWS):
        if logits_at_once is None:
            yield
            return
        with _logits(logits_at_once):
            yield


@contextlib.contextmanager
def _logits(logits_at_once: int) -> Iterator[None]:
    with (
        mock.patch.object(loss, "LOGITS_AT_ONCE", logits_at_once),
        mock.patch.object(loss, "HEAD_LOGITS_AT_ONCE", logits_at_once),
        mock.patch.object(loss, "LOGITS_AT_ONCE", logits_at_once // 3),
    ):
        yield


@contextlib.contextmanager
def traced_once(case: Case) -> Iterator[None]:
    """Ranks that are forked meanwhile share one source of stages: to trace the model takes each of them half its time,
    and all find the same."""
    from ds_hydra.engine.engine import HydraEngine

    if case.family == LAYER_LIST:  # DeepSpeed makes one within a process group only
        yield
        return
    texts = [part for text in case.strategies for part in text.split(THEN)]
    source = for_strategies(source_of(case), map(StrategyShape.parse, texts))
    nameless = mock.patch.object(jobs, "fingerprint", return_value=None)  # none tells another of it
    with mock.patch.object(HydraEngine, "source_of", return_value=source), nameless:
        yield


def source_of(case: Case) -> CausalLM:
    """Where the stages of a case come from, whose experts are cut by width; not of a layer list."""
    with exactly(case):
        source = _source(case.family, model_dtype(case), case.frozen, case.options, case.own_loss, case.sp_groups)
    assert isinstance(source, CausalLM), "all others are"
    return source


def plan_of(case: Case, *, spread: bool) -> ModelPlan:
    """What a case's model can be cut by; with experts that are spread as whole ones, if it is to spread them."""
    if case.family == LAYER_LIST:  # DeepSpeed makes one within a process group only
        plan: ModelPlan = run_ranks(
            lambda _: model_source(build_model(LAYER_LIST, torch.float64), case.options).plan, 1
        )[0]
        return plan
    source = source_of(case)
    return (spreading_experts(source) if spread else source).plan


@functools.cache
def _source(
    family: str, dtype: torch.dtype, frozen: tuple[str, ...], options: StageOptions, own_loss: str, groups: int
) -> ModelSource:
    """The source of all cases with this model and these settings: ranks change copies of their own."""
    model = build_model(family, dtype)
    freeze(model, frozen)
    source = model_source(model, options, loss_fn=OWN.get(own_loss))
    source.overlap = source.overlap._replace(groups=min(groups, source.overlap.groups), least_tokens=0)
    return source


def exactly(case: Case) -> contextlib.AbstractContextManager[None]:
    """Within it, an FP64 case computes in FP64 what its model's code computes in FP32."""
    if case.dtype != FLOAT64:
        return contextlib.nullcontext()
    return float64_throughout(reference_model(case.family, torch.float64))


def compare(case: Case, timeout: float = 120, strict: Rules | None = None) -> Difference:
    """Train a case on ranks, as `train`, and in the reference, and compare all there is to compare."""
    data = samples_of(case)
    with exactly(case), traced_once(case):
        run: RankRun = run_ranks(train, num_ranks(case), case, data, strict, timeout=timeout)[0]
        return difference(case, data, run)


def difference(case: Case, data: Sequence[Sample], run: RankRun) -> Difference:
    """A run's largest differences from the reference's run over the same steps."""
    follow = _reference(case) if case.dtype != FLOAT64 or case.amplifies else None
    wider = {BFLOAT16: FLOAT32, FLOAT32: FLOAT64 if case.amplifies else None}.get(case.dtype)
    exact = _reference(replace(case, dtype=wider)) if wider and case.aims.gradient else None
    return testing.difference(
        run, data, _reference(case), loss_norm=case.loss_norm, seed=0 if case.draws else None, follow=follow,
        exact=exact,
    )  # fmt: skip


def _reference(case: Case) -> OneProcess:
    compute = {FLOAT64: torch.float64, FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}[case.dtype]
    model, masters = reference_model(case.family, compute), None
    if model_dtype(case) != compute:
        masters = reference_model(case.family, model_dtype(case))
        freeze(masters, case.frozen)
    freeze(model, case.frozen)
    return OneProcess(model, optimizer_of(case), clip=case.clip, masters=masters, token_loss=OWN.get(case.own_loss))
