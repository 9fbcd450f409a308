"""A run on ranks beside the same steps in one process: how far they are apart.

The ranks' parameters before every step, and their gradients, come back with the results, so that a step's gradients can
be compared from the same parameters: rounding of earlier steps then does not count.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.dropout import sequence_key, step_key, token_keys
from ds_hydra.pipe.loss import TokenLoss
from ds_hydra.pipe.models.adapted import NAMES_OF_PEFT, base_of
from ds_hydra.pipe.stage import from_flat
from ds_hydra.plan.step_plan import Span, StepPlan
from ds_hydra.ranks.forked import rank_environment, run_ranks
from ds_hydra.testing.one_process import OneProcess, Sample, Step, float64_throughout, token_weights
from ds_hydra.zero_hetero.errors import ConfigError

_ROUNDING = 2.0**-44  # of FP64, and some more: sums of many entries
_APART = 1.5  # two runs with independent roundings are about sqrt(2) times as far apart as each is from a wider type
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Aims:
    """Largest difference allowed, relative to the largest entry of the reference's tensor; None: not judged.

    The defaults are those of FP64. In FP32 losses agree to 1e-6 and gradients to 1e-5; parameters do where an update is
    linear in the gradient (SGD), while Adam magnifies rounding where a gradient is near zero.
    """

    loss: float = 1e-9
    norm: float = 1e-9
    gradient: float | None = 1e-9
    parameter: float | None = 1e-9
    moment: float | None = 1e-9


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
    shares_tokens: bool  # whether tensor parallel ranks did


@dataclass
class Difference:
    """Largest differences of a run, relative to the largest entry of the reference's tensor, and where."""

    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    moment: float = 0.0
    worst: dict[str, str] = field(default_factory=dict)  # what -> name of the worst tensor
    shares_tokens: bool = False  # whether tensor parallel ranks did in the run
    rounding: float = 0.0  # the largest difference of the reference's gradients from those of a wider type, if any

    def missed(self, aims: Aims, name: str = "run") -> list[str]:
        """Aims that are not met, in words; gradients may be apart by as much as the reference itself rounds."""
        least = {"gradient": _APART * self.rounding}
        return [
            f"{name}: {what} differs by {value:.1e} (aim {aim:.0e}) in {self.worst.get(what, 'all')}"
            for what in ("loss", "norm", "gradient", "parameter", "moment")
            if (given := getattr(aims, what)) is not None
            and not (value := getattr(self, what)) <= (aim := max(given, least.get(what, 0.0)))
        ]

    def take(self, what: str, name: str, value: Tensor, reference: Tensor, of_all: float = 0.0) -> None:
        """Note the difference of two tensors; `of_all` as for `relative`."""
        if value.shape != reference.shape:
            raise AssertionError(f"{what} {name} has shape {tuple(value.shape)}, not {tuple(reference.shape)}")
        ratio = relative(value, reference, of_all)
        if not ratio <= getattr(self, what):  # a NaN is the worst there is
            setattr(self, what, ratio)
            self.worst[what] = name


def relative(value: Tensor, reference: Tensor, of_all: float = 0.0) -> float:
    """The largest difference of two tensors, over the reference's largest entry.

    Over `of_all` where that entry is but the rounding of it: where each token sees itself alone, queries and keys have
    no gradients.
    """
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    largest = of_all if largest < _ROUNDING * of_all else largest
    apart = float((value - reference).abs().max()) if reference.numel() else 0.0
    return apart / largest if largest > 0 else (0.0 if apart == 0 else math.inf)


def compare(
    make_model: Callable[[], nn.Module],
    data: Sequence[Sample],
    config: Mapping[str, Any],
    *,
    num_ranks: int,
    steps: int = 3,
    loss_fn: TokenLoss | None = None,
    draws: bool = False,
    timeout: float = 300.0,
) -> Difference:
    """Train a model by the engine on so many forked ranks of this machine and in one process, and compare.

    `make_model` makes the same model, with the same values, each time. `data` are sequences of `input_ids` and
    `labels`, (length,) each; `config` is a job's. `draws`: the model draws random numbers in training, as dropout does.
    `timeout` in seconds is that of the ranks. A model in FP64 computes in it throughout on both sides, and agrees to
    `Aims()`. Ranks that fail raise their own errors; ConfigError for a config with a schedule of rates, which one
    process does not follow.
    """
    from ds_hydra.config.hydra_block import parse_config
    from ds_hydra.host.optimizers import optimizer_recipe

    if "scheduler" in config:
        raise ConfigError("config: compare() trains with a constant rate: leave out scheduler")
    parsed = parse_config(config)
    if parsed is None:
        raise ConfigError('config: there is no block "hydra": give the config of a job that runs on the engine')

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        block = parsed.deepspeed.get("optimizer", {})
        recipe = optimizer_recipe(model, name=block.get("type"), params=block.get("params"))
        named = dict(model.named_parameters())
        return recipe.build([[named[name] for name in group.names] for group in recipe.groups])

    def on_rank(rank: int) -> RankRun | None:
        import ds_hydra

        rank_environment(rank)
        model = make_model()
        engine = ds_hydra.initialize(model=model, training_data=data, config=dict(config), loss_fn=loss_fn)[0]
        run = note_training(engine, steps)
        engine.destroy()
        return run if rank == 0 else None

    narrow = next((dtype for key, dtype in _DTYPES.items() if config.get(key, {}).get("enabled")), None)
    model, masters = base_of(make_model()), None
    if narrow is not None:
        model, masters = model.to(narrow), base_of(make_model())
    wide = next(model.parameters()).dtype == torch.float64
    with float64_throughout(model) if wide else contextlib.nullcontext():
        run: RankRun = run_ranks(on_rank, num_ranks, timeout=timeout)[0]
        clip = parsed.deepspeed.get("gradient_clipping", 0.0)
        reference = OneProcess(model, optimizer, clip=clip, masters=masters, token_loss=loss_fn)
        seed = parsed.hydra.seed if draws else None
        return difference(run, data, reference, loss_norm=parsed.hydra.loss_norm, seed=seed)


def note_training(engine: Any, steps: int, moments: Sequence[str] = ()) -> RankRun:
    """Train so many steps and note what is compared, with these states of the optimizer; only rank 0's has tensors.

    Every rank must call it.
    """
    masters, noted = engine.crew.masters.trained, []
    for _ in range(steps):
        before = _whole(engine, masters.shards)
        engine.train_batch()
        record = engine.last_step
        plan = StepPlan.from_json(record.plan, "the step's plan")
        microbatches = tuple(batch.spans for pipeline in plan.pipelines for batch in pipeline.microbatches)
        result = Step(record.loss, record.grad_norm, whole_gradients(engine), record.router_loss)
        noted.append(RankStep(plan.strategy, plan.sequence_ids, microbatches, before, result))
    states = {key: _whole(engine, masters.optimizer_state(engine.optimizer, key)) for key in moments}
    parameters = {name.removeprefix(NAMES_OF_PEFT): value for name, value in engine.fp32_state_dict().items()}
    assert not any(torch.isnan(value).any() for value in parameters.values()), "parameters are finite"
    return RankRun(tuple(noted), parameters, states, engine.job.source.plan.token_sharding)


def whole_gradients(engine: Any) -> dict[str, Tensor]:
    """The last step's gradients by parameter name, as the optimizer got them; on rank 0. All ranks must call it."""
    return _whole(engine, engine.crew.masters.trained.grads)


def _whole(engine: Any, source: Sequence[Tensor]) -> dict[str, Tensor]:
    flat = engine.crew.masters.trained.gather_full(engine.crew.world.group, source=source, ranks=[0])
    specs = [param for bucket in engine.job.source.plan.buckets for param in bucket.params if param.name in flat]
    return {p.name: from_flat(flat[p.name], p.shape, p.rule.dim, p.rule.parts).contiguous() for p in specs}


def difference(
    run: RankRun,
    data: Sequence[Sample],
    reference: OneProcess,
    *,
    loss_norm: str = "token",
    seed: int | None = None,
    follow: OneProcess | None = None,
    exact: OneProcess | None = None,
) -> Difference:
    """A run's largest differences from the reference's run over the same steps.

    `seed` is the job's, where the model draws random numbers. `follow` takes the ranks' parameters before each step,
    and its gradients are compared in place of the reference's. `exact` computes in a wider type what `follow` does, to
    know by how much that rounds.
    """
    found = Difference(shares_tokens=run.shares_tokens)
    initial = {name: parameter.detach() for name, parameter in reference.masters.items()}
    _take_all(found, "parameter", run.steps[0].before, initial)
    own = next(iter(reference.parameters.values())).dtype
    for number, step in enumerate(run.steps, start=1):
        samples = [data[i] for i in step.ids]
        weights = [
            weight * float(sample.get("sequence_weight", 1.0))
            for weight, sample in zip(token_weights(samples, step.microbatches, loss_norm), samples, strict=True)
        ]
        keys = None if seed is None else _token_keys(seed, number, step.ids, samples)
        expected = reference.step(samples, weights, keys)
        if follow is not None:
            follow.load(step.before)
            expected = follow.gradients(samples, weights, keys)
        if exact is not None:
            exact.load({name: value.to(own) for name, value in step.before.items()})
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


def _token_keys(seed: int, step: int, ids: Sequence[int], samples: Sequence[Sample]) -> list[Tensor]:
    """What the random numbers of each sample follow from in a step of a job with this seed."""
    key = step_key(seed, step)
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
    of_all = max((float(gradient.abs().max()) for gradient in expected.gradients.values()), default=0.0)
    _take_all(found, "gradient", step.result.gradients, expected.gradients, of_all)


def _take_all(
    found: Difference, what: str, values: Mapping[str, Tensor], reference: Mapping[str, Tensor], of_all: float = 0.0
) -> None:
    if set(values) != set(reference):
        raise AssertionError(f"{what}s of {sorted(set(values) ^ set(reference))} are on one side only")
    for name, value in values.items():
        found.take(what, name, value.double(), reference[name].detach().double(), of_all)
