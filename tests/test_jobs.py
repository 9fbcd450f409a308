"""What a job's settings mean for its model, data and end; and how a refusal reaches the user."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutput

import ds_hydra
from ds_hydra.config.hydra_block import ParsedConfig, parse_config
from ds_hydra.data.sampler import StepLoader
from ds_hydra.engine.prepare import tell_threads
from ds_hydra.host import ending, launch
from ds_hydra.host.environment import check_environment, launched_node_size, launched_number
from ds_hydra.host.settings import deepspeed_config, deepspeed_defaults, with_model_settings
from ds_hydra.host.three_calls import Collected, PendingLoss, Term
from ds_hydra.hugging_face.trainer import Counted as Batches
from ds_hydra.pipe.models.flow import arguments
from ds_hydra.step import update
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError
from tests.support.ends import TRACEBACK, all_told, codes, ends
from tests.support.small_job import small_model

# --- What a job's settings mean for its model, its data and its end, on one rank.
HYDRA = {"tokens_per_step": 20, "strategies": ["tp1"], "steps_file": None, "self_check": "off"}
ADAMW = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}}
DATA = [list(range(length)) for length in (5, 3, 9, 40, 7, 12)]


def parsed_config(**settings: Any) -> ParsedConfig:
    parsed = parse_config({"hydra": HYDRA, "optimizer": ADAMW, **settings})
    assert parsed is not None
    return parsed


def make_engine(model: Any = None, lr_scheduler: Any = None, data: Any = DATA, **settings: Any) -> Any:
    rank_environment(0)
    config = {"hydra": HYDRA, "optimizer": ADAMW, **settings}
    model = small_model() if model is None else model
    return ds_hydra.initialize(model=model, training_data=data, config=config, lr_scheduler=lr_scheduler)[0]


def on_one_rank(function: Callable[[], Any]) -> Any:
    return run_ranks(lambda rank: function(), 1)[0]


def test_the_engine_is_asked_as_deepspeeds() -> None:
    def run() -> None:
        warmup = {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}
        engine = make_engine(scheduler={"type": "WarmupLR", "params": warmup})
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        assert engine.train_batch_size() == len(engine.sampler.batch(0)) > 0
        reference = WarmupLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), **warmup)
        rates, expected = [], []
        for step in range(5):
            expected.append(reference.optimizer.param_groups[0]["lr"])
            if step != 1:
                reference.step()
            rates.append(engine.get_lr()[0])
            no_number = mock.patch.object(update, "norm_of", return_value=torch.tensor(torch.nan))
            with no_number if step == 1 else contextlib.nullcontext():
                engine.train_batch()
        assert rates == expected == pytest.approx([0.0, 0.0, 0.0, 0.25, 0.5]), "it stands still in a skipped step"
        assert (engine.global_steps, engine.skipped_steps) == (5, 1)
        assert engine.train_batch_size() == engine.last_step.num_sequences
        assert len(engine.training_dataloader) == 4
        with pytest.raises(ConfigError, match="tokens_per_step"):
            engine.set_train_batch_size(4)
        engine.destroy()

    on_one_rank(run)


def test_precision_follows_the_config_and_the_model() -> None:
    fp32, bf16, fp64, on = torch.float32, torch.bfloat16, torch.float64, {"enabled": True}

    def run() -> None:
        found = []
        for model, settings in (
            (small_model(), {}),
            (small_model(), {"bf16": on}),
            (small_model(), {"bf16": on, "data_types": {"grad_accum_dtype": "bf16"}}),
            (small_model().double(), {}),
        ):
            types = make_engine(model, **settings).types
            found.append((types.compute, types.masters, types.grads))
        assert found == [(fp32, fp32, fp32), (bf16, fp32, fp32), (bf16, fp32, bf16), (fp64, fp64, fp64)]
        with pytest.raises(ConfigError, match="bfloat16 but the block bf16 is not enabled"):
            make_engine(small_model().bfloat16())
        with pytest.raises(ConfigError, match=r'grad_accum_dtype is "bf16" but .* computed in float32.*leave the key'):
            make_engine(data_types={"grad_accum_dtype": "bf16"})
        with pytest.raises(ConfigError, match=r'"fp32" but .* in float64: .* in that type or in float64'):
            make_engine(small_model().double(), data_types={"grad_accum_dtype": "fp32"})

    on_one_rank(run)


def test_client_scheduler_of_another_optimizer_is_refused() -> None:
    def run() -> None:
        stray = LambdaLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1), lambda step: 1.0)
        with pytest.raises(ConfigError, match="belongs to an optimizer that was not passed"):
            make_engine(lr_scheduler=stray)
        engine = make_engine(lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda s: 0.5**s))
        engine.train_batch()
        assert engine.get_lr() == [0.05]

    on_one_rank(run)


def test_clipping_that_the_config_does_not_name_is_told() -> None:
    unsaid = parsed_config()
    notes = deepspeed_defaults(unsaid, deepspeed_config(unsaid))
    assert len(notes) == 1
    assert '"gradient_clipping" is not set' in notes[0]
    assert "a norm of 1," in notes[0]
    for clip in (0.0, 0.5):
        said = parsed_config(gradient_clipping=clip)
        assert deepspeed_defaults(said, deepspeed_config(said)) == ()


def tiny_llama() -> Any:
    """A Hugging Face model of 32 positions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads))


def test_gradient_checkpointing_of_the_model_is_the_settings() -> None:
    model = tiny_llama()
    assert not with_model_settings(parsed_config().hydra, model).activation_checkpointing
    model.gradient_checkpointing_enable()
    asked = with_model_settings(parsed_config().hydra, model)
    assert asked == replace(parsed_config().hydra, activation_checkpointing=True)


class Counted(TorchDispatchMode):
    """Counts how often SiLU runs: once a layer and pass, and no module of the model has to count."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += function is torch.ops.aten.silu.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("enabled", "asked", "times"), [(False, False, 1), (True, False, 1), (True, "all", 2)])
def test_layers_run_again_in_the_backward_pass_where_that_is_ordered(enabled: bool, asked: Any, times: int) -> None:
    """In one step of one micro-batch that fits: gradient_checkpointing_enable() allows it, "all" orders it."""

    def run() -> int:
        model = tiny_llama()
        if enabled:
            model.gradient_checkpointing_enable()
        hydra = {**HYDRA, "planner": {"ahead": 0}, "fast_paths": ["token_sharding", "sp_overlap"],
                 "activation_checkpointing": asked}  # fmt: skip
        engine = make_engine(model, data=[[3] * 20] * 2, hydra=hydra)
        with Counted() as counted:
            engine.train_batch()
        assert engine.last_step.num_micro_batches == (1,)
        return counted.times

    assert on_one_rank(run) == 2 * times, "two layers"


def test_sequences_that_the_model_has_no_positions_for() -> None:
    def run() -> None:
        with pytest.raises(
            ConfigError, match=r"sequence 3 has 40 tokens, more than the model's 32 positions.*truncate"
        ):
            make_engine(tiny_llama())
        too_far = {"hydra": {**HYDRA, "context_length": 64, "too_long": "truncate"}}
        with pytest.raises(ConfigError, match=r"hydra\.context_length 64 .* 32 positions .* at most 32"):
            make_engine(tiny_llama(), **too_far)
        cut = {"hydra": {**HYDRA, "context_length": 32, "too_long": "truncate"}}
        data = make_engine(tiny_llama(), **cut).data
        assert data is not None
        assert max(data.lengths) == 32

    on_one_rank(run)


def test_a_budget_beyond_the_data_is_refused_at_once() -> None:
    def run() -> None:
        with pytest.raises(ConfigError, match=r"hydra\.tokens_per_step 1000000000 is more than the 76 tokens"):
            make_engine(hydra={**HYDRA, "tokens_per_step": 10**9})

    on_one_rank(run)


@pytest.mark.parametrize(("ranks", "threads", "told"), [(8, 1, False), (2, 4, False), (2, 8, True)])
def test_more_threads_than_cores_are_told(
    ranks: int, threads: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        tell_threads(ranks, threads, cores=8)
    assert ("2 ranks of this node compute with 8 threads each on 8 cores" in caplog.text) == told
    assert ("set OMP_NUM_THREADS=4" in caplog.text) == told


def test_a_job_ends_with_its_total_steps() -> None:
    def run() -> None:
        engine = make_engine(hydra={**HYDRA, "total_steps": 5})
        engine.global_steps = 3  # as after loading the third step's checkpoint
        loader = engine.training_dataloader
        assert isinstance(loader, StepLoader)
        made = [engine.train_batch() for _ in loader]
        assert (len(made), engine.global_steps, len(loader)) == (2, 5, 5)
        assert engine.last_step.total_steps == 5
        with pytest.raises(ConfigError, match=r"step 6 .* hydra\.total_steps 5.*for _ in loader.*raise it"):
            engine.train_batch()

    on_one_rank(run)


# --- How a refusal reaches the user: early, once, without a traceback, with an exit code; and what is checked
# early.
BLOCK = {"tokens_per_step": 20, "strategies": ["tp1"], "steps_file": None}
ADAM = {"type": "AdamW", "params": {"lr": 0.1}}


def environment(**variables: str) -> dict[str, str]:
    path = f"{Path(__file__).parent.parent}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(() if "-i" not in arguments else ("-i",)), "-c", code]
    command += [argument for argument in arguments if argument != "-i"]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**variables), timeout=120, input="")


@pytest.mark.parametrize("error", ["ConfigError", "PlanError", "CheckpointError"])
def test_a_refusal_ends_the_script_with_its_text_and_code(error: str) -> None:
    code = f"from ds_hydra.host.ending import *; show_refusals_plainly(); raise {error}('lower x')"
    done = run(code)
    expected = {"ConfigError": 78, "PlanError": 78, "CheckpointError": 74}[error]
    assert (done.returncode, done.stderr, done.stdout) == (expected, f"ds_hydra.{error}: lower x\n", "")
    others = run(code, RANK="3", LOCAL_RANK="3")
    assert (others.returncode, others.stderr) == (expected, ""), "rank 0 of the node has told it"


def test_other_errors_and_sessions_are_left_alone() -> None:
    other = run("from ds_hydra.host.ending import *; show_refusals_plainly(); raise ValueError('mine')")
    assert other.returncode == 1
    assert "Traceback" in other.stderr
    assert "ValueError: mine" in other.stderr
    session = run("from ds_hydra.host.ending import *; show_refusals_plainly(); raise ConfigError('lower x')", "-i")
    assert "Traceback" in session.stderr, "an interactive session goes on"
    twice = "import sys; from ds_hydra.host.ending import *; show_refusals_plainly(); one = sys.excepthook; "
    assert run(twice + "show_refusals_plainly(); sys.exit(one is not sys.excepthook)").returncode == 0
    seen = "import sys; sys.excepthook = lambda *e: sys.exit('seen ' + str(e[1])); from ds_hydra.host.ending import *; "
    assert "seen mine" in run(seen + "show_refusals_plainly(); raise ValueError('mine')").stderr


@pytest.mark.parametrize("texts", [("same", "same"), ("one", "two"), ("", "only rank 1")])
def test_ranks_that_have_met_tell_each_refusal_once(texts: tuple[str, ...]) -> None:
    def program(rank: int, _: Path) -> None:
        if texts[rank]:
            raise ConfigError(texts[rank])

    found = ends(program, 2)
    assert codes(found) == [78 if text else 0 for text in texts]
    lines = sorted(line for line in all_told(found).splitlines() if "ConfigError" in line)
    assert lines == [f"ds_hydra.ConfigError: {text}" for text in sorted({*texts} - {""})]
    assert TRACEBACK not in all_told(found)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the test process's own hook as it is."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hydra": {**BLOCK, "token_per_step": 1}}, ["token_per_step", "did you mean 'tokens_per_step'"]),
        ({"hydra": BLOCK, "gradient_cliping": 1.0}, ["mean 'gradient_clipping'"]),
        ({"hydra": BLOCK, "optimizer": {**ADAM, "params": {"lr": "auto"}}}, ["optimizer.params.lr", '"auto"']),
        ({"hydra": BLOCK, "scheduler": {"type": "WarmpLR"}}, ["mean 'WarmupLR'"]),
        ({"hydra": {**BLOCK, "cost_table": "nowhere.json"}}, ["nowhere.json", "ds-hydra profile"]),
        ({"hydra": {**BLOCK, "strategies": ["tp2"]}}, ["uses 2 = 2 ranks but the job has 1"]),
    ],
)
def test_check_config_needs_neither_model_nor_data(
    settings: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"optimizer": ADAM, **settings}))
    for source in (str(file), file, {"optimizer": ADAM, **settings}):
        with pytest.raises(ConfigError) as error:
            ds_hydra.check_config(source)
        assert all(word in str(error.value) for word in words), error.value


@pytest.mark.usefixtures("hook")
def test_check_config_tells_whose_job_it_is() -> None:
    assert ds_hydra.check_config({"optimizer": ADAM, "hydra": BLOCK})
    assert not ds_hydra.check_config({"train_batch_size": 1})
    assert set(ending.EXIT_CODES) == {ConfigError, PlanError, CheckpointError}


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "one"), ("RANK", "-1"), ("RANK", "2"), ("WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "2x"),
     ("LOCAL_RANK", ""), ("LOCAL_SIZE", "1.5"), ("MASTER_PORT", "http"), ("MASTER_PORT", "70000")],
)  # fmt: skip
def test_what_a_launcher_sets_are_numbers(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for known, good in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(known, good)
    monkeypatch.setenv(name, value)
    if not value:
        assert launched_number(name) is None
        return
    with pytest.raises(ConfigError, match=f"{name}='?{value}"):
        ds_hydra.check_config({"optimizer": ADAM, "hydra": {**BLOCK, "strategies": ["tp2"]}})


def test_the_size_of_a_node_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    check_environment()
    assert launched_node_size() is None  # Accelerate's guess
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert launched_node_size() == 2
    monkeypatch.delenv("LOCAL_SIZE")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert launched_node_size() == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_another_program_has_is_refused_by_all_ranks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for name, value in (("RANK", str(rank)), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, value)
        listens = launch._listens_itself
        monkeypatch.setattr(launch, "_listens_itself", lambda port: False)  # as if it were another process
        with pytest.raises(ConfigError, match=f"MASTER_PORT={port} on 127.0.0.1 cannot be used"):
            launch.check_port()
        monkeypatch.setattr(launch, "_listens_itself", listens)
        if rank == 0:
            launch.check_port()  # a store that this process had before is used again
    launch.check_port()


# --- What functions are handed, taken apart as torch takes it apart.
_TENSOR = torch.zeros(2)


class _Two(NamedTuple):
    one: torch.Tensor
    other: int


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), None),
        ((_TENSOR, nn.Parameter(_TENSOR), 1, 2.0, None, "x", torch.float32, torch.device("cpu"), slice(0, 2)), {}),
        (([_TENSOR, (_TENSOR, [3])],), {"dim": (0, 1), "out": _TENSOR, "other": {"b": _TENSOR, "a": ()}}),
        ((_Two(_TENSOR, 1), OrderedDict(b=1, a=_TENSOR)), {"given": BaseModelOutput(_TENSOR)}),
        ((torch.zeros(2, 2).max(dim=0), torch.Size([1, 2])), {"rest": []}),
    ],
)
def test_arguments_are_the_leaves_that_torch_finds(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    expected = tree_leaves((args, kwargs or {}))
    found = arguments(args, kwargs)
    assert len(found) == len(expected)
    assert all(one is other for one, other in zip(found, expected, strict=True))


# --- What a Trainer's own code would divide by otherwise than a planned step is refused, with the remedy.
LABELS = torch.tensor([[5, 6, 7, -100], [8, 9, -100, -100]])  # three targets
OF_ALL = torch.tensor(10)


def checked(
    given: Any = OF_ALL, handed_on: Any = OF_ALL, labels: torch.Tensor = LABELS, norm: str = "token", batches: int = 2
) -> None:
    counted = Batches()
    counted.count([{"labels": LABELS}], OF_ALL)
    entry = Collected({"input_ids": labels, "labels": labels}, print, num_items=handed_on)
    loss = PendingLoss([Term(entry, 1.0)])
    counted.check(loss, given, owner="Own", norm=norm, batches=batches, last=True)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"given": torch.tensor(10.0), "handed_on": 10},
        {"given": None, "norm": "batch"},
        {"given": None, "batches": 1},
        {"handed_on": None, "batches": 1},
        {"handed_on": None, "norm": "batch"},
    ],
)
def test_what_divides_by_the_targets_is_trained(case: dict[str, Any]) -> None:
    checked(**case)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"given": None}, 'set "loss_norm": "batch"'),
        ({"given": 20}, "leave get_batch_samples as it is"),
        ({"handed_on": None}, "num_items_in_batch=num_items_in_batch"),
        ({"handed_on": 5}, "hand that on"),
        ({"labels": LABELS.masked_fill(LABELS == 6, -100)}, "have 2 targets on this rank in an update"),
    ],
)
def test_what_divides_otherwise_is_refused(case: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        checked(**case)
    assert words in str(error.value)
    assert "Own" in str(error.value)
