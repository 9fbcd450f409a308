"""Losses that a script reads before their step: drawn loops against one process, and who waits in vain is named."""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.testing import OneProcess, Sample, float64_throughout, rank_environment, run_ranks
from ds_hydra.testing.one_process import token_losses
from tests.support.batches import collated, known, num_targets, prompted
from tests.support.ends import all_told, codes, ends, mark_fault
from tests.support.families import build_model, reference_model, vocab_size
from tests.support.small_job import shared_source

FAMILY, RATE = "llama", 0.02
STRATEGIES = {
    1: ["tp1"],
    2: ["tp2", "pp2", "2*tp1", "sp2"],
    3: ["tp2 + tp1", "3*tp1", "pp2 + tp1"],
    4: ["tp2 + 2*tp1", "2*pp2", "sp4", "tp2pp2"],
}
Function = Callable[[Any], Any]
# What a script makes of the losses of its batches; all but the first two read them.
MADE: dict[str, Function] = {
    "as it is": lambda loss: loss,
    "half": lambda loss: loss * 0.5,
    "told": lambda loss: loss if float(loss.detach()) < 1e9 else None,
    "not finite": lambda loss: None if torch.isnan(loss) or not torch.isfinite(loss) else loss / 4,
    "square": lambda loss: loss**2,
    "clamp": lambda loss: loss.clamp(max=5.1) * 3,
    "by size": lambda loss: loss if loss < 5.1 else None,
    "log": lambda loss: torch.log(loss + 1).sum(),
}
READ_LATE = 1  # the step from which on losses are read, in loops that begin without


@dataclass(frozen=True)
class Loop:
    """One drawn script; its ranks know all of it."""

    seed: int
    ranks: int
    accumulation: int
    norm: str
    early: bool
    reads_late: bool
    batches: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)  # lengths, by step and rank
    made: dict[tuple[int, int, int], str] = field(default_factory=dict)
    between: dict[tuple[int, int], str] = field(default_factory=dict)  # by step and number of the batch before

    @classmethod
    def of(cls, seed: int, *, steps: int = 4, function: str = "", early: bool | None = None) -> Loop:
        draw = random.Random(seed)
        ranks = draw.choice([1, 2, 2, 3, 4])
        early = draw.random() < 0.2 if early is None else early
        late = not early and not function and draw.random() < 0.3
        loop = cls(seed, ranks, draw.randint(1, 4), draw.choice(["token", "token", "batch"]), early, late)
        names = draw.sample(list(MADE), draw.randint(1, 4))
        for step in range(steps):
            quiet = late and step < READ_LATE
            for rank in range(ranks):
                count = draw.choice([loop.accumulation, loop.accumulation, draw.randint(rank > 0, loop.accumulation)])
                lengths = [
                    [draw.randint(4, 24) for _ in range(draw.randint(1, 3))] for _ in range(max(1 - rank, count))
                ]
                loop.batches[step, rank] = lengths
                for number in range(len(lengths)):
                    loop.made[step, rank, number] = function or ("half" if quiet else draw.choice(names))
            least = min(len(loop.batches[step, rank]) for rank in range(ranks))
            for number in range(loop.accumulation):
                # Who reads for the first time, or has more batches, must not wait for others in a collective of theirs.
                own = not late and number < least
                which = ["", "", "evaluate", "save"] + ["barrier", "reduce", "objects"] * own
                loop.between[step, number] = draw.choice(which)
        return loop

    def __str__(self) -> str:
        return f"{self.seed}-{self.ranks}"


def batch_of(seed: int, step: int, rank: int, number: int, lengths: Sequence[int]) -> list[Sample]:
    return prompted(lengths, vocab_size(FAMILY), hash((seed, step, rank, number)) % 2**31)


def engine_of(rank: int, loop: Loop, dtype: torch.dtype = torch.float64, **block: Any) -> Any:
    rank_environment(rank)
    model = build_model(FAMILY, dtype)
    own = {"context_length": 64, "strategies": STRATEGIES[loop.ranks], "choose": "cycle", "self_check": "off",
           "planner": {"ahead": 0}, "faults": {"frozen_seconds": 0}, "steps_file": None, "loss_norm": loop.norm,
           "losses": "early" if loop.early else "auto"}  # fmt: skip
    config = {"gradient_accumulation_steps": loop.accumulation, "gradient_clipping": 0.0, "hydra": own | block}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return ds_hydra.initialize(model=model, optimizer=optimizer, config=config)[0]


def script(rank: int, loop: Loop, folder: Path, engine: Any = None) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """The loop as a user has it; losses of batches, parameters, and how many batches of each step ran twice."""
    engine = engine or engine_of(rank, loop)
    told, ran = [], []
    steps = 1 + max(step for step, _ in loop.batches)
    for step in range(steps):
        batches = loop.batches[step, rank]
        for number in range(loop.accumulation):
            if number < len(batches):
                out = engine(**collated(batch_of(loop.seed, step, rank, number, batches[number])))
                loss = MADE[loop.made[step, rank, number]](out.loss)
                if loss is not None:
                    engine.backward(loss)
                    told.append(loss)
            between(engine, loop.between[step, number], folder, rank)
            engine.step()
        assert engine.global_steps == step + 1
        ran.append(engine.last_step.run_twice)
    return [float(loss.detach()) for loss in told], engine.fp32_state_dict(), ran


def between(engine: Any, what: str, folder: Path, rank: int) -> None:
    """What a script does between its calls, on all ranks."""
    if what == "barrier":
        dist.barrier()
    elif what == "reduce":
        number = torch.tensor(float(rank))
        dist.all_reduce(number)
        assert number.item() == sum(range(dist.get_world_size()))
    elif what == "objects":
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, {"rank": rank})
    elif what == "evaluate":
        engine.eval()
        assert engine(collated(batch_of(0, 0, rank, 0, [5, 7]))).loss.item() > 0
        engine.train()
    elif what == "save":
        engine.save_16bit_model(folder)


def expected(loop: Loop) -> tuple[list[list[float]], dict[str, Tensor]]:
    """One process; what each batch counts is written out here. Losses as `script` has them, of each rank."""
    reference = OneProcess(
        reference_model(FAMILY, torch.float64), lambda model: torch.optim.SGD(model.parameters(), lr=RATE), clip=0.0
    )
    told: list[list[float]] = [[] for _ in range(loop.ranks)]
    for step in range(1 + max(step for step, _ in loop.batches)):
        found: list[tuple[list[Sample], float]] = []
        for rank in range(loop.ranks):
            for number, lengths in enumerate(loop.batches[step, rank]):
                batch = batch_of(loop.seed, step, rank, number, lengths)
                with torch.no_grad():
                    sums = [token_losses(reference.model, sample)[known(sample)].sum() for sample in batch]
                value = (torch.stack(sums).sum() / sum(map(num_targets, batch))).requires_grad_()
                loss = MADE[loop.made[step, rank, number]](value)
                if loss is None:
                    continue
                told[rank].append(float(loss.detach()))
                found.append((batch, float(torch.autograd.grad(loss, value)[0]) if loss.requires_grad else 0.0))
        whole = sum(num_targets(sample) for batch, _ in found for sample in batch)
        samples, weights = [], []
        for batch, factor in found:
            of_batch = sum(map(num_targets, batch))
            one = 1 / whole if loop.norm == "token" else 1 / (loop.ranks * loop.accumulation * of_batch)
            samples += batch
            weights += [torch.full((len(sample["labels"]) - 1,), one * factor, dtype=torch.float64) for sample in batch]
        reference.step(samples, weights)
    return told, {name: parameter.detach() for name, parameter in reference.parameters.items()}


def compare(loop: Loop, folder: Path, run: Callable[..., Any] = script) -> list[Any]:
    with float64_throughout(reference_model(FAMILY, torch.float64)):
        told, parameters = expected(loop)
        with shared_source(build_model(FAMILY, torch.float64)):
            results = run_ranks(run, loop.ranks, loop, folder, timeout=120)
    for rank, (losses, own, _) in enumerate(results):
        assert losses == pytest.approx(told[rank], rel=1e-9), rank
        for name, value in parameters.items():
            assert torch.allclose(own[name], value, rtol=1e-9, atol=1e-9 * float(value.abs().max())), name
    return results


@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(12))
def test_a_drawn_loop_trains_as_one_process(seed: int, tmp_path: Path) -> None:
    compare(Loop.of(seed), tmp_path)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("made", "norm", "twice"), [("told", "token", 0), ("half", "batch", 0), ("square", "token", 4)]
)
def test_only_what_counts_otherwise_than_it_ran_with_runs_twice(
    made: str, norm: str, twice: int, tmp_path: Path
) -> None:
    """Losses are read in the first step; half of a loss, that of the first step, is what later batches run with."""
    loop = replace(plain_loop(), norm=norm, early=norm == "batch")
    loop.made.update(dict.fromkeys(loop.made, made))
    for _, _, ran in compare(loop, tmp_path):
        assert ran == [ran[0], twice, twice, twice]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12, 72))
def test_more_drawn_loops_train_as_one_process(seed: int, tmp_path: Path) -> None:
    compare(Loop.of(seed), tmp_path)


def plain_loop(*, seed: int = 7, accumulation: int = 2, steps: int = 4, **how: Any) -> Loop:
    """Of two ranks, each with all batches, that reads nothing."""
    loop = Loop(seed, 2, accumulation, "token", early=False, reads_late=False, **how)
    for step in range(steps):
        for rank in range(2):
            loop.batches[step, rank] = [[9 + step, 5 + rank]] * accumulation
            loop.made.update({(step, rank, number): "half" for number in range(accumulation)})
        loop.between.update({(step, number): "" for number in range(accumulation)})
    return loop


def counted_messages(rank: int, loop: Loop, losses: str) -> tuple[list[dict[str, int]], dict[str, Tensor]]:
    """Operations of torch.distributed in each step, and parameters."""
    engine, counts = engine_of(rank, loop, torch.float32, losses=losses), Counter[str]()
    names = ("all_gather", "all_gather_into_tensor", "all_reduce", "isend", "irecv", "batch_isend_irecv", "broadcast",
             "reduce_scatter_tensor", "send", "recv", "barrier", "all_to_all_single")  # fmt: skip
    for name in names:
        setattr(dist, name, count(getattr(dist, name), counts))
    found = []
    for step in range(1 + max(step for step, _ in loop.batches)):
        counts.clear()
        for number, lengths in enumerate(loop.batches[step, rank]):
            engine.backward(engine(**collated(batch_of(loop.seed, step, rank, number, lengths))).loss / 2)
            engine.step()
        found.append(dict(counts))
    return found, engine.fp32_state_dict()


def count(function: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[function.__name__] += 1
        return function(*args, **kwargs)

    return counting


def test_who_reads_nothing_early_has_the_same_bits_and_no_message_more_from_step_2_on() -> None:
    with shared_source(build_model(FAMILY, torch.float32)):
        auto, step = (run_ranks(counted_messages, 2, plain_loop(), losses) for losses in ("auto", "step"))
    for (messages, parameters), (fewer, same) in zip(auto, step, strict=True):
        assert messages[1:] == fewer[1:]
        assert sum(messages[0].values()) > sum(fewer[0].values()) > 10
        assert all(torch.equal(parameters[name], value) for name, value in same.items())


def in_vain(rank: int, folder: Path, when: int, first: str) -> None:
    """Rank 1 reads in a step, the other one waits in a barrier."""
    faults = {"frozen_seconds": 9.0}
    engine = engine_of(rank, plain_loop(accumulation=1), faults=faults, steps_file=str(folder / "steps.jsonl"))
    for step in range(3):
        loss = engine(**collated(batch_of(7, step, rank, 0, [9, 5]))).loss
        if step == when and rank == 1:
            mark_fault(folder)
            loss.item() if first == "read" else engine(**collated(batch_of(7, step, rank, 1, [9, 5])))
        if step == when:
            dist.barrier()
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize(
    ("when", "first", "told"),
    [
        (2, "read", 'reads a loss before its step, for the first time in the job, at .*test_early_losses.py.*"early"'),
        (0, "batch", "computes a loss that may be read .*test_early_losses.py.*give all ranks as many batches"),
    ],
)
def test_who_waits_in_vain_is_named_within_ten_seconds(when: int, first: str, told: str) -> None:
    with shared_source(build_model(FAMILY, torch.float64)):
        found = ends(lambda rank, folder: in_vain(rank, folder, when, first), 2)
    assert codes(found) == [75, 75], all_told(found)
    assert re.search(f"rank 1 {told}", all_told(found), re.DOTALL), all_told(found)
    assert max(end.seconds for end in found) < 10


# --- Losses made of the logits of a rank's own batch.
TEACHER = torch.linspace(-2, 2, vocab_size(FAMILY), dtype=torch.float64)


def smoothed(loss: Any, logits: Tensor, batch: dict[str, Tensor]) -> Any:
    """A cross entropy of the script's own."""
    labels = batch["labels"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, label_smoothing=0.1)


def distilled(loss: Any, logits: Tensor, batch: dict[str, Tensor]) -> Any:
    """The model's loss, and how far it is from a teacher."""
    far = -(logits.log_softmax(-1) * (TEACHER + logits.new_zeros(1)).softmax(-1)).sum(-1)
    return 0.3 * loss + (far * batch["attention_mask"]).sum() / batch["attention_mask"].sum()


def rewards(loss: Any, logits: Tensor, batch: dict[str, Tensor]) -> Any:
    """Of one number a sequence, at its last token; it mixes sequences."""
    last = batch["attention_mask"].sum(dim=1) - 1
    found = logits[torch.arange(len(last)), last, 5]
    return torch.nn.functional.softplus(found[0] - found.sum()) ** 2


def plain_one(loss: Any, logits: Tensor, batch: dict[str, Tensor]) -> Any:
    return loss / 2


OF_LOGITS = {"smoothed": smoothed, "distilled": distilled, "rewards": rewards, "plain": plain_one}


def made_of(loop: Loop, step: int, rank: int, number: int) -> str:
    return random.Random(f"{loop.seed} {step} {rank} {number}").choice(list(OF_LOGITS)) if number else "distilled"


def script_of_logits(rank: int, loop: Loop, folder: Path) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    engine, told = engine_of(rank, loop), []
    for step in range(3):
        for number, lengths in enumerate(loop.batches[step, rank]):
            batch = collated(batch_of(loop.seed, step, rank, number, lengths))
            name = made_of(loop, step, rank, number)
            out = engine(**batch)
            logits: Any = None if name == "plain" else out.logits
            loss = OF_LOGITS[name](out.loss, logits, batch)
            engine.set_gradient_accumulation_boundary(number == len(loop.batches[step, rank]) - 1)
            engine.backward(loss)
            told.append(loss)
            engine.step()
        assert engine.global_steps == step + 1
    return [float(loss.detach()) for loss in told], engine.fp32_state_dict(), []


def expected_of_logits(loop: Loop) -> tuple[list[list[float]], dict[str, Tensor]]:
    model = reference_model(FAMILY, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    told: list[list[float]] = [[] for _ in range(loop.ranks)]
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(loop.ranks):
            for number, lengths in enumerate(loop.batches[step, rank]):
                samples = batch_of(loop.seed, step, rank, number, lengths)
                batch = collated(samples)
                logits = model(**{**batch, "labels": None}, use_cache=False).logits
                labels = batch["labels"][:, 1:]
                own = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
                loss = OF_LOGITS[made_of(loop, step, rank, number)](own, logits, batch)
                told[rank].append(float(loss.detach()))
                (loss / (loop.ranks * loop.accumulation)).backward()
        optimizer.step()
    return told, {name: one.detach() for name, one in model.named_parameters()}


@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(6))
def test_losses_made_of_logits_train_as_in_one_process(seed: int, tmp_path: Path) -> None:
    loop = Loop.of(seed, steps=3, function="half", early=False)
    with float64_throughout(reference_model(FAMILY, torch.float64)):
        told, parameters = expected_of_logits(loop)
        with shared_source(build_model(FAMILY, torch.float64)):
            results = run_ranks(script_of_logits, loop.ranks, loop, tmp_path, timeout=120)
    for rank, (losses, own, _) in enumerate(results):
        assert losses == pytest.approx(told[rank], rel=1e-9), rank
        for name, value in parameters.items():
            assert torch.allclose(own[name], value, rtol=1e-9, atol=1e-9 * float(value.abs().max())), name
