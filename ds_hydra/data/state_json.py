"""A stream's state in, JSON that keeps its types out, and back: no pickle is written or read.

[Note: states as JSON]
Numbers, text, None, lists and dictionaries with text keys stand as they are. Whatever JSON would lose is an object with
one key that begins with "!": {"!tuple": [3, 4]}, {"!dict": [[1, "a"]]} for other keys than text, {"!tensor": {"dtype":
"int64", "shape": [2], "data": base64 of its bytes}}. What none of them can hold is refused when it is saved.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ds_hydra.zero_hetero.safe_json import MAX_DEPTH, too_deep

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
