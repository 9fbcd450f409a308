"""Plain values in, the manifest of a checkpoint as JSON with its own digest out, and back, checked. Pure.

Loading trusts nothing that it has not checked: size, depth, the digest over the contents, each field's type. So a
damaged manifest ends in an error that names it, and never in a crash, in memory that runs out or in wrong values.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from ds_hydra.zero_hetero.errors import CheckpointError
from ds_hydra.zero_hetero.intervals import overlaps

FORMAT, VERSION = "ds_hydra checkpoint", 1
MANIFEST = "manifest.json"
BLOCK_BYTES = 2**20  # of a file under one digest
DIGEST_BYTES = 4  # CRC-32: finds every single flipped bit, and at memory speed; it is against damage, not forgery
MAX_MANIFEST_BYTES = 256 * 2**20
MAX_DEPTH = 64
MAX_RANKS = 2**20
_MAX_CLIENT_BYTES = 16 * 2**20
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@,-]{0,127}")
_RESERVED = frozenset({"latest", "latest_universal"})


def check_tag(tag: object) -> str:
    """The tag as text; CheckpointError unless it is a plain name, which no path, and nothing hidden, is."""
    text = str(tag)
    if not _TAG.fullmatch(text) or text in _RESERVED:
        raise CheckpointError(
            f"the tag {text[:200]!r} is not a name: use up to 128 letters, digits and ._+=@,- that begin with a letter "
            'or digit, such as "step_1000"'
        )
    return text


def rank_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


def block_digest(data: bytes | memoryview, before: bytes = bytes(DIGEST_BYTES)) -> bytes:
    """Digest of one block, or of its part that follows one with the digest `before`."""
    return zlib.crc32(data, int.from_bytes(before, "big")).to_bytes(DIGEST_BYTES, "big")


@dataclass(frozen=True, slots=True)
class SavedParam:
    """One parameter: its full shape, and its flat order (see `model_plan`)."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    parts: int = 1

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SavedBucket:
    """Parameters that lie one after the other in one flat tensor, cut evenly over the ranks that saved it."""

    name: str
    trainable: bool
    params: tuple[SavedParam, ...]

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the checkpoint: `digests` holds one after the other the digests of its blocks, in hex."""

    name: str
    size: int
    digests: str


@dataclass(frozen=True, slots=True)
class SavedScalar:
    """A number that an optimizer keeps beside its tensors; `dtype` where it was a tensor without dimensions."""

    value: float | int | bool
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A parameter group of the optimizer: its options, and the numbers that all its parameters share."""

    options: dict[str, Any]
    scalars: dict[str, SavedScalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of a checkpoint but its tensors."""

    tag: str
    save_id: str  # also in each file's header
    step: int  # steps that training has made
    num_ranks: int
    buckets: tuple[SavedBucket, ...]
    files: tuple[FileEntry, ...]
    optimizer: str = ""  # class name
    groups: tuple[SavedGroup, ...] = ()
    states: tuple[str, ...] = ()  # element-wise optimizer state, such as "exp_avg"
    lr_scheduler: dict[str, Any] | None = None
    loss_scale: dict[str, Any] | None = None
    data: dict[str, Any] | None = None  # DataCursor
    counters: dict[str, Any] = field(default_factory=dict)  # samples, micro-steps, skipped steps, last strategy
    aliases: dict[str, str] = field(default_factory=dict)  # every path of a parameter in the model -> its name
    config_sha256: str = ""
    client_state: dict[str, Any] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES

    def to_json(self) -> str:
        """The manifest as text, with a digest over its contents."""
        contents = asdict(self)
        return _dump({"format": FORMAT, "version": VERSION, "sha256": _digest(contents), "contents": contents})


def read_manifest(text: str | bytes, place: str) -> Manifest:
    """The manifest in `text`; CheckpointError naming `place` for whatever is not a whole, undamaged one."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{place} has {len(text)} bytes, more than {MAX_MANIFEST_BYTES}; it is no manifest: use another tag"
        )
    record = parse_json(text, place)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{place} is not the manifest of a ds_hydra checkpoint; use another tag or folder")
    if record.get("version") != VERSION:
        raise CheckpointError(
            f"{place} has version {record.get('version')!r}, this ds_hydra reads version {VERSION}: load it with the "
            "release that wrote it, or use another tag"
        )
    contents = record.get("contents")
    if not isinstance(contents, dict) or _digest(contents) != record.get("sha256") or len(record) != 4:
        raise CheckpointError(f"{place} is damaged: its contents do not match its checksum; use another tag")
    try:
        manifest = _manifest(contents)
        _check(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{place} contradicts itself ({error}); use another tag") from None
    return manifest


def parse_json(text: str | bytes | bytearray, place: str) -> Any:
    """JSON without duplicate keys, NaN or deep nesting; CheckpointError naming `place` for anything else."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"{place} is damaged, not the JSON that was written ({reason}); use another tag"
        ) from None
    if _too_deep(value):
        raise CheckpointError(f"{place} is nested deeper than {MAX_DEPTH} levels; use another tag")
    return value


def check_client_state(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the user's state as JSON gives it back (tuples become lists).

    Raises CheckpointError for what JSON cannot hold: tensors, NaN, keys that are not text, other objects.
    """
    try:
        text = json.dumps(_text_keys(dict(state or {})), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"client_state cannot be saved: {error}; give numbers, text, lists and dictionaries with text keys "
            "(tensors: save them yourself as safetensors)"
        ) from None
    if len(text) > _MAX_CLIENT_BYTES:
        raise CheckpointError(f"client_state has {len(text)} bytes as JSON, more than {_MAX_CLIENT_BYTES}; save less")
    return json.loads(text)


def owners(numel: int, num_ranks: int, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(rank, first, last) of the even shards that hold elements [start, stop), counted within each shard."""
    # The cuts of `even_layout`; ranks whose shard is empty hold nothing and are left out.
    cuts = np.array([rank * numel // num_ranks for rank in range(num_ranks + 1)], dtype=np.int64)
    held = np.flatnonzero(cuts[1:] > cuts[:-1])
    span = np.array([start], dtype=np.int64), np.array([stop], dtype=np.int64)
    _, right, first, last = overlaps(*span, cuts[held], cuts[held + 1])
    return [
        (int(held[i]), int(a - cuts[held[i]]), int(b - cuts[held[i]]))
        for i, a, b in zip(right, first, last, strict=True)
        if b > a
    ]


def _manifest(contents: dict[str, Any]) -> Manifest:
    names = {f.name for f in fields(Manifest)}
    if set(contents) != names:
        raise ValueError(f"the fields {sorted(set(contents) ^ names)} are missing or unknown")
    plain = dict(contents)
    plain["buckets"] = tuple(
        SavedBucket(
            _text(b["name"]),
            _kind(b["trainable"], bool),
            tuple(
                SavedParam(
                    _text(p["name"]),
                    tuple(_count(n) for n in p["shape"]),
                    None if p["dim"] is None else _count(p["dim"]),
                    _count(p["parts"]),
                )
                for p in b["params"]
            ),
        )
        for b in contents["buckets"]
    )
    plain["files"] = tuple(
        FileEntry(_text(f["name"]), _count(f["size"]), _text(f["digests"])) for f in contents["files"]
    )
    plain["groups"] = tuple(
        SavedGroup(
            _kind(g["options"], dict),
            {
                _text(key): SavedScalar(_number(s["value"]), s["dtype"] and _text(s["dtype"]))
                for key, s in g["scalars"].items()
            },
        )
        for g in contents["groups"]
    )
    plain["states"] = tuple(_text(state) for state in contents["states"])
    return Manifest(**plain)


def _check(manifest: Manifest) -> None:
    """Fields that everything else relies on."""
    check_tag(manifest.tag)
    for name in ("step", "num_ranks", "block_bytes"):
        _count(getattr(manifest, name))
    for name in ("save_id", "optimizer", "config_sha256"):
        _text(getattr(manifest, name))
    for name in ("counters", "aliases", "client_state"):
        _kind(getattr(manifest, name), dict)
    for name in ("data", "lr_scheduler", "loss_scale"):
        if getattr(manifest, name) is not None:
            _kind(getattr(manifest, name), dict)
    if not 1 <= manifest.num_ranks <= MAX_RANKS or not 1 <= manifest.block_bytes <= 2**30:
        raise ValueError(f"{manifest.num_ranks} ranks, blocks of {manifest.block_bytes} bytes")
    if [entry.name for entry in manifest.files] != [rank_file(rank) for rank in range(manifest.num_ranks)]:
        raise ValueError(f"it lists other files than those of {manifest.num_ranks} ranks")
    for entry in manifest.files:
        blocks = -(-entry.size // manifest.block_bytes)
        if len(bytes.fromhex(entry.digests)) != blocks * DIGEST_BYTES:
            raise ValueError(f"{entry.name} has digests for another size than its {entry.size} bytes")
    names = [param.name for bucket in manifest.buckets for param in bucket.params]
    if len(set(names)) < len(names):
        raise ValueError("a parameter is listed twice")


def _kind(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{str(value)[:80]!r} is no {kind.__name__}")
    return value


def _text(value: Any) -> str:
    return _kind(value, str)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise TypeError(f"{str(value)[:80]!r} is no count")
    return value


def _number(value: Any) -> float | int | bool:
    if not isinstance(value, bool | int | float):
        raise TypeError(f"{str(value)[:80]!r} is no number")
    return value


def _digest(contents: Any) -> str:
    return hashlib.sha256(_dump(contents).encode()).hexdigest()


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    block = dict(pairs)
    if len(block) < len(pairs):
        raise ValueError("a key stands twice in one block")
    return block


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]}")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"the number {name}")


def _too_deep(value: Any) -> bool:
    # Level by level and not by recursion, which deep nesting could break before it is noticed.
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _text_keys(value: Any) -> Any:
    """`value` itself; TypeError where a dictionary in it has other keys than text, which JSON would change."""
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, (dict, list, tuple)):
            _text_keys(inner)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no text")
    return value
