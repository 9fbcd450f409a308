"""What it costs that each rank keeps a copy of another one's masters: seconds, bytes and memory.

Measured on the example's model and optimizer, on four ranks: in one job the copies are left out of some steps and not
of others, in turns, with the same sequences. Counted on 64 ranks of a 32B model, where the simulator says what a step
takes and what part of that the copies' messages are that nothing hides.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.cost_table import read_table_file
from ds_hydra.data.lengths import read_lengths, sample_batches
from ds_hydra.host.environment import MEMBERS_FOLDER
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.simulate.job import SHIPPED, shipped_job
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.step import Simulator
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.buddies import shift_of
from ds_hydra.zero_hetero.layout import even_layout
from tests.support.small_job import find_before_forks
from tools import aims

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANKS, STRATEGIES = 4, ("2*tp2", "tp2 + 2*tp1")
LENGTHS = (1024, 700, 512, 384, 300, 256, 200, 160, 128, 96, 64, 48)  # of the sequences of each step, in tokens
SIMULATED = "tp16 + 2*tp8 + 4*tp4pp2"  # of 64 ranks in nodes of 8
TOKENS = 3125  # of a step, for each of these ranks
GRADIENT, COPIED = 4, 16  # bytes of a rank's share, for each parameter: sent in a step; kept


class Cost(NamedTuple):
    """Of a job: seconds of turns, each of all strategies, by the clock, of CPU on all ranks, and of the training
    threads alone; and what a rank sends and keeps for its copy, in bytes, the fullest rank's."""

    clock: list[tuple[float, float]]  # with copies, without
    cpu: list[tuple[float, float]]
    thread: list[tuple[float, float]]
    sent: int
    kept: int
    parameters: int


def measured(turns: int, lengths: Sequence[int] = LENGTHS) -> Cost:
    """Train the example's model; each turn has every strategy once with copies and once without."""
    find_before_forks()
    with TemporaryDirectory() as folder:
        rank = partial(_rank, folder=folder, turns=turns, lengths=tuple(lengths))
        found: list[Cost] = run_ranks(rank, RANKS, timeout=120.0 + 60.0 * turns)
    return found[0]


def _rank(rank: int, folder: str, turns: int, lengths: Sequence[int]) -> Cost:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import ds_hydra
    from ds_hydra.config.checks import read_config
    from ds_hydra.testing import rank_environment

    rank_environment(rank)
    os.environ[MEMBERS_FOLDER] = folder
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(EXAMPLES / "llama_tiny.json")))
    data = [torch.randint(1, model.config.vocab_size, (length,)) for length in lengths]
    example = read_config(config=EXAMPLES / "ds_hydra.json")
    example["hydra"] = {
        "tokens_per_step": sum(lengths), "context_length": 1024, "strategies": list(STRATEGIES), "choose": "cycle",
        "self_check": "off", "steps_file": None, "elastic": {"compare_every": 0},
    }  # fmt: skip
    engine = ds_hydra.initialize(model=model, training_data=data, config=example)[0]
    copy, update = engine.crew.copy, engine.crew.update
    for _ in STRATEGIES:  # builds all that a strategy needs, and makes the copies whole
        engine.train_batch()
    rows: dict[bool, list[Sequence[float]]] = {True: [], False: []}
    for turn in range(turns):
        for protected in (True, False) if turn % 2 else (False, True):
            update.copy = copy if protected else None
            rows[protected].append(_turn(engine))
    update.copy = copy
    sent, kept = sent_in(engine), kept_by(copy)
    parameters = sum(bucket.numel for bucket in engine.job.source.plan.buckets)
    engine.destroy()
    both = list(zip(rows[True], rows[False], strict=True))
    clock, cpu, thread = ([(with_it[at], without[at]) for with_it, without in both] for at in range(3))
    return Cost(clock, cpu, thread, sent, kept, parameters)


def _turn(engine: Any) -> list[float]:
    """A step of each strategy: seconds by the clock, of CPU on all ranks, and of their training threads."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    began, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in STRATEGIES:
        engine.train_batch()
    dist.barrier()
    own = torch.tensor([time.process_time() - cpu, time.thread_time() - thread], dtype=torch.float64)
    took = time.perf_counter() - began
    dist.all_reduce(own)
    return [took, *own.tolist()]


def sent_in(engine: Any) -> int:
    """Bytes that this rank hands to its links for its copy in the next step."""
    copy, links = engine.crew.copy, engine.crew.world.links
    exchange, leave, sent = links.exchange, copy.leave, 0

    def counted(sends: Any, recvs: Any, tag: int = 0) -> Any:
        nonlocal sent
        sent += sum(tensor.nbytes for _, tensor in sends)
        return exchange(sends, recvs, tag)

    def watched(bucket: int) -> None:
        links.exchange = counted
        leave(bucket)
        del links.exchange

    copy.leave = watched
    engine.train_batch()
    del copy.leave
    return sent


def kept_by(copy: Any) -> int:
    """Bytes of a copy: values, states and gradients."""
    import torch

    masters = copy.masters
    states = [value for state in copy.optimizer.state.values() for value in state.values()
              if isinstance(value, torch.Tensor) and value.dim()]  # fmt: skip
    return sum(one.nbytes for one in (masters.trained.flat, masters.frozen.flat, *masters.trained.grads, *states))


def protection(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each figure: what it is, and the most that it may be."""
    found = measured(1, LENGTHS[-3:]) if quick else measured(30)
    rows = _rows(f"example on {RANKS} ranks", found.sent * RANKS / found.parameters,
                 found.kept * RANKS / found.parameters)  # fmt: skip
    for name, pairs in (
        ("clock", found.clock), ("CPU of all ranks", found.cpu), ("CPU of training threads", found.thread)
    ):  # fmt: skip
        ratio = statistics.median(with_it / without for with_it, without in pairs)
        judged = name == "clock" and not quick
        rows.append(_row(f"a step with copies over one without, {name}, {len(pairs)} pairs", ratio,
                         aims.COPIES_STEP if judged else None))  # fmt: skip
    rows += counted(quick)
    for row in rows:
        if isinstance(row["at most"], float) and row["is"] > row["at most"]:
            missed.append(f"{row['figure']}: {row['is']:.4f}, not at most {row['at most']:.4f}")
    return rows


def counted(quick: bool) -> list[dict[str, Any]]:
    """Rows of 64 ranks of a 32B model; exposed is what a step takes longer with copies than without."""
    strategy, found = StrategyShape.parse(SIMULATED), read_table_file(shipped("a800-32b"))
    ranks, per_node = strategy.num_ranks, 8
    job = shipped_job("a800-32b", found, LinkModel.of_table(found.links, per_node), ranks, [strategy])
    assert job.memory is not None, "shipped jobs have one"
    shift = shift_of([str(rank // per_node) for rank in range(ranks)])
    shares = [sum(even_layout(bucket.numel, ranks).sizes[rank] for bucket in job.plan.buckets) for rank in range(ranks)]
    parameters, sent = sum(bucket.numel for bucket in job.plan.buckets), GRADIENT * max(shares)
    scheme = strategy.pipelines[0]
    kept = sum(
        sign * (needs.masters + needs.optimizer)
        for sign, copies in ((1, True), (-1, False))
        for needs in [replace(job.memory, copies=copies, _cache={}).needs(scheme.scheme or scheme, 0)]
    )
    lengths = read_lengths(shipped("pretraining"), 32768, seed=0).lengths.tolist()
    (batch,) = sample_batches(lengths, TOKENS * ranks, 1, 0, 32768)
    plan = Planner(job.table, [strategy], PlannerOptions(kernels="pure")).plan(0, range(len(batch)), batch.tolist())
    step_s, protected_s = (Simulator(replace(job, shift=how)).step(plan).norm_s for how in (0, shift))
    of = f"{SHIPPED['a800-32b'].shape.params / 1e9:.0f}B on {ranks} ranks"
    most = None if quick else aims.COPIES_EXPOSED
    return [
        *_rows(of, sent * ranks / parameters, kept * ranks / parameters),
        _row(f"{of}: GB that a rank sends in a step", sent / 1e9, None),
        _row(f"{of}: GB that it keeps", kept / 1e9, None),
        _row(f"{of}: exposed share of a simulated step of {step_s:.2f} s", float(protected_s / step_s) - 1, most),
    ]


def _rows(of: str, sent: float, kept: float) -> list[dict[str, Any]]:
    """Of bytes for each parameter of a rank's share."""
    most = 1 + aims.COPIES_FORMULA
    return [_row(f"{of}: bytes sent in a step over {GRADIENT} a parameter of a share", sent / GRADIENT, most),
            _row(f"{of}: bytes kept over {COPIED}", kept / COPIED, most)]  # fmt: skip


def _row(figure: str, value: float, most: float | None) -> dict[str, Any]:
    return {"figure": figure, "is": value, "at most": "" if most is None else most}
