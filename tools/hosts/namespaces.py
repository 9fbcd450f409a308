"""Hosts on one machine: network namespaces, each with an address and a host name of its own and a cable to one switch.

Needs root, iproute2 and a kernel with network namespaces and token buckets; `why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

MTU = 9000  # of the cable: headers of TCP are 0.7 % of its bytes
_NETWORK, _NAMES = 0x40000000, 0x04000000  # CLONE_NEWNET and CLONE_NEWUTS
_BURST = "64kb"  # that may pass at once after a pause
_SETTINGS = (
    # What waits in front of the cable is little: a small message of one connection does not wait behind megabytes of
    # another, which over a slow cable would be a third of a second.
    "net.ipv4.tcp_limit_output_bytes=32768",
    # No rates are guessed, for which some ways of TCP leave the cable idle for 0.2 s now and then.
    "net.ipv4.tcp_congestion_control=reno",
)


@dataclass(frozen=True)
class Host:
    """A host and its cable."""

    namespace: str
    device: str  # its end of the cable
    address: str
    name: str
    switch: str  # the namespace of the other end
    port: str  # that end

    def command(self, *arguments: str) -> list[str]:
        """A command that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, "env", f"GLOO_SOCKET_IFNAME={self.device}", "unshare", "--uts",
                "bash", "-c", 'hostname "$0" && exec "$@"', self.name, *arguments]  # fmt: skip

    def enter(self) -> None:
        """Let this process, which must have one thread, be on this host from now on. OSError where it may not."""
        system = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespace}") as network:
            if system.setns(network.fileno(), _NETWORK) or system.unshare(_NAMES):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")
        socket.sethostname(self.name)
        os.environ["GLOO_SOCKET_IFNAME"] = self.device

    def pull(self) -> None:
        """Pull the cable out: the host has no carrier any more, and nobody is told."""
        run("ip", "-n", self.switch, "link", "set", self.port, "down")

    def plug(self) -> None:
        """Put the cable in again."""
        run("ip", "-n", self.switch, "link", "set", self.port, "up")

    def die(self) -> None:
        """End all that runs there, at once and without a word to other hosts."""
        self.pull()
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def why_not() -> str:
    """Why hosts cannot be made here, as a sentence; empty if they can."""
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} of iproute2 or util-linux is not here"
    try:
        with made_hosts(100.0):
            return ""
    except (subprocess.CalledProcessError, OSError) as error:
        told = getattr(error, "stderr", "") or str(error)
        return f"network namespaces cannot be made here: {str(told).strip().splitlines()[-1]}"


@contextmanager
def made_hosts(megabits: float, *, names: Sequence[str] = ("node0", "node1")) -> Iterator[tuple[Host, ...]]:
    """A host of each name, whose cables carry `megabits` a second each way. CalledProcessError where not possible."""
    key = f"{os.getpid():x}"
    switch, bridge = f"hydra-{key}-switch", "switch"
    hosts = tuple(
        Host(f"hydra-{key}-{i}", f"hy{key}{i}", f"10.77.0.{i + 1}", name, switch, f"port{i}")
        for i, name in enumerate(names)
    )
    try:
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
        run("ip", "-n", switch, "link", "set", bridge, "up")
        for host in hosts:
            run("ip", "netns", "add", host.namespace)
            run("ip", "link", "add", host.device, "mtu", str(MTU), "netns", host.namespace, "type", "veth", "peer",
                "name", host.port, "mtu", str(MTU), "netns", switch)  # fmt: skip
            run("ip", "-n", switch, "link", "set", host.port, "master", bridge)
            inside = ("ip", "-n", host.namespace)
            run(*inside, "address", "add", f"{host.address}/24", "dev", host.device)
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "link", "set", host.device, "up")
            host.plug()
            run("tc", "-n", host.namespace, *limit("add", host.device, megabits))
            run("ip", "netns", "exec", host.namespace, "sysctl", "-w", *_SETTINGS)
        yield hosts
    finally:
        for namespace in (*(host.namespace for host in hosts), switch):
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", namespace)


def limit(verb: str, device: str, megabits: float) -> list[str]:
    """The arguments by which `tc` sets the rate of a cable's end: "add" at first, "change" later."""
    return [
        "qdisc",
        verb,
        "dev",
        device,
        "root",
        "tbf",
        "rate",
        f"{megabits:g}mbit",
        "burst",
        _BURST,
        "latency",
        "5s",  # it loses nothing: what TCP sends again, after up to 0.2 s, is no matter of the cable
    ]


def run(*command: str) -> None:
    """Run a command; CalledProcessError with what it said where it fails."""
    subprocess.run(command, check=True, capture_output=True, text=True)
