"""Images in: batches with pixels trained on ranks, and in one process by the model's own forward."""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

import ds_hydra
import ds_hydra.engine.engine
import ds_hydra.images.exchange
import ds_hydra.images.stage
from ds_hydra.costs.loads import EVERY, Dealt, Load, dealt
from ds_hydra.emulate.cluster import emulate, emulate_plans
from ds_hydra.images import content
from ds_hydra.images.content import Unit
from ds_hydra.images.exchange import ImageExchange
from ds_hydra.images.seam import encoded
from ds_hydra.images.stage import SharedRows
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.planner.pipelines import loaded
from ds_hydra.simulate.step import Simulator
from ds_hydra.testing import float64_throughout, rank_environment, run_ranks, whole_gradients
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.emulated_job import emulated_job
from tests.support.image_models import (
    AUDIO,
    FILM,
    HEARD,
    MODELS,
    VIDEO,
    ImageSample,
    batch_of,
    drawing_images,
    image_model,
    plain_loss,
    sample,
)
from tests.support.pages import blocks
from tests.support.planner_cases import in_slices
from tests.support.strict import Rules, strict_world

SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
NEAR = 1e-9  # of the largest entry
Widths = tuple[int, ...]  # of the images of a sequence; (): it has none


class Row(NamedTuple):
    """A training of a model with images."""

    name: str
    model: str
    strategies: tuple[str, ...]
    ranks: int
    # Of each step, of each rank: the images of its sequences.
    steps: tuple[tuple[tuple[Widths, ...], ...], ...]
    frozen: tuple[str, ...] = ()  # parameters with these words in their names
    slices: bool = False
    recomputed: bool = False
    strict: bool = False
    lora: tuple[str, ...] = ()
    dropout: float = 0.0
    shared: bool = False  # some images by all ranks of a first stage


MIXED = (((0, 1), ()), ((1,), (0, 0, 2)))
EQUAL = (((0, 0), ()), ((), (1, 1, 1)))
NONE = (((), ()), ((),))
ONE = (((0,),), ((), (0,)))
TALL = (((4,), ()), ((2,),))
ALONE = (((), (0,)), ((),))
TWO_STEPS = (MIXED, (((), (2,)), ((0,),)))
FILMED = (((0, FILM), (FILM + 1,)), ((), (FILM, 1, FILM)))
CLIPS = (((HEARD, HEARD + 2), ()), ((HEARD + 1,), (HEARD + 3, HEARD)))  # padded to the longest of each batch
BOTH = (((0, HEARD), (HEARD + 2,)), ((), (HEARD, 1, HEARD + 1)))
# Of models that drop out: what runs for images, and the rates of their configs.
ENCODERS = {"llava": ("model.vision_tower", "model.multi_modal_projector"), "qwen2_vl": ("model.visual",),
            "internvl": ("model.vision_tower", "model.multi_modal_projector")}  # fmt: skip
RATES: dict[str, dict[str, tuple[str, ...]]] = {
    "llava": {"vision_config": ("attention_dropout",), "text_config": ("attention_dropout",)},
    "internvl": {"vision_config": ("hidden_dropout_prob", "attention_dropout", "projection_dropout")},
}
ROWS = [
    Row("packed", "qwen2_vl", ("tp1",), 1, (MIXED[:1], NONE[:1], (((0, 0, 0, 0, 0),),))),
    Row("tensor parallel", "qwen2_vl", ("tp2",), 2, TWO_STEPS),
    Row("sequence parallel", "qwen2_vl", ("sp2",), 2, TWO_STEPS),
    Row("deepstack in stages", "qwen3_vl", ("pp2",), 2, (MIXED, NONE, MIXED)),
    Row("deepstack, tensor parallel", "qwen3_vl", ("tp2",), 2, TWO_STEPS),
    Row("deepstack in four stages", "qwen3_vl", ("pp4",), 4, TWO_STEPS),
    Row("a mix", "qwen3_vl", ("tp2 + pp2", "tp2sp2", "sp2 + 2*tp1"), 4, (MIXED, TWO_STEPS[1], ONE)),
    Row("a mix of stages", "qwen2_vl", ("sp2pp2", "tp2pp2/v", "tp2pp2/zb-h1"), 4, (MIXED, TWO_STEPS[1], ONE)),
    Row("images on one rank's batch", "llava", ("2*tp1",), 2, ((((0,), (0, 0)), ((),)), ONE)),
    Row("frozen encoder", "llava", ("sp2",), 2, (MIXED, ONE), frozen=("vision_tower",)),
    Row("frozen encoder and text", "llava", ("tp2",), 2, (MIXED, ONE), frozen=("vision_tower", "language_model")),
    Row("frozen text", "internvl", ("pp2",), 2, (MIXED, ONE), frozen=("language_model", "lm_head")),
    Row("frozen projector", "internvl", ("tp2",), 2, (MIXED, ONE), frozen=("projector",)),
    Row("images on an axis behind", "smolvlm", ("2*tp1", "sp2"), 2, (MIXED, ONE)),
    Row("images on an axis behind, in stages", "smolvlm", ("pp2",), 2, (MIXED, ONE)),
    Row("slices", "qwen2_vl", ("pp2/list",), 2, TWO_STEPS, slices=True),
    Row("slices of deepstack", "qwen3_vl", ("tp2pp2/list",), 4, (MIXED, MIXED), slices=True),
    Row("slices, sequence parallel", "llava", ("sp2/list",), 2, (MIXED, ONE), slices=True),
    Row("tokens of an image see each other", "gemma3", ("tp2", "sp2", "pp2"), 2, (MIXED, NONE, ONE)),
    Row("tokens of an image see each other, a mix", "gemma3", ("tp2 + sp2", "sp2pp2/v"), 4, (MIXED, TWO_STEPS[1])),
    Row("padded images into every layer", "gemma4", ("pp2", "sp2"), 2, TWO_STEPS),
    Row("recurrent layers", "qwen3_5", ("2*tp1", "pp2", "sp2"), 2, (MIXED, NONE, ONE)),
    Row("recurrent layers in slices", "qwen3_5", ("pp2/list",), 2, TWO_STEPS, slices=True),
    Row("videos and images", "qwen2_vl", ("tp2", "sp2", "pp2"), 2, (FILMED, MIXED, FILMED)),
    Row("videos frame by frame, deepstack", "qwen3_vl", ("pp2", "tp2"), 2, (FILMED, NONE)),
    Row("videos, a mix", "qwen3_vl", ("tp2 + pp2", "sp2 + 2*tp1"), 4, (FILMED, TWO_STEPS[1])),
    Row("videos beside recurrent layers", "qwen3_5", ("2*tp1", "sp2"), 2, (FILMED, FILMED)),
    Row("videos in slices", "qwen2_vl", ("pp2/list",), 2, (FILMED, FILMED), slices=True),
    Row("videos, LoRA of text and encoder", "qwen2_vl", ("tp2",), 2, (FILMED, FILMED), lora=("q_proj", "qkv", "fc1")),
    Row("videos, frozen encoder", "qwen2_vl", ("sp2",), 2, (FILMED, MIXED), frozen=("visual",)),
    Row("clips, tensor parallel", "qwen2_audio", ("tp2",), 2, (CLIPS, NONE, CLIPS)),
    Row("clips, sequence parallel", "qwen3_asr", ("sp2",), 2, (CLIPS, NONE)),
    Row("clips in stages, recomputed", "qwen2_audio", ("pp2",), 2, (CLIPS, NONE), recomputed=True),
    Row("clips, a mix", "qwen3_asr", ("tp2 + pp2", "tp2sp2", "sp2 + 2*tp1"), 4, (CLIPS, CLIPS, CLIPS)),
    Row("clips in slices", "qwen3_asr", ("pp2/list",), 2, (CLIPS, CLIPS), slices=True),
    Row("clips, frozen encoder", "qwen2_audio", ("tp2", "pp2"), 2, (CLIPS, CLIPS), frozen=("audio_tower",)),
    Row("clips, LoRA of text and encoder", "qwen2_audio", ("tp2",), 2, (CLIPS, CLIPS), lora=("q_proj", "fc1")),
    Row("clips and images", "qwen_omni", ("tp2", "sp2", "pp2"), 2, (BOTH, MIXED, CLIPS)),
    Row("clips and images, a mix", "qwen_omni", ("tp2 + pp2", "sp2 + 2*tp1"), 4, (BOTH, CLIPS)),
    Row("clips and images in slices", "qwen_omni", ("pp2/list",), 2, (BOTH, BOTH), slices=True),
    Row("strict, clips", "qwen2_audio", ("tp2",), 2, (CLIPS, NONE), strict=True),
    Row("strict, clips and images", "qwen_omni", ("tp2 + pp2",), 4, (BOTH, CLIPS), strict=True),
    Row("recomputed", "qwen3_vl", ("pp2",), 2, TWO_STEPS, recomputed=True),
    Row("LoRA of text and encoder", "qwen2_vl", ("tp2",), 2, TWO_STEPS, lora=("q_proj", "qkv", "fc1")),
    Row("LoRA of the encoder", "llava", ("tp2", "pp2"), 2, (MIXED, ONE), lora=("vision_tower.*(q_proj|fc1)",)),
    Row("LoRA of text", "llava", ("pp2",), 2, (MIXED, ONE), lora=("language_model.*q_proj",)),
    Row("dropout in attentions", "llava", ("2*tp1", "tp2", "sp2"), 2, (MIXED, NONE, ONE), dropout=0.2),
    Row("dropout in an encoder", "internvl", ("tp2", "pp2", "sp2"), 2, (MIXED, ONE, MIXED), dropout=0.2),
    Row("dropout in slices", "llava", ("pp2/list",), 2, (MIXED, ONE), slices=True, dropout=0.2),
    Row("dropout of adapters", "qwen2_vl", ("tp2", "pp2"), 2, (EQUAL, ONE), lora=("q_proj", "qkv", "fc1"), dropout=0.2),
    Row("dropout in a frozen encoder", "internvl", ("tp2",), 2, (MIXED, ONE), frozen=("vision_tower",), dropout=0.2),
    Row("shared images, tensor parallel", "qwen2_vl", ("tp2",), 2, TWO_STEPS, shared=True),
    Row("shared images, sequence parallel", "llava", ("sp2",), 2, (MIXED, NONE, ALONE), shared=True),
    Row("shared images, deepstack", "qwen3_vl", ("tp2 + sp2", "tp2sp2", "tp2pp2"), 4, (MIXED, ONE, ONE), shared=True),
    Row("shared images, windows", "qwen2_5_vl", ("tp2", "2*tp1", "sp2"), 2, (MIXED, NONE, TALL), shared=True),
    Row("shared images of three ranks, by rows of queries", "qwen2_vl", ("sp3 + tp1",), 4, (MIXED, ONE), shared=True),
    Row("shared images in slices", "qwen3_vl", ("tp2pp2/list",), 4, (MIXED, MIXED), slices=True, shared=True),
    Row("shared images, recomputed", "gemma4", ("sp2pp2",), 4, (MIXED, ONE), recomputed=True, shared=True),
    Row("shared images see each other", "gemma3", ("tp2", "sp2"), 2, (ALONE, MIXED), shared=True),
    Row("shared videos", "qwen2_vl", ("sp2", "tp2"), 2, (FILMED, ONE), shared=True),
    Row("shared images, frozen encoder", "llava", ("tp2",), 2, (ALONE, MIXED), frozen=("vision_tower",), shared=True),
    Row("shared images, LoRA", "qwen2_vl", ("tp2",), 2, TWO_STEPS, lora=("q_proj", "qkv", "fc1"), shared=True),
    Row("shared images, dropout", "llava", ("2*tp2", "tp2sp2"), 4, (ALONE, ONE), dropout=0.2, shared=True),
    Row("shared images, dropout in layers", "internvl", ("sp2", "tp2"), 2, (ALONE, MIXED), dropout=0.2, shared=True),
    Row("strict, shared images", "qwen3_vl", ("tp2sp2", "sp2 + 2*tp1"), 4, (MIXED, ONE), strict=True, shared=True),
    Row("strict, in stages", "qwen3_vl", ("pp2",), 2, (MIXED, NONE), strict=True),
    Row("strict, frozen encoder", "llava", ("tp2",), 2, (MIXED, ONE), frozen=("vision_tower",), strict=True),
    Row("strict, videos", "qwen3_vl", ("tp2",), 2, (FILMED, MIXED), strict=True),
    Row("strict, a mix", "qwen3_vl", ("tp2 + pp2", "tp2sp2"), 4, (MIXED, ONE), strict=True),
    Row("strict, tokens of an image see each other", "gemma3", ("sp2",), 2, (MIXED, ONE), strict=True),
    Row("strict, slices", "qwen2_vl", ("pp2/list",), 2, TWO_STEPS, slices=True, strict=True),
]  # fmt: skip


def samples_of(row: Row, step: int, rank: int) -> list[ImageSample]:
    of_rank = row.steps[step][rank % len(row.steps[step])]
    return [
        sample(row.model, widths, 5 + 4 * i + rank, 1000 * step + 10 * rank + i) for i, widths in enumerate(of_rank)
    ]


def model_of(row: Row) -> Any:
    model = image_model(row.model, **_dropping(row))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(word in name for word in row.frozen))
    if row.lora:
        from peft import LoraConfig, get_peft_model

        target: Any = row.lora[0] if len(row.lora) == 1 and "*" in row.lora[0] else list(row.lora)
        target = f".*{target}" if isinstance(target, str) else target
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=target, lora_dropout=row.dropout))
        torch.manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, dtype=torch.float64))
        model = model.double()
    return model


def _dropping(row: Row) -> dict[str, Any]:
    """What a model's config has other than usual, so that it drops out."""
    rates = RATES.get(row.model, {}) if row.dropout else {}
    return {part: {**MODELS[row.model][2][part], **dict.fromkeys(keys, row.dropout)} for part, keys in rates.items()}


def config_of(row: Row, **hydra: Any) -> dict[str, Any]:
    return {
        "optimizer": {"type": "SGD", "params": SGD},
        "gradient_clipping": 0.0,
        "gradient_accumulation_steps": 1,
        "hydra": {
            "images": True, "tokens_per_step": 200, "context_length": 160, "strategies": list(row.strategies),
            "choose": "cycle", "self_check": "off", "steps_file": None, "planner": {"ahead": 0},
            "timeout_seconds": 150, "activation_checkpointing": "all" if row.recomputed else False, **hydra,
        },
    }  # fmt: skip


def _free(unit: Unit) -> Load:
    return Load(1000 * unit.rows, 0)


def _shared(loads: Sequence[Load], ranks: int) -> Dealt:
    """By the rule, or two of three where it shares none."""
    found = dealt(loads, ranks)
    assert all(one.us >= 1000 for one in loads), "they travel with their images"
    if ranks == 1 or EVERY in found.owners:
        return found
    return Dealt([EVERY if i % 3 < 2 else i % ranks for i in range(len(loads))], found.us)


Found = tuple[list[tuple[float, dict[str, Tensor]]], dict[str, Tensor]]


def train(rank: int, row: Row) -> Found:
    """Each step's loss and gradients, and the parameters at the end; on rank 0."""
    rank_environment(rank)
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    model = model_of(row)
    with contextlib.ExitStack() as stack:
        if row.strict:
            stack.enter_context(strict_world(Rules(stall_s=100)))
        if row.shared:
            stack.enter_context(mock.patch.object(ds_hydra.images.exchange, "loads_by", return_value=_free))
            stack.enter_context(mock.patch.object(content, "dealt", _shared))
        running = mock.patch.object(SharedRows, "running", autospec=True, side_effect=SharedRows.running)
        ran = stack.enter_context(running)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = ds_hydra.initialize(model=model, model_parameters=trained, config=config_of(row))
        if row.slices:
            _cut(engine)
        steps: list[tuple[float, dict[str, Tensor]]] = []
        for step in range(len(row.steps)):
            batch = batch_of(row.model, samples_of(row, step, rank))
            if row.strict:  # which sees all operators, so that no code of a script may run within it
                engine.train_batch(batch)
            else:
                engine.backward(engine(batch))
                engine.step()
            steps.append((engine.last_step.loss, whole_gradients(engine)))
            shown = any(widths for of_rank in row.steps[step] for widths in of_rank)
            # Plans that are cut by hand count none.
            assert row.slices or bool(engine.last_step.beside) is shown, "plans count what the first stage takes"
        assert rank or bool(ran.call_count) is row.shared
        masters = engine.crew.masters
        values = masters.gather(engine.crew.world.group, set(engine.job.source.aliases.values()), [0])
        shapes = {param.name: param.shape for b in engine.job.source.plan.buckets for param in b.params}
    return steps, {name: value.detach().view(shapes[name]) for name, value in values.items()}


def _cut(engine: Any) -> None:
    """Let its plans cut the longer sequences into slices."""
    given, plans = engine.crew.plans.given, engine.crew.plans

    def sliced(*args: Any) -> Any:
        planned = given(*args)
        return replace(planned, plan=in_slices(planned.plan, plans.table))

    plans.given = sliced


def reference(row: Row) -> Found:
    model = model_of(row)
    base = model.get_base_model() if row.lora else model
    if row.dropout:
        base.set_attn_implementation("eager")  # torch's own kernels draw for themselves
    trained = [parameter for parameter in base.parameters() if parameter.requires_grad]
    optimizer, steps = torch.optim.SGD(trained, **SGD), list[tuple[float, dict[str, Tensor]]]()
    for step in range(len(row.steps)):
        samples = [one for rank in range(row.ranks) for one in samples_of(row, step, rank)]
        targets = sum(int((one.labels[1:] != IGNORED).sum()) for one in samples)
        optimizer.zero_grad(set_to_none=True)
        within = partial(_drawing, base, row, step, samples) if row.dropout else nullcontext
        loss = plain_loss(base, row.model, samples, 1 / targets, within)
        gradients = {n: p.grad.clone() for n, p in base.named_parameters() if p.grad is not None}
        steps.append((loss, gradients))
        optimizer.step()
    return steps, {name: parameter.detach() for name, parameter in base.named_parameters()}


def _drawing(model: Any, row: Row, step: int, samples: list[ImageSample], number: int) -> Any:
    one = samples[number]
    rows = next((picture.rows for picture in one.pictures), 0)
    return drawing_images(model, ENCODERS[row.model], step + 1, number, len(one.input_ids), len(one.pictures), rows)


def differences(found: Found, right: Found) -> list[str]:
    """What is further apart than rounding explains."""
    wrong = []
    for number, ((loss, gradients), (own, expected)) in enumerate(zip(found[0], right[0], strict=True)):
        if not abs(loss - own) <= NEAR * abs(own):
            wrong.append(f"step {number}: the loss is {loss}, not {own}")
        wrong += [f"step {number}: {text}" for text in apart(gradients, expected)]
    return wrong + apart(found[1], right[1])


def apart(found: Mapping[str, Tensor], right: Mapping[str, Tensor], near: float = NEAR) -> list[str]:
    """Tensors of which two sets have others, by name."""
    floor = 1e-3 * max(float(one.abs().max()) for one in right.values())
    told = []
    for name, value in found.items():
        expected = right.get(name, torch.zeros_like(value))
        off = float((value - expected).abs().max())
        if not off <= near * max(floor, float(expected.abs().max())):
            told.append(f"{name} is {off:.1e} off")
    return told + [f"{name} is missing" for name in right.keys() - found.keys()]


@pytest.mark.drawn
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_same_as_one_process(row: Row) -> None:
    with float64_throughout(image_model(row.model)):
        found = run_ranks(train, row.ranks, row, timeout=240)[0]
        assert not differences(found, reference(row))


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", ["2*pp2", "pp4/list", "2*pp2/zb-h1", "2*pp2/v", "2*tp2", "tp2 + pp2"])
def test_an_emulated_cluster_takes_for_images_what_is_predicted(strategy: str) -> None:
    """Four sequences of 3 ms a stage; two of them have images of 4 ms, the first one three."""
    job = emulated_job(strategy)
    (bare,) = emulate(job, 1)[0]
    one, table = Load(4000, 500), job.cluster.table  # the one of the third sequence is shared where two ranks are
    loads = ((one, one, one), (), (one,), ())
    phase, ms = loaded(bare.plan.phases[0], loads, table, bare.plan.lengths)
    plan = replace(bare.plan, phases=(phase,), predicted_ms=ms, lower_bound_ms=0.0)
    (step,) = emulate_plans(job.cluster, [plan], job.lengths, job.tokens_per_step, timeout_s=200.0)
    assert 1e3 * step.step_s == pytest.approx(ms, rel=0.02)
    assert Simulator(job.cluster).step(plan).step_s == pytest.approx(step.step_s, rel=0.02)
    assert step.step_s > (1.05 if "tp2" in strategy else 1.1) * bare.step_s


@pytest.mark.drawn
def test_an_encoder_is_left_alone_in_a_step_without_images() -> None:
    """Broken, it decays: the comparison sees that."""
    row = Row("decay", "llava", ("tp1",), 1, (MIXED[:1], NONE[:1]))

    def broken(rank: int) -> Found:
        def tell(_: ImageExchange, update: Any, **__: Any) -> None:
            update.unread = frozenset()

        with mock.patch.object(ImageExchange, "_tell", tell):
            return train(rank, row)

    with float64_throughout(image_model(row.model)):
        wrong = differences(run_ranks(broken, 1, timeout=200)[0], reference(row))
    assert any("vision_tower" in text for text in wrong)


def learnt(rank: int, row: Row) -> set[bool]:
    """Whether a backward of a step comes to what the encoder makes."""
    made: list[bool] = []

    def noted(*given: Any) -> list[Tensor]:
        leaves = encoded(*given)
        made.extend(leaf.requires_grad for leaf in leaves if torch.is_grad_enabled())
        return leaves

    with mock.patch.object(ds_hydra.images.stage, "encoded", noted):
        train(rank, row)
    return set(made)


@pytest.mark.drawn
@pytest.mark.parametrize(("frozen", "learns"), [((), {True}), (("vision_tower", "projector"), {False})])
def test_a_frozen_encoder_keeps_nothing_for_a_backward(frozen: tuple[str, ...], learns: set[bool]) -> None:
    row = Row("frozen", "internvl", ("tp2",), 2, (ONE,), frozen=frozen)
    assert run_ranks(learnt, 2, row, timeout=200) == [learns, learns]


def refused(rank: int, model: str, batches: Sequence[Mapping[str, Any]], images: bool, **hydra: Any) -> list[str]:
    rank_environment(rank)
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    row = Row("refused", model, ("tp1",), 1, ())
    try:
        engine, *_ = ds_hydra.initialize(model=image_model(model), config=config_of(row, images=images, **hydra))
    except ConfigError as error:
        return [str(error)]
    told = []
    for batch in batches:
        try:
            engine.train_batch(batch)
            told.append("")
        except ConfigError as error:
            told.append(str(error))
    return told


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    two = batch_of("llava", [sample("llava", (0,), 4, 1), sample("llava", (0, 0), 4, 2)])
    fewer = {**two, "pixel_values": two["pixel_values"][:2]}
    more = {**two, "pixel_values": torch.cat([two["pixel_values"], two["pixel_values"]])}
    video = {**two, "pixel_values_videos": two["pixel_values"]}
    cut = {key: value[:, :12] if value.dim() == 2 else value for key, value in two.items()}
    told = run_ranks(refused, 1, "llava", [fewer, more, video, cut, two], True, timeout=200)[0]
    words = ("2 images of 32 rows", "6 images of 96 rows", "no such videos", "truncated", "")
    for text, expected in zip(told, words, strict=True):
        assert expected in text
    assert not told[-1]
    (spans,) = run_ranks(refused, 1, "paligemma", [], True, timeout=200)[0]
    assert "PaliGemmaForConditionalGeneration" in spans
    without = {k: v for k, v in batch_of("gemma3", [sample("gemma3", (0,), 4, 1)]).items() if k != "token_type_ids"}
    (untold,) = run_ranks(refused, 1, "gemma3", [without], True, timeout=200)[0]
    assert "has images and no token_type_ids" in untold
    drawn = batch_of("qwen2_vl", [sample("qwen2_vl", (0,), 4, 1)])
    drawn["input_ids"][0, -1] = VIDEO  # as a policy may draw it
    (beside,) = run_ranks(refused, 1, "qwen2_vl", [{**drawn, "mm_token_type_ids": None}], True, timeout=200)[0]
    assert "item 0 of the data has 5 tokens that stand for rows of images or audio, but" in beside
    even = batch_of("llava", [sample("llava", (0,), 4, 1), sample("llava", (0,), 4, 2)])
    for off in run_ranks(refused, 1, "llava", [two, even, even], False, timeout=200)[0]:
        assert "pixel_values" in off


def _off_with_clips(rank: int, batches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Stages make other rows of clips than the model's own forward."""

    def off(model: Any, seam: Any, columns: Any, rows: int) -> list[Tensor]:
        return [(1.0 + content.is_clip(columns)) * leaf for leaf in encoded(model, seam, columns, rows)]

    with mock.patch.object(ds_hydra.images.stage, "encoded", off):
        return refused(rank, "qwen_omni", batches, True, self_check="on")


def _one_more(name: str, rank: int) -> dict[str, Any]:
    """A batch of two clips, the second of which has a placeholder too many on rank 1."""
    one, two = (sample(name, (HEARD + 1,), 4, seed) for seed in (1, 2))
    at = int((two.input_ids == AUDIO).nonzero()[0])
    ids, labels = (torch.cat((row[:at], row[at : at + 1], row[at:])) for row in (two.input_ids, two.labels))
    return batch_of(name, [one, two._replace(input_ids=ids, labels=labels) if rank else two])


def _misfit(rank: int, name: str) -> list[str]:
    return refused(rank, name, [_one_more(name, rank), _one_more(name, 0)], True, self_check="on", strategies=["tp2"])


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "rows"), [("qwen3_asr", "10 rows"), ("qwen_omni", "4 rows"),
                                            ("qwen2_audio", "other rows (Audio features and audio tokens do not match, "
                                                            "tokens: 5, features: 4)")])  # fmt: skip
def test_clips_that_do_not_fit_their_placeholders_are_told_before_the_step(name: str, rows: str) -> None:
    tokens = f"item 1 of the data has {11 if '10' in rows else 5} tokens that stand for a clip"
    for told, fitting in run_ranks(_misfit, 2, name, timeout=200):
        assert not fitting
        assert f"on rank 1: {tokens}, of which the model's encoder makes {rows}: give" in told


@pytest.mark.drawn
def test_images_train_where_clips_fail_their_trial() -> None:
    seen, heard = (batch_of("qwen_omni", [sample("qwen_omni", widths, 4, 1)]) for widths in ((0, 1), (0, HEARD)))
    trained, told = run_ranks(_off_with_clips, 1, [seen, heard], timeout=200)[0]
    assert not trained
    assert "no such videos or audio (with clips, under tp1 a small copy is not equal" in told


# --- Trainer, by one changed import; and the page's script.
def _trained_by_trainer(rank: int, num_ranks: int, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    rank_environment(rank)
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    if num_ranks == 1:
        del os.environ["LOCAL_RANK"]  # by which Accelerate tells a job of several processes
    from transformers import TrainingArguments
    from transformers.trainer import Trainer

    from ds_hydra.hugging_face import HydraTrainer

    widths: list[Widths] = [(0,), (), (1, 0), (0, 2), (), (), (2,), (0, 0, 0)]
    data: Any = [sample("qwen2_vl", one, 5 + number, number) for number, one in enumerate(widths)]
    row = Row("trainer", "qwen2_vl", ("tp2", "pp2"), num_ranks, ())
    config = {"train_micro_batch_size_per_gpu": "auto", "hydra": config_of(row)["hydra"]}
    arguments = TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=4 // num_ranks, optim="sgd", learning_rate=0.05,
        weight_decay=0.1, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, remove_unused_columns=False, deepspeed=config if num_ranks > 1 else None,
    )  # fmt: skip
    trainer: Any = (HydraTrainer if num_ranks > 1 else Trainer)(
        image_model("qwen2_vl"), arguments, train_dataset=data, data_collator=partial(batch_of, "qwen2_vl")
    )
    trainer.train()
    values = trainer.deepspeed.fp32_state_dict() if num_ranks > 1 else trainer.model.state_dict()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: value.detach().clone() for name, value in values.items()}


@pytest.mark.drawn
def test_trainer_on_two_ranks_is_its_own_in_one_process(tmp_path: Path) -> None:
    with float64_throughout(image_model("qwen2_vl")):
        (losses, found), (expected, plain) = (
            run_ranks(_trained_by_trainer, ranks, ranks, f"{tmp_path}/{ranks}", timeout=300)[0] for ranks in (2, 1)
        )
    assert losses == pytest.approx(expected, abs=1e-3)
    assert not apart(found, plain)


def _page(rank: int, script: str) -> None:
    rank_environment(rank)
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    runpy.run_path(script, run_name="__main__")


@pytest.mark.drawn
def test_the_page_prints_what_its_script_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, printed = (
        block.text for block in blocks() if block.page == "docs/images.md" and "test_images.py" in block.comment
    )
    (tmp_path / "images.py").write_text(script)
    run_ranks(_page, 2, str(tmp_path / "images.py"), timeout=300)
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert told == printed.splitlines()
