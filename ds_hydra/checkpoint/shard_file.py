"""Safetensors files with a digest for each block: tensors out in one pass, verified ranges of them back in.

Any tool that reads safetensors reads these files. Written here because the digests are taken while the bytes go by,
and read here because only blocks whose digest was compared may be used.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hydra.checkpoint.format import BLOCK_BYTES, DIGEST_BYTES, FileEntry, block_digest, parse_json
from ds_hydra.zero_hetero.errors import CheckpointError

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_HEADER_BYTES = 64 * 2**20
_PART_BYTES = 8 * 2**20  # written and digested at a time: a thread is woken for each
_MOST_PENDING = 2


@dataclass(frozen=True)
class Source:
    """A tensor to be written: its size is known before its values are fetched."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[], Tensor]  # called once, when its turn comes

    @classmethod
    def of(cls, tensor: Tensor) -> Source:
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_shard(path: Path, tensors: Mapping[str, Source], metadata: Mapping[str, str]) -> FileEntry:
    """Write and fsync a safetensors file; its size and the digests of its blocks.

    Leaves the pages to the system's cache. Raises OSError as the system does.
    """
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
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file, _Blocks(file.fileno()) as blocks:
        blocks.add(memoryview(len(text).to_bytes(8, "little") + text))
        for source in tensors.values():
            blocks.add(_bytes_of(source.fetch()))
        digests, size = blocks.finish()
    return FileEntry(path.name, size, digests.hex())


class _Blocks:
    """Writes bytes as they come; threads beside take the digest of each block and keep the disk at work."""

    def __init__(self, handle: int):
        self._handle, self._size = handle, 0
        self._digests, self._open, self._filled = bytearray(), bytes(DIGEST_BYTES), 0  # `_filled` bytes of a block
        self._worker, self._flusher = ThreadPoolExecutor(1, "digest"), ThreadPoolExecutor(1, "flush")
        self._pending: deque[Future[None]] = deque()

    def add(self, data: memoryview) -> None:
        for start in range(0, len(data), _PART_BYTES):
            part = data[start : start + _PART_BYTES]
            self._size += len(part)
            self._pending.append(self._worker.submit(self._digest, part))
            _write_all(self._handle, part)
            if len(self._pending) > _MOST_PENDING:  # what is pending is held in memory
                self._pending.popleft().result()
            self._flusher.submit(begin_writing, self._handle, self._size - len(part), len(part))

    def __enter__(self) -> _Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        """Threads end before the file closes, also after an error: its number may be another file's then."""
        self._flusher.shutdown(wait=True, cancel_futures=True)
        self._worker.shutdown(wait=True, cancel_futures=True)

    def finish(self) -> tuple[bytes, int]:
        """(digests, size), when everything is on disk."""
        os.fsync(self._handle)
        for pending in self._pending:
            pending.result()
        if self._filled:
            self._end_block()
        return bytes(self._digests), self._size

    def _digest(self, data: memoryview) -> None:
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


def begin_writing(handle: int, start: int, size: int) -> None:
    """Let the disk begin with what was written to a file there, so that the fsync at the end is short.

    On Linux this advice starts the writing of changed pages without a barrier, and leaves them in the cache: with it a
    save runs at the disk's speed; two processes that wrote 0.2 GB each took 1.5 times as long without (ext4).
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, start, size, os.POSIX_FADV_DONTNEED)


def _write_all(handle: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(handle, data) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array) if flat.numel() else memoryview(b"")


class ShardReader:
    """Reads ranges of a file's tensors; every block is compared with its digest before its bytes are used."""

    def __init__(self, path: Path, entry: FileEntry, block_bytes: int, save_id: str):
        """Reads the header. Raises CheckpointError when the file is not the one that was saved."""
        self._path, self._entry, self._block_bytes = path, entry, block_bytes
        self._digests = bytes.fromhex(entry.digests)
        self._kept = (-1, bytearray())  # the last block of which only a part was wanted
        self.bytes_read = 0
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror}; bring it back, or use another tag"
            ) from None
        head = bytearray(8)
        self._fill(0, memoryview(head))
        size = int.from_bytes(head, "little")
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

    def close(self) -> None:
        self._file.close()

    def names(self) -> Iterator[str]:
        """Names of the tensors."""
        return iter(self._tensors)

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return self._find(name)[0]

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out`, flat and in host memory, with a tensor's elements from `start` on, converted to its type."""
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
        found = self._tensors.get(name)
        if found is None:
            raise self._damaged(f"it holds no {name!r}")
        return found

    def _place(self, value: object) -> tuple[torch.dtype, int, int]:
        """(dtype, first byte in the file, elements) of a header's entry."""
        try:
            assert isinstance(value, dict)
            dtype = _DTYPES[value["dtype"]]
            numel = math.prod(int(n) for n in value["shape"])
            begin, end = (int(offset) for offset in value["data_offsets"])
            assert 0 <= begin <= end <= self._entry.size - self._start
            assert end - begin == numel * dtype.itemsize
        except (AssertionError, KeyError, TypeError, ValueError):
            raise self._damaged("its header contradicts itself") from None
        return dtype, self._start + begin, numel

    def _fill(self, start: int, out: memoryview) -> None:
        """Verified bytes of the file from `start` on; blocks that are wanted whole are read straight into place."""
        if start + len(out) > self._entry.size:
            raise self._damaged("it is truncated")
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
        while filled < len(out) and (count := self._file.readinto(out[filled:])):
            filled += count
        self.bytes_read += filled
        digest = self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        if filled < len(out) or block_digest(out) != digest:
            raise self._damaged(f"the bytes from {index * self._block_bytes} on do not match their checksum")

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged: {what}; bring back the file that was saved, or use another tag"
        )
