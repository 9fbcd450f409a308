"""The self-check: a model and its candidate strategies in, which of them train it as one process does out."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.ranks.channel import Channel
from ds_hydra.self_check.cache import fingerprint, read_verdicts, write_verdicts
from ds_hydra.self_check.schemes import bare, shapes_to_run, stand_in
from ds_hydra.self_check.subjects import make_subject
from ds_hydra.self_check.trial import Trial, UntryableError
from ds_hydra.self_check.verdicts import CheckResult, Verdict

logger = logging.getLogger(__name__)

# Of mode "on", for all ranks of a node together; what takes more counts as unchecked.
_SECONDS = 60.0
_BYTES = 8 * 2**30
_AT_A_TIME = 4  # schemes that a rank tries before another helps: as long as it takes to make a subject
Strategies = Sequence[StrategyShape]


def check_strategies(
    model: Any,
    strategies: Strategies,
    *,
    mode: str = "on",
    activation_checkpointing: bool = False,
    channel: Channel | None = None,
    keep: bool = True,
) -> CheckResult:
    """Verdicts on all schemes of `strategies`, from running them on a small copy of the model.

    `mode` is hydra.self_check: "off" says nothing, "full" runs schemes with all their stages and ranks. `channel`
    shares the runs out over its ranks, all of which must call this and get the same result. `keep` uses the cache.
    Nothing of `model` is changed or kept, nor are torch's random numbers.
    """
    began = time.perf_counter()
    if mode == "off":
        return CheckResult({})
    channel = channel or Channel(None, 0, 1)
    run = shapes_to_run(strategies, whole=mode == "full")
    name = fingerprint(model, mode, activation_checkpointing, sorted(map(str, run))) if keep else None
    known = _shared(read_verdicts(name) if channel.rank == 0 else {}, channel)
    missing = [scheme for scheme in run if scheme not in known]
    workers = min(channel.num_ranks, -(-len(missing) // _AT_A_TIME))
    mine = missing[channel.rank :: workers] if channel.rank < workers else []
    found: dict[PipelineShape, Verdict] = {}
    if missing:
        mine_found = _try(
            model, run, mine=mine, mode=mode, activation_checkpointing=activation_checkpointing, began=began,
            at_once=workers,
        )  # fmt: skip
        for text in channel.texts(_to_text(mine_found)):
            found |= _from_text(text)
        if channel.rank == 0:
            write_verdicts(name, known | found)
    verdicts = known | found
    asked = {shape for strategy in strategies for shape in strategy.pipelines}
    whole = {shape: verdicts[bare(shape) if mode == "full" else stand_in(shape)] for shape in asked}
    result = CheckResult(whole, time.perf_counter() - began, len(run) - len(missing))
    if channel.rank == 0:
        logger.info("self-check: %s", result)
    return result


def _try(
    model: Any,
    run: Sequence[PipelineShape],
    *,
    mine: Sequence[PipelineShape],
    mode: str,
    activation_checkpointing: bool,
    began: float,
    at_once: int,
) -> dict[PipelineShape, Verdict]:
    """Verdicts on `mine`, some of all schemes to `run`, while `at_once` ranks of the node do the same."""
    if not mine:
        return {}
    found: dict[PipelineShape, Verdict] = {}
    subject = partial(
        make_subject,
        model,
        run,
        activation_checkpointing=activation_checkpointing,
        memory_bytes=_BYTES / at_once if mode == "on" else float("inf"),
    )
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would change those of GPUs too, for good
        try:
            trial = Trial(subject)
        except UntryableError as error:
            return dict.fromkeys(mine, Verdict("unchecked", str(error)))
        for scheme in mine:
            passed = time.perf_counter() - began
            if passed > _SECONDS and mode == "on":
                found[scheme] = Verdict("unchecked", f"the check has taken {passed:.0f} s already")
                continue
            try:
                found[scheme] = trial.verdict(scheme)
            except Exception as error:  # of the check itself: the other ranks wait for this one's verdicts
                found[scheme] = Verdict("unchecked", f"the check fails with {type(error).__name__}: {error}")
    del trial
    gc.collect()
    return found


def _shared(known: dict[PipelineShape, Verdict], channel: Channel) -> dict[PipelineShape, Verdict]:
    """Rank 0's verdicts on every rank, as if they had taken no time."""
    return {scheme: replace(v, seconds=0.0) for scheme, v in _from_text(channel.tell(_to_text(known))).items()}


def _to_text(verdicts: dict[PipelineShape, Verdict]) -> str:
    return json.dumps({str(scheme): verdict.to_json() for scheme, verdict in verdicts.items()})


def _from_text(text: str) -> dict[PipelineShape, Verdict]:
    return {PipelineShape.parse(scheme): Verdict.from_json(raw) for scheme, raw in json.loads(text).items()}
