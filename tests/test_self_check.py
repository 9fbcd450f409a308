"""The self-check alone, before step 0: models that an engine trains wrongly are refused, plain ones are found equal."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import re
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from ds_hydra.commands.__main__ import main as command
from ds_hydra.pipe import runtime
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.draws import Draws
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.pipe.weight_gradients import WeightGradients
from ds_hydra.self_check import check as self_check
from ds_hydra.self_check.cache import cache_folder, fingerprint, read_verdicts, write_verdicts
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.verdicts import Verdict
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support import mutants
from tests.support.checks import check, strategies
from tests.support.families import adapted, build_model, hard_model
from tests.support.small_job import small_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


ALONE = PipelineShape.of(ParallelScheme())

FOUND = [
    # model, strategy, what is switched off, what the user is told, a strategy that is equal still
    ("final norm without parameters", "pp2", mutants.what_follows_the_layers_runs_everywhere,
     r"the loss is .* off, and model\.layers\.\d\S* is the first module .*; pp: use strategies with pp1", "tp2"),
    ("one norm before and after the layers", "pp3", mutants.what_follows_the_layers_runs_everywhere,
     r"and model\.layers\.1\S* is the first module .*pp: use strategies with pp1", "2*tp1"),
    ("activation with parameters", "tp2", mutants.unnamed_parameters_are_complete,
     r"the gradient of model\.layers\.0\.mlp\.act_fn\.alpha_p is .*tp: use strategies with tp1", "pp2"),
    ("norms of queries and keys (GLM-4.5)", "tp2", mutants.unnamed_parameters_are_complete,
     r"the gradient of model\.layers\.0\.self_attn\.q_norm\.weight is .*tp: use", "tp1"),
    ("norms of queries and keys (Phi)", "tp2", mutants.unnamed_parameters_are_complete,
     r"the gradient of model\.layers\.0\.self_attn\.q_layernorm\.weight is .*tp: use", "tp1"),
    ("norms of each head (Command R+)", "tp2", mutants.unnamed_parameters_are_complete,
     "its run ends with RuntimeError: The size of tensor .* tp: use", "tp1"),
    ("longrope", "tp1", mutants.rotary_tables_follow_the_whole_pack,
     r"the loss is .* off, and model\.layers\.0\.self_attn\S* is the first module .*; no strategy", None),
    ("dynamic rope", "tp1", mutants.dynamic_rotary_is_let_in, "is .* off, .*no strategy", None),
    ("dropout", "tp1", mutants.evaluation_does_not_reach_the_layers,
     r"the loss of an evaluation is .* off, and transformer\.h\.0\S* is the first module", None),
    ("dropout by a function", "tp2", mutants.evaluation_does_not_reach_the_layers, "the loss of an evaluation", None),
    ("bidirectional", "tp1", mutants.all_attention_is_causal,
     r"the loss is .* off, and model\.layers\.0\.self_attn\S* is the first module .*no strategy", None),
    ("masked language model", "sp2", mutants.all_attention_is_causal, "the loss is .* off, .*no strategy", None),
    ("positions from the padding id", "tp1", mutants.positions_begin_at_zero, "the loss is .*no strategy", None),
    ("BERT as a decoder", "tp2", mutants.biases_of_the_head_are_whole, "RuntimeError: .*use strategies with tp1",
     "tp1"),
    ("BERT as a decoder", "pp2", mutants.no_placeholders, "its run ends with .*pp: use strategies with pp1", "tp1"),
    ("embeddings of another width (OPT-350m)", "pp2", mutants.what_is_declared_first_runs_first,
     "its run ends with .*pp: use strategies with pp1", "tp1"),
    ("embeddings scaled in place", "tp2", mutants.sums_are_views, "its run ends with RuntimeError: .*tp: use", "tp1"),
    ("embeddings scaled in place", "pp2", mutants.received_states_come_as_embeddings,
     "its run ends with RuntimeError: .*in-place.*pp: use", "tp1"),
    ("layers called by keyword", "pp2", mutants.no_placeholders, "its run ends with .*pp: use", "tp1"),
    ("embeddings of each layer", "tp1", mutants.heads_see_no_tokens, "its run ends with .*no strategy", None),
]  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "strategy", "mutant", "told", "equal"), FOUND, ids=[f"{r[0]}-{r[1]}" for r in FOUND])
def test_what_would_train_wrongly_or_crash_is_refused(
    name: str, strategy: str, mutant: mutants.Mutant, told: str, equal: str | None
) -> None:
    candidates = strategies(strategy, *([equal] if equal else []))
    with mutant():
        result = check_strategies(hard_model(name), candidates, keep=False)
    with pytest.raises(ConfigError, match=rf"hydra\.strategies\[0\] '{strategy}': .*{told}"):
        result.require(candidates)
    assert result.usable(candidates) == tuple(candidates[1:])


@pytest.mark.drawn
def test_a_split_backward_that_loses_gradients_is_refused() -> None:
    model = build_model("llama", torch.float32)
    assert check(model, "tp2pp2/zb-h1", "pp2/list", "tp2pp2/v", keep=False).objections() == []
    with mock.patch.object(WeightGradients, "_add"):
        (objection,) = check(model, "pp2/zb-h1", "pp2", keep=False).objections()
    assert re.search(r"pp2/zb-h1.* the gradient of .*; schedule: use strategies with the schedule 1f1b", objection)


def test_a_v_whose_last_rank_hands_no_gradient_back_is_refused() -> None:
    with mock.patch.object(runtime, "_gradient", lambda run, at: torch.zeros_like(run.inputs.pop(at))):
        (objection,) = check(build_model("llama", torch.float32), "tp1/v", "tp1", keep=False).objections()
    assert re.search(r"tp1/v.* the gradient of .*; schedule: use strategies with the schedule 1f1b", objection)


def z_loss(model: Any) -> None:
    """In training alone, and small."""

    class Extra(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            if out.loss is not None and self.training:
                out.loss = out.loss + 1e-5 * out.logits.logsumexp(-1).square().mean()
            return out

    model.__class__ = Extra


def halve_loss(model: Any) -> None:
    loss = model.loss_function
    model.loss_function = lambda **given: 0.5 * loss(**given)


@pytest.mark.drawn
@pytest.mark.parametrize("own", ["smooth_labels", "z_loss", "halve_loss"])
def test_a_loss_of_the_models_own_is_refused_unless_one_is_given(own: str) -> None:
    model = build_model("llama", torch.float32)
    globals()[own](model)
    for objection in check(model, "tp1", "pp2", keep=False).objections():
        assert re.search(r"a loss of its own \(.* whose cross entropy is .*\), .*: pass loss_fn", objection)
    assert len(check(model, "tp1", "pp2", keep=False).objections()) == 2
    assert check(model, "tp1", "pp2", loss_given=True, keep=False).objections() == []


def test_a_rank_that_draws_for_the_features_of_another_is_refused() -> None:
    model = build_model("llama", torch.float32)
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.2))
    assert check(model, "tp2", keep=False).objections() == []
    with mock.patch.object(Draws, "_first", return_value=0):
        (objection,) = check(model, "tp2", keep=False).objections()
    assert re.search(r"the loss is .* off.*; tp: use strategies with tp1", objection)


def double(module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    """A hook of a forward."""
    return 2 * out


CHANGES: dict[str, Callable[[Any], Any]] = {
    "activation": lambda model: setattr(model.model.layers[2].mlp, "act_fn", torch.nn.Tanh()),
    "attribute": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.9),
    "config": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "hook": lambda model: model.model.embed_tokens.register_forward_hook(double),
}


def test_what_a_user_changed_is_trained_as_it_is() -> None:
    model = build_model("llama", torch.float32)
    for change in CHANGES.values():
        change(model)
    assert check(model, "tp2", "pp3", keep=False).objections() == []


@pytest.mark.drawn
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_a_stage_has_lost_is_refused(change: str) -> None:
    model = build_model("llama", torch.float32)
    CHANGES[change](model)
    with mutants.stages_are_rebuilt_from_the_config():
        (objection,) = check(model, "tp1", keep=False).objections()
    assert "the loss is" in objection


def test_a_gradient_hook_that_is_lost_is_refused() -> None:
    model = build_model("llama", torch.float32)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.register_hook(lambda gradient, factor=0.5: factor * gradient)  # holds something: checked in few layers
    assert check(model, "pp2", keep=False).objection(strategies("pp2")[0]) is None
    with mutants.hooks_of_gradients_are_lost():
        objection = check(model, "pp2", keep=False).objection(strategies("pp2")[0])
    assert "the gradient of model.layers.1.mlp.up_proj.weight is" in (objection or "")


def test_a_parameter_that_is_read_before_it_arrived_is_refused() -> None:
    model = base_of(adapted("lora of the ends", build_model("llama", torch.float32)))
    assert check(model, "pp2", keep=False).objections() == []
    with mutants.nobody_is_seen_to_read_parameters_of_others():
        (objection,) = check(model, "pp2", keep=False).objections()
    assert "a parameter is read before the stage waits for it" in objection


@pytest.mark.drawn
@pytest.mark.parametrize("family", ["llama_tied", "gemma3_text", "gpt2", "qwen3_moe"])
def test_plain_decoders_are_equal(family: str) -> None:
    result = check(build_model(family, torch.float32), "tp2sp2", "pp4", "(sp2 > tp2)", keep=False)
    assert {verdict.state for verdict in result.verdicts.values()} == {"equal"}, result.verdicts
    assert max(verdict.difference for verdict in result.verdicts.values()) < 1e-11


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["dropout (Phi)", "noise on what is routed", "random routing"])
def test_what_is_drawn_by_place_is_equal(name: str) -> None:
    options = StageOptions(activation_checkpointing=True)
    assert check(hard_model(name), "tp2sp2", "pp3", keep=False, options=options).objections() == []


def test_an_error_of_1e_7_is_no_rounding() -> None:
    """Of norms that compute in FP32 in the model's source."""
    with mutants.norms_of_stages_have_another_epsilon(1.1e-6):
        (objection,) = check(build_model("llama", torch.float32), "tp1", keep=False).objections()
    assert re.search(r"the loss is \d\.\de-0[789] off, and .*layernorm is the first module", objection), objection


def test_a_node_that_gets_a_key_too_few_is_refused() -> None:
    with mutants.nodes_get_a_key_too_few():
        (objection,) = check(build_model("gemma3_text", torch.float32), "sp2", keep=False).objections()
    assert "self_attn" in objection


def skip_at_random(model: Any) -> None:
    """Stochastic depth: one coin for a whole layer, which falls one time in a million."""

    def skip(module: Any, args: Any, out: Tensor) -> Tensor:
        return args[0] if module.training and torch.rand(()) < 2e-6 else out

    model.model.layers[1].mlp.register_forward_hook(skip)


def count_calls(model: Any) -> None:
    """A factor that grows from call to call."""

    def grow(module: Any, args: Any, out: Tensor) -> Tensor:
        module.calls = getattr(module, "calls", torch.zeros(())) + 1  # no number, which would be told at once
        return out * (1.0 + 0.01 * float(module.calls))

    model.model.layers[1].mlp.register_forward_hook(grow)


def write_to_parameter(model: Any) -> None:
    """Past what torch counts as a change."""

    def shrink(module: Any, args: Any) -> None:
        if not module.weight.is_meta and module.weight.stride(0):
            module.weight.data.clamp_(max=1.0)

    model.model.norm.register_forward_pre_hook(shrink)


def smooth_labels(model: Any) -> None:
    class Smooth(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            if labels is not None:
                logits, targets = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                out.loss = F.cross_entropy(logits, targets, label_smoothing=0.1)
            return out

    model.__class__ = Smooth


def drop_in_experts(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.2))


def mix_tokens(model: Any) -> None:
    """Each token with the one before it in the row, whatever sequence that is of."""
    model.model.layers[1].register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1))


def blind_last(model: Any) -> None:
    """The last token of a row, which has a target where a slice ends."""
    model.lm_head.register_forward_hook(lambda module, args, out: torch.cat((out[:, :-1], 0 * out[:, -1:]), dim=1))


REFUSED = [
    # family, what the user did to it, what the user is told
    ("llama", skip_at_random, "the plain model differs from itself when it runs twice"),
    ("llama", count_calls, "the plain model differs from itself when it runs twice"),
    ("llama", write_to_parameter, r"the model's forward changes model\.norm\.weight"),
    ("mixtral", drop_in_experts, r"draws random numbers \(dropout 0\.2\) for rows that are not the tokens"),
    ("llama", mix_tokens, r"the loss is .* off.*model\.layers\.1 is the first.*; no strategy"),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "change", "told"), REFUSED, ids=[row[1].__name__ for row in REFUSED])
def test_what_no_stage_could_do_alike_is_refused(family: str, change: Callable[[Any], None], told: str) -> None:
    model = build_model(family, torch.float32)
    change(model)
    (objection,) = check(model, "tp1", keep=False).objections()
    assert re.search(f"tp1 trains otherwise than one process: .*{told}", objection), objection


def test_a_slice_that_ends_its_row_is_tried() -> None:
    model = build_model("llama", torch.float32)
    assert check(model, "tp1", keep=False).no_slices == ""
    blind_last(model)
    result = check(model, "tp1", keep=False)
    assert result.objections() == []
    assert re.match(r"with a sequence in slices, .* the loss is .* off", result.no_slices)


def test_nothing_is_changed_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama", torch.float32)

    def seeded(seed: int) -> None:
        raise AssertionError("the generators of GPUs are not this process's to change")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    check(model, "tp1", keep=False)  # what is made once and kept is made now
    gc.collect()
    tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    random = torch.get_rng_state()
    check(model, "tp1", keep=False)
    gc.collect()
    assert sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()) <= tensors + 1
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_off_says_nothing() -> None:
    assert check(hard_model("longrope"), "tp1", mode="off").verdicts == {}


def test_the_command_prints_a_verdict_for_each_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(Path(__file__).parents[1] / "examples" / "llama_tiny.json")
    assert command(["check", model, "--strategies", "2*tp1", "(tp2 > sp2)"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("equal") == 2
    assert "(tp2 > sp2)" in printed
    assert "2 of 2 layouts train as one process does" in printed
    assert command(["check", model, "--strategies", "tp7"]) == 2
    assert "cannot be shared by tp=7" in capsys.readouterr().err


def test_what_cannot_be_checked_is_not_used_unless_the_check_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama", torch.float32)
    norm = model.model.norm
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out * norm.weight)
    assert check(model, "tp1").objections() == []
    monkeypatch.setattr(self_check, "_BYTES", 2**20)
    result = check(model, "tp1")
    with pytest.raises(ConfigError, match=r"'tp1': tp1 could not be checked: .* GiB of 0\.0 GiB.*\n.*\"off\""):
        result.require(strategies("tp1"))
    assert check(model, "tp1", mode="full").objections() == []
    monkeypatch.setattr(self_check, "_SECONDS", 0.0)
    assert "the check has taken" in check(build_model("llama", torch.float32), "tp1").objections()[0]


def test_a_busy_machine_leaves_no_scheme_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts what the check computes; how long it waits for a core must not decide on strategies."""
    monkeypatch.setattr(self_check, "_SECONDS", 20.0)
    ticks = itertools.count(step=1000.0)  # of a clock on a machine with no time for this process
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    assert check(build_model("llama", torch.float32), "2*tp1", "tp2").objections() == []


# ---- Models that change what a layer has made in place, or cut its gradient, train under every strategy. ----

SIZES = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def of_type(model_type: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | settings)))


def clipped() -> Any:
    return of_type("olmo", intermediate_size=96, num_key_value_heads=6, clip_qkv=0.5)


def added_in_place() -> Any:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return of_type("roc_bert", is_decoder=True, intermediate_size=96, **rates)


def detached(path: str) -> Any:
    model = small_model(tied=False)
    model.get_submodule(path).register_forward_hook(lambda module, args, out: out.detach())
    return model


def stray_heads() -> Any:
    """Of keys and values, in a config whose model has no such setting."""
    return of_type("gpt2", n_positions=256, num_key_value_heads=3, **NO_DROPOUT)


MODELS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "queries clipped": (clipped, ("tp2pp2", "tp2")),
    "embeddings added": (added_in_place, ("pp2/v", "pp2/zb-h1")),
    "layer detached": (lambda: detached("model.layers.1"), ("tp1", "pp2", "pp4", "pp2/v")),
    "embedding detached": (lambda: detached("model.embed_tokens"), ("tp2", "pp2", "pp2/v")),
    "stray heads": (stray_heads, ("sp2", "tp3", "sp3")),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", MODELS)
def test_it_is_equal(name: str) -> None:
    make, texts = MODELS[name]
    strategies = [*map(StrategyShape.parse, texts)]
    options = StageOptions(token_sharding=True, functions="auto")
    assert check_strategies(make(), strategies, options, keep=False).objections() == []


def test_heads_are_counted_where_layers_attend() -> None:
    assert (CausalLM(stray_heads()).plan.num_heads, CausalLM(stray_heads()).plan.num_kv_heads) == (6, 6)
    assert (CausalLM(small_model()).plan.num_heads, CausalLM(small_model()).plan.num_kv_heads) == (8, 4)


# ---- Verdicts that an earlier job has left: used where all that they depend on is the same, and nowhere else. ----


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
    "closure": lambda lag: torch.func.vmap(torch.sin, chunk_size=1 + lag),
    "class": lambda lag: (LlamaConfig, LlamaMLP)[lag],
    "itself": in_a_cycle,
}


@pytest.mark.parametrize("of", VALUES.values(), ids=VALUES)
def test_what_a_model_holds_is_told_by_value(of: Callable[[int], Any]) -> None:
    texts = [fingerprint(held(of(lag)).enter_result) for lag in (0, 0, 1)]
    assert texts[0] == texts[1] is not None
    assert texts[0] != texts[2]


@pytest.mark.parametrize("target", [LlamaMLP, modeling_llama])
def test_variables_of_installed_classes_and_files_are_told(target: Any) -> None:
    texts = []
    for lag in (1, 1, 2):
        with patched(target, "lag", lag):
            texts.append(fingerprint(small_model()))
    assert texts[0] == texts[1] is not None
    assert texts[0] != texts[2]


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
