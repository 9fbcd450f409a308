"""A range of lengths in, the micro-batches to measure out. Pure.

Single sequences stand on a geometric ladder; packs of the same tokens in shorter sequences tell a from b. Every
other rung between is held out of the fit, to test it on lengths it has not seen. Some rungs run a second time with the
backward split, to time its parts; and with them slices of sequences, which no fit sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_hydra.zero_hetero.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rung:
    """One micro-batch to measure: tokens of its sequences."""

    lengths: tuple[int, ...]
    held_out: bool
    start: int = 0  # tokens of the sequence before these, which are a slice of it


def make_ladder(shortest: int, longest: int, num_rungs: int) -> tuple[Rung, ...]:
    """Micro-batches of `shortest` up to `longest` tokens, shortest first.

    `num_rungs` single sequences for the fit, packs of every second of them in four sequences, packs of up to twice
    `longest` tokens, and held-out single sequences and packs between the rungs. ConfigError for a range without room.
    """
    if not 1 <= shortest < longest:
        raise ConfigError(f"lengths to measure: needs 1 <= shortest < longest but has {shortest} and {longest}")
    if num_rungs < 3:
        raise ConfigError(f"lengths to measure: three coefficients need at least 3 rungs, not {num_rungs}")
    # Equal ratios between lengths: from 128 to 8192 in four rungs 128, 512, 2048, 8192. Halfway between, on the same
    # scale, lie the lengths that are held out: 256, 1024, 4096.
    ratio = (longest / shortest) ** (1.0 / (num_rungs - 1))
    fitted = sorted({round(shortest * ratio**i) for i in range(num_rungs)})
    between = sorted({round(shortest * ratio ** (i + 0.5)) for i in range(num_rungs - 1)} - set(fitted))
    rungs = [Rung((n,), False) for n in fitted]
    # The same tokens in four sequences have a quarter of sum(l^2): only such pairs tell a from b.
    rungs += [Rung(split_evenly(n, 4), False) for n in fitted[1::2] if n >= 16]
    rungs += [Rung(split_evenly(longest * n // 4, n), n == 6) for n in (5, 6, 8)]
    rungs += [Rung((n,), True) if i % 2 == 0 else Rung(split_evenly(n, 3), True) for i, n in enumerate(between)]
    return tuple(sorted(rungs, key=lambda rung: (sum(rung.lengths), len(rung.lengths))))


def beyond_block(rungs: Sequence[Rung], block_tokens: int | None, most_tokens: int) -> tuple[Rung, ...]:
    """Packs above `block_tokens`, where the head is computed twice.

    None where the ladder has some, or where `block_tokens` are as many as a micro-batch of the job can ever have.
    """
    most, longest = max(sum(rung.lengths) for rung in rungs), max(max(rung.lengths) for rung in rungs)
    if block_tokens is None or most > block_tokens or block_tokens >= most_tokens:
        return ()
    # Two packs to fit by and one between them to test, all a little above the step in the head's time.
    totals = ((block_tokens * 9 // 8, False), (block_tokens * 5 // 4, True), (block_tokens * 11 // 8, False))
    return tuple(Rung(split_evenly(total, -(-4 * total // longest)), held_out) for total, held_out in totals)


def beyond_floor(rungs: Sequence[Rung], most_tokens: int) -> tuple[Rung, ...]:
    """Packs of twice to eight times the ladder's most tokens, up to `most_tokens`, each of long and of short sequences.

    For devices that may wait for their host's launches on all of the ladder, so that it tells nothing of the tokens.
    """
    most, longest = max(sum(rung.lengths) for rung in rungs), max(max(rung.lengths) for rung in rungs)
    packs = ((2, 1, False), (2, 4, False), (3, 1, True), (4, 1, False), (4, 4, True), (8, 1, False), (8, 4, False))
    return tuple(
        Rung(split_evenly(most * times, -(-most * times * parts // longest)), held_out)
        for times, parts, held_out in packs
        if most * times <= most_tokens
    )


def split_rungs(rungs: Sequence[Rung], block_tokens: int | None) -> tuple[Rung, ...]:
    """Micro-batches to run with the backward split, in rising order, and slices after them.

    Of the ladder every second one of the fit and every second one that is held out, as far as the head is computed once
    (if there are such). The slices are an eighth and a quarter of the longest sequence at its end, and a quarter that
    ends in its middle; all held out.
    """
    once = [rung for rung in rungs if block_tokens is None or sum(rung.lengths) <= block_tokens]
    once = once if len({sum(rung.lengths) for rung in once if not rung.held_out}) > 1 else list(rungs)
    chosen = [rung for held_out in (False, True) for rung in [r for r in once if r.held_out == held_out][::2]]
    longest = max(max(rung.lengths) for rung in rungs)
    ends = ((7 * longest // 8, longest), (3 * longest // 4, longest), (longest // 4, longest // 2))
    slices = [Rung((stop - start,), True, start) for start, stop in ends if 0 < start < stop]
    return (*sorted(chosen, key=lambda rung: (sum(rung.lengths), len(rung.lengths))), *slices)


def split_evenly(tokens: int, parts: int) -> tuple[int, ...]:
    """`tokens` in up to `parts` sequences that differ by one token at most."""
    parts = min(parts, tokens)
    return tuple(tokens // parts + (i < tokens % parts) for i in range(parts))
