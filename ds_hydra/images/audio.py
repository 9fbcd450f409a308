"""A model's own encoder of audio: a clip in, rows of features where the model's text begins.

[Note: where a text begins]
Models of audio have no argument by which rows of features take the place of clips, and many do more with features than
their encoder's method does. What all of them do is hand embeddings to the module that holds the layers of their text,
with features in the places of placeholders:

    tokens  -> embeddings  \\
                            embeddings with rows of clips  ->  text: layers, norm
    clip    -> encoder     /                               here

So a clip is encoded by the model's own forward, of as many placeholders as it has rows, which ends here; and its rows
are handed in by putting them here into the embeddings. Embeddings of tokens are not computed for the first: nobody
reads them, and ranks that share a table of them would wait for each other.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.images.content import Columns

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


class _Begun(BaseException):
    """Ends a forward where its text begins. Not an `Exception`: a model's own handlers must not swallow it."""

    def __init__(self, embeddings: Tensor):
        super().__init__()
        self.embeddings = embeddings


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
    except _Begun as begun:
        if begun.embeddings.shape[:2] != ids.shape:
            raise ValueError(f"{rows} placeholders have become {begun.embeddings.shape[1]} tokens") from None
        return begun.embeddings[0]
    raise ValueError("its forward does not come to its text")


def _begin(*args: Any, inputs_embeds: Tensor | None = None, **_: Any) -> Any:
    if inputs_embeds is None:
        raise ValueError("its text is handed no embeddings")
    raise _Begun(inputs_embeds)


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
