"""What the engine asks for where a job trains images: a source of stages, what of it is proven, how sequences come."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ds_hydra.costs.loads import first_ranks
from ds_hydra.images.audio import Ear
from ds_hydra.images.exchange import ImageExchange
from ds_hydra.images.find import Subject, rows_of_one, subject_of
from ds_hydra.images.load import heads_of, image_tokens, price_of, with_room
from ds_hydra.images.measure import measured
from ds_hydra.images.shared import PLAIN, SHARED
from ds_hydra.images.small import small_model
from ds_hydra.images.source import ImageText
from ds_hydra.images.trial import KINDS, SLICES, verdicts
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.profiling.stage_timer import hollow_model
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.config.hydra_block import HydraConfig
    from ds_hydra.pipe.loss import TokenLoss
    from ds_hydra.pipe.models.facts import ModelFacts
    from ds_hydra.pipe.shape import StrategyShape
    from ds_hydra.pipe.stage_options import StageOptions
    from ds_hydra.ranks.channel import Channel

logger = logging.getLogger(__name__)

__all__ = ["ImageExchange", "hollow", "image_tokens", "measured", "price_of", "proven", "source_of", "with_room"]


def source_of(
    model: Any, options: StageOptions, *, loss_fn: TokenLoss | None = None, facts: ModelFacts | None = None,
    shapes: Iterable[StrategyShape] = (), computed_in: torch.dtype = torch.float32,
) -> ImageText:  # fmt: skip
    """As `model_source`, of a model with an encoder of images. ConfigError for a class whose images are not trained."""
    base = base_of(model)
    if any(stage.ep > 1 for shape in shapes for pipeline in shape.pipelines for stage in pipeline.stages):
        raise ConfigError("hydra.images: whole experts are not spread over ranks (ep) beside images: list no ep")
    subject = subject_of(base)
    seam = subject.seam
    if seam.layout not in ("grid", "padded", "strip"):
        seam = replace(seam, per_row=rows_of_one(base, seam))
    if seam.cut is not None:
        seam = replace(seam, cut=seam.cut._replace(heads=heads_of(base.config)))
    source = ImageText(base, seam, options, token_loss=loss_fn, facts=facts, computed_in=computed_in)
    source.subject = subject
    if seam.audio is not None:
        try:
            source.ear = Ear(small_model(base, long=True), seam.audio)
        except ConfigError as error:
            logger.debug("rows of clips are not counted before a step: %s", error)
    return source


def hollow(path: str, options: StageOptions, shapes: Iterable[StrategyShape] = ()) -> ImageText:
    """The same of a config file or checkpoint folder, fit for timing and counting. ConfigError as `source_of`."""
    return source_of(hollow_model(path, "AutoModelForImageTextToText"), options, shapes=shapes)


def proven(source: ImageText, config: HydraConfig, channel: Channel) -> ImageText:
    """The source, without the kinds of pipelines under which a small copy with images is not equal to its own forward,
    and without audio where it is equal with images alone. Every rank must call it: rank 0 tries. ConfigError on all of
    them where no kind is."""
    subject, source.subject = source.subject, None
    if config.self_check == "off":
        source.ear = None
        return source
    text = channel.tell(
        json.dumps(_tried(subject, config, source)) if channel.rank == 0 and subject is not None else None
    )
    found, unheard = json.loads(text)
    if why := _unequal(found):
        of = "clips" if source.seam.clips_alone else "images"
        raise ConfigError(
            f"hydra.images: {of} of {source.name} are not trained: {why}; leave hydra.images out to train "
            "its text alone"
        )
    if channel.rank == 0:
        equal = ", ".join(kind for kind, why in found.items() if not why)
        other = "".join(f"; not under {kind}: {why}" for kind, why in found.items() if why)
        logger.info("images: a small copy trains as by its own forward, to 1e-9, under %s%s", equal, other)
        if without := unheard or source.seam.unheard:
            logger.warning("images: clips of %s are not trained, its images are: %s", source.name, without)
    return source.refusing(found, unheard)


def _unequal(found: Mapping[str, str]) -> str:
    """Why nothing is trained, of verdicts by kind; empty: something is."""
    kinds = (kind for kind in ("tp1", "sp2") if found.get(kind))
    return next((f"under {kind} a small copy is not equal to its own forward ({found[kind]})" for kind in kinds), "")


def _tried(subject: Subject, config: HydraConfig, source: ImageText) -> tuple[dict[str, str], str]:
    """What the job's strategies are made of, tried with images; all kinds where none are listed. And why clips are left
    out, where it is equal without them alone."""
    kinds = [kind for kind in (*KINDS, SHARED) if config.chunks != "off" or kind != SLICES]
    stages = [stage for shape in config.shapes for pipeline in shape.pipelines for stage in pipeline.stages]
    if stages:
        uses = {"tp2": any(stage.tp > 1 for stage in stages), "sp2": any(stage.sp > 1 for stage in stages),
                SHARED: any(first_ranks(pipeline) > 1 for shape in config.shapes for pipeline in shape.pipelines),
                "pp2": any(len(p.stages) > 1 for shape in config.shapes for p in shape.pipelines)}  # fmt: skip
        kinds = [kind for kind in kinds if uses.get(kind, True)]
    attends = next((name for name in source.attends.values() if name not in PLAIN), "")
    found, seam = verdicts(subject, kinds, attends), subject.seam
    why = _unequal(found)
    if not why or seam.audio is None or seam.clips_alone:
        return found, ""
    subject.deaf(f"with clips, {why}")
    return verdicts(subject, kinds, attends), subject.seam.unheard
