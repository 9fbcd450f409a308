"""Models with images in one process: what is found of a model, which classes are equal, and that each fault shows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM
from transformers.models.qwen2_audio import modeling_qwen2_audio

from ds_hydra.costs.analytic import analytic_cost_table, model_shape
from ds_hydra.costs.cost_table import TableFile, table_file_from_record
from ds_hydra.engine.costs import job_memory
from ds_hydra.images import content, stage
from ds_hydra.images import seam as seam_module
from ds_hydra.images.content import Unit
from ds_hydra.images.exchange import taken
from ds_hydra.images.find import ImageSubject, Listener, subject_of
from ds_hydra.images.job import KINDS, ImageText, ImageTrial, verdicts
from ds_hydra.images.load import Tower, image_tokens, loads_by, measured, price_of, sharing_of, with_room
from ds_hydra.images.seam import Seam, encoded
from ds_hydra.images.stage import SHARED, Cut, ImageStage, SharedRows, UnitDraws
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.refusals import find_layers
from ds_hydra.pipe.rows import Seen
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.pipe.tensor_parallel import usual_plan
from ds_hydra.pipe.ulysses import AllToAll
from ds_hydra.self_check.runs import doubled, run_pipeline
from ds_hydra.self_check.schemes import uneven_pipeline
from ds_hydra.self_check.shrink import rotary_sections
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.image_models import AUDIO, FILM, HEARD, MODELS, WIDTH, batch_of, image_model, sample
from tools.image_classes import default_model, verdict_of


@functools.cache
def subject(name: str) -> ImageSubject:
    """A tiny model with what was found of it."""
    return subject_of(image_model(name))


def test_the_seam_is_found_by_trying() -> None:
    qwen, llava, internvl, smolvlm = (subject(name).seam for name in ("qwen3_vl", "llava", "internvl", "smolvlm"))
    assert (qwen.layout, qwen.form, qwen.axes, qwen.per_row) == ("grid", "tuple", 3, 4)
    assert qwen.deepest == (0, 1, 2)  # each leaf enters one layer behind the one before
    assert qwen.roots == ("model.visual",)
    assert (llava.layout, llava.form, llava.axes, llava.deepest) == ("each", "tuple", 1, (0,))
    assert llava.roots == ("model.multi_modal_projector", "model.vision_tower")
    assert any("layers.1." in name for name in llava.silent)  # its features are those of the layer before
    assert (qwen.video, llava.video) == (121, None)
    assert (internvl.form, smolvlm.layout) == ("tensor", "beside")


def test_where_rows_of_clips_enter_is_found_by_trying() -> None:
    whisper, windows, omni = (subject(name).seam for name in ("qwen2_audio", "qwen3_asr", "qwen_omni"))
    assert [seam.audio and seam.audio.columns[0] for seam in (whisper, windows, omni)] == 3 * ["input_features"]
    assert [seam.audio and seam.audio.entry for seam in (whisper, windows, omni)] == 3 * ["model.language_model"]
    assert [seam.audio and seam.audio.masked for seam in (whisper, windows, omni)] == [False, True, True]
    assert whisper.clips_alone
    assert windows.clips_alone
    assert not omni.clips_alone
    assert omni.only == (("model.visual",), ("model.audio_tower",))
    heard = {name for name, _ in subject("qwen_omni").model.named_parameters() if "audio_tower" in name}
    assert omni.deaf([*heard, "model.visual.merger.ln_q.weight"], "why").silent - omni.silent == heard - omni.silent
    assert subject("gemma4").seam.audio is None
    assert "no clip" in subject("gemma4").seam.unheard


@pytest.mark.drawn
@pytest.mark.parametrize("name", [name for name in MODELS if name != "paligemma"])
def test_stages_are_equal_to_the_models_own_forward(name: str) -> None:
    found = verdicts(subject(name), (*KINDS, SHARED))
    if name.startswith("gemma"):
        assert "see each other" in found.pop("slices")
    assert set(found.values()) == {""}


@pytest.mark.drawn
@pytest.mark.parametrize("frozen", [False, True])
def test_what_an_encoder_takes_is_measured_and_what_it_holds_is_counted(frozen: bool) -> None:
    model = image_model("qwen2_vl", torch.float32)
    model.model.visual.requires_grad_(not frozen)
    source = ImageText(model, subject("qwen2_vl").seam, StageOptions())
    price, tower = measured(source, torch.device("cpu"), torch.float32, seconds=1.0), Tower.of(source)
    assert price.b > 0.0
    assert bool(price.keep) is bool(tower.kept(4)) is not frozen
    assert frozen or 0.5 < price.keep / tower.kept(4) < 2.0
    counted, unit = FlopCounterMode(display=False), subject("qwen2_vl").samples[0].units[1]
    model.set_attn_implementation("eager")  # whose products are counted
    with counted:
        rows = torch.cat(
            encoded(model, source.seam, {n: c.float() if c.is_floating_point() else c for n, c in unit.items()})
        )
        if not frozen:
            rows.sum().backward()
    size = tower.size(Unit(unit, 0, 1))
    flops = tower.flops * size.patches + tower.attention_flops * size.squares
    # Of pixels there are no gradients, and plain attention keeps what others compute again.
    assert 0.85 < counted.get_total_flops() / flops < 1.0 + 1e-9
    # An image of four times the patches takes more than twice as long, and a video less than as many patches at once.
    film = Unit({"pixel_values_videos": torch.zeros(256, 1), "video_grid_thw": torch.tensor([[4, 8, 8]])}, 0, 64)
    large, small = (Unit({"image_grid_thw": torch.tensor([[1, n, n]])}, 0, n * n // 4) for n in (16, 8))
    assert [tower.size(unit) for unit in (film, large, small)] == [(256, 16384), (256, 65536), (64, 4096)]
    assert price.us(tower.size(large)) >= price.us(tower.size(film)) > 2 * price.us(tower.size(small))
    table = analytic_cost_table(model_shape(source.plan, 32, 128), [ParallelScheme(1), ParallelScheme(1, 2)], 4096)
    found = TableFile(table, images=price._asdict())
    assert table_file_from_record(found.to_record(), "a table").images == price._asdict()
    assert price_of(source, found, 4) == price
    assert price_of(source, TableFile(table), 4).keep == tower.kept(4)
    memory = job_memory(source, table.schemes, 2, 1e9, torch.float32)
    text = sum(p.numel() for n, p in model.named_parameters() if not source.seam.of(n))
    tower_bytes = 4 * sum(p.numel() for n, p in model.named_parameters() if source.seam.of(n))
    assert memory.needs(ParallelScheme(1), 0).params >= 4 * text + tower_bytes
    first, last = memory.stages(ParallelScheme(1, 2))
    assert first.params - last.params > 0.5 * tower_bytes
    for cost in with_room(source, found, memory, 4).table.costs:
        kept = cost.tokens_beside(price.us(tower.size(large)))
        needs = memory.needs(cost.scheme, 0)
        assert kept * needs.per_token / needs.alive >= 0.9 * price.keep * 256
    assert (image_tokens(source, memory, ParallelScheme(1), 4) < memory.max_length(ParallelScheme(1))) is not frozen


def test_layers_in_which_tokens_of_an_image_see_each_other_are_found() -> None:
    assert subject("gemma3").seam.seen == Seen((), frozenset({"sliding_attention", "full_attention"}))
    assert subject("gemma4").seam.seen == Seen((), frozenset({"sliding_attention"}))
    assert subject("llava").seam.seen is None


def test_layers_of_a_text_are_told_from_as_many_of_an_encoder() -> None:
    vision = {**MODELS["qwen2_vl"][2]["vision_config"], "depth": 4}
    model = image_model("qwen2_vl", vision_config=vision)
    assert find_layers(model) == "model.language_model.layers"
    assert verdicts(subject_of(model), ["tp1", "pp2"]) == {"tp1": "", "pp2": ""}


def test_a_text_without_a_plan_of_its_own_is_cut_as_a_llama_is() -> None:
    model, layers = image_model("qwen3_vl"), "model.language_model.layers"
    rules = {one.name: one.rule for bucket in CausalLM(model).plan.buckets for one in bucket.params}
    names = "self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"
    assert [rules[f"{layers}.0.{name}.weight"].dim for name in names] == [0, 1, 0, 1]
    assert usual_plan(model, layers)[f"{layers}.*.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    norm: Any = model.get_submodule(f"{layers}.1.self_attn.q_norm")
    norm.weight = nn.Parameter(torch.ones(2 * len(norm.weight)))  # of all heads together
    assert usual_plan(model, layers) == {}
    other = image_model("qwen3_vl")
    other.get_submodule(f"{layers}.0.mlp").add_module("gate", nn.Linear(2, 2))
    assert usual_plan(other, layers) == {}


def test_looking_takes_no_random_number_of_the_scripts() -> None:
    model, before = image_model("llava"), torch.get_rng_state()
    subject_of(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_prompt_that_sees_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"PaliGemmaForConditionalGeneration .* before an answer see those behind"):
        subject("paligemma")


def test_an_encoder_that_draws_by_kernels_of_its_own_is_refused() -> None:
    model = image_model("internvl")
    model.config.vision_config.attention_dropout = 0.1
    seam = subject_of(model).seam
    assert (seam.draws, subject("llava").seam.draws) == (True, False)
    ImageText(model, seam, StageOptions())
    model.model.vision_tower.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ConfigError, match="attends by flash_attention_2, whose kernels draw for themselves"):
        ImageText(model, seam, StageOptions())


def test_an_encoders_draws_follow_from_its_image() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    mask = torch.rand(6, 6) < 0.7
    mask.fill_diagonal_(True)
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5

    def attended(image: int, rate: float) -> Tensor:
        with UnitDraws(image):
            return F.scaled_dot_product_attention(query, key, value, mask, rate, enable_gqa=True)

    with UnitDraws(7):
        plain = F.dropout(scores.masked_fill(~mask, -torch.inf).softmax(-1), 0.3) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(attended(7, 0.3), plain)
    torch.testing.assert_close(attended(7, 1e-12), attended(7, 0.0))
    assert not torch.equal(attended(7, 0.3), attended(8, 0.3))
    with UnitDraws(7), pytest.raises(ConfigError, match="would depend on which rank draws them"):
        F.alpha_dropout(query, training=True)


@pytest.mark.drawn
def test_images_whose_rows_are_no_share_of_their_patches_stay_together() -> None:
    """A row of HunYuan's ends each line of an image."""
    assert subject_of(default_model("hunyuan_vl")).seam.layout == "whole"


def test_a_small_copy_has_the_sections_of_its_models_axes() -> None:
    assert rotary_sections(1.0) == rotary_sections(1.0, (24, 20, 20)) == [2, 1, 1]
    assert rotary_sections(1.0, (22, 22, 20)) == [1, 1, 2]
    assert rotary_sections(1.0, (16, 16, 16, 16)) == [1, 1, 1, 1]


def test_a_model_without_an_encoder_is_refused() -> None:
    text = LlamaForCausalLM(image_model("llava").config.text_config)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM .* names no token that stands for images"):
        subject_of(text)


# --- Each fault is one that a comparison must see.
def _neighbours(self: Any, of: Any = content._Row._units) -> Iterator[Any]:
    units = list(of(self))
    turned = units[1:] + units[:1]
    yield from (one._replace(unit=one.unit._replace(columns=other.unit.columns))
                for one, other in zip(units, turned, strict=True))  # fmt: skip


def _neighbours_sound(model: Any, audio: Any, columns: Any, rows: int, of: Any = seam_module.clip_rows) -> Tensor:
    values = columns[audio.columns[0]]
    sound: Tensor = of(model, audio, {**columns, audio.columns[0]: values.roll(1, 0) + 0.1 * (len(values) == 1)}, rows)
    return sound


def _unmasked(model: Any, audio: Any, columns: Any, rows: int, of: Any = seam_module.clip_rows) -> Tensor:
    """Attention over padding, and as many rows as before."""
    with mock.patch.object(modeling_qwen2_audio, "create_bidirectional_mask", return_value=None):
        heard: Tensor = of(model, audio, columns, rows)
    return heard


def _turned(self: Any, tokens: Any, of: Any = content._Row._ids) -> Tensor:
    ids: Tensor = of(self, tokens)
    return ids.roll(1)


def _shifted(self: Any, of: Any = content._Row._positions) -> Tensor | None:
    positions = of(self)
    if positions is not None:
        positions[1] = positions[1].roll(1)  # by one and the same number, nothing would be another
    return positions


def _over_tp(ctx: Any, grad: Tensor, of: Any = stage._Everybodys.backward) -> Any:
    total = of(ctx, grad)[0].clone()
    dist.all_reduce(total, group=ctx.tp_group)
    return total, None


def _dealt_twice(units: Any, ranks: int, of: Any = content._dealt) -> Any:
    return (*of(units, ranks), *(one._replace(owner=(one.owner + 1) % ranks) for one in of(units, ranks)))


def _joined(marks: Any, offsets: Any, of: Any = content._runs) -> Any:
    return ((of(marks, offsets)[0][0], of(marks, offsets)[-1][1]),)


def _dropped(self: Any, shown: Any, of: Any = ImageStage._rows) -> Tensor:
    rows: Tensor = of(self, shown)
    return rows.detach()


def _of_next_rank(self: Any, unit: Any, rows: int, of: Any = SharedRows._begin) -> None:
    of(self, unit, rows)
    count = unit.stop - unit.start
    unit.start = (unit.start + count) % rows
    unit.stop = unit.start + count


def _counted_twice(x: Tensor, pack: Any, of: Any = stage._together) -> Tensor:
    whole = of(x, pack)
    return 2 * whole - whole.detach()


@contextmanager
def _one_stage_off(trial: ImageTrial) -> Iterator[None]:
    source = trial.source
    seam = source.seam
    source.seam = Seam(**{**vars(seam), "deepest": tuple(max(0, last - 1) for last in seam.deepest)})
    try:
        yield
    finally:
        source.seam = seam


def _patch(owner: Any, name: str, value: Any) -> Callable[[ImageTrial], AbstractContextManager[Any]]:
    return lambda _: mock.patch.object(owner, name, value)


MUTANTS = {
    "features of the neighbour's image": ("llava", "tp1", _patch(content._Row, "_units", _neighbours)),
    "tokens of an image see those before them alone": (
        "gemma3", "tp1", _patch(content, "_runs", lambda marks, offsets: ())),
    "images side by side are one": ("gemma3", "tp1", _patch(content, "_runs", _joined)),
    "a clip's neighbour is heard": ("qwen2_audio", "tp1", _patch(seam_module, "clip_rows", _neighbours_sound)),
    "a mask of frames is dropped": ("qwen2_audio", "tp1", _patch(seam_module, "clip_rows", _unmasked)),
    "rows of a clip are those of an image": ("qwen_omni", "tp1", _patch(content._Row, "_ids", _turned)),
    "rows of a video are those of an image": ("qwen2_vl", "tp1", _patch(content._Row, "_ids", _turned)),
    "features' gradient is dropped": ("llava", "tp1", _patch(ImageStage, "_rows", _dropped)),
    "an axis of positions is shifted": ("qwen2_vl", "tp1", _patch(content._Row, "_positions", _shifted)),
    "an image is encoded twice": ("llava", "tp2", _patch(content, "_dealt", _dealt_twice)),
    "features' gradient is summed over tensor parallel ranks": (
        "llava", "tp2", _patch(stage._Everybodys, "backward", staticmethod(_over_tp))),
    "rows of a shared image are the next rank's": ("qwen2_vl", SHARED, _patch(SharedRows, "_begin", _of_next_rank)),
    "gradients of a shared image count twice": ("qwen2_vl", SHARED, _patch(stage, "_together", _counted_twice)),
    "windows of a shared image see each other": (
        "qwen2_5_vl", SHARED, _patch(stage, "pairwise", lambda ends: [(0, ends[-1])])),
    "a deepstack leaf stops one stage before": ("qwen3_vl", "pp4", _one_stage_off),
}  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_shows(name: str) -> None:
    model, kind, broken = MUTANTS[name]
    trial = ImageTrial(subject(model))
    with broken(trial):
        assert trial.difference(kind)


def test_ranks_that_share_an_image_send_each_other_what_is_counted() -> None:
    """Two ways of two messages for each layer, of queries, keys and values and of what is made of them, and of one for
    each layer behind which rows come together."""
    trial, found = ImageTrial(subject("qwen3_vl")), list[tuple[int, int]]()
    images: list[int] = []
    begin, start = SharedRows._begin, AllToAll.start
    for kind in (SHARED, "sp2"):  # the text's messages are the same
        sent: list[int] = []

        def began(self: Any, unit: Any, rows: int) -> None:
            images.append(rows)
            begin(self, unit, rows)

        def started(self: Any, x: Tensor, *, back: bool = False, sent: list[int] = sent) -> Tensor:
            sent.append(x.numel())
            return start(self, x, back=back)

        with mock.patch.object(SharedRows, "_begin", began), mock.patch.object(AllToAll, "start", started):
            assert not trial.difference(kind)
        found.append((len(sent), sum(sent)))
    (messages, numbers), (of_text, numbers_of_text) = found
    width, layers, gathers, ranks = 32, 2, 2, 2
    assert trial.source.seam.cut == Cut("model.visual.blocks", frozenset({0}))
    assert len(images) >= 2 * ranks
    ways = 3 / 2  # a training and an evaluation
    assert messages - of_text == ways * (2 * layers + gathers) * len(images)
    assert numbers - numbers_of_text == ways * (4 * layers + ranks * gathers) * width * sum(images) / ranks
    source = ImageText(image_model("qwen3_vl", torch.float32), subject("qwen3_vl").seam, StageOptions())
    table = TableFile(analytic_cost_table(model_shape(source.plan, 32, 128), [ParallelScheme(2)], 4096))
    sharing = sharing_of(source, table, Tower.of(source), price_of(source, table, 4), 4)
    assert sharing is not None
    assert sharing.once == pytest.approx(1e-2 * 2 * (2 * layers + gathers)), "of 10 us each"
    # A small image is for one rank, and one of 4,096 patches would be shared.
    load = loads_by(source, table, 4)
    small, large = (load(Unit({"image_grid_thw": torch.tensor([[1, n, n]])}, 0, n * n // 4)) for n in (4, 2048))
    assert small.more == small.us
    assert large.shared_by(2) < 0.6 * large.us


def test_images_of_a_batch_go_to_the_sequences_that_have_their_placeholders() -> None:
    samples = [sample("qwen2_vl", (0, 1), 4, 1), sample("qwen2_vl", (), 4, 2), sample("qwen2_vl", (2,), 4, 3)]
    found = taken(batch_of("qwen2_vl", samples), subject("qwen2_vl").seam)
    assert [len(units) for units in found.units] == [2, 0, 1]
    for one, units in zip(samples, found.units, strict=True):
        for picture, unit in zip(one.pictures, units, strict=True):
            assert unit.rows == picture.rows
            assert torch.equal(unit.columns["pixel_values"], picture.columns["pixel_values"])
    assert not any("pixel_values" in item or "mm_token_type_ids" in item for item in found.items)
    behind = taken([batch_of("smolvlm", [sample("smolvlm", (0, 0), 4, 1), sample("smolvlm", (0,), 4, 2)])],
                   subject("smolvlm").seam)  # fmt: skip
    assert [len(units) for units in behind.units] == [2, 1]  # what is all zeros fills up
    with pytest.raises(ConfigError, match="no such videos"):
        taken(
            {**batch_of("llava", [sample("llava", (0,), 4, 1)]), "pixel_values_videos": torch.zeros(1)},
            subject("llava").seam,
        )


def test_videos_of_a_batch_stand_among_images() -> None:
    samples = [sample("qwen2_vl", (0, FILM, 1), 4, 1), sample("qwen2_vl", (FILM + 1,), 4, 2)]
    seam = subject("qwen2_vl").seam
    (one, film, other), (second,) = taken(batch_of("qwen2_vl", samples), seam).units
    assert [unit.first for unit in (one, film, other, second)] == [0, 4, 12, 0]
    assert torch.equal(film.columns["pixel_values_videos"], samples[0].pictures[1].columns["pixel_values_videos"])
    assert torch.equal(other.columns["pixel_values"], samples[0].pictures[2].columns["pixel_values"])
    beside = {**batch_of("qwen2_vl", samples), "second_per_grid_ts": [0.5, 1.0]}
    assert taken(beside, seam).units[1][0].columns["second_per_grid_ts"].tolist() == [1.0]
    ids = batch_of("qwen2_vl", samples[:1])["input_ids"].clone()
    ids[0, 4], ids[0, 13] = 121, 120  # an image's first token and a video's
    within = {**batch_of("qwen2_vl", samples[:1]), "input_ids": ids, "mm_token_type_ids": None}
    with pytest.raises(ConfigError, match="within one another"):
        taken(within, seam)


def test_patches_that_stand_side_by_side_are_cut_by_their_images() -> None:
    seam = replace(subject("qwen2_vl").seam, layout="strip", columns=("pixel_values", "target_sizes"))
    pixels = torch.randn(1, 3, 2, 2 * (8 + 16), dtype=torch.float64)
    ids = torch.tensor([[7, *[seam.token] * 2, 7, 7, 7], [*[seam.token] * 4, 7, 7]])
    batch = {"input_ids": ids, "pixel_values": pixels, "target_sizes": torch.tensor([[2, 4], [4, 4]])}
    (first,), (second,) = taken(batch, seam).units
    assert (first.rows, second.rows) == (2, 4)
    assert torch.equal(content.together([first.columns, second.columns], "strip")["pixel_values"], pixels)
    assert first.columns["pixel_values"].shape[-1] == 16
    assert second.columns["target_sizes"].tolist() == [[4, 4]]


def test_clips_of_a_batch_go_to_the_sequences_that_have_their_placeholders() -> None:
    samples = [sample("qwen3_asr", widths, 4, at) for at, widths in enumerate(((HEARD, HEARD + 2), (), (HEARD + 1,)))]
    seam = subject("qwen3_asr").seam
    batch = batch_of("qwen3_asr", samples)
    found = taken(batch, seam).units
    assert [[(unit.first, unit.rows) for unit in units] for units in found] == [[(0, 5), (5, 16)], [], [(0, 10)]]
    for unit, one in zip((*found[0], *found[2]), (*samples[0].pictures, *samples[2].pictures), strict=True):
        own = one.columns["input_features"]
        assert torch.equal(unit.columns["input_features"][..., : own.shape[-1]], own)
        assert int(unit.columns["input_features_mask"].sum()) == int(one.columns["input_features_mask"].sum())
    # Two windows of one recording, whose placeholders stand side by side.
    ids = torch.tensor([[7, *[AUDIO] * 26, 7], [7, *[AUDIO] * 13, *[7] * 14]])
    windows = {"input_features": torch.randn(3, 8, 100), "input_features_mask": torch.ones(3, 100)}
    halves = taken({"input_ids": ids, **windows}, seam).units
    assert [[(unit.first, unit.rows) for unit in units] for units in halves] == [[(0, 13), (13, 13)], [(0, 13)]]
    windows["input_features_mask"][1, 40:] = 0
    ids = torch.tensor([[7, *[AUDIO] * 18, 7], [7, *[AUDIO] * 13, *[7] * 6]])
    with pytest.raises(ConfigError, match="2 runs of tokens 124 stand for rows of audio, but there are 3 clips"):
        taken({"input_ids": ids, **windows}, seam)
    alone = taken([{"input_ids": ids[:1], **{name: column[:2] for name, column in windows.items()}}], seam).units
    assert [(unit.first, unit.rows, len(unit.columns["input_features"])) for unit in alone[0]] == [(0, 18, 2)]
    with pytest.raises(ConfigError, match=r"its images are trained, but no such videos or audio .its config names no"):
        taken({**batch_of("llava", [sample("llava", (0,), 4, 1)]), "input_features": torch.zeros(1)},
              replace(subject("llava").seam, unheard="its config names no token"))  # fmt: skip
    with pytest.raises(ConfigError, match="its clips are trained, but no images"):
        taken({**batch, "pixel_values_videos": torch.zeros(1)}, seam)


def test_a_norm_over_all_clips_of_a_batch_is_refused() -> None:
    model = image_model("qwen2_audio")
    projector = model.model.multi_modal_projector
    projector.linear = nn.Sequential(projector.linear, _Norm(WIDTH).double())
    with doubled(), pytest.raises(ConfigError, match=r"depends on the clips beside it: .*linear.1 takes its mean"):
        Listener(model.eval(), "Own")


class _Norm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def test_what_a_clip_takes_follows_from_what_its_encoder_sees() -> None:
    for name, tokens in (("qwen2_audio", [15, 15]), ("qwen3_asr", [5, 16])):
        source = ImageText(image_model(name), subject(name).seam, StageOptions())
        (units,) = taken(batch_of(name, [sample(name, (HEARD, HEARD + 2), 4, 1)]), source.seam).units
        tower = Tower.of(source)
        assert [tower.size(unit) for unit in units] == [(one, one * one) for one in tokens]
        assert (tower.width, tower.layers) == (WIDTH, 2)
        assert tower.flops > 0
        assert measured(source, torch.device("cpu"), torch.float64, seconds=0.5).b > 0
    source = ImageText(image_model("qwen_omni"), subject("qwen_omni").seam, StageOptions())
    weights = sum(p.numel() for p in source.template.model.audio_tower.parameters() if p.dim() > 1 and p.requires_grad)
    assert Tower.of(source, clips=True).flops == 6.0 * weights


# Of the table that `python -m tools.image_classes` prints: model types, and how its line begins.
TABLE = {
    "llava": "equal: tp1",
    "smolvlm": "equal: tp1",
    "llava_next": "equal: tp1",
    "aria": "equal: tp1",
    "lfm2_vl": "equal: tp1",
    "minicpm_ocr": "equal: tp1",
    "gemma3": "equal: tp1",
    "voxtral": "equal: tp1; audio",
    "musicflamingo": "refused: what its encoder makes of a clip depends",
    "granite_speech": "refused: in training what its encoder makes of a clip depends on the clips beside it: ",
    "paligemma": "refused: tokens before an answer see those behind them",
    "git": "refused: its config names no token",
    "florence2": "refused: ",
}


@pytest.mark.drawn
def test_a_projector_that_runs_in_the_texts_forward_is_counted_once_over_tensor_parallel_ranks() -> None:
    assert verdict_of("llama4", ("tp2",)) == "equal: tp2"


@pytest.mark.drawn
@pytest.mark.parametrize("kind", TABLE)
def test_a_class_is_equal_or_refused_with_its_reason(kind: str) -> None:
    assert verdict_of(kind, ("tp1",)).startswith(TABLE[kind])


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("shape", "heads", "hops"),
    [("tp2sp2", 4, (2, 2)), ("tp2sp2", 3, (2,)), ("tp4sp2", 2, (2, 4)), ("tp2sp3", 4, (2, 3))],
)
def test_ranks_share_an_image_whatever_its_heads(shape: str, heads: int, hops: tuple[int, ...]) -> None:
    """In two hops; in one, where neither hop divides the heads; by sequence parallel ranks first, where they do; and by
    rows of queries where the ranks of the second hop do not."""
    of_class = MODELS["qwen2_vl"][2]
    vision, text = (
        {**of_class["vision_config"], "num_heads": heads},
        {**of_class["text_config"], "num_key_value_heads": 4},
    )
    vision["embed_dim"] = 8 * heads
    trial, found = ImageTrial(subject_of(image_model("qwen2_vl", vision_config=vision, text_config=text))), set()
    source, begin = trial.source, SharedRows._begin
    assert source.seam.cut is not None
    source.seam = replace(source.seam, cut=source.seam.cut._replace(heads=heads))

    def began(self: Any, unit: Any, rows: int) -> None:
        begin(self, unit, rows)
        found.add(tuple(pack.sp for pack in unit.packs))

    pipeline = uneven_pipeline(PipelineShape.parse(shape), source.plan.num_layers)
    with mock.patch.object(SharedRows, "_begin", began):
        assert not trial._compared(run_pipeline(source, pipeline, trial._made(shared=True)))
    assert found == {hops}


@pytest.mark.drawn
def test_encoders_that_attend_by_kernels_of_devices_are_shared_where_torchs_own_attention_is_told_as_much() -> None:
    """Gemma 4 tells FlashAttention where an image ends by a mask of another shape."""
    found = {name: verdicts(subject(name), (SHARED,), "flash_attention_2")[SHARED] for name in ("qwen2_5_vl", "gemma4")}
    assert not found["qwen2_5_vl"]
    assert "must match the size" in found["gemma4"]
