"""A manifest's text in, the manifest out, or an error that says what is wrong with it. Pure."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ds_hydra.checkpoint.format import (
    COUNTERS,
    DIGEST_BYTES,
    FORMAT,
    MAX_MANIFEST_BYTES,
    MAX_RANKS,
    MAX_STEP,
    VERSION,
    WITH_OWNERS,
    FileEntry,
    Manifest,
    SavedBucket,
    SavedGroup,
    SavedParam,
    SavedScalar,
    check_name,
    check_tag,
    count,
    digest_of,
    of_kind,
    parse_json,
    rank_file,
)  # fmt: skip
from ds_hydra.zero_hetero.errors import CheckpointError
from ds_hydra.zero_hetero.layout import even_layout

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
