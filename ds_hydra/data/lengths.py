"""Lengths of sequences: of a dataset's items, from a file, a histogram or a lognormal. Pure: no torch.

Of a file are read numbers separated by white space or commas, under a header line or not, `512` as well as `512.0` or
`5.12e+02`; a table with a column of lengths; one JSON list; a JSON object of numbers, or with a list of them; JSON
lines; and .npy.

A spec is the path of such a file, that of a histogram as .csv (columns "[low, high]" and number of sequences), or
"lognormal:MU,SIGMA" (of the natural log of the tokens).

[Note: lengths of items]
A plan needs all lengths, and a dataset that does not tell them is read once before step 0. The ranks read it together,
each its part of the items. What they find is kept in $XDG_CACHE_HOME/ds_hydra/lengths, under the fingerprint that
`datasets` gives a dataset: it changes with the data and with whatever was done to them. Other datasets have none, so
that nobody could tell whether they are still the same: they are read at each start.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ds_hydra.data.columns import Int64Array, ItemCheck, read_item
from ds_hydra.data.tokens import Limits
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.files import keep_file, kept_folder, open_file

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
    parsed = _parsed(path, content)
    for number, one in enumerate(parsed, start=1):
        place = f"{path}, line {number}" if len(parsed) > 1 else str(path)
        for at, value in enumerate(_numbers_of(one, place)):
            yield _whole(value, f"{place}, entry {at}")


def _parsed(path: Path, content: bytes) -> list[Any]:
    """The one value of a file, or that of each line."""
    try:
        text = content.decode()
        try:
            return [json.loads(text)]
        except ValueError:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"{path} is neither JSON nor a list of numbers: {error}") from error


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


Floats = NDArray[np.float64]
_LOGNORMAL = re.compile(r"lognormal:([^,]+),([^,]+)")
WEB_PAGES = "lognormal:6.220,1.233"  # fits the published bucket counts of CommonCrawl
_TOKENS_A_RANK = 8192
_RANGE = re.compile(r"\[\s*(\d+)\s*,\s*(\d+)\s*\]")


@dataclass(frozen=True)
class LengthSample:
    """Lengths in tokens, how many sequences of the source were longer than the context and left out, and the longest of
    all."""

    lengths: Ints
    too_long: int
    longest: int
    patches: tuple[tuple[int, ...], ...] = ()  # of the units of each sequence; empty: none has any

    def within(self, context_length: int, spec: str) -> LengthSample:
        """Those of at most so many tokens; ConfigError, which begins with the spec, where there are none."""
        fitting = self.lengths <= context_length
        if not fitting.any():
            raise ConfigError(
                f"{spec}: none of its {len(fitting)} sequences fits context_length={context_length} tokens; the "
                f"shortest has {self.lengths.min()}"
            )
        patches = tuple(one for one, fits in zip(self.patches, fitting, strict=False) if fits)
        return LengthSample(self.lengths[fitting], int((~fitting).sum()), self.longest, patches)


def read_lengths(spec: str, context_length: int, count: int = 100_000, seed: int = 0) -> LengthSample:
    """Lengths of 1..context_length tokens from a spec; `count` are drawn where the spec is a distribution.

    Raises ConfigError with file and line for what is not a length, or when nothing fits the context.
    """
    return all_lengths(spec, count, seed).within(context_length, spec)


def all_lengths(spec: str, count: int = 100_000, seed: int = 0) -> LengthSample:
    """The same of any length."""
    rng = np.random.default_rng(seed)
    if spec.startswith("lognormal"):
        mu, sigma = _lognormal(spec)
        drawn = np.maximum(1.0, rng.lognormal(mu, sigma, size=count))
        lengths = np.minimum(drawn, 2.0**62).astype(np.int64)  # larger numbers would wrap around to negative ones
    elif spec.endswith(".csv") and _is_histogram(spec):
        lengths = _draw_histogram(spec, count, rng)
    else:
        lengths = read_length_file(spec)
    return LengthSample(lengths, 0, int(lengths.max()), tuple(_patches(spec)))


def _patches(spec: str) -> list[tuple[int, ...]]:
    """What JSON lines such as `{"length": 830, "patches": [1200, 256]}` say of images; empty: nothing."""
    path = Path(spec)
    if not path.is_file():
        return []
    with path.open("rb") as file:  # of other forms, which may be long, no more is read
        content = b"{" + file.read() if file.read(1) == b"{" else b""
    if b'"patches"' not in content:
        return []
    rows = _parsed(path, content)
    if len(rows) < sum(bool(line.strip()) for line in content.splitlines()):  # one object over several lines
        return []
    found = [tuple(_whole(one, f"{path}, line {number}") for one in row.get("patches", ()))
             for number, row in enumerate(rows, start=1) if isinstance(row, dict)]  # fmt: skip
    return found if any(found) else []


def assumed_lengths(longest: int) -> list[int]:
    """Lengths of web pages, up to `longest` tokens and one of so many, for jobs that do not know theirs yet."""
    drawn = np.random.default_rng(0).lognormal(*_lognormal(WEB_PAGES), size=10_000)
    return [*np.clip(drawn, 1, longest).astype(int).tolist(), longest]


def lengths_of_job(spec: str, longest: int, *, cut: bool) -> LengthSample:
    """Those of a spec as a job trains on them, and one of `longest` tokens, which may come. Where sequences are not
    `cut`, longer ones are left out. ConfigError as by `read_lengths`."""
    sample = read_lengths(spec, longest)
    more = [longest] * (sample.too_long if cut else 0)
    return replace(sample, lengths=np.append(sample.lengths, [*more, longest]))


def assumed_tokens(longest: int, num_ranks: int) -> int:
    """Tokens of a step whose size is not known: 8,192 a rank, or a longest sequence where that is less."""
    return max(longest, num_ranks * min(longest, _TOKENS_A_RANK))


def sample_batches(
    lengths: Sequence[int], tokens_per_step: int, count: int, seed: int, context_length: int
) -> list[np.ndarray]:
    """Batches of random lengths of the data: (sequences,) tokens each, of at least `tokens_per_step` tokens in all.

    PlanError when no length of the data is within the context.
    """
    data = np.asarray(lengths, dtype=np.int64)
    data = data[(data >= 1) & (data <= context_length)]
    if not data.size:
        raise PlanError(f"no sequence of the sample has 1..{context_length} tokens (context_length)")
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        drawn: list[np.ndarray] = []
        total = 0
        # Draw a fifth more than the mean length asks for, and again should that fall short; then cut the batch after
        # the first sequence that reaches the tokens.
        while total < tokens_per_step:
            drawn.append(rng.choice(data, size=max(8, int(1.2 * (tokens_per_step - total) / data.mean()))))
            total += int(drawn[-1].sum())
        batch = np.concatenate(drawn)
        batches.append(batch[: int(np.searchsorted(np.cumsum(batch), tokens_per_step)) + 1])
    return batches


def _lognormal(spec: str) -> tuple[float, float]:
    """MU and SIGMA of "lognormal:MU,SIGMA"; ConfigError for anything else."""
    match = _LOGNORMAL.fullmatch(spec)
    try:
        mu, sigma = (float(match[1]), float(match[2])) if match else (math.nan, math.nan)
    except ValueError:
        mu = sigma = math.nan
    if not (math.isfinite(mu) and math.isfinite(sigma) and sigma >= 0):
        raise ConfigError(f"cannot read lengths from {spec!r}: give lognormal:MU,SIGMA, e.g. lognormal:6.22,1.233")
    return mu, sigma


def _is_histogram(path: str) -> bool:
    """Whether one of the first two lines is a range of lengths; a list of them otherwise."""
    try:
        with Path(path).open(newline="", errors="replace") as file:
            begin = [row for row, _ in zip(csv.reader(file), range(2), strict=False)]
    except OSError as error:
        raise ConfigError(f"cannot read the lengths file {path}: {error.strerror}") from error
    return any(row and _RANGE.fullmatch(row[0].strip()) for row in begin)


def _draw_histogram(path: str, count: int, rng: np.random.Generator) -> Ints:
    """Lengths drawn from a histogram, log-uniform inside each length bin.

    Real lengths thin out towards the end of a wide bin such as [1024, 8192]; uniform ones would be too long there.
    """
    low, high, weight = _read_histogram(path)
    length_bin = rng.choice(len(weight), size=count, p=weight / weight.sum())
    exponent = rng.uniform(np.log(low[length_bin]), np.log(high[length_bin] + 1.0))
    return np.minimum(np.exp(exponent).astype(np.int64), high[length_bin].astype(np.int64))


def _read_histogram(path: str) -> tuple[Floats, Floats, Floats]:
    """Shortest and longest length and the number of sequences of each bin; ConfigError names the line that is wrong."""
    rows: list[tuple[float, float, float]] = []
    try:
        with Path(path).open(newline="") as file:
            for number, row in enumerate(csv.reader(file), start=1):
                match = _RANGE.fullmatch(row[0].strip()) if row else None
                if match is None and number == 1:
                    continue  # header
                if match is None or len(row) < 2 or not row[1].strip().isdigit():
                    raise ConfigError(
                        f'{path}, line {number}: expected "[low, high]",number of sequences but found {row!r}'
                    )
                low, high = int(match[1]), int(match[2])
                if high < max(low, 1):
                    raise ConfigError(f"{path}, line {number}: the length bin [{low}, {high}] holds no length")
                rows.append((float(max(low, 1)), float(high), float(row[1])))
    except OSError as error:
        raise ConfigError(f"cannot read the histogram {path}: {error.strerror}") from error
    if not rows or sum(row[2] for row in rows) <= 0:
        raise ConfigError(f"{path}: the histogram counts no sequence")
    table = np.array(rows)
    return table[:, 0], table[:, 1], table[:, 2]


_LONGEST = 2**40  # tokens, beyond any sequence: their sums must be counts, too
_PATIENCE_S = 3.0  # what takes longer shows how far it is


class ItemLengths(NamedTuple):
    """Lengths of the sequences of consecutive items."""

    lengths: Int64Array  # in tokens, of all sequences, item after item
    counts: Int64Array  # sequences of each item

    @classmethod
    def joined(cls, parts: Iterable[ItemLengths]) -> ItemLengths:
        """Those of the items of all parts, one part after the other."""
        lengths, counts = zip(*parts, strict=True)
        return cls(np.concatenate(lengths), np.concatenate(counts))


def given_lengths(dataset: Any) -> Int64Array | None:
    """`dataset.lengths` or a column `length`: tokens of every item, (len(dataset),); None where there is neither."""
    given = getattr(dataset, "lengths", None)
    if given is None and "length" in (getattr(dataset, "column_names", None) or ()):
        given = dataset["length"]
    if given is None:
        return None
    lengths = np.asarray(given)
    if lengths.shape != (len(dataset),) or lengths.dtype.kind not in "iu" or lengths.min() < 0:
        raise ConfigError(
            f"dataset.lengths must hold {len(dataset)} token counts, one for each item, but has shape "
            f"{lengths.shape}, type {lengths.dtype}"
            + (f", minimum {lengths.min()}" if lengths.size and lengths.dtype.kind == "i" else "")
            + ": correct it, or leave it out, and every item is read once"
        )
    return lengths.astype(np.int64)


def read_part(dataset: Any, part: int = 0, num_parts: int = 1, limits: Limits | None = None) -> ItemLengths:
    """Read the `part`-th of `num_parts` equal parts of the items. The first part shows its progress.

    ConfigError, naming the item, for what is no token sequence, has tokens or columns that do not fit the model, or a
    column that looks like a mask but is unknown.
    """
    lengths: list[int] = []
    counts: list[int] = []
    check = ItemCheck() if limits is None else ItemCheck(limits.inputs)
    items = range(len(dataset) * part // num_parts, len(dataset) * (part + 1) // num_parts)
    for index in tqdm(items, "reading the lengths of the data", disable=part > 0, delay=_PATIENCE_S, unit=" items"):
        item = dataset[index]
        read = read_item(item, index)
        check.check(item, read, index)
        if limits is not None:
            limits.check(read, f"item {index} of the data")
        lengths += read.lengths
        counts.append(len(read.lengths))
    return ItemLengths(np.array(lengths, dtype=np.int64), np.array(counts, dtype=np.int64))


def _file(dataset: Any) -> Path | None:
    fingerprint = getattr(dataset, "_fingerprint", None)
    if not isinstance(fingerprint, str):
        return None
    name = hashlib.sha256(f"{fingerprint} {len(dataset)}".encode()).hexdigest()[:32]
    return kept_folder("lengths") / f"{name}.npz"


def kept(dataset: Any) -> ItemLengths | None:
    """What an earlier start has read; None where nothing is kept, or what is kept cannot be read."""
    file = _file(dataset)
    try:
        if file is None:
            return None
        with open_file(file) as opened, np.load(opened) as arrays:
            found = ItemLengths(arrays["lengths"], arrays["counts"])
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile):
        return None
    plain = all(a.dtype == np.int64 and a.ndim == 1 and ((a >= 0) & (a < _LONGEST)).all() for a in found)
    whole = plain and len(found.counts) == len(dataset) and found.counts.sum() == len(found.lengths)
    return found if whole else None


def keep(dataset: Any, found: ItemLengths) -> None:
    """Keep what was read, for the next start; where nothing can be written nothing is kept."""
    file = _file(dataset)
    if file is not None:
        keep_file(file, lambda partial: np.savez(partial, lengths=found.lengths, counts=found.counts))
