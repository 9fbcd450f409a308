"""The self-check: which candidate strategies train a model as one process does."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch

from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.ranks.channel import Channel
from ds_hydra.self_check.cache import fingerprint, read_verdicts, write_verdicts
from ds_hydra.self_check.schemes import BASE, bare, shapes_to_run, stand_in, teams
from ds_hydra.self_check.trial import Trial, UntryableError, make_subject
from ds_hydra.self_check.verdicts import CheckResult, Verdict
from ds_hydra.zero_hetero.nodes import NodeSize
from ds_hydra.zero_hetero.told import message_of

logger = logging.getLogger(__name__)

# Of mode "on", for all ranks of a node together, which work at the same time; what takes more counts as unchecked. They
# are CPU time of a process: by the clock, a busy machine would train by other strategies than an idle one.
_SECONDS = 60.0
_BYTES = 8 * 2**30
Strategies = Sequence[StrategyShape]


def check_strategies(
    model: Any,
    strategies: Strategies,
    options: StageOptions = AS_WRITTEN,
    *,
    mode: str = "on",
    loss_given: bool = False,
    channel: Channel | None = None,
    node_size: NodeSize | None = None,
    keep: bool = True,
) -> CheckResult:
    """Verdicts on all schemes of `strategies`, from running them on a small copy of the model.

    `mode` is hydra.self_check: "off" says nothing, "full" runs schemes with all their stages and ranks. Of `options`
    happens what the copy is found to allow, as the model was; sequence parallel ranks then exchange heads in groups
    however few the tokens. With `loss_given` a loss of the user's own is trained on, and the model's counts for
    nothing. `channel` shares the runs out over its ranks, all of which must call this and get
    the same result; `node_size` says which of them share a node (None: all). `keep` uses the cache. Nothing of `model`
    is changed or kept, nor are torch's random numbers.
    """
    began = time.perf_counter()
    if mode == "off":
        return CheckResult({})
    channel = channel or Channel(None, 0, 1)
    run = shapes_to_run(strategies, whole=mode == "full")
    name = fingerprint(model, mode, *astuple(options), loss_given, sorted(map(str, run))) if keep else None
    known = _shared(read_verdicts(name) if channel.rank == 0 else {}, channel)
    missing = [scheme for scheme in run if scheme not in known]
    found = _try_in_teams(
        model, run, missing, channel, node_size or channel.num_ranks,
        mode=mode, options=options, loss_given=loss_given,
    )  # fmt: skip
    if missing and channel.rank == 0:
        write_verdicts(name, known | found)
    verdicts = known | found
    asked = {shape for strategy in strategies for shape in strategy.pipelines}
    whole = {shape: verdicts[bare(shape) if mode == "full" else stand_in(shape)] for shape in asked}
    alone = verdicts[BASE]
    no_slices = alone.no_slices if alone.state == "equal" else alone.reason
    result = CheckResult(whole, time.perf_counter() - began, len(run) - len(missing), no_slices, alone.boxed)
    if channel.rank == 0:
        logger.info("self-check: %s", result)
    return result


def _try_in_teams(
    model: Any, run: Sequence[PipelineShape], missing: Sequence[PipelineShape], channel: Channel, node_size: NodeSize,
    **how: Any,
) -> dict[PipelineShape, Verdict]:  # fmt: skip
    """Verdicts on the missing schemes, by as many ranks at once as have the memory; `how` as in `_try`."""
    found: dict[PipelineShape, Verdict] = {}
    began = time.process_time()
    for team in teams(channel.num_ranks, node_size, len(missing)):
        left = [scheme for scheme in missing if scheme not in found or found[scheme].state == "unchecked"]
        if not left:
            break
        mine = team.share(channel.rank, left)
        tried = _try(model, run, mine=mine, began=began, memory_bytes=_BYTES / team.of_node, **how)
        for text in channel.texts(_to_text(tried)):
            found |= _from_text(text)
    return found


def _try(
    model: Any,
    run: Sequence[PipelineShape],
    *,
    mine: Sequence[PipelineShape],
    mode: str,
    options: StageOptions,
    began: float,
    memory_bytes: float,
    loss_given: bool,
) -> dict[PipelineShape, Verdict]:
    """Verdicts on `mine`, some of all schemes to `run`; `began` is the process's CPU time when it began."""
    if not mine:
        return {}
    found: dict[PipelineShape, Verdict] = {}

    def late(coming: float) -> Verdict | None:
        passed = time.process_time() - began
        if mode != "on" or passed + coming <= _SECONDS:
            return None
        return Verdict("unchecked", f"the check has taken {passed:.0f} s of CPU time already, and no more than "
                       f"{_SECONDS:.0f} s is spent on it")  # fmt: skip

    slowest = 0.0  # of the runs so far: the next one is expected to take as long
    subject = partial(
        make_subject,
        model,
        run,
        options=options,
        memory_bytes=memory_bytes if mode == "on" else float("inf"),
    )
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would change those of GPUs too, for good
        if (too_late := late(0.0)) is not None:
            return dict.fromkeys(mine, too_late)
        try:
            trial = Trial(subject, loss_given=loss_given)
        except UntryableError as error:
            return dict.fromkeys(mine, Verdict("unchecked", str(error)))
        for scheme in mine:
            if (too_late := late(slowest)) is not None:
                found[scheme] = too_late
                continue
            try:
                found[scheme] = trial.verdict(scheme)
                slowest = max(slowest, found[scheme].seconds)
            except Exception as error:  # of the check itself: the other ranks wait for this one's verdicts
                what = f"the check fails with {type(error).__name__}: {message_of(error)}"
                found[scheme] = Verdict("unchecked", what)
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
