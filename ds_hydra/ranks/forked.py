"""Runs one function on several forked gloo ranks and returns their results.

Forking costs 0.05 s a rank where spawning costs seconds (each spawned child imports torch again). The ranks
meet at a port of the parent's, which the system chooses, so tests can run side by side without agreeing on ports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist

_HOST = "127.0.0.1"
_set_num_threads = torch.set_num_threads


class RankError(RuntimeError):
    """A rank that left without a result: died, was killed, or raised what cannot be pickled."""


class _RankTraceback(Exception):
    """The child's own traceback, shown as the cause of the exception that the parent re-raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Call `fn(rank, *args)` on `num_ranks` forked ranks of one gloo group; return the results by rank.

    `fn` may be a closure; results are pickled (tensors by value). `timeout` in seconds bounds the whole call
    and every collective. The first exception of any rank ends all ranks and is raised here, with the rank's
    traceback; a rank that hangs tells on standard error where, is killed, and raises `TimeoutError`.
    """
    context = multiprocessing.get_context("fork")
    sys.stdout.flush()
    sys.stderr.flush()
    receivers: list[Connection] = []
    children = []
    store: dist.Store | None = None
    door = socket.create_server((_HOST, 0), backlog=num_ranks)
    port = door.getsockname()[1]
    try:
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(
                target=_rank_main,
                args=(fn, rank, num_ranks, args, timeout, port, sender),
                daemon=True,
            )
            child.start()
            sender.close()
            receivers.append(receiver)
            children.append(child)
        # The store is the parent's, as any rank may end before the others. It has a thread, so it comes after the
        # forks; until then ranks wait at the door.
        store = dist.TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())
        results = _collect(receivers, children, timeout)
        for child in children:
            child.join(timeout=5)
        return results
    finally:
        door.close()
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
        for receiver in receivers:
            receiver.close()
        del store  # now: an error holds this frame, and a thread must not be there when the next ranks fork


def rank_environment(rank: int) -> None:
    """Set what a launcher would set on this forked rank; the ranks have met already, so the port is only a number."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR=_HOST, MASTER_PORT="29500")


def one_thread() -> None:
    """Let this forked process compute in one thread, whatever libraries ask for from now on."""
    # The threads of the parent's OpenMP pool are not in a forked child, where libgomp still counts on them: the first
    # sum that it would share out waits for ever. Libraries such as accelerate ask for threads by themselves, mostly
    # where these variables are not set.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    _set_num_threads(1)
    torch.set_num_threads = lambda *_: _set_num_threads(1)  # type: ignore[assignment]


def _collect(receivers: list[Connection], children: list[Any], timeout: float) -> list[Any]:
    """The ranks' results; raises for the first rank that failed."""
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    pending = {id(receiver): rank for rank, receiver in enumerate(receivers)}
    while pending:
        open_pipes = [receiver for receiver in receivers if id(receiver) in pending]
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in pending.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(children[rank].pid, signal.SIGUSR2)  # it tells where it hangs
            time.sleep(0.5)
            raise TimeoutError(f"ranks {sorted(pending.values())} of {len(receivers)} gave no result in {timeout} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = pending.pop(id(receiver))
            try:
                succeeded, value, text = pickle.loads(receiver.recv_bytes())
            except EOFError:
                children[rank].join(timeout=5)
                raise RankError(f"rank {rank} left without a result, exit code {children[rank].exitcode}") from None
            if not succeeded:
                raise value from _RankTraceback(f"rank {rank}:\n{text}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    timeout: float,
    port: int,
    sender: Connection,
) -> NoReturn:
    """A child's life: join the group, call, hand over the result, leave the group, exit without clean-up."""
    exit_code = 1
    # Its garbage collector would visit all objects that the parent has, and the visit alone copies their pages.
    gc.freeze()
    faulthandler.register(signal.SIGUSR2, file=2)
    try:
        one_thread()
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no name look-up of the host
        patience = timedelta(seconds=timeout)
        store = dist.TCPStore(_HOST, port, is_master=False, timeout=patience)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=patience)
        dist.barrier()  # a rank that is done at once must not leave while another still connects to it
        message = pickle.dumps((True, fn(rank, *args), ""))
        exit_code = 0
    except BaseException as error:
        message = _pickle_error(error, traceback.format_exc())
    # The result goes out before the group closes: so the parent hears of the cause before its consequences.
    sender.send_bytes(message)
    sender.close()
    if exit_code == 0:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _pickle_error(error: BaseException, text: str) -> bytes:
    try:
        message = pickle.dumps((False, error, text))
        pickle.loads(message)
        return message
    except Exception:
        return pickle.dumps((False, RankError(f"{type(error).__name__}: {error}"), text))
