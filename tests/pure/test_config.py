"""The config: what is accepted and from where; all else is refused with the key, the numbers and the remedy."""

from __future__ import annotations

import base64
import contextlib
import json
import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.config.checks import read_config
from ds_hydra.config.describe import LIST
from ds_hydra.config.describe import settings as every_setting
from ds_hydra.config.hosts import ACCELERATE, CALLS, STEPS, TRAINER, TRAINERS
from ds_hydra.config.hydra_block import OPTIMIZER, HydraConfig, ParsedConfig, check_num_ranks, parse_config
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile, check_job, read_table_file
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.zero_hetero.errors import ConfigError

# --- The config: what is accepted, and that everything else is refused with the key, the numbers and the
# remedy.
HYDRA: dict[str, Any] = {"tokens_per_step": 4096, "strategies": ["tp4 + 2*tp1pp2", "8*tp1"]}


def accepted(raw: Mapping[str, Any], host: str | None = None) -> ParsedConfig:
    """A config with a block, parsed."""
    parsed = parse_config(raw, host)
    assert parsed is not None
    return parsed


def parse(**settings: Any) -> HydraConfig:
    return accepted({"hydra": {**HYDRA, **settings}}).hydra


def refusal(raw: dict[str, Any], host: str | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(raw, host)
    return str(error.value)


def test_defaults_and_canonical_strategies() -> None:
    config = parse()
    assert config.strategies == ("tp4 + 2*pp2", "8*tp1")
    assert (config.too_long, config.choose, config.loss_norm, config.context_length) == ("error", "best", "token", None)
    assert parse(strategies="auto").strategies == parse(strategies=["auto"]).strategies == ()
    assert parse(strategies="2*tp1pp2").strategies == ("2*pp2",)
    assert [len(shape.pipelines) for shape in config.shapes] == [3, 8]
    assert (config.trace.steps, parse(trace={"steps": [10, 20]}).trace.steps) == ((), (10, 20))


def test_stages_compute_as_the_settings_say() -> None:
    assert parse().stage_options == StageOptions(token_sharding=True, functions="auto", sp_overlap=True, tiles=True)
    asked = parse(activation_checkpointing=True, fast_paths=["recompute_mlp"]).stage_options
    assert asked == StageOptions(activation_checkpointing=True, functions="recompute")


def test_strategies_by_the_ranks_that_are_left() -> None:
    assert parse().elastic is None
    block = parse(elastic={"strategies": {"3": ["3*tp1"], "2": "auto"}}).elastic
    assert block is not None
    assert block.strategies == ((2, ()), (3, ("3*tp1",)))
    assert block.redundancy == "device"
    assert parse(elastic={}).timeout_seconds == 30
    without = parse(elastic={"redundancy": "off"}).elastic
    assert without is not None
    assert without.redundancy == "off"
    assert parse(elastic={}, timeout_seconds=20).timeout_seconds == 20
    assert (parse().expert_imbalance, parse(expert_imbalance=2).expert_imbalance) == (1.5, 2.0)


def test_what_the_planner_is_told() -> None:
    assert parse(seed=5).planner_options().seed == 5
    replaying = parse(replay="plans.jsonl").planner_options()
    assert (replaying.choose, replaying.replay_file, replaying.highs) == ("replay", "plans.jsonl", "off")


def test_highs_composes_where_strategies_are_proposed_and_advises_where_they_are_listed() -> None:
    assert parse(strategies="auto").planner_options().highs == "composes"
    assert parse(strategies=["tp4", "4*tp1"]).planner_options().highs == "advises"
    assert parse(strategies=["tp4", "4*tp1"], choose="cycle").planner_options().highs == "off"
    assert parse(strategies="auto", planner={"highs": False}).planner_options().highs == "off"
    assert parse().planner_options().method == "search"


@pytest.mark.parametrize("settings", [{}, {"hybrid_engine": {"enabled": True}}])
def test_no_block_means_plain_deepspeed_and_its_settings_are_no_near_miss(settings: dict[str, Any]) -> None:
    assert parse_config({"train_batch_size": 8, **settings}) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokens_per_stp": 1}, ["tokens_per_stp", "did you mean 'tokens_per_step'"]),
        ({"trace": {"steps": [0]}}, ["hydra.trace.steps[0]", "from 1 to"]),
        ({"trace": {"steps": 5}}, ["hydra.trace.steps", "a list of whole numbers"]),
        ({"trace": {"steps": [2, 2]}}, ["hydra.trace.steps", "twice"]),
        ({"trace": {"steps": [2]}, "steps_file": None}, ["hydra.trace", "hydra.steps_file"]),
        ({"elastic": {"redundancy": "disk"}}, ["hydra.elastic.redundancy", "'disk'"]),
        ({"elastic": {"strategies": ["3*tp1"]}}, ["hydra.elastic.strategies", "must be a block"]),
        ({"elastic": {"strategies": {"x": ["3*tp1"]}}}, ["'x'", "no number of ranks"]),
        ({"elastic": {"strategies": {"2": ["3*tp1"]}}}, ["hydra.elastic.strategies.2", "uses 3 ranks and not 2"]),
        ({"elastic": {}, "replay": "plans.jsonl"}, ["hydra.replay", "hydra.elastic"]),
        ({"elastic": {}, "timeout_seconds": 31}, ["hydra.timeout_seconds is 31", "30 at most"]),
        ({"trace": {"profiler": True}}, ["hydra.trace.profiler", "hydra.trace.steps"]),
        ({"planner": {"ahed": 1}}, ["ahed", "hydra.planner", "did you mean 'ahead'"]),
        ({"tokens_per_step": True}, ["hydra.tokens_per_step", "whole number", "True"]),
        ({"tokens_per_step": 1e6}, ["hydra.tokens_per_step", "write 1000000"]),
        ({"tokens_per_step": -1}, ["hydra.tokens_per_step", "-1"]),
        ({"tokens_per_step": 10**30}, ["hydra.tokens_per_step", "from 0 to"]),
        ({"tokens_per_step": None}, ["hydra.tokens_per_step"]),
        ({"tokens_per_step": "auto"}, ["hydra.tokens_per_step", "transformers' Trainer", "write the value"]),
        ({"reorder_steps": 3}, ["hydra.reorder_steps", "from 1 to 2"]),
        ({"total_steps": 0}, ["hydra.total_steps", "from 1"]),
        ({"context_length": 1}, ["hydra.context_length", "1"]),
        ({"activation_checkpointing": "attention"}, ["hydra.activation_checkpointing", '"keep_attention"']),
        ({"activation_checkpointing": "keep_attention", "offload": ["activations"]}, ["hydra.offload", 'use "all"']),
        ({"offload": "activations"}, ["hydra.offload", "a list of activations"]),
        ({"offload": ["optimizers"]}, ["hydra.offload[0]", "optimizers"]),
        ({"activation_checkpointing": 1}, ["hydra.activation_checkpointing", "true or false"]),
        ({"fast_paths": "on"}, ["hydra.fast_paths", '"auto", "off" or a list of functions']),
        ({"fast_paths": ["function"]}, ["hydra.fast_paths[0]", "mean 'functions'"]),
        ({"functions": "off"}, ["hydra.functions", "hydra.fast_paths", '"recompute_mlp"']),
        ({"token_sharding": "off"}, ["hydra.token_sharding", "hydra.fast_paths"]),
        ({"sp_overlap": "off"}, ["hydra.sp_overlap", "hydra.fast_paths"]),
        ({"attention": "flash_2"}, ["hydra.attention", '"flash_3" of hydra.fast_paths']),
        ({"faults": {"heartbeat_seconds": 0}}, ["hydra.faults.heartbeat_seconds", "frozen_seconds 0"]),
        ({"self_check": "of"}, ["hydra.self_check", "Did you mean 'off'"]),
        ({"self_check": False}, ["hydra.self_check", "'full'"]),
        ({"chunks": "on"}, ["hydra.chunks", "'auto'", "'off'"]),
        ({"schedules": ["1f1b"]}, ["hydra.schedules", "hydra.strategies"]),
        ({"timeout_seconds": math.nan}, ["hydra.timeout_seconds", "nan"]),
        ({"timeout_seconds": 0}, ["hydra.timeout_seconds", "above 0"]),
        ({"expert_imbalance": 0.9}, ["hydra.expert_imbalance", "at least 1"]),
        ({"timeout_seconds": math.inf}, ["hydra.timeout_seconds", "inf"]),
        ({"planner": {"seconds": 3}}, ["hydra.planner.seconds", "remove it"]),
        ({"planner": {"node_limit": 3}}, ["hydra.planner.node_limit", "remove it"]),
        ({"planner": {"tolerance": 0.1}}, ["hydra.planner.tolerance", "remove it"]),
        ({"planner": {"seed": 3}}, ["hydra.planner.seed", "hydra.seed"]),
        ({"planner": 3}, ["hydra.planner", "block"]),
        ({"planner": {"method": "fast"}}, ["hydra.planner.method", '"search"']),
        ({"planner": {"method": "exact"}}, ["hydra.planner.method", '"highs"']),
        ({"planner": {"method": "paper"}}, ["hydra.planner.method", '"search"']),
        ({"objective": "paper"}, ["hydra.objective", "remove it", '"flow_shop"', "Eq. 1"]),
        ({"objective": "flow_shop"}, ["hydra.objective", "remove it"]),
        ({"planner": {"highs": "on"}}, ["hydra.planner.highs", "true or false"]),
        ({"choose": "bset"}, ["hydra.choose", "'bset'", "mean 'best'"]),
        ({"choose": "cycle", "strategies": "auto"}, ["hydra.choose", "hydra.strategies"]),
        ({"choose": "replay"}, ["hydra.choose", "hydra.replay"]),
        ({"choose": "cycle", "replay": "x"}, ["hydra.replay", "hydra.choose"]),
        ({"planner": {"replay_file": "x"}}, ["hydra.planner.replay_file", "hydra.replay"]),
        ({"strategies": []}, ["hydra.strategies"]),
        ({"strategies": {"tp": 4}}, ["hydra.strategies", "list"]),
        ({"strategies": ["auto", "tp4"]}, ["hydra.strategies[0]", "'auto'"]),
        ({"strategies": [4]}, ["hydra.strategies[0]", "string"]),
        ({"strategies": ["tp4 + tpp2"]}, ["hydra.strategies[0]", "'tpp2'"]),
        ({"strategies": ["tp4", "tp8"]}, ["strategies[0]", "4 ranks", "strategies[1]", "uses 8"]),
        ({"strategies": ["4*tp1 then tp4"]}, ["hydra.strategies[0]", "several phases", "hydra.replay"]),
        ({"strategies": ["9999999999*tp1"]}, ["hydra.strategies[0]", "digits"]),
        ({"steps_file": ""}, ["hydra.steps_file"]),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], words: list[str]) -> None:
    message = refusal({"hydra": {**HYDRA, **settings}})
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["hydrra", "Hydra", "ds_hydra", "ds-hydra", "hydra_", "hidra", "deepspeed_hydra"])
def test_near_miss_of_the_block_name(name: str) -> None:
    message = refusal({name: HYDRA})
    assert repr(name) in message
    assert '"hydra"' in message


def test_block_in_another_block_or_no_block() -> None:
    assert "hydra must be a block" in refusal({"hydra": [1]})
    message = refusal({"zero_optimization": {"stage": 1, "hydra": HYDRA}})
    assert all(word in message for word in ("'zero_optimization'", "would ignore it", "top level")), message


@pytest.mark.parametrize(
    ("params", "length", "words"),
    [
        ({}, 500, "is hydra.total_steps, 500"),
        ({"total_num_steps": "auto"}, 500, "is hydra.total_steps, 500"),
        ({"total_num_steps": 500}, 500, None),
        ({"total_num_steps": 400}, 400, "400, but training ends with hydra.total_steps 500"),
    ],
)
def test_a_schedule_ends_with_the_job(params: dict[str, Any], length: int, words: str | None) -> None:
    scheduler = {"type": "WarmupDecayLR", "params": params}
    parsed = accepted({"hydra": {**HYDRA, "total_steps": 500}, "scheduler": scheduler})
    assert parsed.deepspeed["scheduler"]["params"] == {"total_num_steps": length}
    assert parsed.source["scheduler"]["params"] == params, "the user's config was changed"
    assert [note for note in parsed.notes if words and words in note] or not (words or parsed.notes), parsed.notes


def test_batch_keys_are_filled_in_and_explained() -> None:
    parsed = accepted({"hydra": HYDRA, "train_batch_size": 64, "gradient_accumulation_steps": 2})
    assert parsed.deepspeed == {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    assert any("train_batch_size, gradient_accumulation_steps" in note for note in parsed.notes)
    assert parsed.source["train_batch_size"] == 64


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage", "from 0 to 3", "4"]),
        ({"zero_optimization": {"stage": True}}, ["zero_optimization.stage", "True"]),
        ({"zero_optimization": {"stage": 3, "overlap_com": True}}, ["overlap_com", "mean 'overlap_comm'"]),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, ["zenflow", "its own step"]),
        ({"zero_optimization": "stage3"}, ["zero_optimization must be a block", "'stage3'"]),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, ["fp16_master_weights_and_grads"]),
        ({"bf16": {"enabled": "auto"}}, ["bf16.enabled", '"auto"', "transformers' Trainer", "write the value"]),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}},
            ["optimizer.params.betas, optimizer.params.lr are", '"auto"', "transformers' Trainer"],
        ),
        ({"gradient_clipping": "auto"}, ["gradient_clipping is", '"auto"', "leave the key out"]),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            ["scheduler.params.total_num_steps", '"auto"'],
        ),
        ({"gradient_cliping": 1.0}, ["'gradient_cliping'", "mean 'gradient_clipping'", "Rename it or remove it"]),
        ({"optimizr": {}}, ["'optimizr'", "mean 'optimizer'"]),
        ({"Scheduler": {}}, ["'Scheduler'", "mean 'scheduler'"]),
        ({"train_batchsize": 8}, ["'train_batchsize'", "mean 'train_batch_size'"]),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, ["bf16_master_weights_and_grads"]),
        ({"data_types": {"grad_accum_dtype": "bf61"}}, ["data_types.grad_accum_dtype", "Did you mean 'bf16'"]),
        ({"data_types": {"grad_accum_dtype": "auto"}}, ["data_types.grad_accum_dtype is", '"auto"']),
        ({"data_types": "bf16"}, ["data_types must be a block"]),
        ({"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op", "hydra.loss_norm"]),
        ({"gradient_clipping": -1.0}, ["gradient_clipping", "-1.0"]),
        ({"gradient_clipping": math.nan}, ["gradient_clipping", "nan"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "abc"}}}, ["optimizer.params.lr", "abc"]),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 2]}}}, ["optimizer.params.betas[1]", "2"]),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, ["optimizer.params.betas", "[0.9, 0.95]"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": [1e-3]}}}, ["optimizer.params.lr", "[0.001]"]),
        ({"optimizer": {"type": "AdamW", "params": {"eps": None}}}, ["optimizer.params.eps", "None"]),
        ({"scheduler": {"type": "OneCycle", "params": {"warmup_max_lr": [math.nan]}}}, ["warmup_max_lr[0]", "nan"]),
        ({"optimizer": {"type": "AdamW", "parms": {}}}, ["parms", "mean 'params'"]),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, ["max_grad_norm", "gradient_clipping"]),
        ({"scheduler": {}}, ["scheduler", "type"]),
        ({"steps_per_print": -1}, ["steps_per_print"]),
        ({"communication_data_type": "fp8"}, ["communication_data_type", "'fp32'", "'fp8'"]),
        ({"communication_data_type": "fp-32"}, ["communication_data_type", "mean 'fp32'"]),
        ({"communication_data_type": 32}, ["communication_data_type", "32"]),
    ],
)
def test_deepspeed_settings_that_cannot_hold(settings: dict[str, Any], words: list[str]) -> None:
    message = refusal({"hydra": HYDRA, **settings})
    assert all(word in message for word in words), message


AUTO = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}},
}  # fmt: skip
ADAMW_AUTO = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}


def test_auto_is_for_those_hosts_that_fill_it_in() -> None:
    whole = {"hydra": HYDRA, **AUTO, "optimizer": ADAMW_AUTO}
    for host in TRAINERS:
        assert accepted(whole, host).source == whole, "values for the checks alone"
    assert parse_config({"hydra": HYDRA, **AUTO}, ACCELERATE) is not None
    nobody: tuple[str | None, ...] = (None, CALLS, STEPS)
    for unfilled in nobody:
        assert "scheduler.params.total_num_steps" in refusal(whole, unfilled)
    assert "optimizer.params.betas, optimizer.params.eps" in (message := refusal(whole, ACCELERATE))
    assert "Accelerate does not fill that in" in message
    assert "mean 'Trainer'" in refusal(whole, "trainer")


@pytest.mark.parametrize(
    ("bf16", "fp16", "expected"),
    [("auto", "auto", (True, False)), ("auto", True, (False, True)), (False, "auto", (False, True)),
     (True, "auto", (True, False)), (None, "auto", (None, True)), ("auto", None, (True, None))],
)  # fmt: skip
def test_one_type_at_most_is_filled_in(bf16: object, fp16: object, expected: tuple[Any, Any]) -> None:
    given = {key: {"enabled": value} for key, value in (("bf16", bf16), ("fp16", fp16)) if value is not None}
    parsed = accepted({"hydra": HYDRA, **given}, TRAINER)
    assert tuple(parsed.deepspeed.get(key, {}).get("enabled") for key in ("bf16", "fp16")) == expected


@pytest.mark.parametrize(
    "value",
    [math.inf, math.nan, -math.inf, 10**400, 1e308, -1, True, "", "x", [], [None], {}, {"": 1}, None],
    ids=lambda value: repr(value)[:9],
)
def test_every_setting_takes_an_odd_value_or_refuses_it_in_words(value: object) -> None:
    for one in every_setting():
        *outer, name = one.place.split(".")
        block: Any = {name: value}
        for key in reversed(outer):
            block = {key.removesuffix(LIST): [block] if key.endswith(LIST) else block}
        with contextlib.suppress(ConfigError):
            parse_config({"hydra": HYDRA | block["hydra"]})


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown"),
        ({"comment": "runs on two nodes", "project": "x"}, '"comment" is unknown'),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "overlap_comm"),
        ({"train_batch_size": 4}, "train_batch_size"),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, "sized by the plan"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}}, "reduce_bucket_size"),
        ({"data_types": {"grad_accum_dtype": "bf16", "param_dtype": "bf16"}}, "data_types: param_dtype"),
    ],
)
def test_nothing_is_ignored_in_silence(settings: dict[str, Any], word: str) -> None:
    parsed = accepted({"hydra": HYDRA, **settings})
    assert any(word in note for note in parsed.notes), parsed.notes


@pytest.mark.parametrize(
    "settings",
    [
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"communication_data_type": "fp32"},
        {"fp16": {"enabled": False}, "torch_autocast": {"enabled": False}},
    ],
)
def test_types_reach_deepspeed_and_what_is_switched_off_is_fine(settings: dict[str, Any]) -> None:
    parsed = accepted({"hydra": HYDRA, **settings})
    assert parsed.notes == ()
    assert all(parsed.deepspeed[key] == value for key, value in settings.items() if key != "torch_autocast")


@pytest.mark.parametrize(("newer", "enabled"), [({}, True), ({"bf16": {"enabled": False}}, False)])
def test_the_old_name_of_bf16_is_honoured_as_deepspeed_does(newer: dict[str, Any], enabled: bool) -> None:
    parsed = accepted({"hydra": HYDRA, "bfloat16": {"enabled": True}, **newer})
    assert (parsed.deepspeed["bf16"], parsed.notes) == ({"enabled": enabled}, ())
    assert "bf16.amp" in refusal({"hydra": HYDRA, "bfloat16": {"enabled": True, "amp": 2}})
    scaled = accepted({"hydra": HYDRA, "bf16": {"enabled": True, "hysteresis": 2, "loss_scale": 0}})
    assert scaled.deepspeed["bf16"] == {"enabled": True}
    assert scaled.notes == ("bf16: hysteresis, loss_scale have no effect here: BF16 has no loss scale",)


def test_number_of_ranks() -> None:
    check_num_ranks(parse(), 8)
    with pytest.raises(ConfigError, match=r"strategies\[0\] 'tp4 \+ 2\*pp2' uses 4 \+ 2 \+ 2 = 8 ranks .* 6"):
        check_num_ranks(parse(), 6)


# --- Where a config is read from, and that any JSON is a config or refused as one.


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


# --- How stages compute: every option changes a job's fingerprint, is a setting, and may be given up alone.
JOB = JobFingerprint("1234", "cpu", "float32", "per_sequence_sdpa", num_ranks=4, versions=(("torch", "2"),))
TABLE = CostTable((SchemeCost(ParallelScheme(), 1e-6, 0.1, 1.0, 1000),), "here")
SETTINGS = dict.fromkeys(StageOptions.paths(), "fast_paths") | {
    "host_activations": "offload", "keep_attention": "activation_checkpointing"
}  # fmt: skip
NAMES = [one.name for one in fields(StageOptions)]


def on(name: str, options: StageOptions = AS_WRITTEN) -> StageOptions:
    """The options with one of them switched on."""
    changed: dict[str, Any] = {name: True if isinstance(getattr(AS_WRITTEN, name), bool) else "auto"}
    return replace(options, **changed)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_changes_the_fingerprint(name: str, tmp_path: Path) -> None:
    base = StageOptions(activation_checkpointing=name == "tiles")  # tiles are of layers that are computed again
    job = replace(JOB, stages=on(name, base))
    TableFile(TABLE, job).save(tmp_path / "t.json")
    found = read_table_file(tmp_path / "t.json")
    assert found.job == job
    setting = SETTINGS.get(name, name)
    with pytest.raises(ConfigError, match=rf"{name}: .* \(profile with the same hydra\.{setting}\)") as error:
        check_job(found, replace(JOB, stages=base), "t.json")
    assert str(error.value).count("the table has") == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_a_setting(name: str) -> None:
    def parsed(**settings: Any) -> StageOptions:
        made = accepted({"hydra": {"tokens_per_step": 1, **settings}}).hydra.stage_options
        own = made.activation_checkpointing, made.as_paths(), made.host_activations, made.keep_attention
        assert StageOptions.of_settings(*own) == made
        return made

    assert parsed(fast_paths="off") == AS_WRITTEN
    assert parsed(fast_paths="auto") == parsed() == StageOptions(False, "auto", True, True, True)
    asked: dict[str, Any] = {"activation_checkpointing": {name: True}, "host_activations": {"offload": ["activations"]},
                             "keep_attention": {"activation_checkpointing": name}}  # fmt: skip
    expected = replace(on(name), activation_checkpointing=name in asked)
    assert parsed(fast_paths=list(on(name).as_paths()), **asked.get(name, {})) == expected
    assert parsed(fast_paths=["recompute_mlp"]) == StageOptions(functions="recompute")


@pytest.mark.parametrize("options", [{}, {"functions": "recompute"}, {"token_sharding": True, "functions": "auto"}])
def test_tables_from_before_there_were_all_of_them_say_off(options: dict[str, Any], tmp_path: Path) -> None:
    record = TableFile(TABLE, JOB).to_record()
    del record["job"]["stages"]
    record["job"] |= options
    (tmp_path / "t.json").write_text(json.dumps(record | {"version": 2}))
    assert read_table_file(tmp_path / "t.json").job == replace(JOB, stages=StageOptions(**options))


@pytest.mark.parametrize("stages", [3, {"speed": True}, {"functions": True}, {"sp_overlap": "auto"}, {"sp_overlap": 1}])
def test_options_that_are_none_are_refused(stages: object, tmp_path: Path) -> None:
    record = TableFile(TABLE, JOB).to_record()
    record["job"]["stages"] = stages
    (tmp_path / "t.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"t\.json: .*stages.* cannot be read .*profile again"):
        read_table_file(tmp_path / "t.json")


def test_fallbacks_give_up_all_and_then_one_at_a_time() -> None:
    asked = StageOptions(True, "auto", True, True)
    bare, *single = asked.fallbacks()
    assert bare == StageOptions(True)
    assert single == [
        replace(asked, functions="off"),
        replace(asked, token_sharding=False),
        replace(asked, sp_overlap=False),
    ]
    assert on("sp_overlap").fallbacks() == (AS_WRITTEN,)
    assert AS_WRITTEN.fallbacks() == StageOptions(True).fallbacks() == ()


def test_deepspeeds_states_on_the_host_are_taken() -> None:
    def offloaded(zero: Any, *block: str) -> tuple[str, ...]:
        found = accepted({"zero_optimization": zero, "hydra": {"tokens_per_step": 1, "offload": list(block)}})
        told = any("offload" in note and "has no effect" in note for note in found.notes)
        assert told is not (OPTIMIZER in found.hydra.offload)
        return found.hydra.offload

    for zero in ({"offload_optimizer": {"device": "cpu"}}, {"stage": 1, "cpu_offload": True}):
        assert offloaded(zero) == offloaded(zero, OPTIMIZER) == (OPTIMIZER,)
        assert offloaded(zero, "activations") == ("activations", OPTIMIZER)
    assert offloaded({"offload_optimizer": {"device": "nvme"}}) == ()
    assert offloaded({"offload_param": {"device": "cpu"}}) == ()


def test_deepspeeds_checkpoints_on_the_host_are_taken() -> None:
    def offloaded(**block: Any) -> tuple[str, ...]:
        found = accepted({"activation_checkpointing": block, "hydra": {"tokens_per_step": 1}})
        assert found.hydra.may_recompute is bool(found.hydra.offload)
        return found.hydra.offload

    assert offloaded(cpu_checkpointing=True, partition_activations=True) == ("activations",)
    assert offloaded(cpu_checkpointing=False) == offloaded(partition_activations=True) == ()
