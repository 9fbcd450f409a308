"""Models and devices that are compared: a name in, its measured or fitted table and its sizes out. Pure: no torch.

[Note: an H100 table]
Nobody has published T(l) of <TP, PP> on H100s. What is published is tokens a second of dense models under FSDP, by
length (llm-foundry, `scripts/train/benchmarking`, H100-80GB, BF16, 8 GPUs, MPT, activation checkpointing where it says
so). Those are one scheme, TP 1, of two models. From them:

  a, b of TP 1      fitted to these figures: seconds a token = b + a * length. Checkpointing is taken off a by the ratio
                    that the 3B model shows (1.22), off b by what the one figure of the 7B model without it leaves
  32B               from the 30B model, a in proportion to width * layers, b to parameters
  a, b of others    the A800's, times what TP 1 has of them: its messages of TP, which is what b is above that of TP 1,
                    over NVLink of 900 in place of 400 GB/s
  c                 not published: two thirds of the A800's, an assumption
  MaxLen, shares    the A800's: as many bytes, the same kernels
  links             as the data sheets: NVLink as above, a card of 400 Gb/s for each GPU

`FIT` tells how far the fitted points are off. Only a and b of TP 1 rest on measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ds_hydra.commands.shipped import shipped
from ds_hydra.costs.analytic import ModelShape
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.peak import Peak
from ds_hydra.costs.table_file import TableFile, read_table_file
from ds_hydra.simulate.links import INSIDE, Speed
from ds_hydra.simulate.llama import SHIPPED

H100 = " H100"  # behind a model's name
NVLINK = 900 / 400  # of an H100's to an A800's
_C = 2 / 3  # of an A800's
# Tokens a second of a GPU, by length, with activation checkpointing.
_MPT_7B = {1024: 10_203.0, 4096: 8_611.0, 8192: 6_935.0, 32768: 3_318.0, 65536: 1_956.0}
_MPT_13B = {1024: 5_502.0, 4096: 4_717.0, 16384: 2_985.0, 32768: 1_976.0}
_MPT_30B = {1024: 2_084.0, 2048: 2_002.0, 4096: 1_802.0}
_WITHOUT = (2048, 10_643.0)  # the 7B model without checkpointing
_A_AGAIN = 1.22  # a with checkpointing over a without it, of the 3B model
_WIDTH, _WIDTH_13B, _WIDTH_30B = 6656 * 60, 5120 * 40, 7168 * 48  # width * layers of LLaMA 32B and of MPT
_PARAMS = 32.51 / 29.96  # of LLaMA 32B over those of MPT 30B


class Fit(NamedTuple):
    """Milliseconds a token are b + a * length; `off`: the largest relative error of a point."""

    a: float
    b: float
    off: float


def fitted(rates: Mapping[int, float]) -> Fit:
    """Least squares of relative errors over tokens a second by length."""
    lengths = np.array(list(rates), dtype=np.float64)
    seen = 1e3 / np.array(list(rates.values()))
    design = np.stack([lengths, np.ones(len(lengths))], axis=1)
    a, b = np.linalg.lstsq(design / seen[:, None], np.ones(len(seen)), rcond=None)[0]
    return Fit(float(a), float(b), float(np.abs((a * lengths + b) / seen - 1.0).max()))


FIT = {"7b": fitted(_MPT_7B), "13b": fitted(_MPT_13B)}


def of_h100(model: str) -> tuple[float, float]:
    """a and b of TP 1 on one H100 without checkpointing, in ms a token^2 and a token [Note: an H100 table]."""
    small, (length, rate) = FIT["7b"], _WITHOUT
    b_again = small.b / (1e3 / rate - small.a / _A_AGAIN * length)
    if model == "7b":
        return small.a / _A_AGAIN, small.b / b_again
    of_width = FIT["13b"].a / _WIDTH_13B
    b = fmean(1e3 / rate - of_width * _WIDTH_30B * length for length, rate in _MPT_30B.items())
    return of_width * _WIDTH / _A_AGAIN, _PARAMS * b / b_again


def base_model(model: str) -> str:
    """The model without its device: "7b" or "32b"."""
    return model.removesuffix(H100)


def shape_of(model: str) -> ModelShape:
    """Its sizes."""
    return SHIPPED[f"a800-{base_model(model)}"].shape


def inside_of(model: str) -> Speed:
    """The link between two GPUs of a node."""
    return INSIDE._replace(bytes_per_s=(NVLINK if model.endswith(H100) else 1.0) * INSIDE.bytes_per_s)


@lru_cache(maxsize=4)
def found_of(model: str) -> TableFile:
    """The table of a model: as shipped for A800s, or what stands for it on H100s."""
    found = read_table_file(shipped(f"a800-{base_model(model)}"))
    if model == base_model(model):
        return found
    a, b = of_h100(base_model(model))
    alone = min((cost for cost in found.table.costs if cost.uniform.tp == 1), key=lambda cost: cost.scheme.pp)
    ranks = alone.scheme.num_ranks
    costs = tuple(_on_h100(cost, a / (alone.a * ranks), b, alone.b * ranks) for cost in found.table.costs)
    peak = Peak.of(shape_of(model).hidden, shape_of(model).layers, "H100")
    source = f"LLaMA {base_model(model).upper()} on H100-80GB, fitted to tokens a second of MPT (llm-foundry)"
    return TableFile(CostTable(costs, source), peak=peak)


def _on_h100(cost: SchemeCost, of_square: float, alone: float, alone_before: float) -> SchemeCost:
    """An entry of the A800 table with its square so many times as dear, and b of TP 1 `alone` GPU-ms a token in place
    of `alone_before`."""
    ranks = cost.scheme.num_ranks
    messages = max(0.0, cost.b * ranks - alone_before) / NVLINK
    return replace(
        cost, a=of_square * cost.a, b=(alone + messages) / ranks, c=_C * cost.c,
        derived="TP 1 of H100s, and messages and c of the A800's" + (f", {cost.derived}" if cost.derived else ""),
    )  # fmt: skip
