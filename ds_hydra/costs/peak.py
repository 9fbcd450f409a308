"""Rows of a cost table in; those that no device could have measured repaired from their siblings, out. Pure: no torch.

[Note: costs that can be true]
Attention to all tokens before takes a model some FLOPs for each token and each of these: 7 * width a layer, two
products forward and five backward, half of each masked. A row that implies more of them in a second than its ranks'
devices compute is wrong, however well it fits the lengths that it was measured at; three quarters of the peak, counted
without the backward's own forward, are the most that kernels reach. So is, most likely, one whose a * ranks is 1.4
times apart from that of schemes with as many heads on a rank: where the square is 1 % of the time, a fit does not see
it. In short sequences that does no harm, but all that is derived from the row runs long ones.

An example: 60 layers of width 6,656 take 2.8e6 FLOPs a token^2. At 0.94e-6 ms on each of 4 ranks that is 744 TFLOP/s a
rank, of an A800's 312; `tp2pp2` next to it has 187.

Such a row gets the a * ranks of the nearest scheme that can be true: as many heads on a rank, then as many ranks. Its b
and c stay: b was fitted together with a, so it may be some percent too high.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from statistics import median_high

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.zero_hetero.errors import ConfigError

MOST_APART, SIBLINGS_APART = 2.0, 1.4  # times the a * ranks of other schemes, and of those with as many heads on a rank
ATTENTION_OF_PEAK = 0.75  # of causal attention by model FLOPs, six of the seven products: what no kernel has passed
SEEN = 0.2  # of a micro-batch's time: less of a square is hardly seen by a fit
CAUSAL_FLOPS = 7.0  # FLOPs of a layer for each token, token before and unit of width, the masked half left out

# Dense BF16 with FP32 sums, in TFLOP/s as the makers' data sheets say, by part of the device's name; the first that
# fits counts, so a longer name stands before a shorter one that it holds.
_PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)


@dataclass(frozen=True, slots=True)
class Peak:
    """What bounds a table's squares: FLOPs of the model's attention, a token^2, and of a device in a second."""

    attention_flops: float
    device_flops: float
    device: str = ""  # its name, for a reader

    @classmethod
    def of(cls, width: int, layers: int, device: str) -> Peak | None:
        """Of a model with full attention, `width` features of all its query heads, on a device of this name; None for a
        device whose peak is not known."""
        peak = peak_tflops(device)
        return None if peak is None else cls(CAUSAL_FLOPS * width * layers, 1e12 * peak, device)

    @property
    def least(self) -> float:
        """The least a * ranks, in ms a token^2."""
        return 1e3 * self.attention_flops * 6 / 7 / (ATTENTION_OF_PEAK * self.device_flops)

    def tflops(self, square: float) -> float:
        """TFLOP/s of a rank in attention, for an a * ranks in ms a token^2."""
        return self.attention_flops / square / 1e9 if square else math.inf


def known_devices() -> tuple[str, ...]:
    """Parts of the names of devices whose peak is known."""
    return tuple(name for name, _ in _PEAK_TFLOPS)


def peak_tflops(name: str) -> float | None:
    """The data sheet's dense BF16 TFLOP/s of a device; None for one that is not listed."""
    return next((peak for part, peak in _PEAK_TFLOPS if part in name), None)


def square_of(cost: SchemeCost) -> float:
    """a * ranks, in ms a token^2: what attention takes of all ranks together."""
    return cost.a * cost.scheme.num_ranks


def believed(
    table: CostTable, peak: Peak | None = None, fixed: Collection[ParallelScheme] = ()
) -> tuple[CostTable, tuple[str, ...]]:
    """The table with rows that cannot be true repaired, and a line for each [Note: costs that can be true].

    Rows of `fixed` schemes, whose squares were well seen, need only be possible at the `peak`. ConfigError where no row
    is left to repair others by. Pipelines whose stages differ are left as they are.
    """
    rows = {cost.uniform: square_of(cost) for cost in table.costs if isinstance(cost.scheme, ParallelScheme)}
    least = peak.least if peak else 0.0
    doubts = {scheme: doubt for scheme in rows if (doubt := _doubt(scheme, rows, peak, scheme in fixed))}
    if not doubts:
        return table, ()
    good = [scheme for scheme, square in rows.items() if scheme not in doubts and square > least]
    if not good:
        listed = "; ".join(f"{scheme}: {doubt}" for scheme, doubt in doubts.items())
        raise ConfigError(f"no row of the cost table can be true: {listed}. Measure again, with longer sequences")
    costs, lines = [], []
    for cost in table.costs:
        if cost.scheme not in doubts:
            costs.append(cost)
            continue
        scheme = cost.uniform
        by = min(good, key=lambda other: _distance(scheme, other))
        costs.append(replace(cost, a=rows[by] / scheme.num_ranks, derived=f"a by that of {by}"))
        lines.append(
            f"a of {scheme} is {cost.a:.3g} ms a token^2, {doubts[scheme]}; {costs[-1].a:.3g} by the measured {by} is "
            "taken instead"
        )
    return replace(table, costs=tuple(costs)), tuple(lines)


def _doubt(scheme: ParallelScheme, rows: dict[ParallelScheme, float], peak: Peak | None, is_fixed: bool) -> str:
    """Why a row cannot be true, in words; empty: it can."""
    square = rows[scheme]
    if peak is not None and square < peak.least:
        rate = f"{peak.tflops(square):,.0f} TFLOP/s of attention on each device" if square else "no time for attention"
        most = f"{peak.tflops(peak.least):,.0f} of its {peak.device_flops / 1e12:.0f}"
        return f"{rate}, where {peak.device or 'one'} reaches {most}"
    possible = [other for other, its in rows.items() if peak is None or its >= peak.least]
    alike = [other for other in possible if _heads(other) == _heads(scheme)]
    # Of two that differ the lower one is doubted: an attention that is too cheap is what plans run into.
    middle = median_high(rows[other] for other in (alike if len(alike) > 2 else possible))
    apart = SIBLINGS_APART if peak is not None and len(alike) > 2 else MOST_APART
    if is_fixed or middle / apart <= square <= apart * middle or middle == 0.0:
        return ""
    whose = "schemes with as many heads on a rank have" if len(alike) > 2 else "the others have"
    return f"{square / middle:.2g} times the a * ranks that {whose}"


def _heads(scheme: ParallelScheme) -> int:
    """Ranks that share the heads."""
    return scheme.tp * scheme.sp


def _distance(scheme: ParallelScheme, other: ParallelScheme) -> tuple[float, float, ParallelScheme]:
    heads, ranks = _heads(other) / _heads(scheme), other.num_ranks / scheme.num_ranks
    return abs(math.log(heads)), abs(math.log(ranks)), other
