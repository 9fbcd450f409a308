"""Which rank reads a loss or logits when, with collectives of the script's own between: drawn orders, which of them
must stand still, and a rank's run of one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from ds_hydra.engine.rounds import Rounds
from tests.support.batches import collated, prompted
from tests.support.drawn_loops import FAMILY
from tests.support.families import vocab_size

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


def run(rank: int, engine: Any, order: Order, begins: Callable[[], object] = lambda: None) -> None:
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
