"""Attention with sinks by the log-sum-exp of a kernel, against probabilities in memory: CPU time, what is kept."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_hydra.pipe.attention import backends
from ds_hydra.pipe.attention.backends import Segments, per_sequence_sdpa
from tools import aims

# A key head of gpt-oss with its queries: eight of width 64; every other layer has a window of 128.
_HEADS, _WIDTH = 8, 64
_WINDOWS = (None, 128)
_TURNS = 2


def sinks(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for attention to all tokens and in a window: one sequence, FP32, forward and backward on one thread."""
    torch.set_num_threads(1)
    tokens = 2048 if quick else 4096
    rows = [_row(tokens, window) for window in _WINDOWS]
    for row in rows:
        for name, aim in (("time ratio", aims.SINKS_TIME[row["window"]]), ("kept ratio", aims.SINKS_KEPT)):
            if row[name] > aim:
                missed.append(f"sinks, window {row['window']}: {name} {row[name]:.2f}, not <= {aim}")
    return rows


def _row(tokens: int, window: int | None) -> dict[str, Any]:
    plain = min(_cost(tokens, window, with_sinks=False) for _ in range(_TURNS))
    mine = min(_cost(tokens, window) for _ in range(_TURNS))
    with mock.patch.object(backends, "has_log_sum_exp", return_value=False):
        shown = min(_cost(tokens, window) for _ in range(_TURNS))
    return {"tokens": tokens, "window": window or "none", "s": mine[0], "by probabilities, s": shown[0],
            "without sinks, s": plain[0], "kept MiB": mine[1], "by probabilities, MiB": shown[1],
            "time ratio": mine[0] / shown[0], "kept ratio": mine[1] / shown[1]}  # fmt: skip


def _cost(tokens: int, window: int | None, *, with_sinks: bool = True) -> tuple[float, float]:
    """CPU seconds of a forward and a backward, and MiB that the backward keeps."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, _HEADS, _WIDTH), (tokens, 1, _WIDTH), (tokens, 1, _WIDTH), (_HEADS,))
    q, k, v, bias = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    began = time.thread_time()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = per_sequence_sdpa(
            q, k, v, Segments.whole((tokens,)), _WIDTH**-0.5, window, None, sinks=bias if with_sinks else None
        )
    out.sum().backward()
    return time.thread_time() - began, sum(kept.values()) / 2**20
