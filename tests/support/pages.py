"""What pages, examples and texts of the package print: their code blocks, and each config or setting among all that."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import hjson

from ds_hydra.config.deepspeed_settings import KNOWN_SETTINGS
from ds_hydra.config.describe import settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")))
_FENCED = re.compile(r"(?:^<!-- ([^\n]*) -->\n\n?)?^```(\S*)\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, language and text, and the comment just above it."""

    page: str
    language: str
    text: str
    comment: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0][:60]}"


def blocks() -> Iterator[Block]:
    """All fenced blocks of the pages."""
    for page in PAGES:
        for found in _FENCED.finditer((ROOT / page).read_text("utf-8")):
            if not found[2].startswith("{"):  # a directive of MyST
                yield Block(page, found[2], found[3], found[1] or "")


def printed_block(page: str = "README.md") -> dict[str, Any]:
    """The first block "hydra" that a page prints, with its key."""
    found = next(block.text for block in blocks() if block.page == page and block.text.startswith('"hydra"'))
    return dict(hjson.loads("{" + found + "}"))


PLACES = {part for one in settings() for part in accumulate(one.place.replace("[]", "").split("."), "{}.{}".format)}
"""Every setting and block of the block "hydra" by its place, such as hydra.planner.ahead."""

_NAMES = {place.rpartition(".")[2] for place in PLACES} | KNOWN_SETTINGS
_NAMED = re.compile(r'"(\w+)": ?(?=\S)')


@dataclass(frozen=True)
class Printed:
    """A config, or a setting of one, and where it is printed."""

    place: str
    text: str

    @property
    def key(self) -> str:
        """The text in one line."""
        return " ".join(self.text.split())


def settings_in(text: str) -> Iterator[str]:
    """The settings that stand in a text as a config has them, such as "planner": {"ahead": 0}; outer ones only."""
    at = 0
    while found := _NAMED.search(text, at):
        at = found.end()
        if found[1] not in _NAMES:
            continue
        if whole := re.compile(r"\{[^{}]*\.\.\.[^{}]*\}").match(text, at):
            at = whole.end()
        else:
            try:
                _, at = json.JSONDecoder().raw_decode(text, at)
            except json.JSONDecodeError:
                continue
        yield text[found.start() : at]


def printed() -> Iterator[Printed]:
    """Every config, and every setting as a config has it, of pages, examples, and texts of the package."""
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        for block in blocks():
            if block.page == page and block.language in ("json", "jsonc"):
                yield Printed(page, block.text)
        told = _FENCED.sub(lambda one: "" if one[2] in ("json", "jsonc") else one[0], text)
        # The rest of a page, code of other languages among it, but not the configs that a test's own code makes.
        for line in told.splitlines():
            for part in re.findall(r"`([^`]+)`", line) or ([line] if line.startswith("# ") else []):
                yield from (Printed(page, one) for one in settings_in(part))
    for path in sorted(ROOT.glob("examples/**/*.json")):
        if '"hydra"' in (text := path.read_text("utf-8")):
            yield Printed(str(path.relative_to(ROOT)), text)
    for folder in ("ds_hydra", "pipe", "zero_hetero", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            if not place.startswith(("ds_hydra/pipe/", "ds_hydra/zero_hetero/")):  # links to the other two folders
                for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield from (Printed(place, one) for one in settings_in(node.value))
