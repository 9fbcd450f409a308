"""The manifest of a checkpoint: its fields, as JSON with a digest of its own, and read back, checked. Pure.

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
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ds_hydra.zero_hetero import files
from ds_hydra.zero_hetero.errors import CheckpointError
from ds_hydra.zero_hetero.layout import even_layout

FORMAT, VERSION = "ds_hydra checkpoint", 1
WITH_OWNERS = 2  # the version of a checkpoint whose buckets some ranks alone own: older releases would misread it
MANIFEST = "manifest.json"
BLOCK_BYTES = 2**20  # of a file under one digest
DIGEST_BYTES = 4  # CRC-32: finds every single flipped bit, and at memory speed; it is against damage, not forgery
LEAST_MANIFEST_BYTES, MAX_MANIFEST_BYTES = 16 * 2**20, 256 * 2**20  # for small files and for large ones beside it
MAX_RANKS = 2**20
MAX_STEP = 2**48  # beyond any job
MAX_NAME_BYTES = 255
COUNTERS = ("global_samples", "micro_steps", "skipped_steps")
_MAX_CLIENT_BYTES = 16 * 2**20
_OUTER_LEVELS = 3  # of a manifest around a user's state
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@,-]{0,127}")
_RESERVED = frozenset({"latest", "latest_universal"})


class OtherJobError(CheckpointError):
    """A whole checkpoint that is of another model, optimizer, schedule or data than this job's."""


def check_tag(tag: object) -> str:
    """The tag as text; CheckpointError unless it is a plain name, which no path, and nothing hidden, is."""
    text = str(tag)
    if not _TAG.fullmatch(text) or text in _RESERVED:
        raise CheckpointError(
            f"the tag {text[:200]!r} is not a name: use up to 128 letters, digits and ._+=@,- that begin with a letter "
            'or digit, such as "step_1000"'
        )
    return text


def check_name(name: object) -> str:
    """The name of a parameter, a bucket or a state; ValueError for one that could lead out of a folder as a file's."""
    text = of_kind(name, str)
    plain = text.isprintable() and not text.startswith(".") and not any(mark in text for mark in "/\\")
    if not plain or not 1 <= len(text.encode()) <= MAX_NAME_BYTES:
        raise ValueError(
            f"the name {text[:80]!r} has a separator, a leading dot, an unprintable character, none or more than "
            f"{MAX_NAME_BYTES} bytes"
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
    """Parameters that lie one after the other in one flat tensor, cut evenly over the ranks that saved it, or over
    those of them that are its `owners`, in rising order."""

    name: str
    trainable: bool
    params: tuple[SavedParam, ...]
    owners: tuple[int, ...] = ()

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

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> SavedGroup:
        """From another rank's JSON of `asdict`."""
        return cls(record["options"], {key: SavedScalar(**scalar) for key, scalar in record["scalars"].items()})


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
    counters: dict[str, int] = field(default_factory=dict)  # some of COUNTERS
    aliases: dict[str, str] = field(default_factory=dict)  # every path of a parameter in the model -> its name
    config_sha256: str = ""
    client_state: dict[str, Any] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES
    stage: int = 0  # how often training began anew with the weights alone [Note: stages]
    planning: dict[str, Any] | None = None  # what plans follow from, and what they have learnt from measured times
    number: int = 0  # of the save, in its folder [Note: branches]
    follows: int = 0  # the number of what its job had loaded or saved there before; 0: nothing
    latest: bool = True  # whether `latest` was to name it
    unnamed: bool = False  # saved without a tag, so `keep_last` counts it

    def to_json(self) -> str:
        """The manifest as text, with a digest over its contents."""
        contents = asdict(self)
        version = WITH_OWNERS if any(bucket.owners for bucket in self.buckets) else VERSION
        return dump({"format": FORMAT, "version": version, "sha256": digest_of(contents), "contents": contents})


def parse_json(text: str | bytes | bytearray, place: str) -> Any:
    """JSON without duplicate keys, NaN or deep nesting; CheckpointError naming `place` for anything else."""
    try:
        return files.parse_json(text)
    except files.JsonError as error:
        raise CheckpointError(f"{place} is damaged, not the JSON that was written ({error}); use another tag") from None


def check_client_state(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the user's state as JSON gives it back: tuples become lists, and numbers of numpy and tensors without
    dimensions become numbers.

    Raises CheckpointError naming the key of what JSON cannot hold: tensors, NaN, keys that are no text, other objects.
    """
    try:
        plain: dict[str, Any] = _as_plain(dict(state or {}), "client_state")
        if files.too_deep(plain, files.MAX_DEPTH - _OUTER_LEVELS):
            raise ValueError("nested too deeply")
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"client_state cannot be saved: {error}; give numbers, text, lists and dictionaries with text keys "
            "(tensors: save them yourself as safetensors)"
        ) from None
    text = json.dumps(plain)
    if len(text) > _MAX_CLIENT_BYTES:
        raise CheckpointError(f"client_state has {len(text)} bytes as JSON, more than {_MAX_CLIENT_BYTES}; save less")
    found: dict[str, Any] = files.parse_json(text)
    return found


def _as_plain(value: Any, place: str) -> Any:
    """`value` in JSON's own types; TypeError or ValueError naming the `place` of what has none."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{place} has the key {key!r}, which is no text")
        return {str(key): _as_plain(one, f"{place}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(one, f"{place}[{index}]") for index, one in enumerate(value)]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place} is {value}")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    shape = getattr(value, "shape", None)
    raise TypeError(f"{place} is a {type(value).__name__}{f' of shape {tuple(shape)}' if shape is not None else ''}")


def shards_of(bucket: SavedBucket, num_ranks: int, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(rank, first, last) of the shards of a bucket that hold its elements [start, stop), counted within each shard."""
    layout = even_layout(bucket.numel, num_ranks, bucket.owners)
    held = ((rank, piece) for rank, pieces in enumerate(layout.pieces) for piece in pieces)
    return [
        (rank, max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start)
        for rank, piece in held
        if max(start, piece.start) < min(stop, piece.stop)
    ]


def of_kind(value: Any, kind: type) -> Any:
    """The value; TypeError unless it is of that kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{str(value)[:80]!r} is no {kind.__name__}")
    return value


def count(value: Any) -> int:
    """The value; TypeError unless it is a whole number from 0 on, below 2^62."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise TypeError(f"{str(value)[:80]!r} is no count")
    return value


def digest_of(contents: Any) -> str:
    """SHA-256 of plain values as JSON."""
    return hashlib.sha256(dump(contents).encode()).hexdigest()


def dump(value: Any) -> str:
    """Plain values as JSON that is the same for equal ones."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


_NEWER = frozenset({"stage", "planning", "number", "follows", "latest", "unnamed"})  # fields that older manifests lack


def read_manifest(text: str | bytes, place: str) -> Manifest:
    """The manifest in `text`; CheckpointError naming `place` for whatever is not a whole, undamaged one."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{place} has {len(text)} bytes, more than {MAX_MANIFEST_BYTES}; it is no manifest: use another tag"
        )
    record = parse_json(text, place)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{place} is not the manifest of a ds_hydra checkpoint; use another tag or folder")
    if record.get("version") not in (VERSION, WITH_OWNERS):
        raise CheckpointError(
            f"{place} has version {record.get('version')!r}, this ds_hydra reads up to {WITH_OWNERS}: load it with the "
            "release that wrote it, or use another tag"
        )
    contents = record.get("contents")
    if not isinstance(contents, dict) or digest_of(contents) != record.get("sha256") or len(record) != 4:
        raise CheckpointError(f"{place} is damaged: its contents do not match its checksum; use another tag")
    try:
        manifest = _manifest(contents)
        _check(manifest)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{place} contradicts itself ({error}); use another tag") from None
    return manifest


def check_saved_text(manifest: Manifest) -> str:
    """The manifest as text, once reading it has given it back. CheckpointError for what could be saved, not loaded."""
    text, place = manifest.to_json(), f"the manifest of {manifest.tag!r}"
    # Before it is written there are no files yet, and so no number of ranks.
    owned = tuple(replace(bucket, owners=()) for bucket in manifest.buckets)
    alone = replace(manifest, num_ranks=1, files=(FileEntry(rank_file(0), 0, ""),), buckets=owned)
    whole = manifest if manifest.files else alone
    try:
        read_manifest(whole.to_json(), place)
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"what is to be saved could not be loaded: {error}") from None
    return text


def _manifest(contents: dict[str, Any]) -> Manifest:
    names = {f.name for f in fields(Manifest)}
    differ = (set(contents) ^ names) - (_NEWER - set(contents))
    if differ:
        raise ValueError(f"the fields {sorted(differ)} are missing or unknown")
    plain = dict(contents)
    plain["buckets"] = tuple(
        SavedBucket(
            check_name(b["name"]),
            of_kind(b["trainable"], bool),
            tuple(
                SavedParam(
                    check_name(p["name"]),
                    tuple(count(n) for n in p["shape"]),
                    None if p["dim"] is None else count(p["dim"]),
                    count(p["parts"]),
                )
                for p in b["params"]
            ),
            tuple(count(rank) for rank in b.get("owners", ())),  # older ones have none
        )
        for b in contents["buckets"]
    )
    plain["files"] = tuple(
        FileEntry(of_kind(f["name"], str), count(f["size"]), of_kind(f["digests"], str)) for f in contents["files"]
    )
    plain["groups"] = tuple(
        SavedGroup(
            of_kind(g["options"], dict),
            {
                check_name(key): SavedScalar(
                    _number(s["value"]), None if s["dtype"] is None else of_kind(s["dtype"], str)
                )
                for key, s in g["scalars"].items()
            },
        )
        for g in contents["groups"]
    )
    plain["states"] = tuple(check_name(state) for state in of_kind(contents["states"], list))
    return Manifest(**plain)


def _check(manifest: Manifest) -> None:
    """Fields that everything else relies on."""
    check_tag(manifest.tag)
    for name in ("step", "num_ranks", "block_bytes", "stage", "number", "follows"):
        count(getattr(manifest, name))
    for name in ("latest", "unnamed"):
        of_kind(getattr(manifest, name), bool)
    for name in ("save_id", "optimizer", "config_sha256"):
        of_kind(getattr(manifest, name), str)
    for name in ("counters", "aliases", "client_state"):
        of_kind(getattr(manifest, name), dict)
    for name in ("data", "lr_scheduler", "loss_scale", "planning"):
        if getattr(manifest, name) is not None:
            of_kind(getattr(manifest, name), dict)
    if not 1 <= manifest.num_ranks <= MAX_RANKS or not 1 <= manifest.block_bytes <= 2**30:
        raise ValueError(f"{manifest.num_ranks} ranks, blocks of {manifest.block_bytes} bytes")
    if [entry.name for entry in manifest.files] != [rank_file(rank) for rank in range(manifest.num_ranks)]:
        raise ValueError(f"it lists other files than those of {manifest.num_ranks} ranks")
    for entry in manifest.files:
        blocks = -(-entry.size // manifest.block_bytes)
        if len(bytes.fromhex(entry.digests)) != blocks * DIGEST_BYTES:
            raise ValueError(f"{entry.name} has digests for another size than its {entry.size} bytes")
    params = [param for bucket in manifest.buckets for param in bucket.params]
    for what, names in (
        ("parameter", [param.name for param in params]),
        ("bucket", [bucket.name for bucket in manifest.buckets]),
        ("state", ["master", *manifest.states]),
    ):
        if len(set(names)) < len(names):
            raise ValueError(f"a {what} is listed twice")
    for param in params:
        _check_param(param)
    for bucket in manifest.buckets:
        if bucket.owners:  # ValueError for such as are no ranks
            even_layout(bucket.numel, manifest.num_ranks, bucket.owners)
    if sum(param.numel for param in params) >= 2**62:
        raise ValueError("its parameters have more elements than any model")
    _check_progress(manifest)


def _check_param(param: SavedParam) -> None:
    """ValueError for a flat order that the shape does not have."""
    cut = (0,) if param.dim is None else param.shape[param.dim : param.dim + 1]  # elements; nothing past the last one
    if not cut or param.parts < 1 or cut[0] % param.parts:
        raise ValueError(
            f"{param.name!r} of shape {param.shape} cannot be cut along {param.dim} into {param.parts} parts"
        )


def _check_progress(manifest: Manifest) -> None:
    """ValueError or TypeError for counts that are none, or that contradict each other."""
    if max(manifest.step, manifest.stage) > MAX_STEP:
        raise ValueError(f"step {manifest.step} of stage {manifest.stage} is more than any job makes")
    known = set(manifest.counters) <= set(COUNTERS)
    if not known or (manifest.optimizer and len(manifest.counters) < len(COUNTERS)):  # converted ones lack some
        raise ValueError(f"its counters are {', '.join(manifest.counters)[:200]} and not {', '.join(COUNTERS)}")
    for number in manifest.counters.values():
        count(number)
    if manifest.counters.get("skipped_steps", 0) > manifest.step:
        raise ValueError(f"{manifest.counters['skipped_steps']} steps were skipped of {manifest.step}")
    if manifest.data is not None and count(manifest.data.get("step")) != manifest.step:
        raise ValueError(
            f"it was saved after step {manifest.step}, its place in the data is that of step {manifest.data['step']}"
        )
    for path, name in manifest.aliases.items():
        of_kind(name, str), of_kind(path, str)
    for group in manifest.groups:
        if "params" in group.options:
            raise ValueError("a group's options hold 'params'")


def _number(value: Any) -> float | int | bool:
    if not isinstance(value, bool | int | float):
        raise TypeError(f"{str(value)[:80]!r} is no number")
    return value
