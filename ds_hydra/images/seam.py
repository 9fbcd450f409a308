"""The seam between a model's encoder of images and its text: how the one is called, and how the other takes its rows.

[Note: the seam]
Nothing of it is told by a class's name. Of a small copy of the model (`small.py`) it is found by trying: with which
arguments its `get_image_features` makes rows for an image; that the rows of several images are those of each; in which
form its forward takes rows in place of pixels; which parameters they go through; between which layers they enter; how
its tokens are numbered. What does not come out equal there is refused, with the first step that did not.

Rows may be of several leaves. Qwen3-VL's encoder makes rows for the embeddings, and others of the same tokens that are
added between the first layers; a leaf goes to the stages up to the one that reads it last, with the hidden states:

  leaf 0   enters layer 0                        stays on the first stage
  leaf 1   is added between layers 0 and 1       reaches the stage that runs layer 1
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.images.audio import Audio, clip_rows
from ds_hydra.images.content import Columns, Images, Unit, is_clip, is_video
from ds_hydra.images.shared import Cut
from ds_hydra.pipe.rows import Seen

ENCODE = "get_image_features"  # what transformers' models call it
ENCODE_VIDEO = "get_video_features"
VIDEO = ("pixel_values_videos", "video_grid_thw")  # what it takes
BESIDE_VIDEO = "second_per_grid_ts"  # by which some number the tokens of a video, (videos,)
COUNT = "get_rope_index"  # by which those that number tokens on several axes do it
GIVEN = "mm_encoder_outputs"  # the argument of their forwards by which rows take the place of pixels
_MORE = "deepstack_features"
FORMS: Mapping[str, Callable[[Tensor], Any]] = {
    "tuple": lambda rows: (rows,),
    "tensor": lambda rows: rows,
    "row": lambda rows: rows[None],
}


@dataclass(frozen=True)
class Seam:
    """What was found of a model [Note: the seam]."""

    owner: str  # path of the module that encodes
    columns: tuple[str, ...]  # what its encoder takes
    layout: str  # how a column's entries belong to images [Note: which rows are whose]
    per_row: int  # of "grid": patches of a row of features; else rows of an image, 0 where that is not known
    token: int  # id of the placeholders
    form: str  # in which the forward takes rows
    output: type  # of the encoder
    widths: tuple[int, ...]  # features of a row, by leaf
    deepest: tuple[int, ...]  # the last layer that each leaf enters; the number of layers: any
    axes: int  # on which tokens are numbered; 1: as text is
    roots: tuple[str, ...]  # modules and parameters that are used for images alone
    silent: frozenset[str]  # their parameters that have no gradient all the same
    inside: frozenset[str] = frozenset()  # parameters of it that run in the text's forward, on rows that are given
    seen: Seen | None = None  # in which layers tokens of an image see each other [Note: spans]
    video: int | None = None  # id of the placeholders of videos, where those are trained: by the same encoder
    cut: Cut | None = None  # where ranks may share an image [Note: rows of a large image]
    draws: bool = False  # whether its encoder draws random numbers in training [Note: an encoder's draws]
    audio: Audio | None = None  # where clips are trained
    unheard: str = ""  # why they are not
    only: tuple[tuple[str, ...], ...] = ((), ())  # of a model of both, roots of images alone, and of clips alone

    def of(self, name: str) -> bool:
        """Whether a parameter is used for images alone."""
        return any(name == root or name.startswith(f"{root}.") for root in self.roots)

    def roots_of(self, *, clips: bool) -> tuple[str, ...]:
        """What is used for clips, or for images; of a model of one kind all of it."""
        heard = tuple(root for root in self.roots if any(f"{one}.".startswith(f"{root}.") for one in self.only[1]))
        return heard if clips and heard else tuple(root for root in self.roots if root not in heard)

    def deaf(self, names: Iterable[str], why: str) -> Seam:
        """The same without clips, which are not trained for this reason; `names` are those of all parameters."""
        unread = {name for name in names if f"{name}.".startswith(tuple(f"{root}." for root in self.only[1]))}
        return replace(self, audio=None, unheard=why, silent=self.silent | unread, only=((), ()))

    def images(self, units: Sequence[Unit] = (), positions: Tensor | None = None) -> Images:
        """Those of a sequence."""
        audio = None if self.audio is None else self.audio.token
        return Images(self.token, tuple(units), positions, self.seen, self.video, audio)

    def given(self, leaves: Sequence[Tensor], ids: Tensor) -> dict[str, Any]:
        """What the model's forward is given for the rows (rows, width) of all leaves, whose placeholders have these
        `ids` (rows,) in their order; nothing for clips."""
        found: dict[str, Any] = {}
        for kind, token in (("image", None if self.clips_alone else self.token), ("video", self.video)):
            own = None if token is None else ids == token
            if own is not None and bool(own.any()):
                found[kind] = self._output([leaf[own] for leaf in leaves])
        return {GIVEN: found} if found else {}

    @property
    def clips_alone(self) -> bool:
        """Whether the model has audio, and no images."""
        return self.audio is not None and self.audio.token == self.token

    def clips(self, leaves: Sequence[Tensor], ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Which of these rows are of clips, (clips' rows,), and they themselves; None: none."""
        own = None if self.audio is None else ids == self.audio.token
        return None if own is None or not bool(own.any()) else (own.nonzero().flatten(), leaves[0][own])

    def _output(self, leaves: Sequence[Tensor]) -> Any:
        first, *more = leaves
        value = FORMS[self.form](first)
        made = {"pooler_output": value, "last_hidden_state": value}
        return self.output(**made, **({_MORE: [[leaf] for leaf in more]} if more else {}))

    def types(self, input_ids: Tensor) -> Tensor:
        """What processors say of tokens (tokens,): 0 text, 1 of an image, 2 of a video, (1, tokens)."""
        found = (input_ids == self.token).long()
        return (found if self.video is None else found + 2 * (input_ids == self.video))[None]


def leaves_of(out: Any) -> list[Tensor]:
    """The rows of each leaf of what an encoder returns, (rows, width)."""
    found = [_flat(pooled(out))]
    more = out.get(_MORE) if hasattr(out, "get") else None
    return found + [_flat(leaf) for leaf in more or ()]


def pooled(out: Any) -> Any:
    """Of what an encoder returns, what takes the place of embeddings."""
    if isinstance(out, Tensor | tuple | list) and not hasattr(out, "keys"):
        return out
    return next(out[key] for key in ("pooler_output", "last_hidden_state") if out.get(key) is not None)


def _flat(rows: Any) -> Tensor:
    return rows.reshape(-1, rows.shape[-1]) if isinstance(rows, Tensor) else torch.cat([_flat(part) for part in rows])


def encoder_of(model: nn.Module) -> tuple[str, Callable[..., Any]] | None:
    """The path of the module that encodes images, the innermost that has text beside it, and what does; None: none."""
    having = [path for path, module in model.named_modules() if callable(getattr(type(module), ENCODE, None))]
    if not having:
        return None
    with_text = [path for path in having if any("text" in n or "language" in n for n, _ in _child(model, path))]
    path = (with_text or having)[-1]
    return path, getattr(model.get_submodule(path), ENCODE)


def _child(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    return list(model.get_submodule(path).named_children())


def arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names that a function takes, without those that it hands on."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "self")


def encoded(model: nn.Module, seam: Seam, columns: Columns, rows: int = 0) -> list[Tensor]:
    """The rows of some units of one kind that are put together, by leaf. Of clips `rows` says how many there are."""
    if is_clip(columns):
        assert seam.audio is not None, "clips are refused where they are read"
        return [clip_rows(model, seam.audio, columns, rows)]
    encode = getattr(model.get_submodule(seam.owner), ENCODE_VIDEO if is_video(columns) else ENCODE)
    given = {name: column for name, column in columns.items() if name != BESIDE_VIDEO}
    return leaves_of(encode(**given, return_dict=True))


def numbered(model: Any, seam: Seam, input_ids: Tensor, columns: Columns) -> Tensor | None:
    """How a model numbers the tokens (tokens,) of a sequence with images, (axes, tokens); None: as text."""
    if seam.axes == 1:
        return None
    find = getattr(model.get_submodule(seam.owner), COUNT)
    types = seam.types(input_ids)
    known = {"input_ids": input_ids[None], "attention_mask": torch.ones_like(types), "mm_token_type_ids": types}
    if seam.audio is not None and (masks := [columns[name] for name in seam.audio.columns[1:] if name in columns]):
        known["audio_seqlens"] = masks[0].sum(-1)
    taken = arguments(find)
    positions: Tensor = find(**{k: v for k, v in {**known, **columns}.items() if k in taken})[0]
    return positions[:, 0]
