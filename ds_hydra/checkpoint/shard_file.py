"""Writes tensors as a safetensors file with a digest for each of its blocks, and reads verified ranges of them.

Any tool that reads safetensors reads these files. They are not written by the safetensors library because digests are
taken of the bytes on their way to the disk, in one pass; and not read by it because only bytes of a block whose digest
was compared may be used.

The file: 8 bytes with the header's length, the header (JSON: for each tensor its type, shape and place), then the
tensors' bytes one after the other. Blocks of 1 MiB are counted from the file's first byte, whatever lies in them.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hydra.checkpoint.format import BLOCK_BYTES, DIGEST_BYTES, FileEntry, block_digest, count, parse_json
from ds_hydra.zero_hetero.errors import CheckpointError
from ds_hydra.zero_hetero.files import create_file, open_file

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_HEADER_BYTES = 64 * 2**20
_PART_BYTES = 8 * 2**20  # written and digested at a time: large, since a thread is woken for each
_MOST_PENDING = 2  # parts that wait for their digest; a writer that is ahead of the digests waits for them


@dataclass(frozen=True)
class Source:
    """A tensor to be written: its size is known before its values are fetched."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[], Tensor]  # called once, when its turn comes

    @classmethod
    def of(cls, tensor: Tensor) -> Source:
        """A tensor that is there already."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_shard(path: Path, tensors: Mapping[str, Source], metadata: Mapping[str, str]) -> FileEntry:
    """Write and fsync a safetensors file; returns its size and the digests of its blocks.

    Tensors are fetched one at a time, when their turn comes. Raises OSError as the system does.
    """
    # Shapes and types are known before the values, so the header can be written first.
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, source in tensors.items():
        header[name] = {
            "dtype": _NAMES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [at, at + source.num_bytes],
        }
        at += source.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of 8, as the format wants
    with create_file(path) as file, _Blocks(file.fileno()) as blocks:
        blocks.add(memoryview(len(text).to_bytes(8, "little") + text))
        for source in tensors.values():
            blocks.add(_bytes_of(source.fetch()))
        digests, size = blocks.finish()
    return FileEntry(path.name, size, digests.hex())


class _Blocks:
    """Writes bytes as they come; two threads beside take the digests of blocks and keep the disk at work.

    The three run side by side because none of them holds Python's lock for long: `os.write`, CRC-32 of a large buffer
    and `posix_fadvise` all release it.
    """

    def __init__(self, handle: int):
        self._handle, self._size = handle, 0
        # Digests of full blocks; the digest so far of the block that is not full, and the bytes that it covers.
        self._digests, self._open, self._filled = bytearray(), bytes(DIGEST_BYTES), 0
        self._digester, self._flusher = _Helper("digest", _MOST_PENDING), _Helper("flush")

    def add(self, data: memoryview) -> None:
        """Write bytes behind those so far."""
        for start in range(0, len(data), _PART_BYTES):
            part = data[start : start + _PART_BYTES]
            self._size += len(part)
            self._digester.do(partial(self._digest, part))  # it keeps its tensor's memory in use until then
            _write_all(self._handle, part)
            self._flusher.do(partial(begin_writing, self._handle, self._size - len(part), len(part)))

    def __enter__(self) -> _Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads before the file is closed, after an error too: the number may be another file's then."""
        self._flusher.end()
        self._digester.end()

    def finish(self) -> tuple[bytes, int]:
        """(digests, size), when everything is on disk."""
        os.fsync(self._handle)  # while the last digests are still being taken
        if (failed := self._digester.end()) is not None:
            raise failed
        if self._filled:
            self._end_block()
        return bytes(self._digests), self._size

    def _digest(self, data: memoryview) -> None:
        """Digest bytes that follow those so far; runs in one thread, so in the order of the file."""
        while len(data):
            part = data[: BLOCK_BYTES - self._filled]
            self._open = block_digest(part, self._open)
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._end_block()
            data = data[len(part) :]

    def _end_block(self) -> None:
        self._digests += self._open
        self._open, self._filled = bytes(DIGEST_BYTES), 0


class _Helper:
    """A thread that does what it is given, one after the other, until the first error.

    A pool of `concurrent.futures` takes no more work as soon as a script has come to its end, where a save in the
    background still goes on; and from 3.12 on Python starts no thread then, so the writer does it itself.
    """

    def __init__(self, name: str, most: int = 0):
        """At `most` so many wait for it at a time, or any number."""
        self._todo: queue.Queue[Callable[[], object] | None] = queue.Queue(most)
        self._failed: Exception | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._live, daemon=True, name=name)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None

    def do(self, action: Callable[[], object]) -> None:
        """Waits where many wait already."""
        if self._thread is None:
            self._try(action)
        else:
            self._todo.put(action)

    def end(self) -> Exception | None:
        """Return the first error, if there was one, when everything is done; nothing can be given afterwards."""
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
            self._thread = None
        return self._failed

    def _live(self) -> None:
        while (action := self._todo.get()) is not None:
            self._try(action)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            if self._failed is None:
                action()
        except Exception as error:
            self._failed = error


def begin_writing(handle: int, start: int, size: int) -> None:
    """Let the disk begin to write `size` bytes of a file from `start` on, so that the fsync at the end is short.

    On Linux this advice starts the writing of changed pages and does not wait for it; the pages stay in the cache.
    Without it, two processes that wrote 0.2 GB each took 1.5 times as long (ext4).
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, start, size, os.POSIX_FADV_DONTNEED)


def _write_all(handle: int, data: memoryview) -> None:
    """Write all bytes; the system may take fewer than it is offered, at most about 2 GiB at once on Linux."""
    while len(data):
        data = data[os.write(handle, data) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy where it lies contiguous in host memory: reading into them fills it."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array) if flat.numel() else memoryview(b"")  # an empty array has no address to view


class ShardReader:
    """Reads ranges of a file's tensors; every block is compared with its digest before its bytes are used."""

    def __init__(self, path: Path, entry: FileEntry, block_bytes: int, save_id: str):
        """Reads the header. Raises CheckpointError when the file is not the one that was saved."""
        self._path, self._entry, self._block_bytes = path, entry, block_bytes
        self._digests = bytes.fromhex(entry.digests)
        # The last block of which only a part was wanted: the next range often begins in it, and so reads it once.
        self._kept = (-1, bytearray())
        self.bytes_read = 0
        try:
            self._file = open_file(path)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror}; bring it back, or use another tag"
            ) from None
        # The header is verified like all else, since its bytes lie in blocks too.
        head = bytearray(8)
        self._fill(0, memoryview(head))
        size = int.from_bytes(head, "little")
        # Digests guard against damage, not against a file that was made to deceive: so the number is checked before
        # memory is asked for.
        if size > min(_MAX_HEADER_BYTES, entry.size - 8):
            raise self._damaged("its header does not fit")
        text = bytearray(size)
        self._fill(8, memoryview(text))
        header = parse_json(text, str(path))
        self._start = 8 + size
        if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
            raise self._damaged("it has no header")
        if header["__metadata__"].get("save_id") != save_id:
            raise self._damaged("it belongs to another save than the manifest")
        self._tensors = {name: self._place(value) for name, value in header.items() if name != "__metadata__"}
        # One after the other and to the file's end, as they were written: none may lie in another.
        at = self._start
        for dtype, begin, numel in sorted(self._tensors.values(), key=lambda place: place[1:]):
            if begin != at:
                raise self._damaged(f"its header contradicts itself (a tensor begins at {begin}, not {at})")
            at += numel * dtype.itemsize
        if at != entry.size:
            raise self._damaged(f"its header contradicts itself (its tensors end at {at} of {entry.size} bytes)")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def names(self) -> Iterator[str]:
        """Names of the tensors."""
        return iter(self._tensors)

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return self._find(name)[0]

    def numel(self, name: str) -> int:
        """Elements of a tensor."""
        return self._find(name)[2]

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out`, flat and in host memory, with a tensor's elements from `start` on, converted to out's type.

        Raises CheckpointError for a tensor that is not there or too short, and for bytes that do not match.
        """
        dtype, begin, numel = self._find(name)
        if not 0 <= start <= start + out.numel() <= numel:
            raise self._damaged(f"{name!r} has {numel} elements where at least {start + out.numel()} were saved")
        data = out if out.dtype == dtype else torch.empty(out.numel(), dtype=dtype)
        self._fill(begin + start * dtype.itemsize, _bytes_of(data))
        if data is not out:
            out.copy_(data)

    def read_all(self, name: str) -> Tensor:
        """A whole tensor, flat."""
        dtype, _, numel = self._find(name)
        out = torch.empty(numel, dtype=dtype)
        self.read(name, 0, out)
        return out

    def _find(self, name: str) -> tuple[torch.dtype, int, int]:
        """(dtype, first byte in the file, elements) of a tensor."""
        found = self._tensors.get(name)
        if found is None:
            raise self._damaged(f"it holds no {name!r}")
        return found

    def _place(self, value: object) -> tuple[torch.dtype, int, int]:
        """(dtype, first byte in the file, elements) of a header's entry."""
        # The header is checked against itself and the file's size, so that no later read can leave its tensor.
        try:
            if not isinstance(value, dict):
                raise TypeError("an entry is no object")
            dtype = _DTYPES[value["dtype"]]
            numel = math.prod(count(n) for n in value["shape"])
            begin, end = (count(offset) for offset in value["data_offsets"])
            if not 0 <= begin <= end <= self._entry.size - self._start:
                raise ValueError(f"bytes {begin} to {end} are not in the file")
            if end - begin != numel * dtype.itemsize:
                raise ValueError(f"{end - begin} bytes for {numel} elements of {dtype}")
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"its header contradicts itself ({error})") from None
        return dtype, self._start + begin, numel

    def _fill(self, start: int, out: memoryview) -> None:
        """Verified bytes of the file from `start` on; blocks that are wanted whole are read straight into place."""
        if start + len(out) > self._entry.size:
            raise self._damaged("it is truncated")
        # Bytes 1.5 MiB to 4 MiB of a file are half of block 1, all of block 2 and all of block 3: block 1 is read and
        # compared as a whole and its second half copied, the other two go straight to where they are wanted.
        while len(out):
            index, skip = divmod(start, self._block_bytes)
            size = min(self._block_bytes, self._entry.size - index * self._block_bytes)
            part = out[: size - skip]
            if len(part) == size:
                self._read_block(index, part)
            else:
                if self._kept[0] != index:
                    block = bytearray(size)
                    self._read_block(index, memoryview(block))
                    self._kept = (index, block)
                part[:] = memoryview(self._kept[1])[skip : skip + len(part)]
            start += len(part)
            out = out[len(part) :]

    def _read_block(self, index: int, out: memoryview) -> None:
        """A whole block, compared with its digest."""
        self._file.seek(index * self._block_bytes)
        filled = 0
        while filled < len(out) and (count := self._file.readinto(out[filled:])):  # a read may give less; 0 is the end
            filled += count
        self.bytes_read += filled
        digest = self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        if filled < len(out) or block_digest(out) != digest:
            raise self._damaged(f"the bytes from {index * self._block_bytes} on do not match their checksum")

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged: {what}; bring back the file that was saved, or use another tag"
        )
