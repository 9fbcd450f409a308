"""Writes the lengths of chats with pictures, and each picture's patches, to a file for init and preview.

  ds-hydra lengths chats.jsonl --model my_model/ --out lengths.jsonl

A line of the data is an object with "messages" or "text", and with the files of its pictures in "images". Pictures are
not decoded: their processor says of a size how many placeholders and patches it has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ds_hydra.commands.figures import CommandParser, guarded, new_file
from ds_hydra.zero_hetero.errors import ConfigError


class Counted(NamedTuple):
    """An item of a data set."""

    length: int  # tokens
    patches: tuple[int, ...]  # of each unit that an encoder takes: an image, or a tile of one


def counted(row: Any, processor: Any, tile: int, place: str) -> Counted:
    """An item, by the processor; `tile`: patches of an image where processors count tiles. ConfigError, beginning with
    `place`, for what is no such item."""
    sizes = [_size(path, place) for path in row.get("images") or ()]
    text = row.get("text")
    if text is None:
        if not isinstance(row.get("messages"), list):
            raise ConfigError(f'{place} has neither "text" nor "messages": write one of them')
        text = processor.apply_chat_template(_with_pictures(row["messages"], len(sizes)), tokenize=False)
    length, patches = len(processor.tokenizer(text, add_special_tokens=False)["input_ids"]), list[int]()
    if sizes:
        found = processor._get_num_multimodal_tokens(image_sizes=sizes)
        for tokens, count in zip(found.num_image_tokens, found.num_image_patches, strict=True):
            length += tokens - 1  # of a placeholder that stands in the text
            # Of some processors these are patches, of others tiles, which have several tokens each.
            patches += [count] if count >= tokens else [tile] * count
    return Counted(length, tuple(patches))


def _size(path: str, place: str) -> tuple[int, int]:
    """Height and width of a picture, by what its file begins with."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.height, picture.width
    except OSError as error:
        raise ConfigError(f"{place}: the picture {path!r} cannot be read: {error}") from error


def _with_pictures(messages: Sequence[Any], count: int) -> list[Any]:
    """Messages with pictures at the begin of the user's first one, as TRL has them, if they stand nowhere."""
    made = [{**one, "content": [{"type": "text", "text": one["content"]}]} if isinstance(one["content"], str) else one
            for one in messages]  # fmt: skip
    if not any(part.get("type") == "image" for one in made for part in one["content"]):
        first = next((at for at, one in enumerate(made) if one["role"] == "user"), 0)
        made[first] = {**made[first], "content": [*[{"type": "image"}] * count, *made[first]["content"]]}
    return made


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            if line.strip():
                yield f"{path}, line {number}", json.loads(line)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no file of JSON lines: {error}") from error


def tile_of(config: Any) -> int:
    """Patches of an image of the size that an encoder's config names; 1: it names none."""
    part = getattr(config, "vision_config", config)
    side, patch = (getattr(part, name, None) for name in ("image_size", "patch_size"))
    side, patch = (one[0] if isinstance(one, list | tuple) else one for one in (side, patch))
    return (side // patch) ** 2 if isinstance(side, int) and isinstance(patch, int) else 1


def run(args: argparse.Namespace, processor: Any = None, tile: int = 0) -> int:
    """Write the file. ConfigError for input that is refused. A `processor` is given by tests."""
    if processor is None:
        from transformers import AutoConfig, AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(args.model)
            tile = tile_of(AutoConfig.from_pretrained(args.model))
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"{args.model} has no processor that runs here: {error}") from error
    if not hasattr(processor, "_get_num_multimodal_tokens"):
        raise ConfigError(
            f"{type(processor).__name__} does not say of a picture's size how many tokens it has: write lines of "
            '{"length": TOKENS, "patches": [PATCHES, ...]} yourself'
        )
    found = [counted(row, processor, tile, place) for place, row in _rows(args.data)]
    lines = [json.dumps({"length": one.length, "patches": one.patches}) for one in found]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    pictured, units = [one for one in found if one.patches], [n for one in found for n in one.patches]
    lengths = [one.length for one in found]
    print(f"{args.out} is written: {len(found):,} sequences of {sum(lengths):,} tokens, the longest of "
          f"{max(lengths, default=0):,}; {len(pictured):,} have {len(units):,} pictures or tiles of {sum(units):,} "
          f"patches, the largest of {max(units, default=0):,}")  # fmt: skip
    print(f"next: ds-hydra init SCRIPT CONFIG --lengths {args.out}, or ds-hydra preview --lengths {args.out}")
    return 0


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra lengths") -> int:
    """Write the file; return 2 for input that is refused."""
    parser = CommandParser(prog=name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="a file of JSON lines")
    parser.add_argument("--model", required=True, help="checkpoint folder with a processor")
    parser.add_argument("--out", type=new_file, required=True)
    args = parser.parse_args(arguments)
    return guarded(name, lambda: run(args))
