"""Verdicts that an earlier job has left: used where all that they depend on is the same, and nowhere else."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.self_check.cache import cache_folder, fingerprint, read_verdicts, write_verdicts
from ds_hydra.self_check.verdicts import Verdict
from tests.support.checks import check
from tests.support.families import build_model

ALONE = PipelineShape.of(ParallelScheme())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_second_job_takes_the_verdicts_from_the_cache() -> None:
    model = build_model("llama", torch.float32)
    first, second = check(model, "tp2", "2*tp1"), check(model, "tp2", "2*tp1")
    assert first.from_cache == 0
    assert second.from_cache == 2
    assert second.verdicts == {s: Verdict(v.state, v.reason, v.difference) for s, v in first.verdicts.items()}


def test_a_damaged_cache_is_ignored() -> None:
    write_verdicts("model", {ALONE: Verdict("equal"), PipelineShape.parse("tp2"): Verdict("unchecked", "too large")})
    (file,) = cache_folder().glob("*.json")
    assert read_verdicts("model") == {ALONE: Verdict("equal")}
    for content in (
        "",
        "[1, 2]",
        '{"tp2": 3}',
        '{"tp2": {"state": "fine"}}',
        '{"what": {}}',
        file.read_text()[:-9],
        "\x00",
        '{"tp2": ' * 100_000,
    ):
        file.write_text(content)
        assert read_verdicts("model") == {}
    file.write_bytes(b"\xff")
    assert read_verdicts("model") == {}
    file.unlink()
    os.mkfifo(file)
    assert read_verdicts("model") == {}


def test_what_a_verdict_depends_on_is_in_the_fingerprint() -> None:
    def changed(change: str) -> str | None:
        model = build_model("llama", torch.float32)
        if change:
            exec(change, {"model": model, "torch": torch})
        return fingerprint(model, "on")

    plain = changed("")
    assert plain == changed("") is not None
    assert changed("model.model.norm.weight.data += 1") == plain
    for change in (
        "model.config.rms_norm_eps = 0.5",
        "model.model.layers[3].self_attn.scaling = 0.5",
        "model.model.layers[3].self_attn.scaling = {'default': [2.0]}",
        "model.model.layers[1].mlp.act_fn = torch.nn.Tanh()",
        "model.model.norm.weight.requires_grad_(False)",
        "model.model.layers.append(model.model.layers[0])",
        "model.model.layers[2].mlp.to(torch.bfloat16)",
        "model.model.layers[2].eval()",
    ):
        assert changed(change) not in (plain, None), change
    assert changed("model.model.norm.register_forward_hook(lambda *a: None)") is None
    assert fingerprint(build_model("llama", torch.float32), "full") != plain
    with mock.patch.object(torch, "get_default_dtype", return_value=torch.float64):
        assert changed("") not in (plain, None)


def test_methods_put_into_installed_classes_are_in_the_fingerprint() -> None:
    model = build_model("llama", torch.float32)
    mlp, plain = type(model.model.layers[0].mlp), fingerprint(model)
    with mock.patch.object(mlp, "forward", lambda self, x: self.down_proj(self.up_proj(x))):
        one = fingerprint(model)
    with mock.patch.object(sys.modules[mlp.__module__], "apply_rotary_pos_emb", lambda q, k, *_: (q, k)):
        two = fingerprint(model)
    assert None not in (plain, one, two)
    assert len({plain, one, two}) == 3
    assert fingerprint(model) == plain
