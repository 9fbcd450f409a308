"""Traces of steps for Perfetto or chrome://tracing: written from spans of ranks, and checked. Pure: no torch.

[Note: trace]
A trace is JSON in Chrome's trace event format: `{"traceEvents": [...], "displayTimeUnit": "ms"}`. Each rank is a
process, once for each source of spans ("predicted", "measured"), and each of its streams a thread; events with the
phase "M" name them. A span is an event with the phase "X", with its begin and duration in microseconds. Within a thread
spans are strictly nested: two of them are apart, or one holds the other, else viewers draw them wrongly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

from ds_hydra.zero_hetero.errors import ConfigError

Stream = Literal["compute", "links out", "links in", "twins out", "twins in", "stages out", "stages in"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
Kind = Literal["forward", "backward", "receive", "send", "pull", "wait", "push", "norm", "optimizer", "control"]
# Of an event that names something: the key in its "args", and the type of what stands there.
_METADATA: Mapping[str, tuple[str, type]] = {
    "process_name": ("name", str), "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int), "thread_sort_index": ("sort_index", int),
}  # fmt: skip


class Span(NamedTuple):
    """What one stream of a rank does from `start_s` to `stop_s`, seconds from the step's begin."""

    rank: int
    stream: Stream
    kind: Kind
    name: str
    start_s: float
    stop_s: float


def trace_record(sources: Mapping[str, Iterable[Span]]) -> dict[str, Any]:
    """Spans by source, such as "predicted", in; the trace as JSON holds it out [Note: trace]. Empty spans are left out.

    With several sources a rank's processes stand one below the other, so that they can be compared.
    """
    events: list[dict[str, Any]] = []
    for index, (source, spans) in enumerate(sources.items()):
        known: set[tuple[int, int]] = set()
        for span in spans:
            # Both ends are rounded, and not the duration: so spans that touch still touch, and never overlap.
            begin, end = round(span.start_s * 1e9), round(span.stop_s * 1e9)
            if end <= begin:
                continue
            pid, tid = span.rank * len(sources) + index, STREAMS.index(span.stream)
            if (pid, tid) not in known:
                known.add((pid, tid))
                events += _names(pid, tid, f"rank {span.rank} {source}", span.stream)
            events.append(
                {"ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": tid, "ts": begin / 1e3,
                 "dur": (end - begin) / 1e3}
            )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(pid: int, tid: int, process: str, thread: str) -> Iterator[dict[str, Any]]:
    for name, value in (
        ("process_name", {"name": process}),
        ("process_sort_index", {"sort_index": pid}),
        ("thread_name", {"name": thread}),
        ("thread_sort_index", {"sort_index": tid}),
    ):
        yield {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": value}


def write_trace(path: str | Path, sources: Mapping[str, Iterable[Span]]) -> int:
    """Write a trace file and return its number of spans. ConfigError when it cannot be written."""
    record = trace_record(sources)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(record, separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the trace {path}: {error.strerror or error}") from error
    return sum(event["ph"] == "X" for event in record["traceEvents"])


def trace_faults(record: Mapping[str, Any]) -> list[str]:
    """What breaks the rules of [Note: trace], one line each; an empty list for a sound trace."""
    events = record.get("traceEvents")
    if not isinstance(events, list) or record.get("displayTimeUnit") not in ("ms", "ns"):
        return ["a trace has a list of traceEvents, and displayTimeUnit is ms or ns"]
    faults: list[str] = []
    threads: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    named: set[tuple[str, int, int]] = set()
    for index, event in enumerate(events):
        fault = _fault(event)
        if fault:
            faults.append(f"event {index} ({event.get('name')!r}) {fault}")
            continue
        pid, tid, name = event["pid"], event["tid"], event["name"]
        if event["ph"] == "M":
            named |= {(name, pid, tid), (name, pid, -1)}
        else:
            begin = round(event["ts"] * 1e3)
            threads.setdefault((pid, tid), []).append((begin, begin + round(event["dur"] * 1e3), name))
    for (pid, tid), spans in threads.items():
        if ("process_name", pid, -1) not in named or ("thread_name", pid, tid) not in named:
            faults.append(f"process {pid}, thread {tid} has spans but no name")
        faults += [f"process {pid}, thread {tid}: {fault}" for fault in _overlaps(spans)]
    return faults


def _fault(event: Mapping[str, Any]) -> str:
    """What is wrong with one event by itself; empty for nothing."""
    name, phase = event.get("name"), event.get("ph")
    if not (isinstance(name, str) and name and type(event.get("pid")) is type(event.get("tid")) is int):
        return "lacks a name, or a whole number as pid or tid"
    if phase == "M":
        key, kind = _METADATA.get(name, ("", object))
        given = event.get("args", {}).get(key)
        return "" if given is not None and isinstance(given, kind) else f"is no metadata of {', '.join(_METADATA)}"
    if phase != "X":
        return f"has the phase {phase!r}, not X or M"
    begin, lasts = event.get("ts"), event.get("dur")
    if not (_is_number(begin) and _is_number(lasts) and begin >= 0 and lasts > 0):
        return f"begins at {begin!r} and lasts {lasts!r} microseconds"
    return ""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _overlaps(spans: Sequence[tuple[int, int, str]]) -> Iterator[str]:
    """Pairs of spans of one thread that overlap without one holding the other; nanoseconds."""
    around: list[tuple[int, int, str]] = []
    for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1][1] <= begin:
            around.pop()
        if around and end > around[-1][1]:
            yield f"{name!r} ({begin}..{end} ns) overlaps {around[-1][2]!r} ({around[-1][0]}..{around[-1][1]} ns)"
        around.append((begin, end, name))
