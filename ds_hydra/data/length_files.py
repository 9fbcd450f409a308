"""A file of lengths in, as pandas, json, numpy or a shell wrote it; whole numbers of tokens out. Pure: no torch.

Read are numbers separated by white space or commas, under a header line or not, `512` as well as `512.0` or `5.12e+02`;
a table with a column of lengths; one JSON list; a JSON object of numbers, or with a list of them; JSON lines; and .npy.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_hydra.zero_hetero.errors import ConfigError

Ints = NDArray[np.int64]
_MOST = 2**62
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
_OF_LENGTHS = re.compile(r"len|tok|size", re.IGNORECASE)  # in the name of a column
_SHOWN = 40


def read_length_file(path: str | Path) -> Ints:
    """The lengths of a file, (sequences,) tokens, each at least 1. 10 million lines take seconds.

    ConfigError names the file, and the line or place of what is no length, or the columns of which none is named so.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the lengths file {path}: {error.strerror}") from error
    if content.startswith(b"\x93NUMPY"):
        return _of_array(path)
    if content.startswith(b"PAR1"):
        raise ConfigError(f"{path} is a Parquet file: write its column of lengths as .csv, .json or .npy")
    # numpy converts a list of byte strings at once, ten million lines in seconds; other forms are read by Python.
    words = content.split()
    if not words:
        raise ConfigError(f"{path}: holds no lengths; write one whole number of tokens a line")
    try:
        lengths = np.array(words, dtype=np.bytes_).astype(np.int64)
    except (ValueError, OverflowError):
        lengths = None
    if lengths is None or int(lengths.min()) < 1:
        found = list(_of_json(path, content) if content.lstrip()[:1] in (b"[", b"{") else _of_text(path, content))
        if not found:
            raise ConfigError(f"{path}: holds no lengths; write one whole number of tokens a line")
        lengths = np.array(found, dtype=np.int64)
    return lengths


def _whole(value: Any, place: str) -> int:
    """A length as it stands in a file."""
    number: Any = value
    if isinstance(value, str):
        text = value.strip()
        text = text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
        try:
            number = int(text) if text.isdecimal() else float(text)
        except ValueError:
            number = None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < _MOST:
        shown = value if len(str(value)) <= _SHOWN else f"{str(value)[:_SHOWN]}..."
        raise ConfigError(f"{place}: {shown!r} is not a whole number of tokens of at least 1")
    return number


def _of_array(path: Path) -> Ints:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    flat = array.ravel()
    if not flat.size or flat.dtype.kind not in "iuf":
        raise ConfigError(f"{path}: expected an array of whole numbers but found {flat.size} of {flat.dtype}")
    wrong = np.flatnonzero(~((flat >= 1) & (flat < _MOST) & (flat == np.floor(flat))))
    if wrong.size:
        _whole(flat[wrong[0]].item(), f"{path}, entry {wrong[0]}")
    return flat.astype(np.int64)


def _of_json(path: Path, content: bytes) -> Iterator[int]:
    """One list, one object of numbers or with one list, or an object a line."""
    try:
        text = content.decode()
        try:
            parsed = [json.loads(text)]
        except ValueError:
            parsed = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"{path} is neither JSON nor a list of numbers: {error}") from error
    for number, one in enumerate(parsed, start=1):
        place = f"{path}, line {number}" if len(parsed) > 1 else str(path)
        for at, value in enumerate(_numbers_of(one, place)):
            yield _whole(value, f"{place}, entry {at}")


def _numbers_of(parsed: Any, place: str) -> list[Any]:
    if isinstance(parsed, list):  # of numbers, or of rows
        return [value for one in parsed for value in (_numbers_of(one, place) if isinstance(one, dict) else [one])]
    if not isinstance(parsed, dict):
        return [parsed]
    values = list(parsed.values())
    named = any(map(_OF_LENGTHS.search, parsed)) or not all(isinstance(value, int | float) for value in values)
    if len(parsed) > 1 and named:
        values = [parsed[_column(list(parsed), place)]]
    if len(values) == 1 and isinstance(values[0], list | dict):
        return _numbers_of(values[0], place)
    return values


def _column(names: Sequence[str], place: str) -> str:
    """Of several names the one that says that it is of lengths."""
    named = [name for name in names if _OF_LENGTHS.search(name)]
    exact = [name for name in named if name.strip().lower() in ("length", "lengths")]
    if len(named) != 1 and len(exact) != 1:
        raise ConfigError(
            f"{place}: which of {', '.join(map(repr, names))} are lengths? Name that one 'length', or keep it alone"
        )
    return (exact or named)[0]


def _of_text(path: Path, content: bytes) -> Iterator[int]:
    """Numbers separated by white space or commas, or a table under a header line."""
    lines = content.decode(errors="replace").splitlines()
    rows = [(number, row) for number, row in enumerate(csv.reader(lines, skipinitialspace=True), start=1) if any(row)]
    header = rows[0][1] if rows and _is_header(rows[0][1]) else None
    rows = rows if header is None else rows[1:]
    at: int | None = None
    if header is not None:
        at = _place_of(header, str(path))
    elif len(rows) > 1 and all(len(row) == 2 and row[0] == str(index) for index, (_, row) in enumerate(rows)):
        at = 1  # beside an index
    for number, row in rows:
        place = f"{path}, line {number}"
        if at is None:
            if len(rows) > 1 and len(row) > 1 and _THOUSANDS.fullmatch(",".join(row)):
                raise ConfigError(f"{place}: {','.join(row)!r} may be one number or several: write it without commas")
            for cell in row:
                for word in [cell] if _THOUSANDS.fullmatch(cell.strip()) else cell.split():
                    yield _whole(word, place)
        else:
            yield _whole(row[at] if at < len(row) else "", place)


def _place_of(header: Sequence[str], place: str) -> int | None:
    names = [name for name in header if name.strip()]  # pandas' index has no name
    if len(header) == 1:
        return None
    return header.index(names[0] if len(names) == 1 else _column(names, place))


def _is_header(row: Sequence[str]) -> bool:
    """pandas calls a column without a name 0, and its index nothing."""
    return row == ["0"] or not row[0].strip() or not any(_is_number(word) for cell in row for word in cell.split())


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
