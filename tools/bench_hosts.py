"""A job on two hosts joined by a slow cable: bytes that cross it and steps, counted and simulated against measured.

  python -m tools.bench_hosts [--quick] [--json FILE]

The hosts are network namespaces on this machine. Of each strategy: bytes that enter a host in a step, by its network
interface and by the plans of pulls, pushes and messages between stages; the same as a multiple of what has to enter,
the parameters that its stages need and nobody on it owns, and the gradients of what it owns; a step's seconds by the
clock and by the simulator, fed with the cable's rate and with what steps over a fast cable have computed, and besides;
the share of the wire's time that was hidden; and plain DeepSpeed's ZeRO-1 with the same sequences. Each is a median of
the steps of its strategy, which changes in every step.

Each host is a process that forks its ranks. Some steps go over a fast cable, which show what a step takes besides it,
the others over the slow one, at last those of DeepSpeed. Computing is as long as the stages' own stopwatches say of the
steps over the fast cable. What such a step takes besides computing, and waiting for pulls and pushes, is no stage's:
planning, the update, small messages. No transfer hides it, so it is added to what the simulator says of the slow cable.

`--quick`: two hosts of two ranks, three strategies and few steps, whose times are not judged, without ZeRO-1. Exits
non-zero if an aim is missed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.model_plan import ModelPlan, plan_transfers
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.rows import edge
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.step import Simulator
from ds_hydra.zero_hetero.layout import Layout, even_layout
from ds_hydra.zero_hetero.transfer_plan import TransferPlan
from tools import aims
from tools.hosts.namespaces import limit, made_hosts, run, why_not

MEGABITS, FAST_MEGABITS = 100.0, 10_000.0
_HOST = "--host"
SHAPE = {"hidden": 160, "layers": 8, "ffn": 432, "vocab": 256}
LENGTHS = (40, 9, 17, 26, 12, 30, 8, 18) * 3
_PORT = 29_600
_HEADERS = 66  # bytes of Ethernet, IPv4 and TCP with its time stamps


@dataclass(frozen=True)
class Settings:
    """What both hosts are told."""

    folder: str
    ranks: int  # of each host
    strategies: tuple[str, ...]
    devices: tuple[str, str]  # each host's end of the cable
    address: str  # of the first host
    megabits: float
    steps: int  # of each strategy
    each_fast: int  # of so many steps one goes over the fast cable, too
    deepspeed: bool

    def command(self, index: int) -> list[str]:
        """The command that runs a host."""
        return [sys.executable, "-m", "tools.bench_hosts", _HOST, json.dumps(asdict(self)), str(index)]


def _crossed(device: str) -> int:
    """Bytes that have entered this host in messages, without the headers of what carried them."""
    statistics = Path("/sys/class/net") / device / "statistics"
    taken, packets = (int((statistics / name).read_text()) for name in ("rx_bytes", "rx_packets"))
    return taken - _HEADERS * packets


def _rank(settings: Settings, index: int, local: int) -> None:
    rank, num_ranks = index * settings.ranks + local, 2 * settings.ranks
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(local),
                   "MASTER_ADDR": settings.address, "MASTER_PORT": str(_PORT)}  # fmt: skip
    import torch
    import torch.distributed as dist

    import ds_hydra

    torch.set_num_threads(1)
    model, sequences = _model(), _sequences()
    engine: Any = ds_hydra.initialize(model=_model(), training_data=sequences, config=_config(settings))[0]
    assert engine.crew.world.node_size == settings.ranks, "as the names of the hosts say"
    device = settings.devices[index]

    def timed(step: Callable[[], object]) -> dict[str, Any]:
        dist.barrier()
        before, began = _crossed(device), time.perf_counter()
        step()
        dist.barrier()
        after = _crossed(device)
        figures = torch.tensor([time.perf_counter() - began, after - before], dtype=torch.float64)
        table = [torch.empty_like(figures) for _ in range(num_ranks)]
        dist.all_gather(table, figures)  # which is not counted
        hosts = [table[0], table[settings.ranks]]
        return {"seconds": float(max(row[0] for row in table)), "into": [float(row[1]) for row in hosts]}

    def cycle(megabits: float) -> list[dict[str, Any]]:
        """A step of each strategy."""
        if local == 0:
            run("tc", *limit("change", device, megabits))
        found = []
        for _ in settings.strategies:
            figures = timed(engine.train_batch)
            last = engine.last_step
            found.append(figures | {"strategy": last.strategy, "plan": last.plan, "pull_ms": last.pull_ms,
                                    "push_ms": last.push_ms, "stage_ms": last.stage_ms})  # fmt: skip
        return found

    cycle(FAST_MEGABITS)  # builds all that a strategy needs
    record: dict[str, Any] = {"fast": [], "slow": []}
    for number in range(settings.steps):  # by turns: both see the same load of the machine
        if number % settings.each_fast == 0:
            record["fast"] += cycle(FAST_MEGABITS)
        record["slow"] += cycle(settings.megabits)
    if rank == 0:
        record |= _expected(engine, settings, record)
    engine.destroy()
    if settings.deepspeed:
        record["deepspeed"] = _deepspeed(settings, model, sequences, timed)
    if rank == 0:
        Path(settings.folder, "found.json").write_text(json.dumps(record))
    dist.barrier()


def _model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=SHAPE["vocab"], hidden_size=SHAPE["hidden"], intermediate_size=SHAPE["ffn"],
                         num_hidden_layers=SHAPE["layers"], num_attention_heads=8, num_key_value_heads=4,
                         max_position_embeddings=64, tie_word_embeddings=False)  # fmt: skip
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def _sequences() -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, SHAPE["vocab"], (length,), generator=generator) for length in LENGTHS]


def _config(settings: Settings) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "hydra": {"tokens_per_step": sum(LENGTHS) // 3, "strategies": list(settings.strategies), "choose": "cycle",
                  "self_check": "off", "steps_file": None, "planner": {"ahead": 0}, "timeout_seconds": 240},
    }  # fmt: skip


def _expected(engine: Any, settings: Settings, record: dict[str, Any]) -> dict[str, Any]:
    """By strategy: bytes that enter each host by the plans, and a step's seconds by the simulator."""
    model = engine.job.source.plan
    plans = [StepPlan.from_json(step["plan"]) for step in record["slow"]]
    crossed = [crossing(model, plan, SHAPE["hidden"], settings.ranks)._asdict() for plan in plans]
    placed = engine.crew.prepared.strategies.items()
    needed = {str(shape): least(model, strategy, settings.ranks) for shape, strategy in placed}
    return {"expected": crossed, "least": needed, "predicted": predicted_seconds(engine, settings, record)}


def _deepspeed(
    settings: Settings, model: Any, sequences: Sequence[Any], timed: Callable[[Callable[[], object]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Steps of DeepSpeed's ZeRO-1 on as many tokens."""
    from tools.deepspeed_baselines import Shape, Zero1, prepare

    prepare()
    job = Zero1(model, Shape(**SHAPE))
    batches = [sequences[at : at + len(LENGTHS) // 3] for at in range(0, len(sequences), len(LENGTHS) // 3)]
    return [timed(lambda batch=batches[number % 3]: job.step(batch)) for number in range(settings.steps)]  # type: ignore[misc]


ELEMENT = 4  # bytes of all that travels in an FP32 job


class Crossing(NamedTuple):
    """Bytes that enter host 0 and host 1."""

    pulls: tuple[int, int]
    pushes: tuple[int, int]
    messages: tuple[int, int]  # between stages

    @property
    def into(self) -> tuple[int, int]:
        """All of them."""
        return tuple(sum(column) for column in zip(*self, strict=True))  # type: ignore[return-value]


def crossing(model: ModelPlan, plan: StepPlan, hidden: int, node_size: int) -> Crossing:
    """Bytes of a step on two hosts of `node_size` ranks each, none of whose stages spans both."""
    pulls, pushes, messages = [0, 0], [0, 0], [0, 0]
    for phase in plan.phases:
        placed = place_strategy(phase.shape, 2 * node_size, model.num_layers)
        for pull, push in plan_transfers(model, placed, node_size):
            _add(pulls, (pull,) if isinstance(pull, TransferPlan) else pull.hops, node_size)
            if push is not None:
                _add(pushes, (push,) if isinstance(push, TransferPlan) else push.hops, node_size)
        for pipeline, planned in zip(placed.pipelines, phase.pipelines, strict=True):
            place = StagePlace(pipeline, 0, 0, 0, None, None, 0, model.token_sharding)
            for microbatch in planned.microbatches:
                rows = microbatch.num_tokens + place.padding(microbatch.num_tokens)
                for before, after in pairwise(pipeline.stages):
                    for src, dst in ((before, after), (after, before)):
                        received = edge(src, dst, rows, token_sharding=model.token_sharding)[1]
                        for receiver, parts in received.items():
                            for part in parts:
                                if part.peer // node_size != receiver // node_size:
                                    messages[receiver // node_size] += (part.stop - part.start) * hidden * ELEMENT
    return Crossing(*((into[0], into[1]) for into in (pulls, pushes, messages)))


def _add(into: list[int], hops: Iterable[TransferPlan], node_size: int) -> None:
    for hop in hops:
        for message in hop.messages:
            if message.src // node_size != message.dst // node_size:
                into[message.dst // node_size] += message.numel * ELEMENT


def least(model: ModelPlan, strategy: Strategy, node_size: int) -> int:
    """Bytes that must enter a host in a step, whatever the way; of the host that needs more.

    That is each parameter once that its stages need and none of its ranks owns, and one sum of the other host's
    gradients of each that they own.
    """
    into = [0, 0]
    for bucket in model.buckets:
        owned = _held(even_layout(bucket.numel, strategy.num_ranks), node_size)
        needed = _held(model.pull_layout(bucket, strategy), node_size)
        given = _held(model.push_layout(bucket, strategy), node_size) if bucket.trainable else np.zeros_like(needed)
        for host in range(2):
            into[host] += int((needed[host] & ~owned[host]).sum() + (given[1 - host] & owned[host]).sum()) * ELEMENT
    return max(into)


def _held(layout: Layout, node_size: int) -> NDArray[np.bool_]:
    """Which elements a rank of each host holds: (2, numel)."""
    held = np.zeros((2, layout.numel), dtype=np.bool_)
    for rank, pieces in enumerate(layout.pieces):
        for piece in pieces:
            held[rank // node_size, piece.start : piece.stop] = True
    return held


INSIDE = Speed(1e-4, 1e9)  # between processes of one machine
LATENCY_S = 2e-4
Scales = Mapping[ParallelScheme | PipelineShape, float]


def predicted_seconds(engine: Any, settings: Settings, record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of each strategy, medians over its steps: a step's seconds over the slow cable, its seconds of computing on the
    slowest stage, and what is added.
    """
    from ds_hydra.engine.prepare import simulated_job

    crew = engine.crew
    job = simulated_job(engine.job, crew.world, crew.prepared.found)
    cable = Speed(LATENCY_S, settings.megabits * 1e6 / 8)
    slow = replace(job, links=LinkModel(settings.ranks, INSIDE, cable, node_cable=True))
    found = {}
    for strategy in settings.strategies:
        measured, plans = ([step for step in record[key] if step["strategy"] == strategy] for key in ("fast", "slow"))
        scales = _scales(job.table, measured)
        simulator = Simulator(_scaled(job, scales))
        added = statistics.median(
            step["seconds"] - simulator.computing_s(_plan(step)) - (step["pull_ms"] + step["push_ms"]) / 1e3
            for step in measured
        )
        simulator = Simulator(_scaled(slow, scales))
        on_wire = statistics.median(simulator.step(_plan(step)).step_s for step in plans)
        computing = statistics.median(max(max(stages) for stages in step["stage_ms"]) for step in measured) / 1e3
        found[strategy] = {"seconds": on_wire + max(0.0, added), "computing": computing, "added": max(0.0, added)}
    return found


def _plan(step: Mapping[str, Any]) -> StepPlan:
    return StepPlan.from_json(step["plan"])


def _scales(table: CostTable, steps: Sequence[Mapping[str, Any]]) -> Scales:
    """How many times as long as the table says each scheme has computed: the median of its pipelines in all steps."""
    ratios: dict[ParallelScheme | PipelineShape, list[float]] = defaultdict(list)
    for step in steps:
        for pipeline, stages in zip(_plan(step).pipelines, step["stage_ms"], strict=True):
            if pipeline.microbatches:
                cost = table[pipeline.shape]
                said = sum(cost.load_ms(batch.lengths) for batch in pipeline.microbatches)
                ratios[cost.scheme].append(statistics.mean(stages) / said)
    return {scheme: statistics.median(each) for scheme, each in ratios.items()}


def _scaled(job: SimulatedJob, scales: Scales) -> SimulatedJob:
    costs = [
        replace(cost, a=cost.a * scale, b=cost.b * scale, c=cost.c * scale)
        for cost in job.table.costs for scale in [scales.get(cost.scheme, 1.0)]
    ]  # fmt: skip
    return replace(job, found=replace(job.found, table=CostTable(tuple(costs))))


STRATEGIES = {
    2: ("4*tp1", "2*tp2", "2*pp2", "tp2 + 2*tp1", "tp2pp2", "pp4"),
    4: ("8*tp1", "4*tp2", "2*tp4", "2*tp2pp2", "tp4 + 2*tp2", "tp4pp2"),
}
STEPS, EACH_FAST = 20, 4


def measured(
    ranks: int, strategies: tuple[str, ...], steps: int, each_fast: int, *, megabits: float = MEGABITS,
    names: tuple[str, str] = ("node0", "node1"), deepspeed: bool = True, limit_s: float = 1500.0,
) -> dict[str, Any]:  # fmt: skip
    """What a job on two hosts has found. RuntimeError, with its last words, where one fails."""
    with tempfile.TemporaryDirectory() as folder, made_hosts(megabits, names=names) as hosts:
        settings = Settings(folder, ranks, strategies, (hosts[0].device, hosts[1].device), hosts[0].address, megabits,
                            steps, each_fast, deepspeed)  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCAL_")}
        environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        jobs = [
            subprocess.Popen(host.command(*settings.command(index)), env=environment, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for index, host in enumerate(hosts)
        ]  # fmt: skip
        try:
            said = [job.communicate(timeout=limit_s)[0] for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        if any(job.returncode for job in jobs):
            raise RuntimeError("\n".join(text[-3000:] for text in said))
        return json.loads(Path(folder, "found.json").read_text())


def _rows(
    missed: list[str], ranks: int, strategies: tuple[str, ...], found: dict[str, Any], *, timed: bool = True
) -> list[list[Any]]:
    zero = statistics.median(step["seconds"] for step in found["deepspeed"]) if timed else None
    times_off, rows = [], []
    for strategy in strategies:
        both = [pair for pair in zip(found["slow"], found["expected"], strict=True) if pair[0]["strategy"] == strategy]
        into = statistics.median(max(step["into"]) for step, _ in both)
        planned = [[sum(kind[host] for kind in plan.values()) for host in range(2)] for _, plan in both]
        off = statistics.median(
            step["into"][host] / plan[host] - 1 for (step, _), plan in zip(both, planned, strict=True)
            for host in range(2)
        )  # fmt: skip
        seconds = statistics.median(step["seconds"] for step, _ in both)
        told = found["predicted"][strategy]
        predicted = told["seconds"]
        wire_s = statistics.median(map(max, planned)) * 8 / MEGABITS / 1e6
        waited_s = statistics.median(step["pull_ms"] + step["push_ms"] for step, _ in both) / 1e3
        times_off.append(abs(predicted / seconds - 1))
        rows.append(
            [2 * ranks, strategy, round(into / 1e6, 2), round(statistics.median(map(max, planned)) / 1e6, 2),
             f"{off:.1%}", round(statistics.median(map(max, planned)) / found["least"][strategy], 2), round(seconds, 2),
             round(predicted, 2), f"{predicted / seconds - 1:.0%}", round(told["computing"], 2),
             round(told["added"], 2), f"{max(0.0, 1 - waited_s / wire_s):.0%}",
             *((round(zero, 2), round(seconds / zero, 2)) if zero is not None else ("-", "-"))]
        )  # fmt: skip
        if abs(off) > aims.HOSTS_BYTES:
            missed.append(f"{strategy} on {2 * ranks} ranks: bytes are {off:.1%} off (aim {aims.HOSTS_BYTES:.0%})")
        if zero is not None and seconds > zero:
            missed.append(f"{strategy} on {2 * ranks} ranks: {seconds / zero:.2f} of ZeRO-1's step (aim 1.0)")
    if timed and statistics.median(times_off) > aims.HOSTS_STEP:
        missed.append(
            f"{2 * ranks} ranks: simulated steps are {statistics.median(times_off):.0%} off in the median "
            f"(aim {aims.HOSTS_STEP:.0%})"
        )
    return rows


def host(text: str, index: int) -> int:
    """Fork the ranks of one host and wait for them."""
    fields: dict[str, Any] = json.loads(text)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    settings = Settings(**values)
    import ds_hydra.engine.engine  # noqa: F401  (before forking: the ranks share what each of them would import)
    from ds_hydra.planner.recipe import warm_up

    warm_up()
    children = []
    for local in range(settings.ranks):
        if (child := os.fork()) == 0:
            code = 1
            try:
                _rank(settings, index, local)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


HEADERS = ("ranks", "strategy", "MB into a host", "by the plan", "off", "of the least", "step s", "simulated", "off ",
           "of it computing", "besides", "hidden", "ZeRO-1 s", "of ZeRO-1")  # fmt: skip


def main() -> int:
    """The exit code: 0, or 1 if an aim was missed."""
    options = figures_parser(__doc__, "python -m tools.bench_hosts").parse_args()
    rows, missed, reason = list[list[Any]](), list[str](), why_not()
    for ranks, strategies in () if reason else STRATEGIES.items():
        if not options.quick:
            rows += _rows(missed, ranks, strategies, measured(ranks, strategies, STEPS, EACH_FAST))
        elif ranks == 2:
            found = measured(ranks, strategies[:3], 3, 3, deepspeed=False)
            rows += _rows(missed, ranks, strategies[:3], found, timed=False)
    print_table(HEADERS, rows)
    summary = f"skipped: {reason}" if reason else f"{len(rows)} strategies, {MEGABITS:.0f} Mbit/s between two hosts"
    return finish("bench_hosts", summary, {"rows": rows}, missed, options.json)


if __name__ == "__main__":
    sys.exit(host(sys.argv[2], int(sys.argv[3])) if sys.argv[1:2] == [_HOST] else guarded("bench_hosts", main))
