"""What a job's settings mean for its model, its data and its end: tried on an engine whose steps only count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ds_hydra
from ds_hydra.data.sampler import StepLoader
from ds_hydra.engine.prepare import tell_threads
from ds_hydra.host.settings import deepspeed_config, deepspeed_defaults, with_model_settings
from ds_hydra.testing import rank_environment
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.still_engine import ADAMW, HYDRA, make_engine, on_one_rank, parsed_config


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


@pytest.mark.parametrize(("enabled", "times"), [(False, 1), (True, 2)])
def test_layers_run_again_in_the_backward_pass_where_the_model_was_told_so(enabled: bool, times: int) -> None:
    """In one step of one micro-batch, without and with gradient_checkpointing_enable()."""

    def run() -> int:
        model = tiny_llama()
        if enabled:
            model.gradient_checkpointing_enable()
        hydra = {**HYDRA, "planner": {"ahead": 0}, "self_check": "off", "fast_paths": ["token_sharding", "sp_overlap"]}
        rank_environment(0)
        engine = ds_hydra.initialize(
            model=model, training_data=[[3] * 20] * 2, config={"hydra": hydra, "optimizer": ADAMW}
        )[0]
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
            make_engine(parsed_config(), tiny_llama())
        too_far = {"hydra": {**HYDRA, "context_length": 64, "too_long": "truncate"}}
        with pytest.raises(ConfigError, match=r"hydra\.context_length 64 .* 32 positions .* at most 32"):
            make_engine(parsed_config(**too_far), tiny_llama())
        cut = {"hydra": {**HYDRA, "context_length": 32, "too_long": "truncate"}}
        data = make_engine(parsed_config(**cut), tiny_llama()).data
        assert data is not None
        assert max(data.lengths) == 32

    on_one_rank(run)


def test_a_budget_beyond_the_data_is_refused_at_once() -> None:
    def run() -> None:
        with pytest.raises(ConfigError, match=r"hydra\.tokens_per_step 1000000000 is more than the 76 tokens"):
            make_engine(parsed_config(hydra={**HYDRA, "tokens_per_step": 10**9}))

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
        engine = make_engine(parsed_config(hydra={**HYDRA, "total_steps": 5}))
        engine.global_steps = 3  # as after loading the third step's checkpoint
        loader = engine.training_dataloader
        assert isinstance(loader, StepLoader)
        made = [engine.train_batch() for _ in loader]
        assert (len(made), engine.global_steps, len(loader)) == (2, 5, 5)
        assert engine.last_step is not None
        assert engine.last_step.total_steps == 5
        with pytest.raises(ConfigError, match=r"step 6 .* hydra\.total_steps 5.*for _ in loader.*raise it"):
            engine.train_batch()

    on_one_rank(run)
