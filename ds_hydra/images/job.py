"""A job that trains images: its source of stages, what of it a small copy proves, and how its sequences come."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_hydra.costs.loads import Load, first_ranks
from ds_hydra.data.tokens import TokenSequence
from ds_hydra.images.content import Images, Unit, is_clip
from ds_hydra.images.exchange import ImageExchange
from ds_hydra.images.find import ImageSubject, Sample, rows_of_one, subject_of
from ds_hydra.images.load import heads_of, image_tokens, measured, price_of, with_room
from ds_hydra.images.seam import Ear, Seam, numbered
from ds_hydra.images.small import small_model
from ds_hydra.images.stage import PLAIN, SHARED, ImageStage
from ds_hydra.pipe.attention import interface as attention
from ds_hydra.pipe.attention.interface import let_attend_alone
from ds_hydra.pipe.model_plan import ModelPlan, ParamSpec, ShardRule
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.flow import Flow
from ds_hydra.pipe.models.refusals import failing
from ds_hydra.pipe.models.token_rules import without
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage import StageModule, StagePlace
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.plan.step_plan import MicroBatchPlan
from ds_hydra.profiling.stage_timer import hollow_model
from ds_hydra.self_check.runs import Data, Outcome, compare, doubled, run_pipeline
from ds_hydra.self_check.schemes import uneven_pipeline
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.config.hydra_block import HydraConfig
    from ds_hydra.pipe.loss import TokenLoss
    from ds_hydra.pipe.models.causal_lm import ModelFacts
    from ds_hydra.pipe.shape import StrategyShape
    from ds_hydra.ranks.channel import Channel


_WHY = "rows of images stand at whole rows of tokens"
_SEEN = "tokens of an image see each other, which a slice would cut"


class ImageText(CausalLM):
    """A `CausalLM` whose tokens may stand for rows of images [Note: rows of images]."""

    def __init__(self, model: Any, seam: Seam, options: StageOptions, **given: Any):
        """`seam` is what was found of it; other arguments as of `CausalLM`. ConfigError for what is not trained."""
        self.seam = seam
        self.subject: Any = None  # the small copy that it was found on, until stages of it are compared
        self.ear: Ear | None = None  # by which rows of clips are counted before a step
        self._refused: Mapping[str, str] = {}
        dropouts = [n for n, m in model.named_modules() if seam.of(n) and isinstance(m, nn.Dropout) and m.p > 0]
        self.draws_images = seam.draws or bool(dropouts)  # an adapter's, too
        inside = tuple(f"{name.rpartition('.')[0]}." for name in seam.inside)
        if any(name.startswith(inside) for name in dropouts):
            raise ConfigError(
                f"hydra.images: {dropouts[0]} of {type(model).__name__} drops out of rows of images within the text's "
                "forward: set its rate to 0"
            )
        self.attends = {root: name for root in seam.roots if (name := _attention_of(model, root))}
        super().__init__(model, replace(options, token_sharding=False), **given)
        if self.boxes and not self.boxes.packed:
            raise ConfigError(
                f"{self.name} has modules in which tokens meet otherwise than by Hugging Face's attention interface "
                f"({self.boxes.told(self.layers_path)}): images are not trained with them; leave hydra.images out to "
                "train its text alone"
            )
        if seam.draws and (fused := set(self.attends.values()) - {"sdpa", "eager"}):
            raise ConfigError(
                f"hydra.images: the encoder of {self.name} drops out, and attends by {', '.join(sorted(fused))}, "
                'whose kernels draw for themselves: load it with attn_implementation="sdpa", or set its dropout to 0'
            )
        for root, name in self.attends.items():
            attention.let_attend_alone(self.template.get_submodule(root), name)

    def _plan(self) -> None:
        """As for the text; what is used for images alone is held whole by the ranks of the first stage, and each of
        them has a part of its gradient [Note: where images are encoded]."""
        own = frozenset(name for name in self.aliases.values() if self.seam.of(name))
        self.flow = _with_encoder(self.flow, own)
        self._published_plan = without(self._published_plan, self.seam.roots)
        super()._plan()
        # What runs in the text's forward has the same gradient on tensor parallel ranks, as a norm of the text has.
        parts = own - self.seam.inside
        self.specs = {name: _partial(spec) if name in parts else spec for name, spec in self.specs.items()}
        self.plan = _planned(self.plan, self.specs, own, self._refused, seen=self.seam.seen is not None)

    def refusing(self, verdicts: Mapping[str, str], unheard: str = "") -> ImageText:
        """The same model, which is not trained under the kinds of pipelines of which `verdicts` have a difference, nor
        are its images shared among ranks if there is one of that, nor its clips if it says why they are `unheard`."""
        other = copy.copy(self)
        if unheard:
            other.seam = other.seam.deaf(self.specs, unheard)
        if verdicts.get(SHARED):
            other.seam = replace(other.seam, cut=None)
        other._refused = verdicts
        other._plan()
        return other

    def learning(self, *, images: bool, clips: bool) -> frozenset[str]:
        """Parameters of encoders that have a gradient in a step, by what it has."""
        if not images and not clips:
            return frozenset()
        # Adapters of a layer that is not read are not either.
        unread = tuple(name.removesuffix("weight") for name in self.seam.silent if name.endswith(".weight"))
        idle = [root for has, roots in zip((images, clips), self.seam.only, strict=True) if not has for root in roots]
        unread += tuple(f"{root}." for root in idle)
        own = (name for name in self.specs if self.seam.of(name) and not name.startswith(unread))
        return frozenset(own) - self.seam.silent - set(idle)

    def build(self, place: StagePlace, device: torch.device, dtype: torch.dtype) -> StageModule:
        """One rank's share of a stage, on the meta device but for its buffers."""
        return ImageStage(self, place, device, dtype)

    def beside(self, layer: int) -> int:
        """Features of rows that reach a layer with its hidden states: of the leaves from the first that enters it or
        one behind it."""
        widths, deepest = self.seam.widths, self.seam.deepest
        first = next((leaf for leaf, last in enumerate(deepest) if last >= max(1, layer)), len(widths))
        return sum(widths[first:]) if 0 < layer < self.plan.num_layers else 0

    def width(self, layer: int) -> int:
        """Features that enter a layer: of its hidden states, and of rows of images beside them."""
        return super().width(layer) + self.beside(layer)


def _with_encoder(flow: Flow, own: Collection[str]) -> Flow:
    """A flow traced without images, with the encoder before the first layer. Its gradients are never put off: what a
    micro-batch's images keep goes with its backward."""
    readers = {**flow.readers, **{name: frozenset[str]() for name in own if name not in flow.readers}}
    return replace(flow, first=flow.first | frozenset(own), last=flow.last - frozenset(own), readers=readers,
                   unread=flow.unread | frozenset(own))  # fmt: skip


def _partial(spec: ParamSpec) -> ParamSpec:
    return replace(spec, rule=ShardRule(gradient="partial"))


def _planned(
    plan: ModelPlan, specs: Mapping[str, ParamSpec], own: Collection[str], refused: Mapping[str, str], *, seen: bool
) -> ModelPlan:
    buckets = tuple(replace(b, params=tuple(specs[param.name] for param in b.params)) for b in plan.buckets)
    told = "with images a small copy is not equal under {}: {}; use strategies without it, or leave hydra.images out"
    why = {kind: told.format(kind, text) for kind, text in refused.items() if text}
    return replace(
        plan, buckets=buckets, last=plan.last - frozenset(own), no_token_sharding=_WHY,
        no_tp=plan.no_tp or why.get("tp2", ""), no_pp=plan.no_pp or why.get("pp2", ""),
        no_slices=plan.no_slices or (_SEEN if seen else why.get("slices", "")),
    )  # fmt: skip


def _attention_of(model: Any, root: str) -> str:
    """By what a part of the user's model attends; empty: it is no module, or says nothing."""
    try:
        part = model.get_submodule(root)
    except AttributeError:
        return ""
    configs: list[Any] = [getattr(module, "config", None) for module in part.modules()]
    names = [config._attn_implementation for config in configs if hasattr(config, "_attn_implementation")]
    return next(filter(None, names), "eager" if names else "")  # of a config that says nothing models take "eager"


SLICES = "slices"
KINDS = ("tp1", "tp2", "sp2", "pp2", SLICES)


@dataclass(frozen=True)
class WithImages(Data):
    """Sequences with images."""

    images: tuple[Images, ...] = ()

    def load(self, sequence: int) -> TokenSequence:
        """Tokens, next tokens and images."""
        return super().load(sequence)._replace(images=self.images[sequence])


class _Still(ImageText):
    """Whose stages drop nothing out: what is drawn is found, and tried of the text alone, elsewhere."""

    def skeleton(self, device: torch.device, dtype: torch.dtype) -> Any:
        return super().skeleton(device, dtype).eval()


class ImageTrial:
    """The stages of a subject's small model. ConfigError where there are none."""

    def __init__(self, subject: ImageSubject):
        self._subject = subject
        with doubled():
            self.source = _Still(subject.model, subject.seam, StageOptions())
        self._data = self._made()

    def attend_by(self, name: str) -> None:
        """Let the encoder attend by what has this name, from now on: none but shared images can be tried by one that
        needs a device."""
        for root in self.source.attends:
            let_attend_alone(self.source.template.get_submodule(root), name)

    def _made(self, *, shared: bool = False) -> WithImages:
        samples = self._subject.samples
        tokens = tuple(sample.tokens.numpy() for sample in samples)
        lengths = [len(one) for one in tokens]
        packs = tuple(MicroBatchPlan.of_whole(pack, lengths) for pack in ([0, 2], [1, *range(3, len(samples))]))
        return WithImages(tokens, packs, tuple(self._images(one, shared) for one in samples))

    def _images(self, sample: Sample, shared: bool) -> Images:
        subject, seam = self._subject, self._subject.seam
        if not sample.units:
            return seam.images()
        pixels = subject.pixels(sample)
        starts = accumulate(sample.rows, initial=0)
        units = tuple(Unit(*one) for one in zip(sample.units, starts, sample.rows, strict=False))
        if seam.layout == "whole":
            units = (Unit(pixels, 0, sum(sample.rows)),)
        # Shared ones cost nothing to share, and each takes more than all before it together.
        first = self._number(sample)
        units = tuple(
            unit._replace(
                load=Load(10.0 ** (first + i), 0.0) if shared and not is_clip(unit.columns) else Load.whole(unit.rows)
            )
            for i, unit in enumerate(units)
        )
        return seam.images(units, numbered(subject.model, seam, sample.tokens, pixels))

    def _number(self, sample: Sample) -> int:
        """Images before those of a sample."""
        samples = self._subject.samples
        return sum(len(one.units) for one in samples[: next(i for i, one in enumerate(samples) if one is sample)])

    def refused(self, kind: str) -> str:
        """Why there are no pipelines of a kind; empty: there are."""
        plan = self.source.plan
        return {"tp2": plan.no_tp, "pp2": plan.no_pp, SLICES: plan.no_slices}.get(kind, "")

    def difference(self, kind: str) -> str:
        """How a kind of pipeline is off the model's own forward, in a clause; empty: it is equal."""
        shape = PipelineShape.parse({SLICES: "tp1", SHARED: "sp2"}.get(kind, kind))
        data = self._data.in_slices() if kind == SLICES else self._made(shared=True) if kind == SHARED else self._data
        try:
            return self._compared(run_pipeline(self.source, uneven_pipeline(shape, self.source.plan.num_layers), data))
        except Exception as error:
            return f"its run ends with {failing(error)[:200]}"

    def _compared(self, found: Outcome) -> str:
        missing = {name: torch.zeros_like(gradient) for name, gradient in found.gradients.items()}
        right = Outcome(self._subject.loss, found.eval_loss, missing | self._subject.gradients)
        return compare(right, replace(found, exact=True)).what or ""


def verdicts(subject: ImageSubject, kinds: Sequence[str] = KINDS, attends: str = "") -> dict[str, str]:
    """For each kind of pipeline, why it is not trained with images, or how it is off; empty: it is equal. `attends`: by
    what an encoder does that runs on devices alone."""
    try:
        trial = ImageTrial(subject)
    except ConfigError as error:
        return dict.fromkeys(kinds, str(error))
    found = {kind: trial.refused(kind) or trial.difference(kind) for kind in kinds if kind != SHARED}
    if SHARED in kinds:
        if attends:
            trial.attend_by(attends)
        found[SHARED] = trial.difference(SHARED)
    return found


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


def _tried(subject: ImageSubject, config: HydraConfig, source: ImageText) -> tuple[dict[str, str], str]:
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
