"""CPU time of a step that hands out memory for messages."""

from __future__ import annotations

import time

import torch

from ds_hydra.zero_hetero.link import Cuts, Scratch
from ds_hydra.zero_hetero.scratch_plan import end_of, in_turn
from tools import aims, machine
from tools.devices.table import Table

_BUCKETS, _PEERS = 34, 63  # of a 7B model, under 64*tp1
_NUMEL = 202_391_552 // 64  # of a layer, 1/64
_STEPS = 30


def handing_out(_quick: bool) -> Table:
    """What gradient hooks spend on memory in a step of 64*tp1 on 64 ranks: each bucket is sent to and received from
    all others, 4,284 messages in all. The least of some steps: what else the machine does only adds to it."""
    numels = [_NUMEL] * (2 * _PEERS)
    cuts = [Cuts(numels) for _ in range(_BUCKETS)]
    size = 2 * cuts[0].numel
    windows = in_turn((size,) * _BUCKETS, 2 * size)
    scratch = Scratch("cpu", end_of(windows))  # nobody writes to it, so it takes no pages
    seconds: list[float] = []
    for _ in range(_STEPS):
        began = time.process_time()
        handed = sum(len(cut.of(scratch.at(w, torch.bfloat16))) for cut, w in zip(cuts, windows, strict=True))
        seconds.append(time.process_time() - began)
    least, most = 1e3 * min(seconds), machine.limit(aims.HAND_OUT_MS)
    missed = [f"{least:.1f} ms of CPU to hand out {handed} buffers (aim {most})"] if least > most.here else []
    row = [handed, round(least, 2), str(most)]
    return Table("memory for messages: CPU time of a step", ["buffers", "ms", "aim"], [row], missed)
