"""Checkpoints that were damaged or forged in; whether all ranks loaded them alike, whole or not at all, out."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import CheckpointError
from tests.support.damages import damage
from tests.support.forgeries import forge
from tests.support.small_job import sequences, small_config, small_engine
from tests.support.streams import Stateful

JOBS = ("usual", "stream", "fp16")
NUM_RANKS = 2
_TAGS = ("old", "new")
_OWN = frozenset({"masters", "moments", "random", "data"})  # parts that each rank has of its own
_LOST = "other ranks raised nothing"
State = dict[str, str]
"""Digests of the parts of what a rank trains."""


def job(kind: str, rank: int) -> Any:
    """An engine of one of JOBS."""
    config = small_config(torch.distributed.get_world_size(), cost_correction="apply")
    if kind == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if kind == "stream":
        config["hydra"]["context_length"] = 200
        return small_engine(rank, config=config, data=Stateful(sequences()))
    return small_engine(rank, config=config)


def save(kind: str, folder: Path, num_ranks: int) -> None:
    """A folder with the tags "old", after one step, and "new", after three."""

    def run(rank: int) -> None:
        engine = job(kind, rank)
        for tag, steps in zip(_TAGS, (1, 3), strict=True):
            while engine.global_steps < steps:
                engine.train_batch()
            engine.save_checkpoint(folder, tag, client_state={"note": [1, {"best": 2.5}]})
        engine.destroy()

    run_ranks(run, num_ranks, timeout=600)


def state_of(engine: Any, client: Any = None) -> State:
    """Of this rank."""
    crew, optimizer = engine.crew, engine.optimizer
    kept = [value for param in optimizer.state.values() for value in param.items()]
    parts = {
        "masters": [shards.flat for shards in (crew.masters.trained, crew.masters.frozen)],
        "moments": [value for _, value in kept if isinstance(value, torch.Tensor) and value.dim()],
        "numbers": sorted({f"{k} {v}" for k, v in kept if not (isinstance(v, torch.Tensor) and v.dim())}),
        "options": [[item for item in group.items() if item[0] != "params"] for group in optimizer.param_groups],
        "counters": [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps],
        "schedule": engine.lr_scheduler.state_dict(),
        "data": engine.sampler.saved(engine.global_steps),
        "random": torch.get_rng_state(),
        "scale": crew.loss_scale.state_dict(),
        "planning": [crew.plans.tables, crew.watch.calibration.state()],
        "stage": crew.checkpoints.stage,
        "client": client,
    }
    return {name: hashlib.sha256(_bytes(part)).hexdigest()[:12] for name, part in parts.items()}


def _bytes(part: Any) -> bytes:
    if isinstance(part, torch.Tensor):
        return part.detach().contiguous().view(torch.uint8).numpy().tobytes() if part.dim() else repr(part).encode()
    if isinstance(part, list):
        return b"".join(map(_bytes, part))
    return repr(part).encode()


class Seen(NamedTuple):
    """What one rank saw of a load: the tag, or the text of the error; the state before and after."""

    tag: str
    error: str
    before: State
    after: State
    trained: str  # why no step followed


def tried(
    kind: str, template: Path, scratch: Path, change: Callable[[Path, int], Any], seeds: Sequence[int]
) -> tuple[dict[str, list[State]], dict[int, list[Seen]], dict[int, Any]]:
    """What all ranks saw: of the true checkpoints, and of each seed's change of them, which is told last."""

    def run(rank: int) -> tuple[dict[str, State], dict[int, Seen], dict[int, Any]]:
        engine = job(kind, rank)
        meeting, told, seen = engine.crew.world.background, dict[int, Any](), dict[int, Seen]()
        truth = {tag: _loaded(engine, template, tag, 0).after for tag in _TAGS}
        for seed in seeds:
            if rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
                shutil.copytree(template, scratch)
                told[seed] = change(scratch, seed)
            meeting.texts("")
            seen[seed] = _loaded(engine, scratch, None if seed % 3 == 0 else "new", seed)
            other = bool(seen[seed].tag) and seen[seed].after not in truth.values()
            if "other" in meeting.texts("other" if other else ""):  # on any rank; a step takes all of them
                seen[seed] = seen[seed]._replace(trained=_goes_on(engine))
        return truth, seen, told

    found = run_ranks(run, NUM_RANKS, timeout=1200)
    truth = {tag: [one[0][tag] for one in found] for tag in _TAGS}
    return truth, {seed: [one[1][seed] for one in found] for seed in seeds}, found[0][2]


def _loaded(engine: Any, folder: Path, tag: str | None, seed: int) -> Seen:
    torch.manual_seed(engine.global_rank)
    before, text, path, client = state_of(engine), "", None, None
    try:
        if seed % 5 == 4:  # as a restart does
            path = engine.crew.checkpoints.resume(folder)
            client = {"note": [1, {"best": 2.5}]}
        else:
            path, client = engine.load_checkpoint(folder, tag)
    except CheckpointError as error:
        text = str(error)
    after = state_of(engine, client if path else None)
    return Seen(Path(path).name if path else "", text, before, after, "")


def _goes_on(engine: Any) -> str:
    """What is wrong with a step from here; "" when nothing is."""
    try:
        engine.train_batch()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def objections(seen: Sequence[Seen], truth: dict[str, list[State]], may_change: frozenset[str]) -> list[str]:
    """What of the promises was not kept by a load that all ranks made."""
    if len({(one.tag, one.error) for one in seen}) > 1:
        return [f"the ranks differ: {[(one.tag, one.error[:200]) for one in seen]}"]
    tag, wrong = seen[0].tag, []
    for rank, one in enumerate(seen):
        if not tag:
            changed = sorted(part for part in one.before if one.before[part] != one.after[part])
            wrong += [f"refused on rank {rank}, but {changed} changed"] if changed else []
            wrong += [] if one.error else [f"rank {rank} loaded nothing, without an error"]
            continue
        true = truth.get(tag, [{}] * NUM_RANKS)[rank]
        others = {part for part in one.after if one.after[part] != true.get(part)} - may_change
        wrong += [f"loaded as {tag!r} on rank {rank} with another {sorted(others)}"] if others else []
        wrong += [f"no step follows on rank {rank}: {one.trained[:300]}"] if one.trained else []
        alike = {part: one.after[part] == seen[0].after[part] for part in one.after if part not in _OWN}
        wrong += [] if all(alike.values()) else [f"rank {rank} has another {[k for k, v in alike.items() if not v]}"]
    return wrong


def damaged(kind: str, template: Path, scratch: Path, seeds: Sequence[int]) -> dict[str, list[str]]:
    """Objections to loads of checkpoints that were damaged, by what was done to them."""
    truth, seen, told = tried(kind, template, scratch, damage, seeds)
    return {
        f"{seed}: {told[seed]} ({_ending(seen[seed])})": objections(seen[seed], truth, frozenset()) for seed in seeds
    }


def forged(kind: str, template: Path, scratch: Path, seeds: Sequence[int]) -> dict[str, list[str]]:
    """The same of forged ones."""
    truth, seen, told = tried(kind, template, scratch, forge, seeds)
    return {
        f"{seed}: {told[seed].what} ({_ending(seen[seed])})": objections(seen[seed], truth, told[seed].may_change)
        for seed in seeds
    }


def _ending(seen: Sequence[Seen]) -> str:
    return f"loaded {seen[0].tag}" if seen[0].tag else f"refused: {ascii(seen[0].error)[1:160]}"
