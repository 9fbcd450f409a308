"""How a model's encoders of images and audio are called, and where its text takes their rows of features: the seam.

[Note: the seam]
Nothing of it is told by a class's name. Of a small copy of the model (`small.py`) it is found by trying: with which
arguments its `get_image_features` makes rows for an image; that the rows of several images are those of each; in which
form its forward takes rows in place of pixels; which parameters they go through; between which layers they enter; how
its tokens are numbered. What does not come out equal there is refused, with the first step that did not.

Rows may be of several leaves. Qwen3-VL's encoder makes rows for the embeddings, and others of the same tokens that are
added between the first layers; a leaf goes to the stages up to the one that reads it last, with the hidden states:

  leaf 0   enters layer 0                        stays on the first stage
  leaf 1   is added between layers 0 and 1       reaches the stage that runs layer 1

[Note: where a text begins]
Models of audio have no argument by which rows of features take the place of clips, and many do more with features than
their encoder's method does. What all of them do is hand embeddings to the module that holds the layers of their text,
with features in the places of placeholders:

    tokens  -> embeddings  \
                            embeddings with rows of clips  ->  text: layers, norm
    clip    -> encoder     /                               here

So a clip is encoded by the model's own forward, of as many placeholders as it has rows, which ends here; and its rows
are handed in by putting them here into the embeddings. Embeddings of tokens are not computed for the first: nobody
reads them, and ranks that share a table of them would wait for each other.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hydra.images.content import Columns, Images, Unit, is_clip, is_video
from ds_hydra.pipe.models.cut import ForwardEnded
from ds_hydra.pipe.rows import Seen

logger = logging.getLogger(__name__)

_COUNTING_S = 60.0  # of a job on a rank, after which clips of other sizes are not counted
_MOST = 150  # rows of a clip that is made up
_ENCODE = "get_audio_features"


@dataclass(frozen=True)
class Audio:
    """What was found of a model's audio."""

    token: int  # id of the placeholders
    columns: tuple[str, ...]  # what its forward takes of clips: values first, then masks
    entry: str  # path of the module that is the text [Note: where a text begins]
    tokens: float = 1.0  # of a clip in the encoder's layers, for each of its frames
    masked: bool = False  # whether those of its padding are left out

    def tokens_of(self, columns: Columns) -> list[int]:
        """Of each clip its tokens in the encoder's layers."""
        values, masks = columns[self.columns[0]], [columns[n] for n in self.columns[1:] if n in columns]
        frames = masks[0].shape[-1] if masks else max(values.shape[1:])
        held = masks[0].reshape(len(values), -1).sum(-1).tolist() if masks and self.masked else [frames] * len(values)
        return [max(1, round(self.tokens * one)) for one in held]


def clip_rows(model: Any, audio: Audio, columns: Columns, rows: int) -> Tensor:
    """The rows (rows, width) of clips that are put together. Raises what the model does where they have others."""
    values, text = columns[audio.columns[0]], model.get_submodule(audio.entry)
    ids = torch.full((1, rows), audio.token, device=values.device)
    given: dict[str, Any] = {"input_ids": ids, "use_cache": False, **columns}
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        given["position_ids"] = torch.arange(rows, device=values.device)[None]
    try:
        with ExitStack() as stack:
            for table in {id(m): m for m in (model.get_input_embeddings(), *text.modules())}.values():
                if isinstance(table, nn.Embedding):
                    stack.enter_context(_called(table, _nothing(table, values)))
            stack.enter_context(_called(text, _begin))
            model(**given)
    except ForwardEnded as ended:
        embeddings: Tensor = ended.value
        if embeddings.shape[:2] != ids.shape:
            raise ValueError(f"{rows} placeholders have become {embeddings.shape[1]} tokens") from None
        return embeddings[0]
    raise ValueError("its forward does not come to its text")


def _begin(*args: Any, inputs_embeds: Tensor | None = None, **_: Any) -> Any:
    if inputs_embeds is None:
        raise ValueError("its text is handed no embeddings")
    raise ForwardEnded(inputs_embeds)


def _nothing(table: nn.Embedding, values: Tensor) -> Callable[..., Tensor]:
    """In place of a table of embeddings, zeros."""
    dtype = values.dtype if values.is_floating_point() else table.weight.dtype
    return lambda ids, *_, **__: torch.zeros(*ids.shape, table.embedding_dim, dtype=dtype, device=ids.device)


@contextmanager
def _called(module: nn.Module, instead: Callable[..., Any]) -> Iterator[None]:
    """Within it a module's calls are those of another function, hooks left out."""
    own = vars(module)
    before = own.get("_call_impl")
    own["_call_impl"] = instead
    try:
        yield
    finally:
        del own["_call_impl"]
        if before is not None:
            own["_call_impl"] = before


def with_tokens(model: Any, audio: Audio, clips: Sequence[tuple[Columns, int]]) -> Audio:
    """With how many tokens the encoder's linear layers see, in the mean of their weights: of a clip with half of its
    frames, and of one without padding, with as many rows as stand beside them."""
    seen, counts = list[float](), list[tuple[int, int]]()
    for columns, rows in clips:
        counts.clear()
        hooks = [m.register_forward_hook(lambda m, _, out: counts.append((m.weight.numel(), out[..., 0].numel())))
                 for m in model.modules() if isinstance(m, nn.Linear)]  # fmt: skip
        try:
            with torch.no_grad():
                clip_rows(model, audio, columns, rows)
        finally:
            for hook in hooks:
                hook.remove()
        seen.append(sum(size * tokens for size, tokens in counts) / max(1, sum(size for size, _ in counts)))
    frames = replace(audio, tokens=1.0, masked=False).tokens_of(clips[-1][0])[0]
    return replace(audio, tokens=seen[-1] / frames, masked=seen[0] < 0.75 * seen[-1])


def count_of(model: Any, audio: Audio, columns: Columns, most: int = _MOST) -> int:
    """How many rows clips have: the most placeholders that the model's own forward finds rows for. Raises what it does
    where there is no such number."""
    found, last, same = 0, ValueError("its forward takes as many placeholders as there are"), 0
    for rows in _likely(model, audio, columns, most):
        try:
            with torch.no_grad():
                clip_rows(model, audio, columns, rows)
        except Exception as error:
            same = same + 1 if str(error) == str(last) else 0
            last = ValueError(str(error))
            if found or same > 2:  # it is not the number that is wrong
                break
        else:
            found = rows
    if not found or found == most - 1:
        raise last
    return found


def _likely(model: Any, audio: Audio, columns: Columns, most: int) -> Iterator[int]:
    """Numbers of rows to try: as many as the method that many encoders have makes, else all of them."""
    owners = [m for m in model.modules() if callable(getattr(type(m), _ENCODE, None))]
    if owners:
        encode = getattr(owners[-1], _ENCODE)
        try:
            with torch.no_grad():
                out = encode(**{n: c for n, c in columns.items() if n in inspect.signature(encode).parameters})
                made = out.last_hidden_state if out.get("pooler_output") is None else out.pooler_output
                count = len(made.reshape(-1, made.shape[-1]))
                clip_rows(model, audio, columns, count)
        except Exception as error:
            logger.debug("rows of a clip are counted by trying: %s", error)
        else:
            yield count
            return
    yield from range(2, most)


class Ear:
    """A small copy of a model, that counts rows of clips as the model does: by the shapes of its layers, which are
    small in width alone."""

    def __init__(self, model: Any, audio: Audio):
        self._model, self._audio = model.float(), audio
        self._known: dict[object, str] = {}  # by sizes of clips, and rows
        self._left_s = _COUNTING_S

    def misfit(self, columns: Columns, rows: int) -> str:
        """How many rows clips have, or what the model says, where there are not so many; empty: there are, or counting
        has taken its time."""
        key = (rows, *(value if isinstance(value, tuple) else tuple(value.shape) for value in self._sizes(columns)))
        if key not in self._known and self._left_s > 0:
            begun = monotonic()
            self._known[key] = self._tried(columns, rows)
            self._left_s -= monotonic() - begun
        return self._known.get(key, "")

    def _sizes(self, columns: Columns) -> Iterator[Any]:
        yield columns[self._audio.columns[0]]
        for name in self._audio.columns[1:]:
            if name in columns:
                yield tuple(columns[name].reshape(len(columns[name]), -1).sum(-1).tolist())

    def _tried(self, columns: Columns, rows: int) -> str:
        given = {n: (c.float() if c.is_floating_point() else c).detach().cpu() for n, c in columns.items()}
        try:
            with torch.no_grad():
                clip_rows(self._model, self._audio, given, rows)
        except Exception as error:
            try:
                return f"{count_of(self._model, self._audio, given, 2)} rows"
            except Exception:  # of a model without a method that makes them
                return f"other rows ({error})"
        return ""


class Entry:
    """Puts rows of clips into embeddings where a model's text begins; none as long as `rows` is None."""

    def __init__(self, model: nn.Module, audio: Audio):
        self.places: Sequence[int] | Tensor = ()
        self.rows: Tensor | None = None
        self._handle = model.get_submodule(audio.entry).register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.rows is None or not len(self.rows):
            return None
        embeddings = kwargs["inputs_embeds"]
        places = torch.as_tensor(self.places, device=embeddings.device)
        row = embeddings[0].index_put((places,), self.rows.to(embeddings.dtype))
        return args, {**kwargs, "inputs_embeds": row[None]}

    def close(self) -> None:
        """Leave the model alone from here on."""
        self._handle.remove()


def entry_of(layers: str) -> str:
    """The path of the text that holds layers of this path."""
    return layers.rpartition(".")[0]


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


class Cut(NamedTuple):
    """Where the rows of an image are cut."""

    layers: str  # path of the list of the encoder's layers
    read: frozenset[int] = frozenset()  # those whose output is read by others than the next one
    heads: int = 0  # of their attention


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
