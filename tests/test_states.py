"""Recurrent layers and boxes: in slices of sequences, with heads that ranks share, and what is refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.models.bamba import modeling_bamba

from ds_hydra.pipe.contexts import Carried, Contexts
from ds_hydra.pipe.model_plan import ParamSpec, ShardRule
from ds_hydra.pipe.models import boxes as running
from ds_hydra.pipe.models import causal_lm, find_boxes, recurrent_heads
from ds_hydra.pipe.models.boxes import CarriedState, StageBoxes
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.draws import Draws
from ds_hydra.pipe.models.find_boxes import with_states
from ds_hydra.pipe.models.recurrent_heads import HeadCut, head_cut
from ds_hydra.pipe.placement import Strategy, place_pipeline
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.profiling import stage_memory
from ds_hydra.profiling.stage_memory import measure_activations
from ds_hydra.profiling.stage_timer import hollow_source
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.runs import Data, Outcome, compare, doubled, run_pipeline, uneven_data
from ds_hydra.self_check.shrink import shrunk_config
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.families import BOXED, build_model, hf_config
from tests.support.mutants import gradients_of_other_ranks_are_dropped
from tests.support.tiny_families import class_names, tiny_model
from tools import aims

Subject = tuple[CausalLM, Data, Outcome]


def beside(model: Any, data: Data) -> Subject:
    """A model's stages, data, and what one process makes of them."""
    with doubled():
        source = CausalLM(model)
    return source, data, Plain(model, source.flow.draws, source.layers_path).outcome(data)


def differing(subject: Subject, shape: str) -> str | None:
    """What a pipeline computes otherwise than one process, if anything."""
    source, data, right = subject
    pipeline = place_pipeline(PipelineShape.parse(shape), 0, source.plan.num_layers)
    source.plan.check(Strategy((pipeline,)))
    return compare(right, run_pipeline(source, pipeline, data)).what


# --- Recurrent layers in slices of sequences: what they carry from one to the next, what runs whole, what is
# refused.
FOUND = {"qwen3_next": ("linear_attn", 4 * 8 * 8 + 3 * 64), "bamba": ("mamba", 16 * 8 * 8 + 3 * 144),
         "lfm2": ("conv", 2 * 64)}  # fmt: skip


@pytest.mark.parametrize("family", FOUND)
def test_what_a_slice_carries_is_found(family: str) -> None:
    path, numbers = FOUND[family]
    source = CausalLM(build_model(family, torch.float32))
    assert source.plan.no_slices == ""
    boxes = [box for of in source.boxes.of for box in of]
    assert {(box.path, box.carries) for box in boxes} == {(path, 4 * numbers)}


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
    shapes."""
    source, data, right = beside(build_model(family, torch.float64), uneven_data(97, [(200,), (30, 7)]))
    for each in (shape, MIXED):
        assert differing((source, data.in_slices(), right), each) is None, each


IN_SLICES = """Lfm2 Bamba Qwen3Next Lfm2Moe Lfm3 GraniteMoeHybrid NemotronH Mamba2 Qwen3_5 Qwen3_5Moe OlmoHybrid
KimiLinear"""


@pytest.mark.long
@pytest.mark.parametrize("name", [f"{name}ForCausalLM" for name in re.findall(r"\w+", IN_SLICES)])
def test_sequences_of_these_classes_run_in_slices(name: str) -> None:
    """Short convolutions, Mamba-2, gated delta rules, and delta rules by channel."""
    model = tiny_model(name, class_names()[name])
    with doubled():
        source = CausalLM(model)
    assert not source.plan.no_slices
    data = uneven_data(source.vocab_size or 0, [(6, 130, 9), (30,)])
    right = Plain(model, source.flow.draws, source.layers_path).outcome(data)
    for shape in ("tp1", "pp2/v", "(tp3[0:2] > sp3[2:4])"):
        pipeline = place_pipeline(PipelineShape.parse(shape), 0, source.plan.num_layers)
        found = compare(right, run_pipeline(source, pipeline, data.in_slices()))
        assert found.worst <= aims.SLICES_OF_STATES, shape


def state_is_not_passed() -> Any:
    return mock.patch.object(CarriedState, "get_recurrent_state", return_value=None)


def tail_is_cut_by_one() -> Any:
    right = CarriedState.update_conv_state

    def update(self: CarriedState, *args: Any, conv_kernel_size: int, **kwargs: Any) -> Tensor:
        return right(self, *args, conv_kernel_size=conv_kernel_size - 1, **kwargs)

    return mock.patch.object(CarriedState, "update_conv_state", update)


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
        given[box.state] = CarriedState({key: value for key, value in before.items() if key == ("conv", 0)})
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
        with mock.patch.multiple(CarriedState, **right_state), mock.patch.multiple(Carried, **right_carried):
            return with_states(*given)

    right_state = {name: vars(CarriedState)[name] for name in ("get_recurrent_state", "update_conv_state")}
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


# --- Recurrent layers whose heads tensor parallel ranks share: which they are, what stays whole, what is found.
# Of the first layer: the module, the degrees, and what rank 0 of 4 has of some parameters (of a degree that it has not,
# all of it).
SHARED: dict[str, tuple[str, tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "qwen3_next": ("linear_attn", (2,), {"in_proj_qkvz.weight": (96, 64), "out_proj.weight": (64, 32)}),
    "qwen3_5": ("linear_attn", (2, 4), {"in_proj_qkv.weight": (24, 64), "conv1d.weight": (24, 1, 4), "A_log": (1,),
                                        "norm.weight": (8,), "out_proj.weight": (64, 8)}),
    "nemotron_h": ("mixer", (2, 4, 8, 16), {"in_proj.weight": (32 + 32 + 8 + 8 + 4, 64), "conv1d.bias": (48,),
                                            "norm.weight": (32,), "D": (4,)}),
    "bamba": ("mamba", (2, 4, 8, 16), {"in_proj.weight": (32 + 32 + 8 + 8 + 4, 64), "out_proj.weight": (64, 32)}),
}  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("family", SHARED)
def test_ranks_share_heads(family: str) -> None:
    path, degrees, shapes = SHARED[family]
    source = CausalLM(build_model(family, torch.float32))
    module = f"model.layers.0.{path}"
    assert source.head_cuts[module][0].degrees == degrees
    assert {name: source.specs[f"{module}.{name}"].shard_shape(0, 4) for name in shapes} == shapes
    assert source.plan.no_tp == ""


def test_blocks_of_unequal_size_are_cut_each_for_itself() -> None:
    """Two key heads of 2 rows and four value heads of 3, in one weight: of q, k and v."""
    spec = ParamSpec("mixed", (20, 5), ShardRule(0, blocks=((4, 2), (4, 2), (12, 4)), degrees=(2, 4)))
    assert spec.shard_ranges(1, 2) == ((2, 4), (6, 8), (14, 20))
    assert spec.shard_ranges(3, 4) == ((2, 4), (6, 8), (17, 20)), "ranks 2 and 3 hold the same key heads"
    assert spec.shard_shape(3, 4) == (7, 5)
    assert list(spec.shard_intervals(1, 2)) == [(10, 20), (30, 40), (70, 100)]
    assert list(spec.shard_intervals(1, 3)) == [(0, 100)], "of another degree each rank holds the whole"
    assert ShardRule(gradient="partial", degrees=(2,)).of(3).gradient == "complete"


def biased(model: Any) -> None:
    """Adds up over ranks what must count once."""
    mixer = model.model.layers[0].mamba
    mixer.out_proj = nn.Linear(mixer.out_proj.in_features, mixer.out_proj.out_features)


def of_a_part_that_nobody_knows(model: Any) -> None:
    model.model.layers[0].mamba.another = nn.Linear(2, 2)


def normed_otherwise(model: Any) -> None:
    norm = model.model.layers[0].mamba.norm
    norm.forward = lambda hidden, gate: type(norm).forward(norm, hidden, 2 * gate)


class _Scaled(modeling_bamba.BambaMixer):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(*args, **kwargs)
        return out * self.num_heads


def scaled_by_its_heads(model: Any) -> None:
    model.model.layers[0].mamba.__class__ = _Scaled


@pytest.mark.drawn
@pytest.mark.parametrize("change", [biased, of_a_part_that_nobody_knows, normed_otherwise, scaled_by_its_heads])
def test_what_is_made_otherwise_stays_whole(change: Callable[[Any], None]) -> None:
    model = build_model("bamba", torch.float32)
    change(model)
    source = CausalLM(model)
    assert list(source.head_cuts) == ["model.layers.2.mamba"]
    assert source.specs["model.layers.0.mamba.A_log"].rule == ShardRule()


def channels_are_cut_as_one() -> Any:
    """Of q, k and v together a rank has a consecutive part."""

    def cut(module: nn.Module) -> HeadCut | None:
        found = head_cut(module)
        return found and replace(found, rules={name: replace(rule, blocks=()) for name, rule in found.rules.items()})

    return mock.patch.object(recurrent_heads, "head_cut", cut)


def test_a_cut_that_computes_something_else_is_left_out() -> None:
    with channels_are_cut_as_one(), mock.patch.object(find_boxes, "head_cut", lambda m: recurrent_heads.head_cut(m)):
        source = CausalLM(build_model("qwen3_5", torch.float32))
    assert not source.head_cuts


@pytest.mark.drawn
def test_the_self_check_finds_what_trying_did_not() -> None:
    with channels_are_cut_as_one():
        result = check_strategies(build_model("qwen3_5", torch.float32), [StrategyShape.parse("tp2")], keep=False)
    (objection,) = result.objections()
    assert "tp2 trains otherwise" in objection


@pytest.mark.drawn
def test_the_self_check_proves_more_groups_than_ranks_and_fewer() -> None:
    """Its small copy has the model's groups, or as many as its heads can have."""
    config = hf_config("nemotron_h")
    config.n_groups = 8
    assert shrunk_config(config, 4, 1).n_groups == 8
    shapes = [StrategyShape.parse("tp4")]
    result = check_strategies(build_model("nemotron_h", torch.float32), shapes, keep=False)
    assert (result.objections(), result.no_slices) == ([], "")


def test_no_kernel_norms_a_part_of_a_group() -> None:
    """The kernel that fuses a whole layer takes the norm of what it is given."""
    source = CausalLM(build_model("bamba", torch.float32))
    called: list[str] = []
    for shape in ("tp1", "tp2"):
        fused = mock.patch.object(
            modeling_bamba, "mamba2_split_conv1d_scan_combined", lambda *_, shape=shape, **__: called.append(shape)
        )
        with fused:
            run_pipeline(source, place_pipeline(PipelineShape.parse(shape), 0, 4), uneven_data(97, [(9, 4)]))
    assert set(called) == {"tp1"}


# --- Recurrent layers whose heads sequence parallel ranks share: equal to one process, and what is found if
# they are not.
@pytest.fixture(scope="module")
def subject() -> Subject:
    """Two groups of B and C and 16 heads; three sequences, of which one has slices."""
    return beside(build_model("nemotron_h", torch.float64), uneven_data(97, [(6, 33), (12,)]))


@pytest.mark.drawn
@pytest.mark.parametrize("shape", ["sp4", "(tp2sp2[0:2] > sp2[2:4])/zb-h1"])
def test_ranks_compute_what_one_process_does(subject: Subject, shape: str) -> None:
    source, data, right = subject
    assert differing((source, data.in_slices(), right), shape) is None


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

    return mock.patch.object(recurrent_heads, "_within", first)


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


# --- Models with boxes: which modules they are, what one process computes with the same sequences, what is
# refused.
DATA = uneven_data(97, [(6, 33, 2, 6), (12,)])
_HALF_AGAIN = tuple(replace(batch, recompute=0.5) for batch in DATA.microbatches)
AGAIN = replace(DATA, microbatches=_HALF_AGAIN)

WAYS = {
    "bloom": [("self_attention",)] * 4,
    "gptj, dropout": [("attn",)] * 4,
    "qwen3_next": [("linear_attn",), ()] * 2,
    "lfm2": [("conv",), ()] * 2,
    "falcon_h1": [("mamba", "self_attn")] * 4,
    "llama": [],
}


@pytest.mark.drawn
@pytest.mark.parametrize("family", WAYS)
def test_tokens_meet_in_these_modules(family: str) -> None:
    source = CausalLM(build_model(family, torch.float32))
    assert [tuple(box.path for box in of) for of in source.boxes.of] == WAYS[family]


MIXED_TOKENS, BOX_SHAPES = "(sp2[0:1] > tp2[1:3] > tp1[3:4])", ("tp2", "pp2/v", "sp4", "pp2/zb-h1")


@pytest.mark.drawn
@pytest.mark.parametrize(("number", "family"), enumerate(BOXED))
def test_equal_to_one_process(number: int, family: str) -> None:
    """In FP64; layers that are computed again, split backwards, V shapes and dropout by place among it. Each family has
    one of the shapes; rows of the training table have the others."""
    source, _, right = beside(build_model(family, torch.float64), DATA)
    for shape in (MIXED_TOKENS, BOX_SHAPES[number % len(BOX_SHAPES)]):
        assert differing((source, AGAIN, right), shape) is None, shape


def of_the_neighbour() -> Any:
    """A box is given what the sequence before its own is handed."""
    right = running._Cut._of

    def of(self: Any, place: int, group: list[int]) -> Any:
        return right(self, place, [max(0, group[0] - 1)] if self.box.sources[place] is not None else group)

    return mock.patch.object(running._Cut, "_of", of)


def of_the_whole_row() -> Any:
    """A module runs once for a pack: its state and its convolution go over the boundaries."""

    def call(self: Any, box: Any, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return mock.patch.object(running.BoxedLayers, "_call", call)


def rows_are_put_back_in_another_order() -> Any:
    right = running._Cut.joined

    def joined(self: Any, outs: Any) -> Any:
        of_length = {n: s for s, n in enumerate(self.run.pack.lengths)}
        return right(self, {s: outs.get(of_length[self.run.pack.lengths[s]], outs[s]) for s in outs})

    return mock.patch.object(running._Cut, "joined", joined)


def layers_computed_again_know_no_sequences() -> Any:
    return mock.patch.object(StageBoxes, "again", lambda self: self._layers.of(None))


def sequences_draw_as_the_row() -> Any:
    return mock.patch.object(Draws, "alone", return_value=contextlib.nullcontext())


def no_layer_has_boxes() -> Any:
    """Nor does its class say that it needs some."""
    return mock.patch.multiple(causal_lm, may_mix_otherwise=lambda _: False, may_mix_beside=lambda *_: False)


WRONG_BOXES: list[tuple[str, str, Callable[[], Any]]] = [
    ("lfm2", "tp1", of_the_whole_row),
    ("qwen3_next", "tp1", of_the_whole_row),
    ("falcon_h1", "tp1", no_layer_has_boxes),
    ("bloom", "tp1", of_the_neighbour),
    ("bloom", "tp1", rows_are_put_back_in_another_order),
    ("bloom", "sp2", gradients_of_other_ranks_are_dropped),
    ("qwen3_next", "sp2", gradients_of_other_ranks_are_dropped),
    ("bloom", "tp1", layers_computed_again_know_no_sequences),
    ("gptj, dropout", "tp1", sequences_draw_as_the_row),
]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("family", "strategy", "mutant"), WRONG_BOXES, ids=[f"{f}-{m.__name__}" for f, _, m in WRONG_BOXES]
)
def test_what_would_train_wrongly_is_refused(family: str, strategy: str, mutant: Callable[[], Any]) -> None:
    candidates = [StrategyShape.parse(strategy)]
    with mutant():
        result = check_strategies(build_model(family, torch.float32), candidates, keep=False)
    (verdict,) = (result.verdicts[shape] for shape in candidates[0].pipelines)
    assert verdict.state == "refused", verdict
