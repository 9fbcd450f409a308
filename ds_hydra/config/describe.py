"""Every setting of the block "hydra" with its type, default and sentence, as a page and as a JSON Schema. Pure.

Both follow from the dataclasses that read the block, so that neither can differ from what is accepted.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from ds_hydra.config.hydra_block import BLOCK, HydraConfig

_JSON_TYPES: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null",
               Mapping[str, str]: "object"}  # fmt: skip
LIST = "[]"  # behind the name of a setting that is a list of blocks
_WORDS = {"strategies": ["auto"], "fast_paths": ["auto", "off"]}  # that stand for a list

_WORDS_LINKED = "Words: " + ", ".join(
    f"[{word}](glossary.md#{word.replace(' ', '-')})"
    for word in ("strategy", "scheme", "masters", "slice", "self-check", "compose", "elastic")
) + "."  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One setting: its place, such as "hydra.planner.ahead", and what a user may write there."""

    place: str
    kinds: tuple[Any, ...]  # Python's types of its value; a block's class
    default: Any  # MISSING: it must be given
    sentence: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None


def settings(block: type = HydraConfig, place: str = BLOCK) -> Iterator[Setting]:
    """All settings of a block in the order of their fields, those of the blocks within it after its own."""
    sentences, kinds = _sentences(block), get_type_hints(block)
    inner: list[Setting] = []
    for one in fields(block):
        of_type = _kinds_of(kinds[one.name])
        known = inspect.getclosurevars(one.metadata["check"]).nonlocals
        found = Setting(
            f"{place}.{one.name}", of_type, one.default, sentences.get(one.name, ""),
            tuple(known.get("known", ())), known.get("minimum"),
        )  # fmt: skip
        if (within := _block_of(of_type)) is not None:
            inner += settings(within, found.place + (LIST if Ellipsis in of_type else ""))
        else:
            yield found
    yield from inner


def page() -> str:
    """All settings as one page of Markdown."""
    blocks: dict[str, list[str]] = {}
    for one in settings():
        block, _, name = one.place.rpartition(".")
        blocks.setdefault(block, []).append(f"`{name}`{_default_text(one)}\n: {one.sentence}\n")
    kinds = {name: _kinds_of(kind) for name, kind in get_type_hints(HydraConfig).items()}
    own = {f"{BLOCK}.{name}{LIST if Ellipsis in of else ''}": _block_of(of) for name, of in kinds.items()}
    lines = ["# Settings", "", "All keys of the block `\"hydra\"`. `ds-hydra settings --schema` prints them as a JSON "
             "Schema, which editors check configs by as they are written.", "", _WORDS_LINKED, ""]  # fmt: skip
    for block, rows in blocks.items():
        kind = own.get(block)
        lines += [f"## {block}", "", *([inspect.getdoc(kind) or "", ""] if kind else []), *rows]
    return "\n".join(lines)


def schema() -> str:
    """A JSON Schema (draft 2020-12) of a DeepSpeed config with the block; of DeepSpeed's own keys it says nothing."""
    tree: dict[str, Any] = _object("The block of ds-hydra.")
    for one in settings():
        node = tree
        for name in one.place.split(".")[1:-1]:
            inner = node["properties"].setdefault(name.removesuffix(LIST), _inner(name))
            node = inner["items"] if name.endswith(LIST) else inner
        name = one.place.rpartition(".")[2]
        node["properties"][name] = _described(one)
        if one.default is MISSING:
            node.setdefault("required", []).append(name)
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {BLOCK: tree}}
    return json.dumps(whole, indent=2) + "\n"


def _inner(name: str) -> dict[str, Any]:
    """A block within another, or a list of blocks."""
    return {"type": ["array", "null"], "items": _object("")} if name.endswith(LIST) else _object("")


def _object(words: str) -> dict[str, Any]:
    return {"type": "object", **({"description": words} if words else {}), "additionalProperties": False,
            "properties": {}}  # fmt: skip


def _described(one: Setting) -> dict[str, Any]:
    name = one.place.rpartition(".")[2]
    found: dict[str, Any] = {"description": one.sentence}
    types = [_JSON_TYPES[kind] for kind in one.kinds if kind in _JSON_TYPES]
    if name in _WORDS or Ellipsis in one.kinds:  # a tuple
        items = "integer" if int in one.kinds else "string"
        words = [{"enum": _WORDS[name]}] if name in _WORDS else []
        found["anyOf"] = [*words, {"type": "array", "items": {"type": items}}]
    elif one.choices:
        found["enum"] = list(one.choices)
    else:
        found["type"] = types[0] if len(types) == 1 else types
    if one.minimum is not None:
        found["minimum"] = one.minimum
    if one.default is not MISSING and name not in _WORDS:
        found["default"] = one.default
    return found


def _default_text(one: Setting) -> str:
    if one.default is MISSING:
        return ", required"
    if one.place.rpartition(".")[2] in _WORDS:
        return ', default `"auto"`'
    words = " or ".join(f'`"{word}"`' for word in one.choices)
    return f", default `{json.dumps(one.default)}`" + (f", one of {words}" if words else "")


def _kinds_of(kind: Any) -> tuple[Any, ...]:
    """The types of which a value may be any."""
    return get_args(kind) or (kind,)


def _block_of(kinds: tuple[Any, ...]) -> type | None:
    """The block that a setting is, if it is one."""
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def _sentences(block: type) -> dict[str, str]:
    """The sentence below each field of a class, on one line."""
    source = inspect.getsource(sys.modules[block.__module__])
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    body = classes[block.__name__].body
    found: dict[str, str] = {}
    for node, below in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[node.target.id] = " ".join(value.value.split())
    return found
