"""One host of a job on two hosts: its ranks are forked, train by each strategy in turn, and count what crosses.

Runs on each host as `python -m tools.hosts.job SETTINGS INDEX`. Some steps go over a fast cable, which show what a step
takes besides it, the others over the slow one, at last those of DeepSpeed. Rank 0 writes what was found.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.hosts.namespaces import limit, run

FAST_MEGABITS = 10_000.0
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
        return [sys.executable, "-m", "tools.hosts.job", json.dumps(asdict(self)), str(index)]


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
    from ds_hydra.plan.step_plan import StepPlan
    from tools.hosts.expected import crossing, least
    from tools.hosts.predicted import predicted_seconds

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


def main() -> int:
    """Fork the ranks of one host and wait for them."""
    fields: dict[str, Any] = json.loads(sys.argv[1])
    index = int(sys.argv[2])
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    settings = Settings(**values)
    import ds_hydra.engine.engine  # noqa: F401  (before forking: the ranks share what each of them would import)
    from ds_hydra.planner.selection import warm_up

    warm_up()
    children = []
    for local in range(settings.ranks):
        if (child := os.fork()) == 0:
            code = 1
            try:
                _rank(settings, index, local)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main())
