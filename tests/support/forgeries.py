"""Forgeries of saved checkpoints, drawn at random: one thing is changed, and all digests are made to match again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ds_hydra.checkpoint.format import BLOCK_BYTES, MANIFEST, block_digest, rank_file

# Parts of an engine's state (`tests.support.loads`) that a field of the manifest may change, where what it says can be.
_SAYS: dict[str, frozenset[str]] = {
    "groups": frozenset({"options", "numbers"}),
    "lr_scheduler": frozenset({"schedule"}),
    "loss_scale": frozenset({"scale"}),
    "counters": frozenset({"counters"}),
    "client_state": frozenset({"client"}),
    "planning": frozenset({"planning"}),
    "data": frozenset({"data"}),
    "stage": frozenset({"stage"}),
    "buckets": frozenset({"masters", "moments"}),  # the flat order that they were saved in
}
_TENSORS = frozenset({"masters", "moments", "random"})


class Forgery(NamedTuple):
    """What was changed, and which parts of the state may be others than the true ones if it is loaded all the same."""

    what: str
    may_change: frozenset[str]


def forge(folder: Path, seed: int) -> Forgery:
    """Forge the checkpoint "new" of a folder, as the seed says."""
    draw, place = random.Random(seed), folder / "new"
    record = json.loads((place / MANIFEST).read_text())
    contents = record["contents"]
    if draw.random() < 0.3:
        found = _forge_file(place, contents, draw)
    else:
        name = draw.choice(sorted(contents))
        path, changed = _changed(contents[name], draw)
        contents[name] = changed
        found = Forgery(f"{name}{path}", _SAYS.get(name, frozenset()))
    from ds_hydra.checkpoint.format import digest_of, dump

    (place / MANIFEST).write_text(dump({**record, "sha256": digest_of(contents)}))
    return found


def _changed(value: Any, draw: random.Random) -> tuple[str, Any]:
    """Where something was changed within a value of JSON, and to what; and the changed value."""
    inner = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if inner and draw.random() < 0.8:
        key = draw.choice(inner)
        path, changed = _changed(value[key], draw)
        copied = dict(value) if isinstance(value, dict) else list(value)
        copied[key] = changed
        return f".{key}{path}", copied
    other = draw.choice(_others(value, draw))
    return f" {ascii(value)[:40]} -> {ascii(other)[:40]}", other


def _others(value: Any, draw: random.Random) -> list[Any]:
    """What may stand in the place of a value."""
    if isinstance(value, bool):
        return [not value, None, 0, "true"]
    if isinstance(value, (int, float)):
        return [value + 1, value - 1, -value - 1, 0, 2**31, 2**61, 1e300, value + 0.5, str(value), None, True, [value]]
    if isinstance(value, str):
        return ["", f"{value}x", value[:-1], value.upper(), "../../x", "/etc/passwd", "a" * 300, "\ud800", 7, None, []]
    if isinstance(value, list):
        at = draw.randrange(len(value)) if value else 0
        return [value[:at] + value[at + 1 :], [*value, *value[at : at + 1]], value[::-1], [], [*value, None], {}]
    if isinstance(value, dict):
        gone = draw.choice(list(value)) if value else ""
        less = {key: inner for key, inner in value.items() if key != gone}
        return [less, {**value, "extra": 1}, {**less, "renamed": value.get(gone)}, {}, None, list(value)]
    return [0, {}, "x", [], True]


class _File(NamedTuple):
    """A rank's file, taken apart."""

    metadata: dict[str, str]
    tensors: dict[str, tuple[str, list[int], bytes]]  # type, shape, bytes

    @classmethod
    def read(cls, path: Path) -> _File:
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        metadata = header.pop("__metadata__")
        tensors = {
            name: (entry["dtype"], entry["shape"], data[start + entry["data_offsets"][0] :][: _size(entry)])
            for name, entry in header.items()
        }
        return cls(metadata, tensors)

    def write(self, path: Path, entry: dict[str, Any], shift: int = 0) -> None:
        """Write it, with places `shift` bytes beside the true ones; `entry` of the manifest is made to match."""
        header: dict[str, Any] = {"__metadata__": self.metadata}
        at = 0
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at + shift, at + shift + len(data)]}
            at += len(data)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        whole = len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in self.tensors.values())
        path.write_bytes(whole)
        blocks = (whole[begin : begin + BLOCK_BYTES] for begin in range(0, len(whole), BLOCK_BYTES))
        entry.update(size=len(whole), digests=b"".join(map(block_digest, blocks)).hex())


def _size(entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    return int(end - begin)


def _forge_file(place: Path, contents: dict[str, Any], draw: random.Random) -> Forgery:
    """Change a rank's file, and what the manifest says of its size and bytes."""
    rank = draw.randrange(contents["num_ranks"])
    path, entry = place / rank_file(rank), contents["files"][rank]
    file = _File.read(path)
    kind, name = draw.choice(list(_OF_FILES)), draw.choice(list(file.tensors))
    if kind == "places":
        file.write(path, entry, shift=draw.choice([-8, 1, 8, 2**40]))
        return Forgery(f"places in the file of rank {rank}", frozenset())
    if kind == "cut elsewhere":
        return _cut_elsewhere(place, contents, draw)
    may_change = _OF_FILES[kind](file, name, draw)
    file.write(path, entry)
    return Forgery(f"{kind} of {name} in the file of rank {rank}", may_change)


def _cut_elsewhere(place: Path, contents: dict[str, Any], draw: random.Random) -> Forgery:
    """A tensor's last elements in rank 0's file go to the front of rank 1's, as if it had been cut there."""
    one, other = (_File.read(place / rank_file(rank)) for rank in (0, 1))
    name = draw.choice([name for name in one.tensors if not name.startswith("rng")])
    (dtype, (size,), data), (_, (more,), behind) = one.tensors[name], other.tensors[name]
    count = draw.choice([1, size // 2, size])
    moved = data[len(data) - 4 * count :]
    one.tensors[name] = dtype, [size - count], data[: len(data) - len(moved)]
    other.tensors[name] = dtype, [more + count], moved + behind
    for rank, file in enumerate((one, other)):
        file.write(place / rank_file(rank), contents["files"][rank])
    return Forgery(f"{name} is cut elsewhere between ranks 0 and 1", frozenset())


def _other_type(file: _File, name: str, draw: random.Random) -> frozenset[str]:
    dtype, shape, data = file.tensors[name]
    other = draw.choice([other for other in ("I32", "F16", "F64", "I8", "BOOL", "U8", "F32", "X") if other != dtype])
    width = {"I32": 4, "F32": 4, "F16": 2, "F64": 8}.get(other, 1)
    fits = len(data) % width == 0 and draw.random() < 0.7
    file.tensors[name] = other, [len(data) // width] if fits else shape, data
    return frozenset()


def _other_shape(file: _File, name: str, draw: random.Random) -> frozenset[str]:
    dtype, (size,), data = file.tensors[name]
    shape: Any = draw.choice(
        [[size, 1], [1, size], [size + 1], [size - 1], [-size, -1], [2**40, 2**40], [], ["x"], None]
    )
    file.tensors[name] = dtype, shape, data
    return frozenset()


def _other_values(file: _File, name: str, draw: random.Random) -> frozenset[str]:
    dtype, shape, data = file.tensors[name]
    file.tensors[name] = dtype, shape, draw.choice([draw.randbytes(len(data)), bytes(len(data)), b"\xff" * len(data)])
    return _TENSORS


def _swapped(file: _File, name: str, draw: random.Random) -> frozenset[str]:
    other = draw.choice(list(file.tensors))
    file.tensors[name], file.tensors[other] = file.tensors[other], file.tensors[name]
    return _TENSORS


def _gone(file: _File, name: str, _: random.Random) -> frozenset[str]:
    del file.tensors[name]
    return frozenset()


def _renamed(file: _File, name: str, draw: random.Random) -> frozenset[str]:
    file.tensors[draw.choice(["x", f"{name}x", "../x", "", "rng/cuda"])] = file.tensors.pop(name)
    return frozenset()


def _one_more(file: _File, name: str, draw: random.Random) -> frozenset[str]:
    file.tensors[draw.choice(["more", f"{name}2", name.replace("master", "step")])] = file.tensors[name]
    return frozenset()


def _shorter(file: _File, name: str, draw: random.Random) -> frozenset[str]:
    dtype, (size,), data = file.tensors[name]
    width, less = len(data) // max(1, size), draw.choice([1, size // 2, size])
    file.tensors[name] = dtype, [size - less], data[: len(data) - width * less]
    return frozenset()


def _metadata(file: _File, _: str, draw: random.Random) -> frozenset[str]:
    key = draw.choice(list(file.metadata))
    file.metadata[key] = draw.choice(["", "x", "0" * 16])
    return frozenset()


_OF_FILES: dict[str, Callable[[_File, str, random.Random], frozenset[str]]] = {
    "type": _other_type,
    "shape": _other_shape,
    "values": _other_values,
    "names swapped": _swapped,
    "absence": _gone,
    "name": _renamed,
    "one more": _one_more,
    "fewer elements": _shorter,
    "metadata": _metadata,
    "places": _metadata,
    "cut elsewhere": _metadata,
}
