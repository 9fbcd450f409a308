"""Shard files: ranges come back as they were written, and a header that contradicts itself is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ds_hydra.checkpoint.format import BLOCK_BYTES, FileEntry, block_digest
from ds_hydra.checkpoint.shard_file import ShardReader, Source, write_shard
from ds_hydra.zero_hetero.errors import CheckpointError


def test_ranges_across_blocks_come_back(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000.safetensors"
    numbers = torch.arange(3 * BLOCK_BYTES // 4, dtype=torch.float32)
    tensors = {"a": numbers, "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "none": torch.empty(0)}
    entry = write_shard(path, {name: Source.of(tensor) for name, tensor in tensors.items()}, {"save_id": "7"})
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(path).items())
    reader = ShardReader(path, entry, BLOCK_BYTES, "7")
    assert sorted(reader.names()) == sorted(tensors)
    for start, stop in ((0, 5), (BLOCK_BYTES // 4 - 40, BLOCK_BYTES // 2 + 3), (len(numbers) - 1, len(numbers))):
        part = torch.empty(stop - start)
        reader.read("a", start, part)
        assert torch.equal(part, numbers[start:stop])
    wide = torch.empty(2)
    reader.read("b", 0, wide)
    assert wide.tolist() == [1.5, -2.0]
    assert reader.read_all("none").numel() == 0
    with pytest.raises(CheckpointError, match="'a' has"):
        reader.read("a", len(numbers) - 1, torch.empty(2))
    reader.close()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "4 bytes for 2 elements"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "bytes 4 to 12 are not in the file"),
        ({"dtype": "F32", "shape": [0], "data_offsets": [4, 0]}, "bytes 4 to 0 are not in the file"),
        ({"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}, "F33"),
        ({"dtype": "F32", "shape": [2]}, "data_offsets"),
        ([0, 8], "no object"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "no count"),
        ({"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}, "no count"),
        ({"dtype": "F32", "shape": [2.5], "data_offsets": [0, 8]}, "no count"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "begins at"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "end at"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, value: Any, reason: str) -> None:
    """Its digests are right, so only the header itself can show that it is wrong."""
    path = tmp_path / "rank_00000.safetensors"
    text = json.dumps({"__metadata__": {"save_id": "7"}, "a": value}).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(8)
    path.write_bytes(data)
    entry = FileEntry(path.name, len(data), block_digest(data).hex())
    with pytest.raises(CheckpointError, match=f"its header contradicts itself.*{reason}") as error:
        ShardReader(path, entry, BLOCK_BYTES, "7")
    assert str(path) in str(error.value)
