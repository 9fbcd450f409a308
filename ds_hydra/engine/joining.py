"""A process that joins a job which runs: what must be equal on it, what it is told, how it is let in.

[Note: joining]
The process is started as a job of one rank, and does all that takes long by itself: imports, model, data. Then it
compares what it has with what the members have left in their invitation, and knocks. All of them park at the end of the
step, without a fault, and the next view has the process with the others. It brings nothing: its masters come by the new
cut [Note: cutting anew], and all else that a checkpoint would hold from rank 0, which is never one that joins.

Where no strategy fits so many ranks, all of them find that as they assemble: those who have come end themselves, the
others go back to what they were, and let nobody join until the numbers are others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ds_hydra.checkpoint.checkpointer import config_digest
from ds_hydra.checkpoint.loading import as_json
from ds_hydra.elastic.agent import Invitation, MemberAgent
from ds_hydra.elastic.membership import TURN_S
from ds_hydra.elastic.rounds import Patience
from ds_hydra.elastic.view import View
from ds_hydra.engine.calls import end_lost
from ds_hydra.host.environment import INVITATION, MOST_RANKS, launched_number, members_folder
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.told import Told

if TYPE_CHECKING:
    from ds_hydra.config.hydra_block import HydraConfig
    from ds_hydra.engine.crew import Crew
    from ds_hydra.engine.engine import HydraEngine

logger = logging.getLogger(__name__)

_LATER = 8  # turns after `Freeing`, which knows of what training is stuck in, an agent gives its own process up
_BEATS = 9  # of a member, in the time after which it counts as frozen


def living(config: HydraConfig) -> dict[str, Any]:
    """How long members wait for each other, and how many there may be, for `MemberAgent.start` and `join`."""
    assert config.elastic is not None, "only elastic jobs have agents"
    stuck, usual = math.ceil(config.elastic.stuck_seconds / TURN_S) + _LATER, Patience()
    frozen_s = config.faults.frozen_seconds or math.inf
    return {
        "frozen_s": frozen_s,
        "heartbeat_s": min(frozen_s / _BEATS, 1.0),
        "patience": replace(usual, stuck=stuck, give_up=max(usual.give_up, 2 * stuck)),
        "most": launched_number(MOST_RANKS),
    }


def job_print(engine: HydraEngine) -> dict[str, str]:
    """What must be equal on all members, in short."""
    assert engine.data is not None, "elastic jobs have map-style data"
    buckets = [[bucket.name, bucket.trainable, [[param.name, *param.shape] for param in bucket.params]]
               for bucket in engine.job.source.plan.buckets]  # fmt: skip
    lengths = np.asarray(engine.data.lengths, dtype=np.int64)
    return {
        "version of ds-hydra": sys.modules["ds_hydra"].__version__,
        "version of torch": torch.__version__,
        "config": config_digest(engine.config),
        "model": hashlib.sha256(json.dumps(buckets).encode()).hexdigest(),
        "training data": f"{len(lengths)} sequences, {hashlib.sha256(lengths.tobytes()).hexdigest()}",
    }


def join_members(engine: HydraEngine) -> MemberAgent:
    """This process's agent, which knocks from now on. ConfigError where there is no job to join, or another one."""
    folder = members_folder()
    if folder is None or not (folder / INVITATION).exists():
        raise ConfigError(
            "this process was started to join a job, and no job of this node has come to its first step: start the "
            "whole job by 'ds-hydra launch'"
        )
    invitation = Invitation.read(folder / INVITATION)
    check_same_job(job_print(engine), json.loads(invitation.job))
    return MemberAgent.join(folder / INVITATION, **living(engine.hydra_config))


def check_same_job(own: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """ConfigError that names what differs."""
    differ = [f"its {name} ({own[name][:40]}) is not theirs ({theirs.get(name, 'none')[:40]})"
              for name in own if own[name] != theirs.get(name)]  # fmt: skip
    if differ:
        raise ConfigError(
            f"this process cannot join the job, which goes on without it: {'; '.join(differ)}. Start it with the "
            "script, the arguments and the packages of the others"
        )


def invite(agent: MemberAgent) -> None:
    """Say on this host how to join those who are members now."""
    folder = members_folder()
    if folder is not None:
        agent.invitation.write(folder / INVITATION)


def refuse(view: View, told: Told, agent: MemberAgent) -> None:
    """All ranks of a view have the error that they cannot train together: go back to those that did before processes
    joined, which end themselves; where none has joined the job ends."""
    if not view.joined:
        end_lost(f"the ranks that are left cannot go on: {told.text}")
    logger.warning("%d ranks cannot train together (%s): the job goes on without those that have come",
                   len(view.members), told.text)  # fmt: skip
    agent.unfit(len(view.members))


def check_can_be_told(engine: HydraEngine) -> None:
    """ConfigError where a process that joins could not be told what the LR scheduler has come to."""
    try:
        if engine.lr_scheduler is not None:
            as_json(engine.lr_scheduler.state_dict(), "the LR scheduler's state")
    except Exception as error:
        raise ConfigError(f"hydra.elastic: {error}, or remove hydra.elastic") from error


def progress_of(engine: HydraEngine) -> dict[str, Any]:
    """Counters and the place in the data, as JSON holds them."""
    assert engine.sampler is not None, "elastic jobs have map-style data"
    return {
        "steps": [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps],
        "data": engine.sampler.saved(engine.global_steps),
    }


def take_progress(engine: HydraEngine, crew: Crew, told: Mapping[str, Any]) -> None:
    """Go on at the step and the place in the data that rank 0 has told by `progress_of`."""
    assert engine.sampler is not None, "elastic jobs have map-style data"
    engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps = told["steps"]
    engine.sampler.check_saved(told["data"])
    engine.sampler.restore(told["data"])
    crew.update.committed = engine.global_steps
