"""Streamed training data: the sequences of each step, read some steps ahead, and places in the stream to go on from.

[Note: streams]
A stream is whatever can be iterated but not indexed: `datasets` with streaming=True, torch's IterableDataset, a loader
such as torchdata's StatefulDataLoader, a generator. Rank 0 alone reads it, in a thread that stays some steps ahead, so
reading and planning hide behind training; the sequences then travel to the ranks that run them. So there is one order,
which no number of ranks changes, and a script need not deal the stream out to its ranks.

A step takes whole items until it has its tokens; where the stream ends it is iterated again, the pass number given to
its `set_epoch`, if it has one. With 10 tokens a step, the items of 4, 5, 7 and 3 tokens make

    step 0   4 5 7       step 1   3 4 5       step 2   7 3       ...

A place is kept where a step begins, not where the thread has come to: that is what a checkpoint saves. It holds the
stream's own `state_dict()`. A stream without one is read again from its beginning up to the place, which is exact if it
gives the same items again.

[Note: states as JSON]
Numbers, text, None, lists and dictionaries with text keys stand as they are. Whatever JSON would lose is an object with
one key that begins with "!": {"!tuple": [3, 4]}, {"!dict": [[1, "a"]]} for other keys than text, {"!tensor": {"dtype":
"int64", "shape": [2], "data": base64 of its bytes}}. What none of them can hold is refused when it is saved.
"""

from __future__ import annotations

import base64
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.data.columns import ItemCheck, ModelInput
from ds_hydra.data.sampler import RESUME_WEIGHTS
from ds_hydra.data.sequences import Tally, read_share
from ds_hydra.data.tokens import LeftOut, Limits, TokenSequence
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError
from ds_hydra.zero_hetero.files import MAX_DEPTH, too_deep

_MARK = "!"
_OUTER_LEVELS = 8  # of a manifest around a state
_DTYPES = frozenset(  # of tensors; arrays have all but the last
    [
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        "bool",
        "float16",
        "float32",
        "float64",
    ]
) | {"bfloat16"}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque,
}  # fmt: skip
_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {"dict": dict, "ordered": OrderedDict}


def state_to_json(state: Any) -> Any:
    """The state as JSON. ValueError names what of it cannot be held, and where."""
    try:
        record = _encoded(state, "state_dict()")
    except RecursionError:
        raise ValueError("state_dict() contains itself or is nested too deeply") from None
    if too_deep(record, MAX_DEPTH - _OUTER_LEVELS):
        raise ValueError("state_dict() is nested too deeply")
    return record


def state_from_json(record: Any) -> Any:
    """Inverse of `state_to_json`; ValueError for what it never wrote."""
    try:
        return _decoded(record)
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _encoded(value: Any, place: str) -> Any:
    # Exact types: a subclass, such as a named tuple, would come back as another thing.
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is int:
        if abs(value) >= 2**512:
            raise ValueError(f"{place} is a number of {value.bit_length()} bits, more than 512")
        return value
    if kind is float:
        return {"!float": repr(value)}
    if kind is list:
        return [_encoded(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith(_MARK) for key in value):
        return {key: _encoded(item, f"{place}[{key!r}]") for key, item in value.items()}
    if kind in (dict, OrderedDict):
        pairs = [[_encoded(key, f"a key of {place}"), _encoded(item, f"{place}[{key!r}]")]
                 for key, item in value.items()]  # fmt: skip
        return {"!dict" if kind is dict else "!ordered": pairs}
    if kind in (set, frozenset):
        return {f"!{kind.__name__}": sorted((_encoded(item, f"an item of {place}") for item in value), key=repr)}
    if kind in (tuple, deque) and (kind is tuple or value.maxlen is None):
        return {f"!{kind.__name__}": [_encoded(item, f"{place}[{index}]") for index, item in enumerate(value)]}
    if kind is bytes:
        return {"!bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) or kind is np.ndarray:
        name, array = ("scalar" if kind is not np.ndarray else "array"), np.asarray(value)
        if array.dtype.name in _DTYPES:
            array = array.astype(array.dtype.newbyteorder("="))
            return {f"!{name}": _numbers(array.dtype.name, array.shape, array.tobytes())}
    if _is_tensor(value):
        return _tensor(value, place)
    raise ValueError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: let state_dict() give "
        "numbers, text, bytes, tensors or arrays, in lists, tuples, sets and dictionaries"
    )


def _tensor(value: Any, place: str) -> dict[str, Any]:
    """A dense tensor in host memory; ValueError for any other."""
    import torch

    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES or value.layout != torch.strided or value.device.type != "cpu" or value.requires_grad:
        raise ValueError(
            f"{place} is a tensor of {name} on {value.device}, which a checkpoint cannot hold: let state_dict() give "
            "dense tensors in host memory, without gradients"
        )
    data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return {"!tensor": _numbers(name, tuple(value.shape), data)}


def _numbers(dtype: str, shape: tuple[int, ...], data: bytes) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data": base64.b64encode(data).decode()}


def _decoded(record: Any) -> Any:
    if isinstance(record, list):
        return [_decoded(item) for item in record]
    if not isinstance(record, dict):
        return record
    marks = [key for key in record if key.startswith(_MARK)]
    if not marks:
        return {key: _decoded(item) for key, item in record.items()}
    if len(record) > 1:
        raise ValueError(f"{marks[0]!r} stands beside other keys")
    kind, inner = marks[0].removeprefix(_MARK), record[marks[0]]
    if kind in _SEQUENCES and isinstance(inner, list):
        return _SEQUENCES[kind]([_decoded(item) for item in inner])
    if kind in _MAPPINGS and isinstance(inner, list):
        pairs = [(_decoded(key), _decoded(item)) for key, item in inner]
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a key stands twice")
        return _MAPPINGS[kind](pairs)
    if kind == "float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    if kind == "bytes":
        return base64.b64decode(inner, validate=True)
    if kind in ("array", "scalar", "tensor"):
        return _of_numbers(kind, inner)
    raise ValueError(f"{marks[0]!r} is unknown")


def _of_numbers(kind: str, record: Mapping[str, Any]) -> Any:
    """The array, number or tensor in a record of `_numbers`."""
    if set(record) != {"dtype", "shape", "data"} or record["dtype"] not in _DTYPES:
        raise ValueError(f"a {kind} without dtype, shape and data, or of an unknown dtype")
    shape, name = record["shape"], record["dtype"]
    if any(type(size) is not int or size < 0 for size in shape) or (kind == "scalar" and shape):
        raise ValueError(f"a {kind} of shape {str(shape)[:80]}")
    data = bytearray(base64.b64decode(record["data"], validate=True))
    width = 2 if name == "bfloat16" else np.dtype(name).itemsize
    if len(data) != math.prod(shape) * width:
        raise ValueError(f"a {kind} of shape {shape} with {len(data)} bytes")
    if kind == "tensor":
        import torch

        dtype = getattr(torch, name)
        return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)
    array = np.frombuffer(data, dtype=name).reshape(shape)
    return array[()] if kind == "scalar" else array


def _is_tensor(value: Any) -> bool:
    """Whether this is a plain tensor, without importing torch where nothing else has."""
    return f"{type(value).__module__}.{type(value).__qualname__}" == "torch.Tensor"


logger = logging.getLogger(__name__)


def is_stream(data: Any) -> bool:
    """Whether data can be iterated, but not indexed."""
    if isinstance(data, (Mapping, str, bytes)) or not isinstance(data, Iterable):
        return False
    # torch's IterableDataset inherits a __getitem__ that only raises.
    iterable = any(base.__name__ == "IterableDataset" for base in type(data).__mro__)
    return iterable or not (hasattr(data, "__len__") and hasattr(data, "__getitem__"))


_MOST = 2**48  # of steps, passes, items and sequences


@dataclass(frozen=True, slots=True)
class StreamCursor:
    """A place in a stream, between two items."""

    step: int  # the step that draws its first item here
    passes: int = 0  # times that the stream has ended before
    items: int = 0  # of this pass that were drawn before
    sequences: int = 0  # of all passes that were drawn before: their ids go on from here
    state: Any = None  # the stream's own, as JSON; None where items are counted


class Drawn(NamedTuple):
    """The sequences of a step, and the place after them."""

    first_id: int
    sequences: tuple[TokenSequence, ...]
    left_out: LeftOut
    end: StreamCursor


class StreamReader:
    """Reads a stream step by step, from a place on."""

    def __init__(self, stream: Any, tokens_per_step: int, limits: Limits, *, saves: bool):
        self._stream, self._budget, self._limits, self._saves = stream, tokens_per_step, limits, saves
        self._check = ItemCheck(limits.inputs)
        self.has_state = hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
        self.unsaved = ""  # why the stream's state cannot be saved
        self._iterator: Iterator[Any] | None = None
        self._place = StreamCursor(0)
        self._target: StreamCursor | None = None
        self._fruitful = False  # whether this pass gave a sequence

    def use_inputs(self, inputs: ModelInput) -> None:
        """Read items for a model that takes them so from now on."""
        self._check, self._limits = ItemCheck(inputs), replace(self._limits, inputs=inputs)

    def restart(self, place: StreamCursor) -> None:
        """Go on from a saved place, which the next `draw` seeks."""
        self._target = place

    def _seek(self, place: StreamCursor) -> None:
        """Go to a saved place. ConfigError if the stream cannot get there."""
        used = self._iterator is not None
        if used and iter(self._stream) is self._stream:
            raise ConfigError(
                "the training data are an iterator, which cannot go back to the place of a checkpoint after it was "
                "read from: load the checkpoint before the first step, or give an iterable"
            )
        self._place, self._fruitful = place, True
        if place.state is not None:
            self._set_epoch()
            state = _state_of(place.state)
            try:
                self._stream.load_state_dict(state)
                self._iterator = iter(self._stream)
            except Exception as error:
                raise ConfigError(
                    "the training data refuse the state that the checkpoint holds of them "
                    f"({type(error).__name__}: {error}): give the data that it was saved with, or "
                    f"{RESUME_WEIGHTS}"
                ) from error
            return
        self._open()
        if place.items:
            logger.warning(
                "the training data have no state_dict(): their first %d items are read again and passed over, which is "
                "exact if they are the same ones", place.items,
            )  # fmt: skip
        for number in range(place.items):
            if next(self._iterator or iter(()), None) is None:
                raise ConfigError(
                    f"the training data ended after {number} items, but the checkpoint was saved after {place.items}: "
                    "give the same data, or start anew"
                )

    def draw(self, step: int) -> Drawn:
        """The sequences of the next step, which is `step`. ConfigError for items that cannot be trained on, and where
        the stream gives no sequence any more."""
        if self._target is not None:
            self._seek(self._target)
            self._target = None
        if self._iterator is None:
            self._open()
        sequences: list[TokenSequence] = []
        first_id, left_out, tokens = self._place.sequences, LeftOut(), 0
        while tokens < self._budget:
            share = read_share(self._next(), self._limits, first=self._place.items, check=self._check)
            for line in share.notes:
                logger.warning("%s", line)
            self._place = replace(self._place, items=self._place.items + 1)
            left_out += share.left_out
            sequences += share.sequences
            tokens += sum(len(sequence.input_ids) for sequence in share.sequences)
            self._fruitful = self._fruitful or bool(share.sequences)
        self._place = replace(self._place, step=step + 1, sequences=first_id + len(sequences))
        return Drawn(first_id, tuple(sequences), left_out, self._here())

    def _here(self) -> StreamCursor:
        """The present place with the stream's state."""
        # Where a pass begins, a stream with set_epoch is found again by the pass's number; its state may still be that
        # of the end before.
        begins = self._place.items == 0 and hasattr(self._stream, "set_epoch")
        state = self._stream.state_dict() if self.has_state and not begins else None
        try:
            return replace(self._place, state=None if state is None else {"json": state_to_json(state)})
        except ValueError as error:
            self.unsaved = f"the place in the training data cannot be saved: {error}"
            if self._saves:  # at the first step, and not when the first checkpoint is due
                raise ConfigError(f"{self.unsaved}; or remove hydra.checkpoint") from None
            return self._place

    def _open(self) -> None:
        self._set_epoch()
        self._iterator = iter(self._stream)

    def _set_epoch(self) -> None:
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(self._place.passes)

    def _next(self) -> Any:
        """The next item, of the next pass where this one ends."""
        assert self._iterator is not None, "the stream is open"
        for item in self._iterator:
            return item
        if not self._fruitful:
            raise ConfigError(
                f"the training data end: pass {self._place.passes + 1} over them gave no sequence of at least two "
                f"tokens in {self._place.items} items. Give more data, or end training with hydra.total_steps"
            )
        self._place, self._fruitful = replace(self._place, passes=self._place.passes + 1, items=0), False
        self._open()
        return self._next()


class StreamSampler:
    """The steps of a stream [Note: streams]. Rank 0, which `reads`, knows them; the others know their number only.

    `ahead` steps are read before they are asked for. In a job that `saves` checkpoints, a state of the stream that none
    can hold is refused when the first step is read; in others when a script saves one.
    """

    known_to_all = False

    def __init__(
        self, stream: Any, tokens_per_step: int, limits: Limits, ahead: int, *, reads: bool, saves: bool = True
    ):
        if limits.context_length is None:
            raise ConfigError(
                "training data that are streamed need hydra.context_length: their longest sequence is not known "
                "before it comes, and one that no strategy holds would end the job"
            )
        split = getattr(stream, "_distributed", None)  # of datasets.distributed.split_dataset_by_node
        if getattr(split, "world_size", 1) > 1:
            raise ConfigError(
                "the training data were split by node, but rank 0 reads a stream for all ranks, so the other parts "
                "would never be read: pass the whole stream, or hand each rank's part in by train_batch(iterator)"
            )
        self._reader = StreamReader(stream, tokens_per_step, limits, saves=saves)
        self.use_inputs = self._reader.use_inputs
        self._ahead, self._reads = ahead, reads
        self._thread: ThreadPoolExecutor | None = None
        self._steps: dict[int, Future[Drawn]] = {}
        self._begin = StreamCursor(0)  # of the step that was asked for first
        self._tally = Tally()

    def drawn(self, step: int) -> Drawn:
        """The sequences of `step`, which is the one that was last asked for, or a coming one."""
        first = max(self._steps, default=self._begin.step - 1) + 1
        for coming in range(first, step + self._ahead + 1):
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="stream")
            self._steps[coming] = self._thread.submit(self._reader.draw, coming)
        return self._steps[step].result()

    def ready(self, step: int) -> bool:
        """Whether a coming step has been read."""
        return step in self._steps and self._steps[step].done() and self._steps[step].exception() is None

    def batch(self, step: int) -> tuple[int, ...]:
        """Ids of the sequences of `step`: those of the whole stream are counted through."""
        drawn = self.drawn(step)
        return tuple(range(drawn.first_id, drawn.first_id + len(drawn.sequences)))

    def batch_lengths(self, step: int) -> tuple[int, ...]:
        """Tokens of each sequence of `batch(step)`."""
        return tuple(len(sequence.input_ids) for sequence in self.drawn(step).sequences)

    def taken(self, step: int) -> dict[int, TokenSequence]:
        """The sequences of `step` by position, on the rank that reads; the steps before are forgotten."""
        if not self._reads:
            return {}
        drawn = self.drawn(step)
        for old in [number for number in self._steps if number < step]:
            del self._steps[old]
        if self._tally.add(drawn.left_out):
            logger.warning("of the sequences streamed so far: %s", self._tally.total)
        return dict(enumerate(drawn.sequences))

    def saved(self, step: int) -> dict[str, Any]:
        """Where `step` begins, as JSON; of use from the rank that reads. CheckpointError if JSON cannot hold it."""
        place = self._begin if step <= self._begin.step or not self._reads else self.drawn(step - 1).end
        if self._reader.unsaved:
            raise CheckpointError(self._reader.unsaved)
        return asdict(replace(place, step=step))

    def check_saved(self, record: Mapping[str, Any]) -> None:
        """Raise unless this is a place in a stream that this one can get to: ConfigError for another's, CheckpointError
        for damage."""
        if record.keys() != asdict(StreamCursor(0)).keys():
            raise ConfigError(
                "the checkpoint was saved with map-style data, this job streams its data: give the data that it was "
                f"saved with, or {RESUME_WEIGHTS}"
            )
        wrong = [name for name in ("step", "passes", "items", "sequences") if not _is_count(record[name])]
        if wrong:
            raise CheckpointError(
                f"the saved place in the stream is damaged: {', '.join(wrong)} is no count "
                f"({', '.join(str(record[name])[:40] for name in wrong)}); use another tag"
            )
        if record["state"] is not None and not self._reader.has_state:
            raise ConfigError(
                "the checkpoint holds the state_dict() of the stream that it was saved with, but these training data "
                f"have none: give the same stream, or {RESUME_WEIGHTS}"
            )
        if record["state"] is not None:
            _state_of(record["state"])

    def restore(self, record: Mapping[str, Any]) -> None:
        """Go on from a saved place; what was read ahead is forgotten."""
        self._move(StreamCursor(**record))

    def begin_at(self, step: int) -> None:
        """Let `step` be the first to draw from the stream, whose place no checkpoint knows: from its beginning."""
        self._move(StreamCursor(step))

    def _move(self, place: StreamCursor) -> None:
        self.close()
        self._begin = place
        self._reader.restart(place)

    def close(self) -> None:
        """Stop reading."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread, self._steps = None, {}


class StreamSteps:
    """The steps that a job still has to make, by number: `for _ in loader: engine.train_batch()`."""

    def __init__(self, total_steps: int | None, next_step: Callable[[], int]):
        self._total, self._next_step = total_steps, next_step

    def __len__(self) -> int:
        """Steps of the whole job, those before a restart included."""
        if self._total is None:
            raise ConfigError(
                "the number of steps of a stream is not known: set hydra.total_steps, or loop `while "
                "engine.global_steps < N`"
            )
        return self._total

    def __iter__(self) -> Iterator[int]:
        yield from range(self._next_step(), len(self))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _state_of(record: Any) -> Any:
    """A stream's state from what was saved; CheckpointError where it is damaged, ConfigError for an old pickle."""
    if isinstance(record, dict) and record.keys() == {"torch"}:
        raise ConfigError(
            "the checkpoint holds the stream's state as a pickle, as earlier releases wrote it, which is not read: "
            f"load it with the release that wrote it, or {RESUME_WEIGHTS}"
        )
    if not isinstance(record, dict) or record.keys() != {"json"}:
        raise CheckpointError("the stream's state in the checkpoint is damaged: it holds no state; use another tag")
    try:
        return state_from_json(record["json"])
    except ValueError as error:
        raise CheckpointError(f"the stream's state in the checkpoint is damaged ({error}); use another tag") from None
