"""The seam of a model [Note: the seam], found on a small copy of it.

Every refusal says which class, what was tried and what came out, and what to do.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.images.content import CLIP, Columns, columns_of, is_clip, patches_of, together
from ds_hydra.images.seam import (
    COUNT,
    ENCODE,
    ENCODE_VIDEO,
    FORMS,
    GIVEN,
    VIDEO,
    Audio,
    Entry,
    Seam,
    arguments,
    clip_rows,
    count_of,
    encoded,
    encoder_of,
    entry_of,
    leaves_of,
    numbered,
    with_tokens,
)
from ds_hydra.images.small import Maker, clip_columns, clips, makers, placeholder, small_model
from ds_hydra.images.stage import UnitDraws, cut_of
from ds_hydra.pipe.attention.interface import layer_type
from ds_hydra.pipe.models.meta_copy import copy_to_meta
from ds_hydra.pipe.models.refusals import failing, find_layers
from ds_hydra.pipe.rows import Seen
from ds_hydra.self_check.runs import doubled
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

NEAR = 1e-9  # relative to the largest entry, in FP64
_REMEDY = "leave hydra.images out to train its text alone"
_TOLD = 200  # characters of an error
_WORDS = 96  # ids of the tokens that are made up are below it


class Sample(NamedTuple):
    """A made-up sequence with its images, and how many rows each of them has."""

    tokens: Tensor  # (tokens,)
    units: tuple[Columns, ...]
    rows: tuple[int, ...]


class ImageSubject:
    """A small model and made-up sequences, of two images, of one and of none; `seam` is what was found of it."""

    def __init__(self, model: Any, name: str):
        self.model, self.name, self.token = model, name, self._placeholder(model, name)
        self.video: int | None = None  # id of the placeholders of videos, where those are trained
        self.owner, self._encode = self._encoder()
        self.maker, self.samples = self._sampled()
        seam = self._formed()
        leaves = self._leaves(self.samples[0])
        seam = replace(seam, seen=self._seen(seam, leaves), deepest=self._deepest(seam, leaves), draws=self._draws())
        seam = self._heard(self._filmed(seam))
        self.loss, self.gradients = self._learnt(self.samples)
        self.seam = self._rooted(seam)

    kind, of = "images", "images"

    def refusal(self, what: str) -> ConfigError:
        """An error for this class."""
        return ConfigError(f"hydra.images: {self.of} of {self.name} are not trained: {what}; {_REMEDY}")

    def _placeholder(self, model: Any, name: str) -> int:
        self.name, token = name, placeholder(model.config, self.kind)
        if token is None:
            raise self.refusal("its config names no token that stands for images or audio")
        return token

    def _encoder(self) -> tuple[str, Callable[..., Any]]:
        found = encoder_of(self.model)
        if found is None:
            raise self.refusal(f"it has no {ENCODE}, by which an encoder is called apart from the text")
        if GIVEN not in arguments(type(self.model).forward):
            raise self.refusal(f"its forward has no argument {GIVEN}, by which rows of images take the place of pixels")
        return found

    def _sampled(self) -> tuple[Maker, tuple[Sample, ...]]:
        tried, taken = list[str](), arguments(self._encode)
        for maker in makers(self.model.config, taken):
            torch.manual_seed(1)
            one, other, third = maker.make(0), maker.make(1), maker.make(0)
            if any(one[key].shape[1:] != other[key].shape[1:] for key in one):
                other = maker.make(0)  # those of one call have one size
            try:
                with torch.no_grad():
                    alone = [self._rows([unit], maker) for unit in (one, other, third)]
                    both = self._rows([one, other], maker)
            except Exception as error:
                tried.append(failing(error)[:_TOLD])
                continue
            for parts, whole in zip(zip(*alone[:2], strict=True), both, strict=True):
                if not apart(torch.cat(parts), whole) < NEAR:
                    raise self.refusal("what its encoder makes of an image depends on the images beside it")
            counts = [len(leaves[0]) for leaves in alone]
            of_each = (((one, other), counts[:2]), ((third,), counts[2:]), ((), ()))
            samples = (Sample(self._tokens(rows, i), units, tuple(rows)) for i, (units, rows) in enumerate(of_each))
            return maker, tuple(samples)
        raise self.refusal(f"no image was found that its {ENCODE}({', '.join(taken)}) takes ({tried[0]})")

    def _rows(self, units: Sequence[Columns], maker: Maker) -> list[Tensor]:
        return leaves_of(self._encode(**together(units, maker.layout), return_dict=True))

    def _leaves(self, sample: Sample) -> list[Tensor]:
        with torch.no_grad():
            return self._rows(sample.units, self.maker)

    def _tokens(self, counts: Sequence[int], seed: int) -> Tensor:
        draw, words = np.random.default_rng(seed), self._words()

        def plain(count: int) -> list[int]:
            return [words[at] for at in draw.integers(0, len(words), count)]

        tokens = plain(5)
        for count in counts:
            tokens += [self.token] * count + plain(3)
        return torch.tensor(tokens + plain(6))

    def _words(self) -> list[int]:
        """Ids of tokens that no config says are more than words."""
        config = self.model.config
        special = {value for part in (config, config.get_text_config()) for key, value in vars(part).items()
                   if isinstance(value, int) and key.endswith(("token_id", "token_index", "patch_id"))}  # fmt: skip
        most = min(self.model.get_input_embeddings().weight.shape[0], _WORDS)
        return [token for token in range(8, most) if token not in special]

    def pixels(self, sample: Sample) -> dict[str, Tensor]:
        """What a processor makes of a sample's images."""
        return columns_of(sample.units, self.maker.layout)

    def logits(self, sample: Sample, **beside: Any) -> Tensor:
        """Of the model's own forward, (tokens, words)."""
        for module in self.model.modules():
            if "rope_deltas" in vars(module):  # stays from one call to the next
                module.rope_deltas = None
        marks = torch.eq(sample.tokens, self.token).long()[None]
        if self.video is not None:
            marks = marks + 2 * torch.eq(sample.tokens, self.video).long()
        known = {"attention_mask": torch.ones_like(marks), "mm_token_type_ids": marks, "token_type_ids": marks}
        names = inspect.signature(type(self.model).forward).parameters
        given = {key: value for key, value in known.items() if key in names}
        out: Tensor = self.model(input_ids=sample.tokens[None], use_cache=False, **given, **beside).logits
        return out[0]

    def _formed(self) -> Seam:
        """The seam as far as the forward's first layer: which form of rows it takes for the pixels' own logits."""
        sample, leaves = self.samples[0], self._leaves(self.samples[0])
        with torch.no_grad():
            out = self._encode(**self.pixels(sample), return_dict=True)
            right = self.logits(sample, **self.pixels(sample))
        if any(len(leaf) != sum(sample.rows) for leaf in leaves):
            raise self.refusal("its encoder makes other numbers of rows for the embeddings and for the layers behind")
        layout, per_row = self._told()
        axes = self._counted(sample)
        widths = tuple(leaf.shape[-1] for leaf in leaves)
        seam = Seam(
            self.owner, arguments(self._encode), layout, per_row, self.token, "",
            type(out), widths, (), 1 if axes is None else axes.shape[0], (), frozenset(),
        )  # fmt: skip
        tried = list[str]()
        for form in FORMS:
            seam = replace(seam, form=form)
            try:
                with torch.no_grad():
                    found = self._with_rows(seam, leaves)
            except ConfigError:
                raise
            except Exception as error:
                tried.append(failing(error)[:_TOLD])
                continue
            if apart(found, right) < NEAR:
                return seam
            tried.append(f"logits are {apart(found, right):.0e} of the largest off")
        raise self.refusal(f"its forward does not take rows in place of pixels ({tried[0]})")

    def _told(self) -> tuple[str, int]:
        """By which layout images are told from one another, and of how many patches a row is. Where rows are not of
        as many patches each, they cannot be told."""
        layout, sample = self.maker.layout, self.samples[0]
        patches = [patches_of(unit, layout)[0] for unit in sample.units]
        per_row = patches[0] // sample.rows[0]
        even = all(each == per_row * rows for each, rows in zip(patches, sample.rows, strict=True))
        return (layout, per_row) if even else ("whole", 0)

    def _filmed(self, seam: Seam) -> Seam:
        """With videos, where an encoder takes them as it takes images, and its forward their rows."""
        token, encode = getattr(self.model.config, "video_token_id", None), None
        if seam.layout == "grid" and seam.seen is None and isinstance(token, int):
            encode = getattr(self.model.get_submodule(self.owner), ENCODE_VIDEO, None)
        if encode is None or not set(VIDEO) <= set(arguments(encode)):
            return seam
        self.video, filmed = token, replace(seam, video=token)
        for parted in (False, True):
            try:
                with torch.no_grad():
                    sample = self._film(filmed, parted=parted)
                    each = [encoded(self.model, filmed, unit) for unit in sample.units]
                    found = self._with_rows(filmed, [torch.cat(parts) for parts in zip(*each, strict=True)], sample)
                    right = self.logits(sample, **self.pixels(sample))
            except Exception as error:
                logger.debug("videos are not trained: %s", failing(error))
                continue
            if apart(found, right) < NEAR:
                self.samples = (*self.samples, sample)
                return filmed
        self.video = None
        return seam

    def _heard(self, seam: Seam) -> Seam:
        """With clips, beside images, where the model has an encoder of them, too; else with the reason why not."""
        if seam.audio is not None or placeholder(self.model.config, Listener.kind) is None:
            return seam
        try:
            listener = Listener(self.model, self.name)
            found_draws = seam.draws or listener.seam.draws
            heard, clip = replace(seam, audio=listener.seam.audio, draws=found_draws), listener.samples[1]
            image = self.samples[1]
            tokens = torch.cat((image.tokens, clip.tokens))
            sample = Sample(tokens, image.units + clip.units, image.rows + clip.rows)
            leaves = list(self._leaves(image))
            leaves[0] = torch.cat((leaves[0], listener._leaves(clip)[0]))
            leaves[1:] = [F.pad(leaf, (0, 0, 0, clip.rows[0])) for leaf in leaves[1:]]
            with torch.no_grad():
                found, right = self._with_rows(heard, leaves, sample), self.logits(sample, **self.pixels(sample))
            if not apart(found, right) < NEAR:
                raise self.refusal("beside images, rows in place of clips are another thing")
            self._learnt((sample, clip))
        except Exception as error:
            why = str(error).partition(" are not trained: ")[2].removesuffix(f"; {_REMEDY}") or failing(error)[:_TOLD]
            return replace(seam, unheard=why)
        self.samples = (*self.samples, sample, clip)
        return heard

    def deaf(self, why: str) -> None:
        """From now on there are no clips, which are not trained for this reason."""
        self.samples = tuple(one for one in self.samples if not any(map(is_clip, one.units)))
        with doubled():
            self.loss, self.gradients = self._learnt(self.samples)
        self.seam = self.seam.deaf((name for name, _ in self.model.named_parameters()), why)

    def _film(self, seam: Seam, *, parted: bool) -> Sample:
        """A sequence of an image and a video of two frames, whose placeholders stand together or frame by frame."""
        assert seam.video is not None
        image, frames = self.maker.make(0), [self.maker.make(1) for _ in range(2)]
        grid = next(frames[0][name] for name in frames[0] if name.endswith("hw")) * torch.tensor([2, 1, 1])
        pixels = torch.cat([frame["pixel_values"] for frame in frames])
        units: tuple[Columns, ...] = (image, dict(zip(VIDEO, (pixels, grid), strict=True)))
        rows = [len(encoded(self.model, seam, unit)[0]) for unit in units]
        plain = self._words()
        words = [plain[at] for at in np.random.default_rng(7).integers(0, len(plain), 12)]
        frame = [seam.video] * (rows[1] // 2)
        between = words[:1] if parted else []
        tokens = [*words[1:4], *[self.token] * rows[0], *words[4:6], *frame, *between, *frame, *words[6:]]
        return Sample(torch.tensor(tokens), units, tuple(rows))

    def _with_rows(self, seam: Seam, leaves: Sequence[Tensor], sample: Sample | None = None) -> Tensor:
        """A sample's logits, of the first one's, by rows in place of pixels, and by positions as stages are given
        them."""
        sample = sample or self.samples[0]
        places = torch.from_numpy(seam.images().marks(sample.tokens.numpy())).nonzero().flatten()
        ids = sample.tokens[places]
        if seam.audio is None:
            return self._numbered(seam, seam.given(leaves, ids), sample)
        entry = Entry(self.model, seam.audio)
        try:
            if (found := seam.clips(leaves, ids)) is not None:
                entry.places, entry.rows = places[found[0]], found[1]
            return self._numbered(seam, seam.given(leaves, ids), sample)
        finally:
            entry.close()

    def _numbered(self, seam: Seam, given: Mapping[str, Any], sample: Sample) -> Tensor:
        positions = numbered(self.model, seam, sample.tokens, self.pixels(sample))
        if positions is not None:
            own = self._counted(sample)
            if own is None or not torch.equal(own[:, 0], positions):
                raise self.refusal(f"its text is numbered on {seam.axes} axes in a way that is not its {COUNT}")
            return self.logits(sample, **given, position_ids=positions[:, None])
        return self.logits(sample, **given)

    def _counted(self, sample: Sample) -> Tensor | None:
        """The positions on several axes that reach the text, (axes, 1, tokens), as the model makes them; else None."""
        if not hasattr(self.model.get_submodule(self.owner), COUNT):
            return None
        found: list[Any] = []
        text = self.model.get_submodule(find_layers(self.model).rpartition(".")[0])
        handle = text.register_forward_pre_hook(
            lambda _, __, kwargs: found.append(kwargs.get("position_ids")), with_kwargs=True
        )
        try:
            with torch.no_grad():
                self.logits(sample, **self.pixels(sample))
        finally:
            handle.remove()
        several = found and found[0] is not None and found[0].dim() == 3
        return found[0] if several else None

    def _draws(self) -> bool:
        """Whether its encoder draws random numbers in training. ConfigError where they do not follow from the image
        that they are drawn for [Note: an encoder's draws]."""
        self.model.train()
        try:
            counts, runs = list[int](), list[list[Tensor]]()
            for _ in range(2):
                with UnitDraws(1) as draws:
                    runs.append(self._leaves(self.samples[0]))
                counts.append(draws.count)
        except ConfigError as error:
            raise self.refusal(f"{error}: set its dropout to 0 in the config") from error
        finally:
            self.model.eval()
        if any(apart(first, second) > 0 for first, second in zip(*runs, strict=True)):
            raise self.refusal("its encoder draws random numbers in training: set its dropout to 0 in the config")
        return counts[0] > 0

    def _seen(self, seam: Seam, leaves: Sequence[Tensor]) -> Seen | None:
        """In which layers tokens of an image see those behind them: the first of an image has a gradient of its last
        then. ConfigError where others see what is behind them."""
        layers: Any = self.model.get_submodule(find_layers(self.model))
        marks = torch.eq(self.samples[0].tokens, self.token).nonzero().flatten().tolist()
        first, last = marks[0], marks[self.samples[0].rows[0] - 1]
        with _cut_at(layers) as values:
            self._with_rows(seam, [leaf.detach().requires_grad_() for leaf in leaves])
        found, inputs, whole = set[str](), dict[int, Tensor](), True
        for index, value, entered in values:
            if index not in inputs:
                inputs[index] = entered
                continue
            sees = [_seen_by(at, value, inputs[index]) for at in (0, first)]
            if sees[0][-1] > 0 or sees[1][-1] > last:
                raise self.refusal("tokens before an answer see those behind them, and stages attend causally")
            if sees[1][-1] > first:
                found.add(_type_of(layers[index]))
                # The small copy has windows that are shorter than an image.
                whole = whole and _seen_by(last, value, inputs[index])[0] <= first
        return Seen((), frozenset(found), whole) if found else None

    def _deepest(self, seam: Seam, leaves: Sequence[Tensor]) -> tuple[int, ...]:
        """The last layer that each leaf enters, before it or in it: hidden states are cut at each, so that what a leaf
        is behind there has come to it at that layer."""
        layers: Any = self.model.get_submodule(find_layers(self.model))
        given = [leaf.detach().requires_grad_() for leaf in leaves]
        with _cut_at(layers) as values:
            out = self._with_rows(seam, given)
        values.append((len(layers) - 1, out, out))
        deepest = [0] * len(given)
        for index, value, _ in values:
            if not value.requires_grad:
                continue
            found = torch.autograd.grad(value.sum(), given, allow_unused=True, retain_graph=True)
            for leaf, gradient in enumerate(found):
                if gradient is not None and bool(gradient.any()):
                    deepest[leaf] = max(deepest[leaf], index)
        if any(one > other for one, other in pairwise(deepest)):
            raise self.refusal(f"leaves of its rows enter at layers {deepest}, one behind a later one")
        return tuple(deepest)

    def _learnt(self, samples: Iterable[Sample]) -> tuple[float, dict[str, Tensor]]:
        """The loss of samples, each by itself, and the gradients that there are."""
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for sample in samples:
            logits = self.logits(sample, **self.pixels(sample))
            loss = F.cross_entropy(logits[:-1], sample.tokens[1:], reduction="sum")
            loss.backward()
            total += float(loss.detach())
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return total, found

    def _rooted(self, seam: Seam) -> Seam:
        """With what is used for images alone, and which parameters of it have no gradient in spite of one."""
        layers, names = f"{find_layers(self.model)}.", [name for name, _ in self.model.named_parameters()]
        _, text = self._learnt(sample for sample in self.samples if not sample.units)
        own = {name for name in names if name not in text and not name.startswith(layers)}
        roots = tuple(_outermost(own, set(names) - own))
        used = {name: p for name, p in self.model.named_parameters() if name in own and p.requires_grad}
        out = self._with_rows(seam, self._leaves(self.samples[0])).sum()
        found = torch.autograd.grad(out, list(used.values()), allow_unused=True)
        inside = frozenset(name for name, gradient in zip(used, found, strict=True) if gradient is not None)
        seam = replace(seam, roots=roots, silent=frozenset(own - self.gradients.keys()), inside=inside)
        if seam.clips_alone:
            return seam
        if seam.audio is None:
            return replace(seam, cut=cut_of(self.model, roots, lambda: self._leaves(self.samples[0])))
        learnt = [self._learnt([one])[1].keys() & own for one in (self.samples[1], self.samples[-1])]
        alone = [learnt[at] - learnt[1 - at] for at in (0, 1)]
        images, clips = (tuple(_outermost(one, set(names) - one - seam.silent)) for one in alone)
        seam = replace(seam, only=(images, clips))
        cut = cut_of(self.model, seam.roots_of(clips=False), lambda: self._leaves(self.samples[0]))
        return replace(seam, cut=cut)


class Listener(ImageSubject):
    """The same of a model's audio: clips in place of images, the rows of which are of one leaf."""

    kind, of = "audio", "clips"

    def _encoder(self) -> tuple[str, Callable[..., Any]]:
        names = clip_columns(arguments(type(self.model).forward))
        if not names:
            raise self.refusal("its forward takes no clips that are known as such")
        path = find_layers(self.model)
        self._audio = Audio(self.token, names, entry_of(path))
        if not self._audio.entry:
            raise self.refusal("its layers are in no module of their own, to which embeddings are handed")
        return "", type(self.model).forward

    def _sampled(self) -> tuple[Maker, tuple[Sample, ...]]:
        tried = list[str]()
        for maker in clips(self.model.config, self._audio.columns):
            torch.manual_seed(1)
            units = [maker.make(0), maker.make(1), maker.make(1)]
            try:
                counts = [count_of(self.model, self._audio, unit) for unit in units]
                alone = [self._of(*one) for one in zip(units, counts, strict=True)]
                both = self._of(together(units[:2], CLIP), sum(counts[:2]))
                again = self._of(units[0], counts[0])
            except Exception as error:
                tried.append(failing(error)[:_TOLD])
                continue
            if not float(alone[0].abs().max()) > 0:
                tried.append("nothing of a clip comes to its text")
                continue
            if apart(again, alone[0]) > 0:
                raise self.refusal("its encoder draws random numbers, in evaluation too")
            if not apart(torch.cat(alone[:2]), both) < NEAR:
                raise self.refusal("what its encoder makes of a clip depends on the clips beside it")
            self.model.train()
            try:
                pair = [self._of(one, count) for one, count in zip(units, counts, strict=True)][:2]
                apart_in_training = apart(torch.cat(pair), self._of(together(units[:2], CLIP), sum(counts[:2])))
            finally:
                self.model.eval()
            norms = [name for name, m in self.model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            if norms and not apart_in_training < NEAR:
                raise self.refusal(f"in training what its encoder makes of a clip depends on the clips beside it: "
                                   f"{norms[0]} takes its mean over all of them")  # fmt: skip
            self._audio = with_tokens(self.model, self._audio, list(zip(units[:2], counts[:2], strict=True)))
            of_each: Any = ((tuple(units[:2]), counts[:2]), ((units[2],), counts[2:]), ((), []))
            samples = (Sample(self._tokens(rows, i), own, tuple(rows)) for i, (own, rows) in enumerate(of_each))
            return maker, tuple(samples)
        named = ", ".join(self._audio.columns)
        raise self.refusal(f"no clip was found that its forward takes ({named}): {tried[0] if tried else 'no sizes'}")

    def _of(self, columns: Columns, rows: int) -> Tensor:
        with torch.no_grad():
            return clip_rows(self.model, self._audio, columns, rows)

    def _leaves(self, sample: Sample) -> list[Tensor]:
        return [self._of(together(sample.units, CLIP), sum(sample.rows))]

    def _formed(self) -> Seam:
        sample = self.samples[0]
        leaves, axes = self._leaves(sample), self._counted(sample)
        seam = Seam(
            self.owner, (), CLIP, 0, self.token, "", object, (leaves[0].shape[-1],), (),
            1 if axes is None else axes.shape[0], (), frozenset(), audio=self._audio,
        )  # fmt: skip
        with torch.no_grad():
            off = apart(self._with_rows(seam, leaves), self.logits(sample, **self.pixels(sample)))
        if not off < NEAR:
            raise self.refusal(f"with its rows where its text begins, logits are {off:.0e} of the largest off")
        return seam


@contextmanager
def _cut_at(layers: Sequence[nn.Module]) -> Iterator[list[tuple[int, Tensor, Tensor]]]:
    """Within it what enters and leaves each layer is noted with its number, and goes on without its graph: as what
    is noted behind it."""
    noted: list[tuple[int, Tensor, Tensor]] = []

    def cut(index: int, hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return hidden
        noted.append((index, hidden, hidden.detach().requires_grad_()))
        return noted[-1][-1]

    def enter(index: int) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (cut(index, args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": cut(index, kwargs["hidden_states"])}

        return hook

    def leave(index: int) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, out: Any) -> Any:
            return cut(index, out) if isinstance(out, Tensor) else type(out)((cut(index, out[0]), *out[1:]))

        return hook

    handles = [layer.register_forward_pre_hook(enter(i), with_kwargs=True) for i, layer in enumerate(layers)]
    handles += [layer.register_forward_hook(leave(i)) for i, layer in enumerate(layers)]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def _seen_by(token: int, out: Tensor, entered: Tensor) -> tuple[int, int]:
    """The first and the last token that one sees in a layer: by its output and what entered, (1, tokens, features)."""
    gradient = torch.autograd.grad(out[0, token].sum(), entered, retain_graph=True)[0][0].abs().amax(-1)
    seen = (gradient > NEAR * gradient.max()).nonzero()
    return int(seen.min()), int(seen.max())


def _type_of(layer: nn.Module) -> str:
    """Of which type the model's config says that a layer is."""
    attends = (module for module in layer.modules() if hasattr(module, "layer_idx") and hasattr(module, "config"))
    return next((layer_type(module) for module in attends), "")


def _outermost(wanted: set[str], others: set[str]) -> list[str]:
    """The outermost modules all of whose parameters are wanted, and wanted parameters beside them, by path."""
    found: list[str] = []
    for name in sorted(wanted):
        if any(name.startswith(f"{root}.") for root in found):
            continue
        parts = name.split(".")
        paths = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        found.append(next((path for path in paths if not any(one.startswith(f"{path}.") for one in others)), name))
    return found


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest entry."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    return float((one - other).abs().max()) / max(float(one.abs().max()), float(other.abs().max()), 1e-300)


def subject_of(model: Any) -> ImageSubject:
    """A small copy of a model, on which its seam is found. ConfigError for a class whose images are not trained."""
    small = small_model(model)
    with torch.random.fork_rng(devices=[]), doubled():
        try:
            alone = placeholder(small.config) is None and placeholder(small.config, Listener.kind) is not None
            return (Listener if alone else ImageSubject)(small, type(model).__name__)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"hydra.images: images of {type(model).__name__} are not trained: trying a small copy of it ends with "
                f"{failing(error)[:_TOLD]}; {_REMEDY}"
            ) from error


def rows_of_one(model: Any, seam: Seam) -> int:
    """Rows that a model's encoder makes of an image of its size, found without values; 0 where that is not known."""
    for maker in makers(model.config, seam.columns):
        if maker.layout != seam.layout or seam.layout == "whole":
            continue
        try:
            copied = copy_to_meta(model).to("meta")
            dtype = next(parameter.dtype for parameter in copied.parameters())
            columns = {n: c.to("meta", dtype if c.is_floating_point() else None) for n, c in maker.make(0).items()}
            with torch.device("meta"), torch.no_grad():
                return len(encoded(copied, seam, columns)[0])
        except Exception as error:  # of an encoder that looks at its pixels
            logger.debug("rows of an image are not known before: %s", failing(error))
    return 0
