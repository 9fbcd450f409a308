"""Recurrent layers whose heads sequence parallel ranks share: equal to one process, and what is found if they are
not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_hydra.pipe.models import boxed_layers, own_heads
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.states import State
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.row_collectives import all_of_row
from ds_hydra.pipe.rows import Pack
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.compare import compare
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.precision import doubled
from ds_hydra.self_check.runs import Data, Outcome, run_pipeline, uneven_data
from tests.support.families import build_model

Subject = tuple[CausalLM, Data, Outcome]


@pytest.fixture(scope="module")
def subject() -> Subject:
    """Two groups of B and C and 16 heads; three sequences, of which one has slices."""
    data, model = uneven_data(97, [(6, 33), (12,)]), build_model("nemotron_h", torch.float64)
    with doubled():
        source = CausalLM(model)
    return source, data, Plain(model, source.flow.draws, source.layers_path).outcome(data)


def difference(subject: Subject, shape: str) -> str | None:
    """What differs from one process, if anything does."""
    source, data, right = subject
    pipeline = place_pipeline(PipelineShape.parse(shape), 0, 4)
    return compare(right, run_pipeline(source, pipeline, data.in_slices())).what


@pytest.mark.drawn
@pytest.mark.parametrize("shape", ["sp4", "(tp2sp2[0:2] > sp2[2:4])/zb-h1"])
def test_ranks_compute_what_one_process_does(subject: Subject, shape: str) -> None:
    assert difference(subject, shape) is None


def test_each_rank_computes_its_heads_for_all_tokens(subject: Subject) -> None:
    """Four heads with one group of two ranks each, of all sequences of the row."""
    source, data, _ = subject
    mixer = source.template.model.layers[0].mixer
    right, seen = type(mixer).forward, []

    def forward(self: Any, hidden: Tensor, *rest: Any, **more: Any) -> Any:
        seen.append((hidden.shape[1], len(self.A_log), len(self.norm.weight), self.in_proj.weight.shape[0]))
        return right(self, hidden, *rest, **more)

    with mock.patch.object(type(mixer), "forward", forward):
        run_pipeline(source, place_pipeline(PipelineShape.parse("sp4"), 0, 4), data)
    lengths, heads, features, rows = (set(each) for each in zip(*seen, strict=True))
    assert (lengths, heads, features, rows) == ({6, 33, 12}, {4}, {32}, {32 + 32 + 8 + 8 + 4})


def first_heads_are_computed_by_all() -> Any:
    def first(held: Any, own: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(0, stop - start) for start, stop in own]

    return mock.patch.object(own_heads, "_within", first)


def parts_are_not_added_up() -> Any:
    def own(x: Tensor, pack: Pack) -> Tensor:
        start, stop = pack.local
        return x[start:stop]

    return mock.patch.object(boxed_layers, "own_of_sum", own)


def tokens_have_the_gradient_of_a_rank() -> Any:
    """What other ranks' heads make of a token counts nothing in its gradient."""

    class _Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: int, pack: Pack) -> Tensor:
            ctx.dim, ctx.pack = dim, pack
            return all_of_row(x, dim, pack)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
            start, stop = ctx.pack.local
            return grad.narrow(ctx.dim, start, stop - start), None, None

    return mock.patch.object(boxed_layers, "all_of_row", _Gathered.apply)


def states_are_of_the_next_head() -> Any:
    right = State.get_recurrent_state

    def other(self: State, *args: Any, **kwargs: Any) -> Tensor | None:
        found = right(self, *args, **kwargs)
        return None if found is None else found.roll(1, 1)

    return mock.patch.object(State, "get_recurrent_state", other)


@contextmanager
def squares_are_of_a_rank() -> Iterator[None]:
    """A group of the norm lies on two ranks."""
    right = own_heads.gated_norm

    def own(norm: Any, groups: int, part: int, parts: int, ranks: Any, *given: Tensor) -> Tensor:
        return right(norm, groups, part, parts, (), *given)

    with mock.patch.object(own_heads, "gated_norm", own):
        yield


MUTANTS = [
    first_heads_are_computed_by_all,
    states_are_of_the_next_head,
    parts_are_not_added_up,
    tokens_have_the_gradient_of_a_rank,
    squares_are_of_a_rank,
]


@pytest.mark.drawn
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_whatever_else_ranks_compute_is_found(subject: Subject, mutant: Callable[[], Any]) -> None:
    """By the comparison of which the self-check consists."""
    with mutant():
        assert difference(subject, "sp4") is not None


@pytest.mark.drawn
def test_the_self_check_finds_it_before_step_0() -> None:
    with first_heads_are_computed_by_all():
        result = check_strategies(build_model("bamba", torch.float32), [StrategyShape.parse("sp2")], keep=False)
    (objection,) = result.objections()
    assert "sp2 trains otherwise" in objection


def test_a_slice_of_a_weight_is_no_weight_that_is_put_off(subject: Subject) -> None:
    """Its module has the whole one again, by the time that the gradient is computed."""
    source, *_ = subject
    place = StagePlace(place_pipeline(PipelineShape.parse("sp2/zb-h1"), 0, 4), 0, 0, 0, None, None)
    stage = source.build(place, torch.device("cpu"), torch.float32)
    module: Any = stage.module.get_submodule("model.layers.0.mixer.in_proj")
    whole = torch.nn.Parameter(torch.ones(4, 2))
    queue, x = stage.linear_queue, torch.ones(3, 2, requires_grad=True)
    assert queue is not None
    with queue.of(0):
        module._parameters["weight"] = whole
        assert queue.takes(module, x)
        module._parameters["weight"] = whole[:2]
        assert not queue.takes(module, x)
