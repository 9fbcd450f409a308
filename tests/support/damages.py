"""Damages of saved checkpoints, drawn at random: what happens to files, folders and names on a disk."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

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
}
"""By name; several may follow each other."""


def damage(folder: Path, seed: int) -> str:
    """Do one to three damages, drawn by the seed; what was done."""
    draw = random.Random(seed)
    kinds = [list(DAMAGES)[seed % len(DAMAGES)], *draw.choices(list(DAMAGES), k=draw.choice([0, 0, 1, 2]))]
    for kind in kinds:
        DAMAGES[kind](folder, draw)
    return ", ".join(kinds)
