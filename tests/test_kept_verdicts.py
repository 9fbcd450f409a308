"""Verdicts that an earlier job has left: used where all that they depend on is the same, and nowhere else."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, get_cosine_schedule_with_warmup
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.cache import cache_folder, fingerprint, read_verdicts, write_verdicts
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.verdicts import Verdict
from tests.support.checks import check
from tests.support.families import build_model
from tests.support.small_job import small_model

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


def held(value: Any) -> Any:
    """A model of transformers' whose MLP holds a value."""
    model = small_model()
    model.model.layers[1].mlp.held = value
    return contextlib.nullcontext(model)


def patched(target: Any, name: str, value: Any) -> Any:
    """The same with something else under a name of its classes or files."""
    return mock.patch.object(target, name, value, create=True)


def in_a_cycle(lag: int) -> list[Any]:
    value: list[Any] = [lag]
    value.append(value)
    return value


VALUES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda lag: torch.tensor([lag]),
    "set": lambda lag: {("lag", lag)},
    "dict in a list": lambda lag: [{"by": lag}],
    "config": lambda lag: LlamaConfig(num_hidden_layers=1 + lag),
    "partial": lambda lag: functools.partial(nn.functional.pad, pad=(lag, 0)),
    "method": lambda lag: LlamaConfig(num_hidden_layers=1 + lag).to_dict,
    "closure": lambda lag: schedule_with(lag),
    "class": lambda lag: (LlamaConfig, LlamaMLP)[lag],
    "itself": in_a_cycle,
}


def schedule_with(lag: int) -> Any:
    return get_cosine_schedule_with_warmup(torch.optim.SGD([torch.zeros(1)]), lag, 9).lr_lambdas[0]


@pytest.mark.parametrize("of", VALUES.values(), ids=VALUES)
def test_what_a_model_holds_is_told_by_value(of: Callable[[int], Any]) -> None:
    texts = [fingerprint(held(of(lag)).enter_result) for lag in (0, 0, 1)]
    assert texts[0] == texts[1] is not None
    assert texts[0] != texts[2]


@pytest.mark.parametrize("target", [LlamaMLP, modeling_llama])
def test_variables_of_installed_classes_and_files_are_told(target: Any) -> None:
    with patched(target, "lag", 1):
        one = fingerprint(small_model())
    assert None not in (one, fingerprint(small_model()))
    assert one != fingerprint(small_model())


@pytest.mark.parametrize(
    "value", [torch.Generator(), threading.Lock(), itertools.count(), iter([1]), np.array([object()]), memoryview(b"1")]
)
def test_of_what_cannot_be_told_no_verdict_is_kept(value: Any) -> None:
    assert fingerprint(held({"held": [value]}).enter_result) is None


OWN = {
    "an object": held(types.SimpleNamespace(call=lambda x: x)),
    "a function": held([lambda x: x]),
    "a method of an installed class": patched(LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x))),
    "a function of transformers": patched(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_: (q, k)),
    "a function of torch": patched(nn.functional, "silu", lambda x, inplace=False: x.sigmoid()),
}


@pytest.mark.parametrize("of", OWN.values(), ids=OWN)
def test_of_a_scripts_code_no_verdict_is_kept(of: Any) -> None:
    with of as model:
        assert fingerprint(model if isinstance(model, nn.Module) else small_model()) is None


def test_what_the_engine_itself_leaves_in_transformers_changes_nothing() -> None:
    before = fingerprint(small_model())
    check_strategies(small_model(), [StrategyShape.parse("tp2")], StageOptions(functions="auto"), keep=False)
    assert fingerprint(small_model()) == before is not None
