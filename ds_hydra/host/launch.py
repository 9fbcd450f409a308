"""A launcher's environment and a config in; torch.distributed, started as DeepSpeed starts it, out."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_hydra.config.hydra_block import FaultsConfig, HydraConfig, check_num_ranks
from ds_hydra.host.compile_locks import tell_locks
from ds_hydra.host.devices import before_devices_start
from ds_hydra.host.environment import joins, launched_number, longest_wait_s
from ds_hydra.host.meeting import Fellows, meeting_of
from ds_hydra.ranks.groups import wait_at_most
from ds_hydra.ranks.together import Texts
from ds_hydra.zero_hetero.errors import ConfigError

_LISTENING_S, _ANSWER_S = 2.0, 8.0  # until a connection to MASTER_PORT, and an answer there, count as not coming
_OTHER_PLACE = frozenset({"init_method", "rank", "world_size"})  # arguments that say where ranks meet otherwise
_FROZEN_S, _TIMEOUT = FaultsConfig().frozen_seconds, torch.distributed.constants.default_pg_timeout
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def init_distributed(
    config: HydraConfig,
    *,
    port: int,
    required: bool | None = None,
    begin: Callable[[Texts], object] | None = None,
) -> None:
    """Start torch.distributed through DeepSpeed, with an explicit timeout and nothing compiled on CPU.

    `port` and `required` are `distributed_port` and `dist_init_required` of `deepspeed.initialize`. All ranks `begin`
    with a channel of theirs when they have met, where torch.distributed was not there before. Raises ConfigError when
    no launcher has set the environment, or when the strategies do not fit the number of ranks.
    """
    _require_launcher()
    check_launched_ranks(config)
    timeout = timedelta(seconds=longest_wait_s(config, begun=False))
    accelerator = get_accelerator()
    before_devices_start(config, accelerator.communication_backend_name(), launched_number("WORLD_SIZE"))
    if accelerator.device_name() != "cpu" and "LOCAL_RANK" in os.environ:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    init_as_deepspeed(
        begin=begin,
        frozen_s=config.faults.frozen_seconds,
        dist_backend=accelerator.communication_backend_name(),
        distributed_port=port,
        dist_init_required=required,
        timeout=timeout,
        verbose=False,
    )
    if (everyone := torch.distributed.group.WORLD) is not None:
        wait_at_most(timeout, [everyone])  # a script may have made it, with torch's 30 minutes
    if not joins():
        check_num_ranks(config, dist.get_world_size())
    if "LOCAL_RANK" not in os.environ:  # the script itself started torch.distributed, without a launcher
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % max(1, accelerator.device_count()))


def init_as_deepspeed(
    *args: Any, begin: Callable[[Texts], object] | None = None, frozen_s: float = _FROZEN_S, **kwargs: Any
) -> None:
    """`deepspeed.init_distributed`, with nothing compiled on CPU, when all ranks have come [Note: meeting]."""
    backend = (args[0] if args else kwargs.get("dist_backend")) or get_accelerator().communication_backend_name()
    meeting = None  # its store is torch's, too, as long as it is there
    if not torch.distributed.is_initialized() and not _OTHER_PLACE & kwargs.keys():
        of_agent, timeout = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", kwargs.get("timeout", _TIMEOUT)
        if not of_agent:
            check_port()
        meeting = meeting_of(timeout_s=timeout.total_seconds(), frozen_s=frozen_s)
        if meeting is not None:
            (begin or (lambda channel: channel.texts("")))(meeting)
        if of_agent:
            _meet_in_this_attempt(backend, timeout)
    tell_locks()
    with _no_shared_memory_operator():
        deepspeed.init_distributed(*args, **kwargs)


def check_port() -> None:
    """ConfigError where another program listens on MASTER_PORT, on rank 0 as on those that would ask it for ever."""
    rank, port, address = launched_number("RANK"), launched_number("MASTER_PORT"), os.environ.get("MASTER_ADDR")
    if rank is None or not port or not address:
        return
    if rank == 0:
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE and not _listens_itself(port):
                    raise _port_taken(f"rank 0 cannot listen on it: {error.strerror}") from None
        return
    try:
        socket.create_connection((address, port), timeout=_LISTENING_S).close()
    except OSError:
        return  # rank 0 is not there yet
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(torch.distributed.DistError):
            patience = timedelta(seconds=_ANSWER_S)
            torch.distributed.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
            answered.set()

    asking = threading.Thread(target=ask, daemon=True)  # torch waits for an answer longer than it is told to
    asking.start()
    asking.join(_ANSWER_S)
    fellows = Fellows(rank, str(port))
    fellows.look()
    if not answered.is_set() and not fellows.is_stopped(0):  # of which the meeting tells
        raise _port_taken("what listens there does not answer as rank 0 does")


def _listens_itself(port: int) -> bool:
    """Whether this process listens on a port: the store of groups that it had before, which torch uses again."""
    own: set[str] = set()
    for handle in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(handle))
    for table in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            listens = fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
            if listens and f"socket:[{fields[9]}]" in own:
                return True
    return False


def _port_taken(why: str) -> ConfigError:
    where = f"MASTER_PORT={os.environ['MASTER_PORT']} on {os.environ['MASTER_ADDR']}"
    return ConfigError(
        f"{where} cannot be used ({why}): is another job running there? Give a free port by the "
        "launcher's --master_port"
    )


def check_launched_ranks(config: HydraConfig) -> None:
    """Raise ConfigError when the launcher has started more or fewer ranks than the strategies use.

    Without a launcher's environment there is nothing to check yet.
    """
    num_ranks = launched_number("WORLD_SIZE")
    if num_ranks is not None:
        check_num_ranks(config, num_ranks)


@contextmanager
def _no_shared_memory_operator() -> Iterator[None]:
    """Keep DeepSpeed from compiling an operator for CPU inference whenever it starts torch.distributed.

    It takes a C++ compiler and 20 s, and leaves 66 MiB per rank in /dev/shm.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    build = backend.build_shm_op
    backend.build_shm_op = lambda: None
    try:
        yield
    finally:
        backend.build_shm_op = build


def _meet_in_this_attempt(backend: str, timeout: timedelta) -> None:
    """Start the process group under torchrun, with keys of this attempt only in torchrun's store."""
    # torchrun's agent keeps one store over its restarts (--max-restarts). After a rank has died, the store still holds
    # the addresses under which the ranks of attempt 0 met; ranks of attempt 1 that read the same keys would try to
    # connect to processes that are gone. So attempt 1 writes and reads below ".../attempt_1".
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(address, port, num_ranks, is_master=False, timeout=timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # With its device a rank makes its communicators where groups are made, and not at their first use, as it does under
    # DeepSpeed's launcher. A rank alone has nobody to reach.
    on_cuda = backend == "nccl" and num_ranks > 1
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else None
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore(f"ds_hydra/attempt_{attempt}", store),
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        device_id=device,
    )


def _require_launcher() -> None:
    if torch.distributed.is_initialized() or all(name in os.environ for name in _LAUNCHER_VARIABLES):
        return
    if "OMPI_COMM_WORLD_RANK" in os.environ or importlib.util.find_spec("mpi4py"):
        return
    missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
    raise ConfigError(
        f"the environment lacks {', '.join(missing)}, which a launcher sets: start the script by "
        "'deepspeed --num_gpus N script.py ...' or 'torchrun --nproc_per_node N script.py ...'"
    )
