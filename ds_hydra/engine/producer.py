"""A job's config in, the process that plans its steps out, started before all else. Pure: no torch."""

from __future__ import annotations

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.planner.producer_process import BEAT_S, ProducerProcess, producer_command


def command_of(config: HydraConfig) -> tuple[str, ...]:
    """How the process is started. It tells that it is alive well within the time after which it is frozen."""
    return producer_command("ds_hydra.simulate.producer", min(BEAT_S, config.faults.silent_seconds / 4))


def start_producer(config: HydraConfig, rank: int, *, own: bool) -> ProducerProcess | None:
    """On rank 0: the process, which compiles its kernels from now on; None where there is to be none, since the script
    plans on its `own` for one."""
    if rank != 0 or own or config.planner.ahead == 0 or config.replay is not None:
        return None
    try:
        producer = ProducerProcess(command_of(config))
    except OSError:  # the service tries once more, and says so
        return None
    producer.send({"kernels": "auto"})
    return producer
