"""A language model with an encoder of images as a source of stages: the text as ever, and the encoder on the first."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_hydra.images.audio import Ear
from ds_hydra.images.seam import Seam
from ds_hydra.images.shared import SHARED
from ds_hydra.images.stage import ImageStage
from ds_hydra.pipe.attention import interface as attention
from ds_hydra.pipe.model_plan import ModelPlan, ParamSpec, ShardRule
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.flow import Flow
from ds_hydra.pipe.models.token_rules import without
from ds_hydra.pipe.stage import StageModule, StagePlace
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.zero_hetero.errors import ConfigError

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
