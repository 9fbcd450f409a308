"""What a script does to its model after `initialize` is honoured, told, or let pass where it changes nothing."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from ds_hydra.engine.costs import job_memory
from ds_hydra.host import kept_model
from ds_hydra.host.kept_model import KeptModel, Twin
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.profiling.stage_memory import Allocations
from ds_hydra.step.update import ModelNow
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.edits.edits import KINDS
from tests.support.edits.job import EDITED, STEPS, fresh_job
from tests.support.families import build_model
from tests.support.small_job import small_engine, small_model, whole_state


def kept(model: nn.Module, steps_differ: bool = False, dtype: torch.dtype = torch.float32) -> KeptModel:
    first = {id(p): name for name, p in model.named_parameters()}
    names = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}

    def twin() -> Twin:
        return Twin(model, names, dtype, (), torch.device("cpu"))

    return KeptModel(model, names, steps_differ=lambda: steps_differ, twin=twin)


def blind(model: nn.Module, dtype: torch.dtype = torch.float64) -> KeptModel:
    """One that sees no sign, and runs the twin in every step."""
    watched: Any = kept(model, dtype=dtype)
    watched._changed, watched._every, watched._ended = dict, 1, time.perf_counter()
    watched._set_pace = lambda *_: None
    return watched  # type: ignore[no-any-return]


@pytest.mark.parametrize(("layers", "words"), [(8, 512), (2, 8192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_run_beside_the_copy_holds_is_what_the_memory_model_counts(
    layers: int, words: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where layers are most of it, and where logits and gradients of the vocabulary are. A CPU makes a wide copy of a
    tensor for a mark of it, and a GPU none."""
    config = LlamaConfig(hidden_size=256, intermediate_size=896, num_hidden_layers=layers, num_attention_heads=8,
                         num_key_value_heads=2, vocab_size=words, tie_word_embeddings=False)  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    source = CausalLM(model, StageOptions())
    memory = job_memory(source, [ParallelScheme()], 1, 2**40, dtype)
    twin = Twin(model, {name: name for name, _ in model.named_parameters()}, dtype, (), torch.device("cpu"))
    monkeypatch.setattr(kept_model, "_mark", lambda tensor: tensor.detach().flatten()[:2].long())
    with Allocations(torch.device("cpu")) as found:
        twin.differs(torch.arange(words)[None], kept_model.TWIN_TOKENS, counting=False)
    assert memory.twin_bytes == pytest.approx(found.peak, rel=0.05)


# Edits of values are refused as they are made, where the masters have them; what is frozen is honoured.
_OF_VALUES = {"clamp a weight", "load other values", "row of a weight", "all weights at once"}
LATE = [name for name, kind in KINDS.items() if "after" in kind.when and not name.startswith("freeze ")]
MOVED = ("method of an object that moves", "settings of a partial that move", "array that moves")
# What a run does not show: code that counts its calls, and hooks that run behind a gradient's sum.
BY_THEIR_SIGN = {"hook from the tenth call on", "attention that is an object", "hook after accumulation"}


def edited(rank: int, name: str) -> list[tuple[str, str]]:
    """What is told before each update of a job that an edit changes: by signs and the twin, and by the twin alone."""
    job, kind = fresh_job(KINDS[name].family), KINDS[name]
    if name in MOVED:
        kind.edit(job)
    both = kept(job.model, dtype=torch.float64), blind(job.model)
    told = []
    for step in range(STEPS):
        if step == EDITED and name not in MOVED:
            kind.edit(job)
        for call in job.each_step:
            call(step)
        tokens = torch.cat([item["input_ids"] for item in job.data[:4]])[None]
        told.append((both[0].now(step + 1, tokens).problem, both[1].now(step + 1, tokens).problem))
    return told


@pytest.mark.drawn
@pytest.mark.parametrize("name", [name for name in (*LATE, *MOVED) if name not in _OF_VALUES])
def test_an_edit_is_told_before_the_next_update_and_by_the_twin_alone(name: str) -> None:
    first, (told, alone), *_ = run_ranks(edited, 1, name)[0]
    assert first == ("", "")
    assert " was changed after the engine was made" in told
    assert bool(alone) is (name not in BY_THEIR_SIGN), alone
    if alone:
        assert f"step {EDITED + 1} stops before its update" in alone
        assert "found equal at step 1" in alone


WORDS: Mapping[str, Callable[[Any], Any]] = {
    "attribute scaling of model.layers.2.self_attn of the model was changed after the engine was made, and "
    "model.layers.2.self_attn.o_proj computes something else (found equal at step 7; step 8 stops":
        (lambda m: setattr(m.model.layers[2].self_attn, "scaling", 0.2)),
    "parameter weight of lm_head of the model was changed after the engine was made, and the gradient of lm_head":
        (lambda m: m.lm_head.weight.register_hook(lambda gradient: 2 * gradient)),
    "module mlp of model.layers.1 of the model was changed after the engine was made, and the model cannot run any":
        (lambda m: setattr(m.model.layers[1], "mlp", None)),
    # Nobody can tell what it changes where no token comes to.
    "forward hooks of tower of the model was changed after the engine was made. Stages are":
        (lambda m: m.tower.register_forward_hook(lambda *_: None)),
}  # fmt: skip


@pytest.mark.parametrize("words", WORDS)
def test_module_and_attribute_are_named(words: str) -> None:
    model = small_model(tied=False)
    model.tower = nn.Linear(2, 2)
    watched = kept(model)
    model.config.use_cache = False
    assert watched.now(7) == ModelNow()
    WORDS[words](model)
    assert watched.now(8).problem.startswith(words)


def test_what_changes_no_number_is_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    watched = kept(model)
    rotate = modeling_llama.rotate_half
    for change in (
        lambda: setattr(model.config, "use_cache", False),
        lambda: setattr(model.model, "_num_params", 12),  # as DeepSpeed-Chat's scripts note it down
        lambda: setattr(model.model.layers[1].mlp, "limits", [1]),
        lambda: model.model.layers[1].mlp.limits.append(2),
        lambda: model.model.norm.register_forward_hook(lambda *_: None),
        lambda: monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: rotate(x)),
        model.gradient_checkpointing_enable,
        model.model.layers[0].compile,
        model.eval,
        model.train,
        lambda: model.model.layers[1].eval(),  # which has no dropout
    ):
        change()
        assert watched.now() == ModelNow()
    model.model.layers[2].mlp.act_fn = nn.Tanh()
    assert watched.now().problem


def test_a_model_with_parts_in_training_is_switched_as_a_whole_and_a_part_of_it_is_told() -> None:
    model = build_model("gpt2", torch.float32).eval()
    for block in model.transformer.h:
        block.attn.resid_dropout, block.mlp.dropout = nn.Dropout(0.5), nn.Dropout(0.5).eval()  # as adapters are made
    watched, alone = kept(model), blind(model, torch.float32)
    for switch in (model.train, model.eval, model.train):
        assert watched.now() == alone.now() == ModelNow()
        assert watched._changed() == {}
        switch()
    for path in ("transformer.h.0.attn", "transformer.h.1.mlp"):
        model.train()
        assert watched.now() == ModelNow()
        model.get_submodule(path).eval()
        assert f"mode of training of {path}" in watched.now().problem


UNCOPIED = threading.Lock()


@pytest.mark.parametrize("way", ["not copied", "other bits in each run"])
def test_without_a_twin_signs_alone_are_told(way: str) -> None:
    model, calls = small_model(), itertools.count()
    if way == "not copied":
        model.lock = UNCOPIED
    else:
        model.model.norm.register_forward_hook(lambda module, args, out: out + next(calls))
    watched = blind(model, torch.float32)
    assert watched.now(1) == ModelNow()
    del watched._changed  # type: ignore[attr-defined]
    assert watched.now(2) == ModelNow()
    model.config.use_cache = False
    assert watched.now(3).problem.startswith("setting use_cache in the config of the model was changed after")


SEEN = ("llama_tied", "gpt2", "dropout", "lora with dropout", "mixtral", "lora of stacks", "qwen3_next", "bamba")


@pytest.mark.parametrize("name", SEEN)
def test_a_twin_is_equal_in_16_bit_and_sees_a_thousandth_three_times(name: str) -> None:
    model = base_of(build_model(name, torch.bfloat16)).train()
    watched = blind(model, torch.bfloat16)
    for step in range(1, 4):
        assert watched.now(step) == ModelNow()
    path = next(path for path, _ in model.named_modules() if path.endswith(("1.mlp", "1.feed_forward")))
    model.get_submodule(path).register_forward_hook(lambda module, args, out: _times(out, 1.003))
    assert watched.now(4).problem.startswith(f"{path} computes something else than when the engine was made")


def _times(out: Any, factor: float) -> Any:
    return (factor * out[0], *out[1:]) if isinstance(out, tuple) else factor * out


def test_a_twin_takes_a_hundredth_of_the_time_in_steps_that_ranks_have_in_common() -> None:
    watched = kept(small_model())
    for seconds in (0.001, 0.01, 0.03, 0.5):
        watched._set_pace(seconds, 1.0)
        assert seconds / watched._every <= 0.01
        assert watched._every & (watched._every - 1) == 0


class Noting(modeling_llama.LlamaMLP):
    """Notes down in a buffer, which is not saved, and in attributes what it has seen."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1.0)
        self.calls, self.last = self.calls + 1, x
        return super().forward(x)


def test_a_module_is_left_as_it_was() -> None:
    model = small_model()
    noting: Any = model.model.layers[0].mlp
    noting.__class__ = Noting
    noting.register_buffer("seen", torch.zeros(2), persistent=False)
    watched, before, weights = blind(model, torch.float32), dict(vars(noting)), list(model.parameters())
    assert watched.now(1) == watched.now(2) == ModelNow()
    assert vars(noting) == before
    assert noting.seen.tolist() == [0.0, 0.0]
    assert all(a is b and a.grad is None for a, b in zip(model.parameters(), weights, strict=True))


def trained(rank: int, every: int) -> Any:
    """What is left of training with a twin in every step, or in none."""
    model = small_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.2))
    engine: Any = small_engine(rank, model)
    random.seed(5)
    runs = []
    whole = KeptModel._tried

    def tried(kept: KeptModel, *given: Any) -> str:
        if every:
            runs.append(given[0])
            return whole(kept, *given)
        return ""

    def paced(kept: Any, *_: Any) -> None:
        kept._every = 1

    with mock.patch.object(KeptModel, "_tried", tried), mock.patch.object(KeptModel, "_set_pace", paced):
        for _ in range(4):
            engine.train_batch()
    assert runs == [2, 3, 4][: 3 * every]
    numbers = [random.random(), np.random.rand(), torch.rand(1).item()]
    return whole_state(engine), numbers


def test_training_is_the_same_to_the_bit_with_a_twin_and_without() -> None:
    for (one, drawn), (other, also) in zip(run_ranks(trained, 2, 1), run_ranks(trained, 2, 0), strict=True):
        assert drawn == also
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_parameter_may_be_frozen_and_trained_again_where_no_steps_are_counted() -> None:
    model = small_model(tied=False)
    for steps_differ in (False, True):
        watched, alone = kept(model, steps_differ), blind(model, torch.float32)
        model.lm_head.weight.requires_grad_(False)
        assert alone.now().problem == ""
        assert watched.now() == ModelNow("", frozenset({"lm_head.weight"}))
        model.lm_head.weight.requires_grad_(True)
        assert bool(watched.now().problem) is steps_differ


def frozen_midway(rank: int) -> tuple[dict[str, Tensor], ...]:
    engine, states = small_engine(rank), []
    for step in range(4):
        if step == 2:
            for name, parameter in engine.module.named_parameters():
                parameter.requires_grad_("norm" not in name and "layers.1" not in name)
        engine.train_batch()
        states.append({name: value.clone() for name, value in whole_state(engine).items()})
    return tuple(states)


def test_frozen_parameters_and_their_moments_stand_still() -> None:
    for states in run_ranks(frozen_midway, 2):
        for name, value in states[3].items():
            assert torch.equal(value, states[1][name]) is ("norm" in name or "layers.1" in name), name


@pytest.mark.parametrize("who", [0, 1])
def test_ranks_that_differ_are_refused_on_all(who: int) -> None:
    def errors(rank: int) -> list[str]:
        engine = small_engine(rank)
        engine.train_batch()
        told = []
        weight = engine.module.model.layers[2].mlp.up_proj.weight
        for change in (
            lambda: weight.requires_grad_(False),
            lambda: engine.module.model.norm.register_forward_hook(lambda module, args, out: 2 * out),
            lambda: engine.optimizer.register_step_pre_hook(lambda *_: None),
        ):
            if rank == who:
                change()
            with pytest.raises(ConfigError) as error:
                engine.train_batch()
            told.append(str(error.value))
            weight.requires_grad_(True)
            engine.module.model.norm._forward_hooks.clear()
        return told

    frozen, hooked, stepped = run_ranks(errors, 2)[1 - who]
    assert frozen.startswith("the ranks have frozen different parameters")
    assert hooked.startswith(f"rank {who}: forward hooks of model.norm")
    assert stepped.startswith(f"rank {who}: optimizer AdamW has the step hook")


def with_spares(rank: int) -> list[dict[str, Tensor]]:
    model = small_model()
    model.register_parameter("spare", nn.Parameter(torch.ones(7)))
    model.model.layers[1].mlp.register_parameter("spare", nn.Parameter(torch.ones(5)))
    engine = small_engine(rank, model)
    before = engine.fp32_state_dict()
    for _ in range(3):
        engine.train_batch()
    return [before, engine.fp32_state_dict()]


def test_parameters_that_no_forward_reads_stay_as_they_are() -> None:
    """In torch they have no gradient, so that nothing decays them."""
    before, after = run_ranks(with_spares, 2)[0]
    still = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert still == {"spare", "model.layers.1.mlp.spare"}


def test_a_window_is_seen_where_sequences_are_longer_than_it() -> None:
    model = build_model("mistral", torch.float32)
    model.config.sliding_window = 300
    watched = kept(model)
    model.config.sliding_window = 200
    assert "sliding_window" in watched.now(3, longest=1000).problem
    with mock.patch.object(Twin, "_ran", side_effect=torch.OutOfMemoryError):
        assert "sliding_window" in watched.now(4, longest=1000).problem, "what cannot be tried is refused"
    model = build_model("mistral", torch.float32)
    model.config.sliding_window = 300
    watched, ran = kept(model), Twin._ran
    model.config.sliding_window = 200

    def short_of_memory(own: Twin, of: Any, tokens: Tensor, **options: Any) -> Any:
        if tokens.numel() > 128:
            raise torch.OutOfMemoryError
        return ran(own, of, tokens, **options)

    with mock.patch.object(Twin, "_ran", short_of_memory):
        assert not watched.now(5, longest=1000).problem, "which it does not change on so few tokens"
