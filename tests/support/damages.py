"""Damages and forgeries of saved checkpoints, drawn at random, and whether all ranks load them whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_hydra.checkpoint.format import BLOCK_BYTES, MANIFEST, block_digest, rank_file
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import CheckpointError
from tests.support.small_job import Stateful, sequences, small_config, small_engine

# --- Damages of saved checkpoints, drawn at random: what happens to files, folders and names on a disk.
Damage = Callable[[Path, random.Random], object]
"""Damages the checkpoint "new" of a folder, which also holds "old"."""


def _file(folder: Path, draw: random.Random) -> Path | None:
    """One of the files that are left of "new"."""
    files = sorted(path for path in (folder / "new").rglob("*") if path.is_file() and not path.is_symlink())
    return draw.choice(files) if files else None


def _of_bytes(change: Callable[[bytearray, random.Random], object]) -> Damage:
    def damage(folder: Path, draw: random.Random) -> None:
        if path := _file(folder, draw):
            data = bytearray(path.read_bytes())
            change(data, draw)
            path.write_bytes(data)

    return damage


def _of_path(change: Callable[[Path, random.Random], object]) -> Damage:
    def damage(folder: Path, draw: random.Random) -> None:
        if path := _file(folder, draw):
            change(path, draw)

    return damage


def _place(data: bytearray, draw: random.Random) -> int:
    """Somewhere, one time in three in what is likely to be the header."""
    return draw.randrange(max(1, min(len(data), 300 if draw.random() < 0.3 else len(data))))


def _flip(data: bytearray, draw: random.Random) -> None:
    if data:
        data[_place(data, draw)] ^= 1 << draw.randrange(8)


def _overwrite(data: bytearray, draw: random.Random, fill: Callable[[int], bytes]) -> None:
    at, size = _place(data, draw), draw.choice([1, 8, 100, 4096])
    size = min(size, len(data) - at)
    data[at : at + size] = fill(size)


def _insert(data: bytearray, draw: random.Random) -> None:
    at = _place(data, draw)
    data[at:at] = draw.randbytes(draw.choice([1, 3, 512]))


def _cut_out(data: bytearray, draw: random.Random) -> None:
    at = _place(data, draw)
    del data[at : at + draw.choice([1, 4, 512])]


def _swap_blocks(data: bytearray, draw: random.Random) -> None:
    size, half = 512, len(data) // 2
    one, other = data[half - size : half], data[half : half + size]
    data[half - size : half + size] = other + one


def _digit(data: bytearray, draw: random.Random) -> None:
    """Another digit in what may be JSON."""
    found = [match.start() for match in re.finditer(rb"\d", bytes(data[:100_000]))]
    if found:
        data[draw.choice(found)] = draw.choice(b"0123456789")


def _flip_many(data: bytearray, draw: random.Random) -> None:
    for _ in range(20):
        _flip(data, draw)


def _into_circle(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to(path)


def _into_folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _into_link(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.parent.parent / "old" / path.name)


def _swap_files(folder: Path, draw: random.Random) -> None:
    one, other = _file(folder, draw), _file(folder, draw)
    if one and other:
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)


def _from_old(path: Path, _: random.Random) -> None:
    source = path.parent.parent / "old" / path.name
    if source.is_file():
        shutil.copy(source, path)


def _old_for_new(folder: Path, _: random.Random) -> None:
    shutil.rmtree(folder / "new", ignore_errors=True)
    shutil.copytree(folder / "old", folder / "new")


def _latest(folder: Path, draw: random.Random) -> None:
    path = folder / "latest"
    text = draw.choice([b"", b"old", b"gone", b"../run/new", b"new\0", b"new\nold", b"\xff\xfe", b"n" * 5000, None])
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_bytes(text)


DAMAGES: dict[str, Damage] = {
    "bit": _of_bytes(_flip),
    "bits": _of_bytes(_flip_many),
    "zeros": _of_bytes(lambda data, draw: _overwrite(data, draw, bytes)),
    "noise": _of_bytes(lambda data, draw: _overwrite(data, draw, draw.randbytes)),
    "digit": _of_bytes(_digit),
    "inserted": _of_bytes(_insert),
    "cut out": _of_bytes(_cut_out),
    "blocks swapped": _of_bytes(_swap_blocks),
    "appended": _of_bytes(lambda data, draw: data.extend(draw.randbytes(draw.choice([1, 1000])))),
    "twice": _of_bytes(lambda data, _: data.extend(bytes(data))),
    "lines of another system": _of_bytes(lambda data, _: data.__setitem__(slice(None), data.replace(b",", b",\r\n"))),
    "truncated": _of_path(lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size + 1))),
    "emptied": _of_path(lambda path, _: path.write_bytes(b"")),
    "missing": _of_path(lambda path, _: path.unlink()),
    "renamed": _of_path(lambda path, draw: path.rename(path.with_name(draw.choice(["x", "rank_00007.safetensors"])))),
    "a folder": _of_path(_into_folder),
    "a link to another save": _of_path(_into_link),
    "a link in a circle": _of_path(_into_circle),
    "of another save": _of_path(_from_old),
    "files swapped": _swap_files,
    "another tag's folder": _old_for_new,
    "folder missing": lambda folder, _: shutil.rmtree(folder / "new", ignore_errors=True),
    "stale name": lambda folder, _: (folder / "new").is_dir() and (folder / "new").rename(folder / "newer"),
    "something beside": lambda folder, _: (folder / "new").is_dir() and (folder / "new" / "notes.txt").write_text("x"),
    "latest": _latest,
    "a pickle": _of_path(lambda path, _: path.write_bytes(pickle.dumps(os.system))),
}
"""By name; several may follow each other."""


def damage(folder: Path, seed: int) -> str:
    """Do one to three damages, drawn by the seed; what was done."""
    draw = random.Random(seed)
    kinds = [list(DAMAGES)[seed % len(DAMAGES)], *draw.choices(list(DAMAGES), k=draw.choice([0, 0, 1, 2]))]
    for kind in kinds:
        DAMAGES[kind](folder, draw)
    return ", ".join(kinds)


# --- Forgeries of saved checkpoints, drawn at random: one thing is changed, and all digests are made to match
# again.
# Parts of an engine's state that a field of the manifest may change, where what it says can be.
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


# --- Checkpoints that were damaged or forged in; whether all ranks loaded them alike, whole or not at all, out.
JOBS = ("usual", "stream", "fp16")
NUM_RANKS = 2
_TAGS = ("old", "new")
_OWN = frozenset({"masters", "moments", "random", "data"})  # parts that each rank has of its own
_LOST = "other ranks raised nothing"
State = dict[str, str]
"""Digests of the parts of what a rank trains."""


def job(kind: str, rank: int) -> Any:
    """An engine of one of JOBS."""
    config = small_config(torch.distributed.get_world_size(), cost_correction="apply")
    if kind == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if kind == "stream":
        config["hydra"]["context_length"] = 200
        return small_engine(rank, config=config, data=Stateful(sequences()))
    return small_engine(rank, config=config)


def save(kind: str, folder: Path, num_ranks: int) -> None:
    """A folder with the tags "old", after one step, and "new", after three."""

    def run(rank: int) -> None:
        engine = job(kind, rank)
        for tag, steps in zip(_TAGS, (1, 3), strict=True):
            while engine.global_steps < steps:
                engine.train_batch()
            engine.save_checkpoint(folder, tag, client_state={"note": [1, {"best": 2.5}]})
        engine.destroy()

    run_ranks(run, num_ranks, timeout=600)


def state_of(engine: Any, client: Any = None) -> State:
    """Of this rank."""
    crew, optimizer = engine.crew, engine.optimizer
    kept = [value for param in optimizer.state.values() for value in param.items()]
    parts = {
        "masters": [shards.flat for shards in (crew.masters.trained, crew.masters.frozen)],
        "moments": [value for _, value in kept if isinstance(value, torch.Tensor) and value.dim()],
        "numbers": sorted({f"{k} {v}" for k, v in kept if not (isinstance(v, torch.Tensor) and v.dim())}),
        "options": [[item for item in group.items() if item[0] != "params"] for group in optimizer.param_groups],
        "counters": [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps],
        "schedule": engine.lr_scheduler.state_dict(),
        "data": engine.sampler.saved(engine.global_steps),
        "random": torch.get_rng_state(),
        "scale": crew.loss_scale.state_dict(),
        "planning": [crew.plans.tables, crew.watch.calibration.state()],
        "stage": crew.checkpoints.stage,
        "client": client,
    }
    return {name: hashlib.sha256(_bytes(part)).hexdigest()[:12] for name, part in parts.items()}


def _bytes(part: Any) -> bytes:
    if isinstance(part, torch.Tensor):
        return part.detach().contiguous().view(torch.uint8).numpy().tobytes() if part.dim() else repr(part).encode()
    if isinstance(part, list):
        return b"".join(map(_bytes, part))
    return repr(part).encode()


class Seen(NamedTuple):
    """What one rank saw of a load: the tag, or the text of the error; the state before and after."""

    tag: str
    error: str
    before: State
    after: State
    trained: str  # why no step followed


def tried(
    kind: str, template: Path, scratch: Path, change: Callable[[Path, int], Any], seeds: Sequence[int]
) -> tuple[dict[str, list[State]], dict[int, list[Seen]], dict[int, Any]]:
    """What all ranks saw: of the true checkpoints, and of each seed's change of them, which is told last."""

    def run(rank: int) -> tuple[dict[str, State], dict[int, Seen], dict[int, Any]]:
        engine = job(kind, rank)
        meeting, told, seen = engine.crew.world.background, dict[int, Any](), dict[int, Seen]()
        truth = {tag: _loaded(engine, template, tag, 0).after for tag in _TAGS}
        for seed in seeds:
            if rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
                shutil.copytree(template, scratch)
                told[seed] = change(scratch, seed)
            meeting.texts("")
            seen[seed] = _loaded(engine, scratch, None if seed % 3 == 0 else "new", seed)
            other = bool(seen[seed].tag) and seen[seed].after not in truth.values()
            if "other" in meeting.texts("other" if other else ""):  # on any rank; a step takes all of them
                seen[seed] = seen[seed]._replace(trained=_goes_on(engine))
        return truth, seen, told

    found = run_ranks(run, NUM_RANKS, timeout=1200)
    truth = {tag: [one[0][tag] for one in found] for tag in _TAGS}
    return truth, {seed: [one[1][seed] for one in found] for seed in seeds}, found[0][2]


def _loaded(engine: Any, folder: Path, tag: str | None, seed: int) -> Seen:
    torch.manual_seed(engine.global_rank)
    before, text, path, client = state_of(engine), "", None, None
    try:
        if seed % 5 == 4:  # as a restart does
            path = engine.crew.checkpoints.resume(folder)
            client = {"note": [1, {"best": 2.5}]}
        else:
            path, client = engine.load_checkpoint(folder, tag)
    except CheckpointError as error:
        text = str(error)
    after = state_of(engine, client if path else None)
    return Seen(Path(path).name if path else "", text, before, after, "")


def _goes_on(engine: Any) -> str:
    """What is wrong with a step from here; "" when nothing is."""
    try:
        engine.train_batch()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def objections(
    seen: Sequence[Seen], truth: dict[str, list[State]], may_change: frozenset[str], words: Sequence[str]
) -> list[str]:
    """What of the promises was not kept by a load that all ranks made; a refusal is to have these words."""
    if len({(one.tag, one.error) for one in seen}) > 1:
        return [f"the ranks differ: {[(one.tag, one.error[:200]) for one in seen]}"]
    tag, wrong = seen[0].tag, []
    for rank, one in enumerate(seen):
        if not tag:
            changed = sorted(part for part in one.before if one.before[part] != one.after[part])
            wrong += [f"refused on rank {rank}, but {changed} changed"] if changed else []
            told = one.error and all(word in one.error for word in words)
            wrong += [] if told else [f"rank {rank} is not told {words}: {one.error}"]
            continue
        true = truth.get(tag, [{}] * NUM_RANKS)[rank]
        others = {part for part in one.after if one.after[part] != true.get(part)} - may_change
        wrong += [f"loaded as {tag!r} on rank {rank} with another {sorted(others)}"] if others else []
        wrong += [f"no step follows on rank {rank}: {one.trained[:300]}"] if one.trained else []
        alike = {part: one.after[part] == seen[0].after[part] for part in one.after if part not in _OWN}
        wrong += [] if all(alike.values()) else [f"rank {rank} has another {[k for k, v in alike.items() if not v]}"]
    return wrong


def damaged(kind: str, template: Path, scratch: Path, seeds: Sequence[int]) -> dict[str, list[str]]:
    """Objections to loads of checkpoints that were damaged, by what was done to them."""
    truth, seen, told = tried(kind, template, scratch, damage, seeds)
    return {
        f"{seed}: {told[seed]} ({_ending(seen[seed])})": objections(
            seen[seed], truth, frozenset(), (str(scratch), "tag")
        )
        for seed in seeds
    }


def forged(kind: str, template: Path, scratch: Path, seeds: Sequence[int]) -> dict[str, list[str]]:
    """The same of forged ones."""
    truth, seen, told = tried(kind, template, scratch, forge, seeds)
    return {
        f"{seed}: {told[seed].what} ({_ending(seen[seed])})": objections(seen[seed], truth, told[seed].may_change, ())
        for seed in seeds
    }


def _ending(seen: Sequence[Seen]) -> str:
    return f"loaded {seen[0].tag}" if seen[0].tag else f"refused: {ascii(seen[0].error)[1:160]}"
