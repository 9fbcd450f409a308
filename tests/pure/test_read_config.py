"""Where a config is read from, and that any JSON is a config or refused as one."""

from __future__ import annotations

import base64
import contextlib
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.config.hydra_block import HydraConfig, parse_config
from ds_hydra.config.read import read_config
from ds_hydra.zero_hetero.errors import ConfigError

HYDRA = {"tokens_per_step": 4096, "strategies": ["tp4 + 2*tp1pp2", "8*tp1"]}


def test_read_config_from_every_place(tmp_path: Path) -> None:
    raw = {"hydra": HYDRA}
    file = tmp_path / "ds.json"
    file.write_text("// a comment\n" + json.dumps(raw))
    encoded = base64.urlsafe_b64encode(json.dumps(raw).encode()).decode()
    sources = [
        read_config(config=raw),
        read_config(config=str(file)),
        read_config(config=file),
        read_config(config=encoded),
        read_config(config_params=raw),
        read_config(Namespace(deepspeed_config=str(file))),
    ]
    assert all(source == raw for source in sources)
    read_config(config=raw)["hydra"]["seed"] = 3
    assert "seed" not in HYDRA, "the caller's dict was changed"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"hydra": {"seed": 1, "seed": 2}}', "'seed' stands twice"),
        ('{"a": [1', "not valid"),
        ("[1, 2]", "must be one block"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, word: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=word):
        read_config(config=str(file))


def test_missing_and_double_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json.*does not exist"):
        read_config(config="nowhere.json")
    with pytest.raises(ConfigError, match="no config was given"):
        read_config(Namespace(deepspeed_config=None))
    with pytest.raises(ConfigError, match="two configs"):
        read_config(Namespace(deepspeed_config="a.json"), config={})
    with pytest.raises(ConfigError, match="int"):
        read_config(config=3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


KEYS = st.sampled_from(sorted(HydraConfig.__dataclass_fields__)) | st.text(max_size=12)


@given(st.dictionaries(KEYS, JSON, max_size=4), st.dictionaries(st.text(max_size=8), JSON, max_size=2))
def test_any_json_parses_or_is_refused_as_config_error(block: dict[str, Any], rest: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        parse_config({**rest, "hydra": {**HYDRA, **block}})
