"""Hosts on one machine: network namespaces joined by a cable, each with an address and a host name of its own.

Needs root, iproute2 and a kernel with network namespaces and token buckets; `why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

MTU = 9000  # of the cable: headers of TCP are 0.7 % of its bytes
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
    """One end of the cable."""

    namespace: str
    device: str  # its end of the cable
    address: str
    name: str

    def command(self, *arguments: str) -> list[str]:
        """A command that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, "env", f"GLOO_SOCKET_IFNAME={self.device}", "unshare", "--uts",
                "bash", "-c", 'hostname "$0" && exec "$@"', self.name, *arguments]  # fmt: skip


def why_not() -> str:
    """Why hosts cannot be made here, as a sentence; empty if they can."""
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} of iproute2 or util-linux is not here"
    try:
        with two_hosts(100.0):
            return ""
    except (subprocess.CalledProcessError, OSError) as error:
        told = getattr(error, "stderr", "") or str(error)
        return f"network namespaces cannot be made here: {str(told).strip().splitlines()[-1]}"


@contextmanager
def two_hosts(megabits: float, *, names: Sequence[str] = ("node0", "node1")) -> Iterator[tuple[Host, Host]]:
    """Two hosts, joined by a cable that carries `megabits` a second each way. CalledProcessError where not possible."""
    key = f"{os.getpid():x}"
    hosts = [Host(f"hydra-{key}-{i}", f"hy{key}{i}", f"10.77.0.{i + 1}", names[i]) for i in range(2)]
    one, other = hosts
    try:
        for host in hosts:
            run("ip", "netns", "add", host.namespace)
        run("ip", "link", "add", one.device, "mtu", str(MTU), "netns", one.namespace, "type", "veth", "peer", "name",
            other.device, "mtu", str(MTU), "netns", other.namespace)  # fmt: skip
        for host in hosts:
            inside = ("ip", "-n", host.namespace)
            run(*inside, "address", "add", f"{host.address}/24", "dev", host.device)
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "link", "set", host.device, "up")
            run("tc", "-n", host.namespace, *limit("add", host.device, megabits))
            run("ip", "netns", "exec", host.namespace, "sysctl", "-w", *_SETTINGS)
        yield one, other
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", host.namespace)


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
