"""Recurrent layers in slices of sequences: what they carry from one to the next, what runs whole, what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_hydra.pipe.carried import Carried
from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.models import boxed_layers as running
from ds_hydra.pipe.models import find_boxes
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.facts import ModelFacts
from ds_hydra.pipe.models.find_states import with_states
from ds_hydra.pipe.models.states import State
from ds_hydra.pipe.placement import Strategy, place_pipeline
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.profiling import stage_memory
from ds_hydra.profiling.hollow import hollow_source
from ds_hydra.profiling.stage_memory import measure_activations
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.compare import compare
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.precision import doubled
from ds_hydra.self_check.runs import run_pipeline, uneven_data
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.families import build_model
from tests.support.tiny_families import class_names, tiny_model

FOUND = {"qwen3_next": ("linear_attn", 4 * 8 * 8 + 3 * 64), "bamba": ("mamba", 16 * 8 * 8 + 3 * 144),
         "lfm2": ("conv", 2 * 64)}  # fmt: skip


@pytest.mark.parametrize("family", FOUND)
def test_what_a_slice_carries_is_found(family: str) -> None:
    path, numbers = FOUND[family]
    source = CausalLM(build_model(family, torch.float32))
    assert source.plan.no_slices == ""
    boxes = [box for of in source.boxes.of for box in of]
    assert {(box.path, box.carries) for box in boxes} == {(path, 4 * numbers)}
    assert ModelFacts.from_json(source.facts.to_json()) == source.facts


def test_a_config_alone_tells_what_a_slice_carries(tmp_path: Path) -> None:
    """Profiles, memory and simulations are made from it."""
    model = build_model("lfm2", torch.float32)
    model.config.save_pretrained(tmp_path)
    plan = hollow_source(tmp_path).plan
    assert (plan.boxes, plan.no_slices) == (CausalLM(model).plan.boxes, "")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("JambaForCausalLM", r"^mamba of layer 0 takes whole sequences only: in 2 slices its result is off by"),
        ("BloomForCausalLM", r"^self_attention of layer 0 .*: it is handed more of each token than hidden states$"),
        ("RwkvForCausalLM", r"^attention of layer 0 .*: it asks for no state that is known here$"),
    ],
)
def test_others_take_whole_sequences(name: str, why: str) -> None:
    found = CausalLM(tiny_model(name, class_names()[name]), by_one_rank=True).plan.no_slices
    assert re.search(why, found), found


MIXED, SHAPES = "(sp2[0:1] > tp2[1:3] > tp1[3:4])/zb-h1", ("tp2", "sp4", "pp2/v")


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "shape"), zip(FOUND, SHAPES, strict=True))
def test_four_slices_of_200_tokens_equal_the_whole(family: str, shape: str) -> None:
    """In FP64, to 1e-9; another sequence runs in turns with it, and short ones beside. Each family has one of the
    shapes; `tools.check_hybrids` has more of both."""
    model = build_model(family, torch.float64)
    with doubled():
        source = CausalLM(model)
    data = uneven_data(97, [(200,), (30, 7)])
    right = Plain(model, source.flow.draws, source.layers_path).outcome(data)
    for each in (shape, MIXED):
        pipeline = place_pipeline(PipelineShape.parse(each), 0, source.plan.num_layers)
        source.plan.check(Strategy((pipeline,)))
        assert compare(right, run_pipeline(source, pipeline, data.in_slices())).what is None, each


def state_is_not_passed() -> Any:
    return mock.patch.object(State, "get_recurrent_state", return_value=None)


def tail_is_cut_by_one() -> Any:
    right = State.update_conv_state

    def update(self: State, *args: Any, conv_kernel_size: int, **kwargs: Any) -> Tensor:
        return right(self, *args, conv_kernel_size=conv_kernel_size - 1, **kwargs)

    return mock.patch.object(State, "update_conv_state", update)


def gradient_of_the_state_is_dropped() -> Any:
    return mock.patch.object(Carried, "_left", return_value=None)


def token_is_not_carried() -> Any:
    """A slice of one token hands on the state before it."""
    right = Carried.hand_on

    def hand_on(self: Carried, out: Tensor, states: Mapping[Any, Tensor], start: int, stop: int) -> Tensor:
        return right(self, out, {key: value for key, value in states.items() if key != "token"}, start, stop)

    return mock.patch.object(Carried, "hand_on", hand_on)


def state_of_another_sequence_is_taken() -> Any:
    """A slice begins with what the module's last slice of any sequence has ended with."""
    of_module: dict[Any, dict[Any, Tensor]] = {}
    right = Contexts.carried

    def carried(self: Contexts, module: Any) -> Carried:
        found, latest = right(self, module), of_module.setdefault(module, {})
        begun = vars(self).setdefault(f"begun {module}", set())
        take, hand_on = Carried.take, Carried.hand_on

        def taken(start: int) -> dict[Any, Tensor]:
            mine = take(found, start)
            for key in mine.keys() & latest.keys() if start not in begun else ():  # again: what it began with
                mine[key].data.copy_(latest[key])
            begun.add(start)
            return mine

        def handed(out: Tensor, states: Mapping[Any, Tensor], start: int, stop: int) -> Tensor:
            latest.update({key: value.detach().clone() for key, value in states.items()})
            return hand_on(found, out, states, start, stop)

        return mock.Mock(wraps=found, take=taken, hand_on=handed)

    return mock.patch.object(Contexts, "carried", carried)


def convolution_looks_into_the_slice_before() -> Any:
    """The sequence beside a slice begins with the tail that this began with."""
    right = running._Cut.arguments

    def arguments(self: Any, group: list[int]) -> list[Any]:
        given, chunk, box = right(self, group), self.run.pack.chunk, self.box
        if chunk is None or 0 in group or box.state is None:
            return given
        before = chunk.contexts.carried((self.index, box.path)).take(chunk.start)
        given[box.state] = State({key: value for key, value in before.items() if key == ("conv", 0)})
        return given

    return mock.patch.object(running._Cut, "arguments", arguments)


BY_TRYING: list[tuple[str, Callable[[], Any]]] = [
    ("qwen3_next", state_is_not_passed),
    ("bamba", state_is_not_passed),
    ("qwen3_next", tail_is_cut_by_one),
    ("lfm2", tail_is_cut_by_one),
    ("bamba", gradient_of_the_state_is_dropped),
    ("lfm2", gradient_of_the_state_is_dropped),
    ("lfm2", token_is_not_carried),
]


def _names(mutants: list[tuple[str, Callable[[], Any]]]) -> list[str]:
    return [f"{family}-{mutant.__name__}" for family, mutant in mutants]


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "mutant"), BY_TRYING, ids=_names(BY_TRYING))
def test_what_would_be_wrong_in_slices_runs_whole(family: str, mutant: Callable[[], Any]) -> None:
    with mutant():
        found = CausalLM(build_model(family, torch.float32), by_one_rank=True).plan.no_slices
    assert re.search("in [23] slices .* is off by", found), found


BY_SELF_CHECK = [
    ("qwen3_next", state_is_not_passed),
    ("lfm2", tail_is_cut_by_one),
    ("lfm2", gradient_of_the_state_is_dropped),
    ("lfm2", token_is_not_carried),
    ("lfm2", state_of_another_sequence_is_taken),
    ("lfm2", convolution_looks_into_the_slice_before),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "mutant"), BY_SELF_CHECK, ids=_names(BY_SELF_CHECK))
def test_the_self_check_sees_what_trying_did_not(family: str, mutant: Callable[[], Any]) -> None:
    def tried(*given: Any) -> Any:  # without the mutant
        with mock.patch.multiple(State, **right_state), mock.patch.multiple(Carried, **right_carried):
            return with_states(*given)

    right_state = {name: vars(State)[name] for name in ("get_recurrent_state", "update_conv_state")}
    right_carried = {name: vars(Carried)[name] for name in ("take", "hand_on", "_left")}
    with mutant(), mock.patch.object(find_boxes, "with_states", tried):
        result = check_strategies(build_model(family, torch.float32), [StrategyShape.parse("tp1")], keep=False)
    assert result.verdicts[PipelineShape.parse("tp1")].state == "equal"
    assert "with a sequence in slices" in result.no_slices, result


@pytest.mark.drawn
@pytest.mark.parametrize("family", FOUND)
def test_the_self_check_finds_slices_equal(family: str) -> None:
    result = check_strategies(build_model(family, torch.float32), [StrategyShape.parse("tp1")], keep=False)
    assert (result.objections(), result.no_slices) == ([], "")


@pytest.mark.drawn
@pytest.mark.parametrize("family", FOUND)
def test_memory_counts_what_slices_hand_on(family: str) -> None:
    source = CausalLM(build_model(family, torch.float32))
    stage = (source, 1, 1, torch.device("cpu"), torch.float32, 64)
    found = measure_activations(*stage)
    carried = [sum(box.carries for box in of) for of in source.boxes.of]
    assert found.state == 2 * sum(carried) / 4, "with their gradients"
    with mock.patch.object(stage_memory, "state_bytes", return_value=0.0):
        undivided = measure_activations(*stage)
    measured = (undivided.context - found.context) * 64 * found.layer  # in the one layer of the middle stage
    assert measured == pytest.approx(2 * carried[2]), "what a length was measured with is not counted by token"


def test_slices_out_of_order_are_refused() -> None:
    carried = Carried(9)
    out = torch.ones(1, 4, 2, requires_grad=True)
    with pytest.raises(PlanError, match="begins at token 4, where no slice that has run ends"):
        carried.take(4)
    first = carried.hand_on(out, {"conv": out[:, 3:]}, 0, 4)
    (state,) = carried.take(4).values()
    last = carried.hand_on(out + state, {}, 4, 9)
    with pytest.raises(PlanError, match="the backward of the tokens 0 to 4 of a sequence of 9 runs when that of the "
                                        "slice up to 9 is due"):  # fmt: skip
        first.sum().backward(retain_graph=True)
    last.sum().backward()
    out.grad = None
    first.sum().backward()
    assert out.grad is not None
    assert out.grad.tolist() == [[[1.0, 1.0]] * 3 + [[5.0, 5.0]]], "its own, and that of the four that follow"
    assert carried.bytes_at(4) == 0, "nothing is kept after the backward"


def test_a_box_that_carries_nothing_refuses_a_slice() -> None:
    box = running.Box("conv", ((1,),), (None,), ((1,),))
    chunk = running.Chunk(3, 5, Contexts(9))
    with pytest.raises(ConfigError, match="tokens 3 to 5 of a sequence of 9 run as a slice, but conv runs whole"):
        running.call_on_slice(lambda *_: [], box, [torch.ones(1, 2)], None, chunk, "conv")
