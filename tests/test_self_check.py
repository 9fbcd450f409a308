"""The self-check alone, before step 0: models that an engine trains wrongly are refused, plain ones are found equal."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hydra.pipe.shape import ParallelScheme, parse_strategy
from ds_hydra.self_check.cache import cache_folder, fingerprint, read_verdicts, write_verdicts
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.verdicts import CheckResult, Verdict
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.families import build_model
from tests.support.hard_models import hard_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def strategies(*texts: str) -> list[tuple[ParallelScheme, ...]]:
    return [parse_strategy(text) for text in texts]


def check(model: Any, *texts: str, **settings: Any) -> CheckResult:
    return check_strategies(model, strategies(*texts), **settings)


REFUSED = [
    # model, strategy, what the user is told, a strategy that is equal
    ("final norm without parameters", "pp2", "the loss is .* off; pp: use strategies with pp1", "tp2"),
    ("one norm before and after the layers", "pp3", "pp: use strategies with pp1", "2*tp1"),
    ("activation with parameters", "tp2", r"gradient of model\.layers\.0\.mlp\.act_fn\.alpha_p .*tp: use", "pp2"),
    ("norms of queries and keys (GLM-4.5)", "tp2", r"layers\.0\.self_attn\.q_norm\.weight .*tp: use", "tp1"),
    ("norms of queries and keys (Phi)", "tp2", r"layers\.0\.self_attn\.q_layernorm\.weight .*tp: use", "tp1"),
    ("norms of each head (Command R+)", "tp2", "its run ends with RuntimeError: .* tp: use", "tp1"),
    ("longrope", "tp1", "the loss is .* off; no strategy", None),
    ("dynamic rope", "tp1", "no strategy", None),
    ("dropout", "tp1", "the loss of an evaluation is .* off; no strategy", None),
    ("dropout by a function", "tp2", "the loss of an evaluation is .* off; no strategy", None),
    ("bidirectional", "tp1", "the loss is .* off; no strategy", None),
    ("masked language model", "sp2", "the loss is .* off; no strategy", None),
    ("positions from the padding id", "tp1", "the loss is .* off; no strategy", None),
    ("BERT as a decoder", "tp2", "its run ends with RuntimeError: .*tp: use", "tp1"),
    ("BERT as a decoder", "pp2", "its run ends with RuntimeError: .*pp: use", "tp1"),
    ("embeddings of another width (OPT-350m)", "pp2", "its run ends with RuntimeError: .*pp: use", "tp1"),
    ("embeddings scaled in place", "tp2", "its run ends with RuntimeError: .*tp: use", "tp1"),
    ("embeddings scaled in place", "pp2", "its run ends with RuntimeError: .*pp: use", "tp1"),
    ("layers called by keyword", "pp2", "its run ends with TypeError: .*pp: use", "tp1"),
    ("embeddings of each layer", "tp1", "its run ends with AttributeError: .*no strategy", None),
    ("random routing", "tp1", "the plain model differs from itself", None),
]


@pytest.mark.parametrize(("name", "strategy", "told", "equal"), REFUSED, ids=[f"{r[0]}-{r[1]}" for r in REFUSED])
def test_what_would_train_wrongly_or_crash_is_refused(name: str, strategy: str, told: str, equal: str | None) -> None:
    candidates = strategies(strategy, *([equal] if equal else []))
    result = check_strategies(hard_model(name), candidates, keep=False)
    with pytest.raises(ConfigError, match=rf"hydra\.strategies\[0\] '{strategy}': .*{told}"):
        result.require(candidates)
    assert result.usable(candidates) == tuple(candidates[1:])


@pytest.mark.parametrize("family", ["llama_tied", "gemma3_text", "gpt2", "qwen3_moe"])
def test_plain_decoders_are_equal(family: str) -> None:
    result = check(build_model(family, torch.float32), "tp2 + 2*tp1", "tp2sp2", "2*pp2", "pp4", keep=False)
    assert {verdict.state for verdict in result.verdicts.values()} == {"equal"}, result.verdicts
    assert max(verdict.difference for verdict in result.verdicts.values()) < 5e-6


def test_a_second_job_takes_the_verdicts_from_the_cache() -> None:
    model = build_model("llama", torch.float32)
    first, second = check(model, "tp2", "2*tp1"), check(model, "tp2", "2*tp1")
    assert first.from_cache == 0
    assert second.from_cache == 2
    assert second.verdicts == {s: Verdict(v.state, v.reason, v.difference) for s, v in first.verdicts.items()}


def test_a_damaged_cache_is_ignored() -> None:
    write_verdicts("model", {ParallelScheme(): Verdict("equal"), ParallelScheme(2): Verdict("unchecked", "too large")})
    (file,) = cache_folder().glob("*.json")
    assert read_verdicts("model") == {ParallelScheme(): Verdict("equal")}
    for content in (
        "",
        "[1, 2]",
        '{"tp2": 3}',
        '{"tp2": {"state": "fine"}}',
        '{"what": {}}',
        file.read_text()[:-9],
        "\x00",
    ):
        file.write_text(content)
        assert read_verdicts("model") == {}
    file.write_bytes(b"\xff")
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
        "model.model.layers[1].mlp.act_fn = torch.nn.Tanh()",
        "model.model.norm.weight.requires_grad_(False)",
        "model.model.layers.append(model.model.layers[0])",
    ):
        assert changed(change) not in (plain, None), change
    assert changed("model.model.norm.register_forward_hook(lambda *a: None)") is None
    assert fingerprint(build_model("llama", torch.float32), "full") != plain


def test_nothing_is_changed_and_nothing_stays() -> None:
    model = build_model("llama", torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check(model, "tp2", keep=False)  # what is made once and kept is made now
    gc.collect()
    tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    random = torch.get_rng_state()
    check(model, "tp2", keep=False)
    gc.collect()
    assert sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()) <= tensors + 1
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_off_says_nothing() -> None:
    assert check(hard_model("longrope"), "tp1", mode="off").verdicts == {}
