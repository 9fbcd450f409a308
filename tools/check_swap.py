"""The engine in jobs that were written for another one: scripts, streams, own data, own losses, against one process.

python -m tools.check_swap [--quick] [--json FILE] [--only PART ...]

scripts  those of examples/swap with the lines of their diffs changed: losses of 10 updates, evaluations among them; of
         the loop of GRPO losses and norms, against plain DeepSpeed on 2 ranks
stream   streams, those of datasets and torchdata among them, stopped in the middle and resumed, against the undisturbed
         run, to the bit
handed   train_batch(sequences) dealt out to ranks in several ways against map-style data, to the bit
losses   losses of the user's own, those of routers, and weights of sequences under changing strategies, FP64
lora     PEFT's adapters under changing strategies
plan     milliseconds that planning stands in the way of a step on 64 ranks whose lengths are known only at the call

The quick form computes on one thread a process: ranks that share a few cores wait for each other's threads by spinning.
Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hydra.commands.figures import chosen_parts, finish, guarded, print_table, shipped
from ds_hydra.config.hydra_block import HydraConfig, PlannerConfig
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.lengths import read_lengths, sample_batches
from ds_hydra.engine.plans import PlanSource
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner import PlanRecipe
from ds_hydra.ranks.channel import Channel
from ds_hydra.testing import run_ranks
from ds_hydra.watchdog import Activity
from tests.support.case import Case
from tests.support.cases import CASES
from tests.support.equivalence import compare
from tests.support.families import ADAPTED, ADAPTED_WITHOUT_TP, BALANCED
from tests.support.small_job import (
    REAL_STREAMS,
    STREAMS,
    Stateful,
    of_datasets,
    same,
    sequences,
    small_engine,
    whole_state,
)
from tools import aims, machine
from tools.swap.scripts import accelerated, grpo, lora, sft, three_calls, trainer

STRATEGIES_64 = ("4*tp16", "8*tp8", "2*tp16 + 8*tp4", "tp16 + 4*tp8 + 4*tp4", "16*tp4")

AHEAD = (Stateful, of_datasets)  # kinds of streams that are read some steps ahead

Rows = list[dict[str, Any]]


def check_scripts(quick: bool, missed: list[str]) -> Rows:
    """The scripts of examples/swap, each with its diff, on 2 ranks."""
    rows: Rows = []
    for run in (three_calls, trainer, grpo) if quick else (three_calls, lora, trainer, sft, accelerated, grpo):
        with contextlib.redirect_stdout(io.StringIO()):
            found, expected, *saved = run(4 if quick else 10)
        apart = [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]
        row = {"script": run.__name__, "losses": len(found)}
        row |= {"last, swapped": f"{found[-1]:.7f}", "last, unswapped": f"{expected[-1]:.7f}"}
        rows.append(row | {"most apart": f"{max(apart):.1e}", "saved file": f"{saved[0]:.1e}" if saved else ""})
        if not max(apart) <= aims.SWAP_LOSS:
            missed.append(f"{run.__name__}.py: losses {found} after the swap, {expected} without it")
        if saved and not saved[0] <= aims.SWAP_WEIGHTS:
            missed.append(f"{run.__name__}.py: the weights that it saves are {saved[0]:.1e} off")
    return rows


def stream_engine(rank: int, kind: Any) -> Any:
    return small_engine(rank, data=kind(sequences()), context_length=128, planner={"ahead": 2 if kind in AHEAD else 0})


def check_stream(quick: bool, missed: list[str]) -> Rows:
    """Each kind of stream, stopped after 3 of 6 steps."""
    rows: Rows = []
    for kind in REAL_STREAMS[:1] if quick else (*STREAMS, *REAL_STREAMS):
        for num_ranks in (2,) if quick else (2, 4):
            with tempfile.TemporaryDirectory() as folder:

                def job(rank: int, kind: Any = kind, folder: str = folder) -> tuple[bool, list[float]]:
                    whole = stream_engine(rank, kind)
                    losses = [float(whole.train_batch()) for _ in range(6)]
                    state = whole_state(whole)
                    whole.destroy()
                    again: list[float] = []
                    for part in range(2):
                        engine = stream_engine(rank, kind)
                        if part:
                            engine.load_checkpoint(folder)
                        again += [float(engine.train_batch()) for _ in range(3)]
                        if not part:
                            engine.save_checkpoint(folder)
                        else:
                            return same(whole_state(engine), state) and again == losses, losses
                        engine.destroy()
                    raise AssertionError("returns in the second part")

                equal, losses = run_ranks(job, num_ranks, timeout=300)[0]
            rows.append({"stream": kind.__name__, "ranks": num_ranks, "last loss": losses[-1], "equal": equal})
            if not equal:
                missed.append(f"{kind.__name__} on {num_ranks} ranks: resumed in the middle it trains otherwise")
    return rows


def dealt_out(batch: Sequence[Tensor], rank: int, num_ranks: int, how: str) -> list[Tensor]:
    """A rank's share of a step, in the order of the whole."""
    if how == "all on the first":
        return list(batch) if rank == 0 else []
    if how == "all on the last":
        return list(batch) if rank == num_ranks - 1 else []
    if how == "none on the first":
        rank, num_ranks = rank - 1, num_ranks - 1
    cut = len(batch) * max(rank, 0) // num_ranks
    return [] if rank < 0 else list(batch[cut : len(batch) * (rank + 1) // num_ranks])


def check_handed(quick: bool, missed: list[str]) -> Rows:
    """Four ranks, strategies in turn; every way of dealing out is the update of map-style data."""
    num_ranks, steps = 4, 3

    def job(rank: int, how: str | None) -> dict[str, Tensor]:
        source = small_engine(rank)
        drawn = [source.sampler.batch(step) for step in range(steps)]
        data = sequences()
        engine = source if how is None else small_engine(rank, data=None)
        for ids in drawn:
            share = None if how is None else dealt_out([data[i] for i in ids], rank, num_ranks, how)
            engine.train_batch(share)
        return whole_state(engine)

    expected = run_ranks(job, num_ranks, None, timeout=300)[0]
    rows: Rows = []
    for how in ("evenly", "all on the first", "all on the last", "none on the first")[: 1 if quick else 4]:
        equal = all(same(found, expected) for found in run_ranks(job, num_ranks, how, timeout=300))
        rows.append({"sequences": how, "ranks": num_ranks, "steps": steps, "equal": equal})
        if not equal:
            missed.append(f"sequences handed in {how} train otherwise than map-style data")
    return rows


def compared(cases: Sequence[Case], quick: bool, missed: list[str]) -> Rows:
    """Rows of the training table, each against one process."""
    rows: Rows = []
    for case in [case for case in cases if case.quick][:2] if quick else cases:
        found = compare(case.shortened() if quick else case, timeout=300)
        missed += found.missed(case.aims, case.name)
        what = ("loss", "gradient", "parameter")
        rows.append({"case": case.name} | {name: f"{getattr(found, name):.1e}" for name in what})
    return rows


def check_losses(quick: bool, missed: list[str]) -> Rows:
    """Rows whose loss is the user's own or has a part of routers, or whose sequences have weights."""
    own = [case for case in CASES if case.own_loss or case.weighted or case.family in BALANCED]
    return compared(own, quick, missed)


def check_lora(quick: bool, missed: list[str]) -> Rows:
    """Rows of models with PEFT's adapters."""
    adapted = {*ADAPTED, *ADAPTED_WITHOUT_TP}
    return compared([case for case in CASES if case.family in adapted], quick, missed)


class Overheard(Channel):
    """The channel of one of 64 ranks that are not there: `texts` takes what rank 0 tells, for the other to read."""

    def __init__(self, rank: int, texts: list[str]):
        super().__init__(None, rank, 64)
        self._texts = texts

    def tell(self, text: str | None) -> str:
        """Rank 0's text."""
        if text:
            self._texts.append(text)
        return self._texts[-1]


def check_plan(quick: bool, missed: list[str]) -> Rows:
    """What `train_batch(sequences)` waits for between lengths and plan: on rank 0 to have it, then on another to read
    and check it. Of five tries of a batch the shortest counts: others may use the processor."""
    count, unmeasured, tries = 8 if quick else 40, 2, 5  # the first ones wait for the producer's start
    table, strategies = CostTable.load(shipped("a800-32b")), tuple(map(StrategyShape.parse, STRATEGIES_64))
    lengths = read_lengths("lognormal:6.22,1.233", 32768).lengths
    batches = sample_batches(lengths.tolist(), 200_000, count + unmeasured, 0, 32768)
    told: list[str] = []
    first, other = (
        PlanSource(
            PlanRecipe(table, strategies),
            HydraConfig(200_000, planner=PlannerConfig(ahead=ahead)),
            None,
            Overheard(rank, told),
            Activity(),
        )
        for rank, ahead in ((0, 2), (1, 0))
    )

    def once(step: int, batch: tuple[int, ...]) -> tuple[float, float]:
        began = time.perf_counter()
        planned = first.given(step, batch)
        other.given(step, batch)
        return 1e3 * (time.perf_counter() - began), planned.planning_ms

    shortest = [
        min(once(tries * number + again, tuple(batch.tolist())) for again in range(tries))
        for number, batch in enumerate(batches)
    ][unmeasured:]
    first.close()
    waited, planning = np.array(shortest).T
    if not np.median(waited) <= (most := machine.limit(aims.WAIT_FOR_PLAN_MS, waits=True)).here:
        missed.append(f"a step of 64 ranks waits {np.median(waited):.1f} ms for its plan (aim {most})")
    row = {
        "ranks": 64,
        "strategies": len(strategies),
        "sequences": int(np.mean([len(batch) for batch in batches])),
        "waited, median ms": float(np.median(waited)),
        "longest": float(waited.max()),
        "of it planning": float(np.median(planning)),
    }
    return [row]


PARTS: dict[str, Callable[[bool, list[str]], Rows]] = {
    "scripts": check_scripts,
    "stream": check_stream,
    "handed": check_handed,
    "losses": check_losses,
    "lora": check_lora,
    "plan": check_plan,
}


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 if an aim was missed."""
    options, chosen = chosen_parts("check_swap", __doc__, PARTS, arguments)
    if options.quick:
        torch.set_num_threads(1)  # which ranks inherit when they are forked
    began = time.perf_counter()
    missed: list[str] = []
    figures: dict[str, Rows] = {}
    for name in chosen:
        rows = figures[name] = PARTS[name](options.quick, missed)
        print(f"\n{name}")
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    seconds = time.perf_counter() - began
    checked = ", ".join(f"{len(rows)} of {name}" for name, rows in figures.items())
    return finish("check_swap", f"{checked}, {seconds:.0f} s", {"parts": figures}, missed, options.json)


if __name__ == "__main__":
    sys.exit(guarded("check_swap", main))
