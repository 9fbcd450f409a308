"""What strangers may send or leave behind: payloads, paths, connections."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tools.faults.tally import Tally, refused


def check_security(quick: bool) -> Tally:
    """Payloads, tags that are paths, foreign clients on the heartbeat port: none accepted."""
    from ds_hydra.checkpoint.format import check_tag, parse_json
    from ds_hydra.checkpoint.universal import from_universal
    from ds_hydra.testing import run_ranks
    from ds_hydra.watchdog import Watchdog
    from ds_hydra.zero_hetero.errors import CheckpointError

    tally = Tally("security")
    for tag in ("../x", "/etc/passwd", "a/b", "..", ".x", "a\0b", "x" * 200, "latest"):
        tally.count(not refused(partial(check_tag, tag), (), CheckpointError), f"tag {tag!r}")
    for text in ("[" * 10**6, "[" * 70 + "]" * 70, '{"a":1,"a":2}', "NaN", "[1e999999]"):
        tally.count(not refused(partial(parse_json, text, "x"), (), CheckpointError), f"JSON {text[:20]!r}")
    with tempfile.TemporaryDirectory() as scratch:
        import torch

        mark, place = Path(scratch) / "executed", Path(scratch) / "uni/zero/w"
        place.mkdir(parents=True)

        class Payload:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(mark),)

        torch.save({"param": Payload()}, place / "fp32.pt")
        answer = refused(
            lambda: from_universal(place.parents[1], Path(scratch) / "out", "a", step=1), (), CheckpointError
        )
        tally.count(not answer and not mark.exists(), "a pickle's payload ran")

    def visited(rank: int) -> list[str]:
        from ds_hydra.ranks.channel import Channel

        ended: list[str] = []
        meeting = Channel(None, rank, 2)
        dog = Watchdog(meeting, lambda: (1, "forward"), heartbeat_s=0.2, frozen_s=5.0, end=ended.append)
        if rank == 1:
            assert dog.address is not None
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\0" * 16 + (2**31).to_bytes(4, "big")):
                with socket.create_connection(dog.address, timeout=5) as client:
                    client.sendall(data)
                    client.settimeout(0.5)
                    try:
                        while client.recv(4096):
                            pass
                    except OSError:
                        pass
        time.sleep(1.0)
        meeting.texts("")
        dog.close()
        return [*ended, *([] if dog.address and dog.address[0] == "127.0.0.1" else [f"listens on {dog.address}"])]

    for rank, ended in enumerate(run_ranks(visited, 2)):
        tally.count(not ended, f"foreign clients: rank {rank} {ended}")
    return tally
