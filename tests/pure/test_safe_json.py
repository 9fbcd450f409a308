"""Files that strangers may have written are values or errors of ours with the file's name, never a crash."""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ds_hydra.costs.table_file import read_table_file
from ds_hydra.plan.plan_file import load_plans
from ds_hydra.zero_hetero import kept_files
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.kept_files import keep_file

TABLE: dict[str, Any] = {
    "format": "ds-hydra cost table", "version": 2, "source": "", "unit": "ms",
    "schemes": [{"scheme": "tp1", "a": 1e-6, "b": 1e-3, "c": 0.5, "max_length": 4096, "util_length": 512}],
}  # fmt: skip
WRONG = [
    b"\xff\xfe\x00x", b"\xc3", b"[" * 100_000, b'{"a":' * 70 + b"1" + b"}" * 70, b'{"step": NaN}', b'{"step": 1e999}',
    b'{"step": ' + b"9" * 400 + b"}", b'{"a": 1, "a": 2}', b"", b"\0",
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG, ids=lambda text: repr(text[:12]))
def test_what_is_no_plan_and_no_table_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text or b"\n")
    with pytest.raises(PlanError, match=r"file\.json, line 1"):
        load_plans(path)
    with pytest.raises(ConfigError, match=r"file\.json"):
        read_table_file(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("a", 1e308), ("b", 1e308), ("c", -1.0), ("c", 10**299), ("max_length", 1e308), ("max_length", 2**60), ("b", "1")],
)
def test_figures_that_no_measurement_gives_are_refused(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "table.json"
    row = TABLE["schemes"][0]
    path.write_text(json.dumps({**TABLE, "schemes": [{**row, key: value}]}))
    with pytest.raises(ConfigError, match=rf"table\.json.*{key}"):
        read_table_file(path)
    path.write_text(json.dumps({**TABLE, "activations": {"1,1": {"layer": 1e308, "first": 1.0, "last": 1.0}}}))
    with pytest.raises(ConfigError, match=r"table\.json.*activations"):
        read_table_file(path)


def test_damaged_tables_are_refused_or_harmless(tmp_path: Path) -> None:
    draw, path, whole = random.Random(0), tmp_path / "table.json", json.dumps(TABLE).encode()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data))
            data[at : at + draw.randint(0, 3)] = bytes(draw.choices(range(256), k=draw.randint(0, 3)))
        path.write_bytes(data)
        with suppress(ConfigError):
            read_table_file(path)


def test_a_kept_file_leaves_nothing_half_written(tmp_path: Path) -> None:
    def interrupted(file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep_file(tmp_path / "a", interrupted)
    assert not list(tmp_path.iterdir())
    killed, begun = tmp_path / "tmpkilled.partial", tmp_path / "tmpbegun.partial"
    for path in (killed, begun):
        path.write_bytes(b"half")
    os.utime(killed, (0.0, time.time() - 2 * kept_files._LONGEST_S))
    keep_file(tmp_path / "a", lambda file: file.write(b"whole"))
    assert {path.name for path in tmp_path.iterdir()} == {"a", "tmpbegun.partial"}
