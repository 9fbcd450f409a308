"""What it costs to look at a user's model, data and loss, on the example's job: shares of its self-check, of a step.

The self-check tries a small copy under each pipeline. Beside it, the job's own sequences are tried at the start, its
loss and some of its data are read twice, and before every update signs are looked for that the model was changed. All
ranks run the example's config on its model, and CPU time of their processes is counted, so that a busy machine does not
count.
"""

from __future__ import annotations

import functools
import logging
import os
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import torch

import ds_hydra
from ds_hydra.config.checks import read_config
from ds_hydra.engine import engine as engines
from ds_hydra.engine import prepare
from ds_hydra.engine.real_sequences import RealSequences
from ds_hydra.host.kept_model import KeptModel
from ds_hydra.pipe.models import causal_lm
from ds_hydra.testing import rank_environment, run_ranks

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples"
_RANKS, _FILES = 8, 300
_TIMED: tuple[tuple[str, Any, str], ...] = (
    ("self-check", prepare, "check_candidates"),
    ("start", RealSequences, "before_training"),
    ("start", KeptModel, "__init__"),
    ("start", engines, "read_twice"),
    ("start", engines, "try_loss"),
    ("start", causal_lm, "counts_padding"),
    ("start", causal_lm, "refuse_parts_in_evaluation"),
    ("step", KeptModel, "_changed"),  # a run beside its copy keeps to its share by itself
    ("step", RealSequences, "before_step"),
)


class Added(NamedTuple):
    """CPU seconds of all ranks together."""

    self_check: float
    start: float  # of what else looks at model, data and loss before step 0
    step: float  # of what looks at the model in a step
    whole_step: float

    @property
    def shares(self) -> tuple[float, float]:
        """Of the self-check's own time, and of a step's."""
        return self.start / self.self_check, self.step / self.whole_step


def added(steps: int) -> Added:
    """Start the example's job and train this many steps after the first, which builds and compiles."""
    with TemporaryDirectory() as cache, mock.patch.dict(os.environ, XDG_CACHE_HOME=cache):  # no verdict from before
        found = run_ranks(_train, _RANKS, steps, timeout=3600.0)
    return Added(*(sum(of_rank) for of_rank in zip(*found, strict=True)))


def _train(rank: int, steps: int) -> Added:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    rank_environment(rank)
    config = read_config(config=str(_EXAMPLE / "ds_hydra.json"))
    table = str(_EXAMPLE / "cost_tables" / "example_cpu.json")
    config["hydra"] |= {"cost_table": table, "steps_file": None, "planner": {"ahead": 0}}
    context = config["hydra"]["context_length"]
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_FILES]
    data = [torch.tensor(list(text[:context])) for text in (file.read_bytes() for file in files) if len(text) > 1]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(_EXAMPLE / "llama_tiny.json"))
    spent: dict[str, float] = defaultdict(float)
    with _timed(spent):
        engine = ds_hydra.initialize(model=model, training_data=data, config=config)[0]
        engine.train_batch()
        began, before = time.process_time(), spent["step"]
        for _ in range(steps):
            engine.train_batch()
        whole = time.process_time() - began
    engine.destroy()
    return Added(spent["self-check"], spent["start"], (spent["step"] - before) / steps, whole / steps)


@contextmanager
def _timed(spent: dict[str, float]) -> Iterator[None]:
    """Within it, CPU seconds of what is timed add up in `spent`."""
    with ExitStack() as stack:
        for name, owner, function in _TIMED:
            stack.enter_context(mock.patch.object(owner, function, _counted(getattr(owner, function), name, spent)))
        yield


def _counted(function: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.process_time() - began

    return run
