"""Where sequence lengths for planning come from: a file, a histogram, or a lognormal. Pure: no torch.

A spec is the path of a list of lengths in any form of `length_files`, that of a histogram as .csv (columns "[low,
high]" and number of sequences), or "lognormal:MU,SIGMA" (of the natural log of the tokens).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_hydra.data.length_files import Ints, read_length_file
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

Floats = NDArray[np.float64]
_LOGNORMAL = re.compile(r"lognormal:([^,]+),([^,]+)")
WEB_PAGES = "lognormal:6.220,1.233"  # fits the published bucket counts of CommonCrawl
_TOKENS_A_RANK = 8192
_RANGE = re.compile(r"\[\s*(\d+)\s*,\s*(\d+)\s*\]")


@dataclass(frozen=True)
class LengthSample:
    """Lengths in tokens, how many sequences of the source were longer than the context and left out, and the longest of
    all."""

    lengths: Ints
    too_long: int
    longest: int


def read_lengths(spec: str, context_length: int, count: int = 100_000, seed: int = 0) -> LengthSample:
    """Lengths of 1..context_length tokens from a spec; `count` are drawn where the spec is a distribution.

    Raises ConfigError with file and line for what is not a length, or when nothing fits the context.
    """
    rng = np.random.default_rng(seed)
    if spec.startswith("lognormal"):
        mu, sigma = _lognormal(spec)
        drawn = np.maximum(1.0, rng.lognormal(mu, sigma, size=count))
        lengths = np.minimum(drawn, 2.0**62).astype(np.int64)  # larger numbers would wrap around to negative ones
    elif spec.endswith(".csv") and _is_histogram(spec):
        lengths = _draw_histogram(spec, count, rng)
    else:
        lengths = read_length_file(spec)
    fitting = lengths[lengths <= context_length]
    if not fitting.size:
        raise ConfigError(
            f"{spec}: none of its {len(lengths)} sequences fits context_length={context_length} tokens; the shortest "
            f"has {lengths.min()}"
        )
    return LengthSample(fitting, len(lengths) - len(fitting), int(lengths.max()))


def assumed_lengths(longest: int) -> list[int]:
    """Lengths of web pages, up to `longest` tokens and one of so many, for jobs that do not know theirs yet."""
    drawn = np.random.default_rng(0).lognormal(*_lognormal(WEB_PAGES), size=10_000)
    return [*np.clip(drawn, 1, longest).astype(int).tolist(), longest]


def lengths_of_job(spec: str, longest: int, *, cut: bool) -> LengthSample:
    """Those of a spec as a job trains on them, and one of `longest` tokens, which may come. Where sequences are not
    `cut`, longer ones are left out. ConfigError as by `read_lengths`."""
    sample = read_lengths(spec, longest)
    more = [longest] * (sample.too_long if cut else 0)
    return replace(sample, lengths=np.append(sample.lengths, [*more, longest]))


def assumed_tokens(longest: int, num_ranks: int) -> int:
    """Tokens of a step whose size is not known: 8,192 a rank, or a longest sequence where that is less."""
    return max(longest, num_ranks * min(longest, _TOKENS_A_RANK))


def sample_batches(
    lengths: Sequence[int], tokens_per_step: int, count: int, seed: int, context_length: int
) -> list[np.ndarray]:
    """Batches of random lengths of the data: (sequences,) tokens each, of at least `tokens_per_step` tokens in all.

    PlanError when no length of the data is within the context.
    """
    data = np.asarray(lengths, dtype=np.int64)
    data = data[(data >= 1) & (data <= context_length)]
    if not data.size:
        raise PlanError(f"no sequence of the sample has 1..{context_length} tokens (context_length)")
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        drawn: list[np.ndarray] = []
        total = 0
        # Draw a fifth more than the mean length asks for, and again should that fall short; then cut the batch after
        # the first sequence that reaches the tokens.
        while total < tokens_per_step:
            drawn.append(rng.choice(data, size=max(8, int(1.2 * (tokens_per_step - total) / data.mean()))))
            total += int(drawn[-1].sum())
        batch = np.concatenate(drawn)
        batches.append(batch[: int(np.searchsorted(np.cumsum(batch), tokens_per_step)) + 1])
    return batches


def _lognormal(spec: str) -> tuple[float, float]:
    """MU and SIGMA of "lognormal:MU,SIGMA"; ConfigError for anything else."""
    match = _LOGNORMAL.fullmatch(spec)
    try:
        mu, sigma = (float(match[1]), float(match[2])) if match else (math.nan, math.nan)
    except ValueError:
        mu = sigma = math.nan
    if not (math.isfinite(mu) and math.isfinite(sigma) and sigma >= 0):
        raise ConfigError(f"cannot read lengths from {spec!r}: give lognormal:MU,SIGMA, e.g. lognormal:6.22,1.233")
    return mu, sigma


def _is_histogram(path: str) -> bool:
    """Whether one of the first two lines is a range of lengths; a list of them otherwise."""
    try:
        with Path(path).open(newline="", errors="replace") as file:
            begin = [row for row, _ in zip(csv.reader(file), range(2), strict=False)]
    except OSError as error:
        raise ConfigError(f"cannot read the lengths file {path}: {error.strerror}") from error
    return any(row and _RANGE.fullmatch(row[0].strip()) for row in begin)


def _draw_histogram(path: str, count: int, rng: np.random.Generator) -> Ints:
    """Lengths drawn from a histogram, log-uniform inside each length bin.

    Real lengths thin out towards the end of a wide bin such as [1024, 8192]; uniform ones would be too long there.
    """
    low, high, weight = _read_histogram(path)
    length_bin = rng.choice(len(weight), size=count, p=weight / weight.sum())
    exponent = rng.uniform(np.log(low[length_bin]), np.log(high[length_bin] + 1.0))
    return np.minimum(np.exp(exponent).astype(np.int64), high[length_bin].astype(np.int64))


def _read_histogram(path: str) -> tuple[Floats, Floats, Floats]:
    """Shortest and longest length and the number of sequences of each bin; ConfigError names the line that is wrong."""
    rows: list[tuple[float, float, float]] = []
    try:
        with Path(path).open(newline="") as file:
            for number, row in enumerate(csv.reader(file), start=1):
                match = _RANGE.fullmatch(row[0].strip()) if row else None
                if match is None and number == 1:
                    continue  # header
                if match is None or len(row) < 2 or not row[1].strip().isdigit():
                    raise ConfigError(
                        f'{path}, line {number}: expected "[low, high]",number of sequences but found {row!r}'
                    )
                low, high = int(match[1]), int(match[2])
                if high < max(low, 1):
                    raise ConfigError(f"{path}, line {number}: the length bin [{low}, {high}] holds no length")
                rows.append((float(max(low, 1)), float(high), float(row[1])))
    except OSError as error:
        raise ConfigError(f"cannot read the histogram {path}: {error.strerror}") from error
    if not rows or sum(row[2] for row in rows) <= 0:
        raise ConfigError(f"{path}: the histogram counts no sequence")
    table = np.array(rows)
    return table[:, 0], table[:, 1], table[:, 2]
