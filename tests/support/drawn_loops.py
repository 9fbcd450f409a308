"""Loops of three calls as scripts have them, drawn by a seed, run on any engine and computed by one process; and drawn
orders of reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.engine.rounds import Rounds
from ds_hydra.testing import Sample, rank_environment
from tests.support.families import build_model, reference_model, vocab_size
from tests.support.planner_cases import in_slices
from tests.support.small_job import QUIET, collated, num_targets, prompted, start_deepspeed

FAMILY = "llama"
STRATEGIES = {
    1: ["tp1"],
    2: ["tp2", "pp2", "2*tp1", "sp2"],
    3: ["tp2 + tp1", "3*tp1", "pp2 + tp1"],
    4: ["tp2 + 2*tp1", "2*pp2", "sp4", "tp2pp2"],
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.02),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5),
}
Batch = dict[str, Tensor]
Made = Callable[[Any, Callable[[], Tensor], Batch], Any]
TEACHER = torch.linspace(-2, 2, vocab_size(FAMILY), dtype=torch.float64)


def smoothed(loss: Any, logits: Callable[[], Tensor], batch: Batch) -> Any:
    """A cross entropy of the script's own."""
    return F.cross_entropy(logits()[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1)


def distilled(loss: Any, logits: Callable[[], Tensor], batch: Batch) -> Any:
    """The model's loss, and how far it is from a teacher."""
    given = logits()
    far = -(given.log_softmax(-1) * TEACHER.to(given.dtype).softmax(-1)).sum(-1)
    return 0.3 * loss + (far * batch["attention_mask"]).sum() / batch["attention_mask"].sum()


def rewards(loss: Any, logits: Callable[[], Tensor], batch: Batch) -> Any:
    """Of one number a sequence, at its last token; it mixes sequences."""
    last = batch["attention_mask"].sum(dim=1) - 1
    found = logits()[torch.arange(len(last)), last, 5]
    return F.softplus(found[0] - found.sum()) ** 2


def reduced(loss: Any, logits: Callable[[], Tensor], batch: Batch) -> Any:
    """Told as the mean of all ranks."""
    told = loss.detach().clone()
    dist.all_reduce(told)
    assert torch.isfinite(told)
    return loss


UNREAD: dict[str, Made] = {
    "as it is": lambda loss, *_: loss,
    "half": lambda loss, *_: (loss + loss.detach()) * 0.5,  # a part without a gradient counts in the number alone
}
READING: dict[str, Made] = {
    "told": lambda loss, *_: loss if float(loss.detach()) < 1e9 else None,
    "not finite": lambda loss, *_: None if torch.isnan(loss) or not torch.isfinite(loss) else loss / 4,
    "square": lambda loss, *_: loss**2,
    "clamp": lambda loss, *_: loss.clamp(max=5.1) * 3,
    "by size": lambda loss, *_: loss if loss < 5.1 else None,
    "log": lambda loss, *_: torch.log(loss + 1).sum(),
}
OF_LOGITS: dict[str, Made] = {"smoothed": smoothed, "distilled": distilled, "rewards": rewards}
MADE = UNREAD | READING | OF_LOGITS | {"reduced": reduced}
"""What a script makes of the losses of its batches, and of their logits."""


@dataclass(frozen=True)
class Loop:
    """One drawn script; its ranks know all of it."""

    seed: int
    ranks: int
    accumulation: int
    norm: str = "token"
    early: bool = False
    optimizer: str = "SGD"
    clip: float = 0.0
    sliced: bool = False
    batches: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)  # lengths, by step and rank
    made: dict[tuple[int, int, int], str] = field(default_factory=dict)
    reads: dict[tuple[int, int, int], str] = field(default_factory=dict)  # where the loss is read besides
    between: dict[tuple[int, int], str] = field(default_factory=dict)  # by step and number of the batch before
    calls: dict[int, int] = field(default_factory=dict)  # of step() in a step that the script closes by hand

    @classmethod
    def of(cls, seed: int, *, steps: int = 4, plain: bool = False) -> Loop:
        """`plain`: as DeepSpeed can run it too, with as many batches on all ranks."""
        draw = random.Random(f"loop {seed}")
        loop = cls(
            seed, draw.choice([2, 2, 3] if plain else [1, 2, 2, 3, 4]), draw.randint(1, 4),
            "batch" if plain else draw.choice(["token", "token", "batch"]), early=draw.random() < 0.2,
            optimizer=draw.choice(list(OPTIMIZERS)), clip=draw.choice([0.0, 0.0, 0.7]), sliced=draw.random() < 0.3,
        )  # fmt: skip
        reading, of_logits = draw.choice([0, 2, 3]), draw.choice([0, 2])
        kinds = [*UNREAD, *draw.sample([*READING], reading), *draw.sample([*OF_LOGITS], of_logits)]
        names = draw.sample(kinds, draw.randint(2, len(kinds)))
        first = draw.choice([0, 0, 1, steps])  # the step from which on losses are read
        for step in range(steps):
            loop._draw_step(draw, step, names if step >= first else [*UNREAD], plain=plain)
        loop._draw_between(draw, first)
        return loop

    def _draw_step(self, draw: random.Random, step: int, names: Sequence[str], *, plain: bool) -> None:
        calls = self.accumulation
        if draw.random() < 0.15:
            self.calls[step] = calls = draw.randint(1, self.accumulation)
        for rank in range(self.ranks):
            fewer = not plain and draw.random() < 0.3
            count = draw.randint(int(rank == 0 or draw.random() < 0.7), calls) if fewer else calls
            lengths = [[draw.randint(4, 24) for _ in range(draw.randint(1, 3))] for _ in range(count)]
            self.batches[step, rank] = lengths
            for number in range(count):
                never = {"by size"} if plain or (rank, number) == (0, 0) else set()  # leaves it out
                self.made[step, rank, number] = draw.choice([name for name in names if name not in never] or [*UNREAD])
                if not set(names) <= set(UNREAD) and draw.random() < 0.3:
                    self.reads[step, rank, number] = draw.choice(["forward", "backward", "step"])

    def _draw_between(self, draw: random.Random, first: int) -> None:
        """What the script does between its calls, on all ranks. Where a rank waits in a collective of the script's own,
        none may wait for its first read, nor have more batches in a step whose losses are read."""
        steps = 1 + max(step for step, _ in self.batches)
        reading = min((step for step, *_ in [*self.reads, *self._of(READING), *self._of(OF_LOGITS)]), default=steps)
        logits = min((step for step, *_ in self._of(OF_LOGITS)), default=steps)
        together = draw.random() < 0.6  # all ranks read for the first time in one place
        for step in {reading, logits} - {steps} if together else ():
            name = draw.choice([*OF_LOGITS]) if step == logits else "told"
            self.made.update({(step, rank, 0): name for rank in range(self.ranks) if self.batches[step, rank]})
            together &= all(self.batches[step, rank] for rank in range(self.ranks))
        for step in range(steps):
            least = min(len(self.batches[step, rank]) for rank in range(self.ranks))
            for number in range(self.calls.get(step, self.accumulation)):
                rounds = self.early or step == 0 or step >= reading
                own = (number < least or not rounds) and (together or step < reading)
                which = ["", "", "evaluate", "save"] + ["barrier", "reduce", "objects"] * own
                self.between[step, number] = draw.choice(which)
                known = step > (reading if logits == steps else logits)
                if own and known and number < least and draw.random() < 0.2:
                    self.made.update({(step, rank, number): "reduced" for rank in range(self.ranks)})

    def _of(self, kind: dict[str, Made]) -> Iterator[tuple[int, int, int]]:
        return (place for place, name in self.made.items() if name in kind)

    def batch(self, step: int, rank: int, number: int) -> list[Sample]:
        """The sequences of a batch."""
        seed = hash((self.seed, step, rank, number)) % 2**31
        return prompted(self.batches[step, rank][number], vocab_size(FAMILY), seed)

    def __str__(self) -> str:
        return f"{self.seed}-{self.ranks}"


def engine_of(rank: int, loop: Loop, dtype: torch.dtype = torch.float64, **block: Any) -> Any:
    """The engine of a loop."""
    rank_environment(rank)
    model = build_model(FAMILY, dtype)
    own = QUIET | {"context_length": 64, "strategies": STRATEGIES[loop.ranks], "choose": "cycle",
                   "loss_norm": loop.norm, "losses": "early" if loop.early else "auto"}  # fmt: skip
    config = {"gradient_accumulation_steps": loop.accumulation, "gradient_clipping": loop.clip, "hydra": own | block}
    engine = ds_hydra.initialize(model=model, optimizer=OPTIMIZERS[loop.optimizer](model), config=config)[0]
    if loop.sliced:
        _slice(engine.crew.plans)
    return engine


def _slice(plans: Any) -> None:
    """Cut most sequences of whatever is planned from now on."""

    def cut(plan: Any, *asked: Any) -> Any:
        planned = plan(*asked)
        return replace(planned, plan=in_slices(planned.plan, plans.table))

    for name in ("given", "plan_once"):
        mock.patch.object(plans, name, partial(cut, getattr(plans, name))).start()


def plain_engine(rank: int, loop: Loop, stage: int) -> Any:
    """DeepSpeed's own, in FP32."""
    start_deepspeed(rank)
    model = build_model(FAMILY, torch.float32)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": loop.accumulation,
              "gradient_clipping": loop.clip, "zero_optimization": {"stage": stage},
              "zero_allow_untested_optimizer": True, "steps_per_print": None}  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=OPTIMIZERS[loop.optimizer](model), config=config)[0]


def script(rank: int, loop: Loop, folder: Path, engine: Any = None) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """The loop as a user has it; losses of batches, parameters, and how many batches of each step ran twice."""
    engine = engine or engine_of(rank, loop)
    told, backs, ran = [], [], []
    for step in range(1 + max(step for step, _ in loop.batches)):
        batches, calls = loop.batches[step, rank], loop.calls.get(step, loop.accumulation)
        for number in range(calls):
            if loop.calls:
                engine.set_gradient_accumulation_boundary(number == calls - 1)
            read, loss = loop.reads.get((step, rank, number)), None
            if number < len(batches):
                batch = collated(loop.batch(step, rank, number))
                out = engine(**batch)
                if read == "forward":
                    assert f"{out.loss.item():.3f}" == f"{out[0]:.3f}"
                loss = MADE[loop.made[step, rank, number]](out.loss, lambda out=out: out.logits, batch)  # type: ignore
            if loss is not None:
                if read == "backward":
                    assert loss.item() == float(loss.detach())
                if loop.calls:  # as Accelerate has it
                    back = engine.backward(loss / loop.accumulation, scale_wrt_gas=False)
                else:
                    assert engine.is_gradient_accumulation_boundary() == (number == calls - 1)
                    back = engine.backward(engine.scale(loss))
                told.append(loss)
                backs.append(back)
            between(engine, loop.between[step, number], folder, rank)
            engine.step()
            assert engine.was_step_applied() == (number == calls - 1)
            if loss is not None and read == "step":
                assert loss.detach().cpu().numpy() == loss.item()
        assert engine.global_steps == step + 1
        ran.append(getattr(getattr(engine, "last_step", None), "run_twice", 0))
    losses = [float(loss.detach()) for loss in told]
    assert not told or torch.allclose(loop.accumulation * torch.stack(backs), torch.stack(told))
    if not hasattr(engine, "fp32_state_dict"):
        return losses, {name: one.detach().clone() for name, one in engine.module.named_parameters()}, ran
    return losses, engine.fp32_state_dict(), ran


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
        with torch.no_grad():
            assert engine(**collated(prompted([5, 7], vocab_size(FAMILY), rank))).loss.item() > 0
        engine.train()
    elif what == "save":
        engine.save_16bit_model(folder)


def expected(loop: Loop) -> tuple[list[list[float]], dict[str, Tensor]]:
    """One process; what each batch counts is written out here. Losses as `script` has them, of each rank."""
    model: Any = reference_model(FAMILY, torch.float64)
    optimizer = OPTIMIZERS[loop.optimizer](model)
    told: list[list[float]] = [[] for _ in range(loop.ranks)]
    by_batch = loop.norm == "batch"
    for step in range(1 + max(step for step, _ in loop.batches)):
        optimizer.zero_grad()
        found: list[tuple[Tensor, int]] = []
        by_batch |= any(place[0] == step for place in loop._of(OF_LOGITS))
        for rank in range(loop.ranks):
            for number in range(len(loop.batches[step, rank])):
                samples = loop.batch(step, rank, number)
                batch = collated(samples)
                logits = model(**{**batch, "labels": None}, use_cache=False).logits
                own = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
                name = loop.made[step, rank, number]
                made = MADE["as it is" if name == "reduced" else name]
                if (loss := made(own, lambda logits=logits: logits, batch)) is not None:  # type: ignore[misc]
                    told[rank].append(float(loss.detach()))
                    found.append((loss, sum(map(num_targets, samples))))
        whole = sum(targets for _, targets in found)
        for loss, targets in found:
            (loss / (loop.ranks * loop.accumulation) if by_batch else loss * (targets / whole)).backward()
        if loop.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        optimizer.step()
    return told, {name: one.detach() for name, one in model.named_parameters()}


def plain_loop(*, seed: int = 7, accumulation: int = 2, steps: int = 4, **how: Any) -> Loop:
    """Of two ranks, each with all batches, that reads nothing."""
    loop = Loop(seed, 2, accumulation, **how)
    for step in range(steps):
        for rank in range(2):
            loop.batches[step, rank] = [[9 + step, 5 + rank]] * accumulation
            loop.made.update({(step, rank, number): "half" for number in range(accumulation)})
        loop.between.update({(step, number): "" for number in range(accumulation)})
    return loop


def always(loop: Loop, made: str, **how: Any) -> Loop:
    """The same batches, of which all make this."""
    return replace(loop, made=dict.fromkeys(loop.made, made), **how)


# --- Which rank reads a loss or logits when, with collectives of the script's own between: drawn orders, which of them
# must stand still, and a rank's run of one.
BATCH, READ, LOGITS, OWN, EVALUATE, STEP = "batch", "read", "logits", "own", "evaluate", "step"


class Order(NamedTuple):
    """What each rank does, one after the other."""

    seed: int
    ranks: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, seed: int, ranks: int, steps: int = 3) -> Order:
        draw = random.Random(f"order {seed}")
        found: list[list[str]] = [[] for _ in range(ranks)]
        reads, of_logits, own = (draw.choice(rates) for rates in ([0.1, 0.5, 0.9], [0.0, 0.3, 1.0], [0.0, 0.1, 0.4]))
        for _ in range(steps):
            most, quiet = draw.randint(1, 2), draw.random() < 0.3
            counts = [most if rank == 0 or draw.random() < 0.8 else draw.randint(0, most) for rank in range(ranks)]
            for number in range(most):
                of_all = OWN if draw.random() < own else EVALUATE if draw.random() < 0.1 else ""
                for rank, does in enumerate(found):
                    if number < counts[rank]:
                        does.append(BATCH)
                        if not quiet and draw.random() < reads:
                            does.append(LOGITS if draw.random() < of_logits else READ)
                    does += [of_all] * bool(of_all)
            for does in found:
                does.append(STEP)
        return cls(seed, tuple(map(tuple, found)))

    @property
    def stands_still(self) -> bool:
        """Whether a rank comes to a collective of the script's own while another one waits for all in the engine."""
        at, known, handed = [0] * len(self.ranks), [False] * len(self.ranks), False
        rounds, was_read = True, False
        while any(place < len(does) for place, does in zip(at, self.ranks, strict=True)):
            for rank, does in enumerate(self.ranks):  # until each waits for others
                while does[at[rank]] in (READ, LOGITS, BATCH):
                    op = does[at[rank]]
                    was_read |= op != BATCH
                    if rounds if op == BATCH else not (handed if op == LOGITS else known[rank]):
                        break
                    known[rank] &= op != BATCH
                    at[rank] += 1
            waits = [does[place] for does, place in zip(self.ranks, at, strict=True)]
            if OWN in waits and set(waits) != {OWN}:
                return True
            if set(waits) & {BATCH, READ, LOGITS}:
                rounds, handed = True, handed or LOGITS in waits
                at = [place + (op in (BATCH, READ, LOGITS)) for place, op in zip(at, waits, strict=True)]
                known = [one or op in (BATCH, READ, LOGITS) for one, op in zip(known, waits, strict=True)]
                continue
            if waits[0] == STEP:
                rounds, known = was_read, [False] * len(at)
            at = [place + 1 for place in at]
        return False


def orders(ranks: int, first: int, number: int, *, still: bool) -> Iterator[Order]:
    """Of those that the seeds from `first` on draw, so many that stand still, or that do not."""
    seed = first
    while number:
        order = Order.of(seed, ranks)
        if order.stands_still == still:
            number -= 1
            yield order
        seed += 1


def run_order(rank: int, engine: Any, order: Order, begins: Callable[[], object] = lambda: None) -> None:
    """Of this rank, as if the job began with it; `begins` is called before each operation."""
    engine.rounds = Rounds(engine, "auto")
    out: Any = None
    loss: Any = None
    for number, does in enumerate(order.ranks[rank]):
        begins()
        if loss is not None and does not in (READ, LOGITS):
            engine.backward(loss)
            loss = None
        if does == BATCH:
            out = engine(**collated(prompted([4, 3 + (order.seed + number) % 5], vocab_size(FAMILY), number)))
            loss = out.loss
        elif does == READ:
            assert loss.item() > 0
        elif does == LOGITS:
            loss = out.logits.square().mean() + loss
        elif does == OWN:
            dist.barrier()
        elif does == EVALUATE:
            engine.eval()
            assert engine([[5, 6, 7]]).loss.item() > 0
            engine.train()
        else:
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
