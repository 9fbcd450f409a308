"""What passes between the end of a step's update and the first forward of the next, and how many small messages.

The example's job on 8 ranks: its model, config and cost table, sequences as long as Python's own sources. Steps in
turns are made ready by the thread and left to training itself, as all were before, so both stand under the same load.
Times are medians over ranks and steps. The wall time holds the waits for the slowest rank and, since ranks may be more
than cores, for a core; beside it stands what the training thread itself computes. Small messages are those of the
channel in a step: a text that is told, rows that are gathered. The gradient's norm, of all ranks too, is none of them.
"""

from __future__ import annotations

import logging
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import torch

import ds_hydra
import ds_hydra.engine.engine  # (the same)
from ds_hydra.config.checks import read_config
from ds_hydra.engine.next_step import NextStep
from ds_hydra.pipe.runtime import StageRuntime
from ds_hydra.ranks.channel import Channel
from ds_hydra.ranks.telling import Telling
from ds_hydra.step.update import Update
from ds_hydra.testing import rank_environment, run_ranks
from tools import aims
from tools.devices.table import Table

RANKS = 8
_QUICK_STRATEGIES, _QUICK_STEPS, _QUICK_TOKENS = ("tp2 + 2*tp1", "4*tp1"), 6, 2048
_STEPS = 40
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_BYTES_A_TOKEN, _FILES, _CONTEXT = 4, 400, 1024


class Gap(NamedTuple):
    """Between the update of a step and the first forward of the next, on one rank; seconds."""

    ready: bool  # the next step was made ready by the thread
    wall_s: float
    cpu_s: float  # of the training thread
    messages: int  # of the step after the gap, from its plan to its figures
    step_s: float  # how long that step took


class Moments:
    """Notes when a rank's updates end and when its first forwards begin, and counts its small messages."""

    def __init__(self) -> None:
        self.updated: tuple[float, float] | None = None
        self.gap: tuple[float, float] | None = None
        self.messages: list[str] = []  # and not a number: the thread adds to it too

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note what happens within the block."""
        with ExitStack() as stack:
            for owner, name, note in (
                (Update, "apply", self._note_update),
                (StageRuntime, "_forward", self._note_forward),
                (Telling, "_passed_on", self._count),
                (Channel, "rows", self._count),
                (Channel, "exchange", self._count),
            ):
                original = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, name, note(original)))
            yield

    def _note_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            applied = original(*args, **kwargs)
            self.updated = (time.perf_counter(), time.thread_time())
            return applied

        return noted

    def _note_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self.updated is not None:
                wall_s, cpu_s = self.updated
                self.gap, self.updated = (time.perf_counter() - wall_s, time.thread_time() - cpu_s), None
            return original(*args, **kwargs)

        return noted

    def _count(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.messages.append(original.__name__)
            return original(*args, **kwargs)

        return counted


def between_steps(quick: bool) -> Table:
    """Gaps before steps that were made ready, and before others.

    Quick: half of the ranks and other strategies, fewer steps and tokens than the example's, so that only messages are
    judged.
    """
    ranks, changed, steps = RANKS, {}, _STEPS
    if quick:
        ranks, steps = RANKS // 2, _QUICK_STEPS
        changed = {"strategies": list(_QUICK_STRATEGIES), "tokens_per_step": _QUICK_TOKENS}
    gaps = [gap for found in run_ranks(_train, ranks, steps, changed, timeout=1800) for gap in found]
    table = Table(
        f"between steps: from the update to the next step's first forward, the example on {ranks} ranks",
        ["the next step is", "wall ms", "of the step", "aim", "training thread's ms", "small messages", "aim "],
    )
    for name, ready in (("made in its own time", False), ("made ready before", True)):
        kind = [gap for gap in gaps if gap.ready is ready]
        share = median(gap.wall_s / gap.step_s for gap in kind)
        messages, judged = max(gap.messages for gap in kind), ready and not quick
        table.rows.append(
            [name, round(1e3 * median(gap.wall_s for gap in kind), 1), f"{share:.2%}",
             f"{aims.BETWEEN_STEPS:.0%}" if judged else "-",
             round(1e3 * median(gap.cpu_s for gap in kind), 1), messages, aims.BETWEEN_MESSAGES if ready else "-"]
        )  # fmt: skip
        if judged and share > aims.BETWEEN_STEPS:
            table.missed.append(f"{share:.2%} of a step between two steps (aim {aims.BETWEEN_STEPS:.0%})")
        if ready and messages > aims.BETWEEN_MESSAGES:
            table.missed.append(f"{messages} small messages in a step (aim {aims.BETWEEN_MESSAGES})")
    return table


def _train(rank: int, steps: int, changed: dict[str, object]) -> list[Gap]:
    """The gaps of a run of strategies in turns on this rank, after the first use of each, which builds it.

    `changed`: settings that the example has otherwise.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    rank_environment(rank)
    warnings.simplefilter("ignore")
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    config = read_config(config=EXAMPLES / "ds_hydra.json")
    config["hydra"] |= {"cost_table": str(EXAMPLES / "cost_tables" / "example_cpu.json"), "steps_file": None,
                        "choose": "cycle", "self_check": "off", **changed}  # fmt: skip
    turns = len(config["hydra"]["strategies"])
    torch.manual_seed(0)
    model_config = AutoConfig.from_pretrained(str(EXAMPLES / "llama_tiny.json"))
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    data = _sequences(model_config.vocab_size)
    engine = ds_hydra.initialize(model=model, training_data=data, config=config)[0]
    moments, gaps = Moments(), list[Gap]()
    with moments.watch():
        for step in range(steps):
            # While this step runs, the next one is made ready or not. Of two strategies that take turns, steps 2 and 3
            # are ready, 4 and 5 not, 6 and 7 again, so each strategy comes in both ways.
            ready, next_ready = (number // turns % 2 == 1 for number in (step, step + 1))
            moments.gap, began = None, time.perf_counter()
            moments.messages.clear()
            with mock.patch.object(NextStep, "begin", NextStep.begin if next_ready else _leave):
                engine.train_batch()
            # A step that is made ready was told its plan in the step before; this one tells the next one's, if any.
            told = int(ready) - int(next_ready)
            if moments.gap is not None and step >= turns:
                gaps.append(Gap(ready, *moments.gap, len(moments.messages) + told, time.perf_counter() - began))
    engine.destroy()
    return gaps


def _leave(*_: Any) -> None:
    """In the place of `NextStep.begin`."""


def _sequences(vocab_size: int) -> Sequence[torch.Tensor]:
    """Random tokens, as many as the sources of Python's library have, cut at the context."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))[:_FILES]
    lengths = [min(_CONTEXT, file.stat().st_size // _BYTES_A_TOKEN) for file in files]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths if length > 1]
