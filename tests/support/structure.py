"""The shape of the code, read from its files without importing them: imports between folders, lengths, comments.

A folder is a directory of modules. Every import statement counts, inside functions too, except those under
`if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tools import aims

LINKED = ("pipe", "zero_hetero")  # imported as parts of ds_hydra
TOPS = ("ds_hydra", *LINKED, "benchmarks")
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")  # where nodes of the syntax tree hold statements
BESIDE = ("tools", "tests", "examples", "docs")  # of which only lengths are judged


@dataclass(frozen=True)
class Block:
    """A file or function: where it stands and how long it is; `positional` counts without self and cls."""

    place: str
    lines: int
    positional: int = 0


@dataclass(frozen=True)
class Source:
    """One module, parsed. `folder` is its directory from the root on; `name` as it is imported."""

    path: str
    text: str

    @property
    def folder(self) -> str:
        return str(Path(self.path).parent)

    @property
    def name(self) -> str:
        parts = list(Path(self.path).with_suffix("").parts)
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        return ".".join(["ds_hydra", *parts] if parts[0] in LINKED else parts)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def imports(self) -> tuple[str, ...]:
        """Names that are imported; of `from a import b` both `a` and `a.b`, since `b` may be a module."""
        found = list[str]()
        for node in _statements(self.tree, type_checking=False):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        return tuple(found)

    @cached_property
    def functions(self) -> tuple[Block, ...]:
        """Functions and methods, nested ones too."""
        found = list[Block]()
        for node in _statements(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                kernel = any("triton" in ast.unparse(one) for one in node.decorator_list)  # which is given pointers
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args) if not kernel]
                found.append(self._block(node, len(names) - (names[:1] in (["self"], ["cls"]))))
        return tuple(found)

    def _block(self, node: ast.FunctionDef | ast.AsyncFunctionDef, positional: int) -> Block:
        return Block(f"{self.path}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1, positional)

    def comments(self) -> int:
        """Comments in words: orders to the formatter and the type checker say nothing to a reader."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        found = [token.string for token in tokens if token.type == tokenize.COMMENT]
        return sum(not text.startswith(("# fmt:", "# type:", "# noqa")) for text in found)


def _statements(tree: ast.AST, *, type_checking: bool = True) -> Iterator[ast.stmt]:
    """All statements of a module, nested ones too, those under `if TYPE_CHECKING` where they are asked for.

    Expressions, of which there are ten times as many, hold none and are not entered."""
    left: list[ast.AST] = [tree]
    while left:
        at = left.pop()
        for part in _BODIES:
            for node in getattr(at, part, ()):
                if not type_checking and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                    continue
                if isinstance(node, ast.stmt):
                    yield node
                left.append(node)


def read_sources(root: Path, tops: Sequence[str] = TOPS) -> list[Source]:
    """Every module of the library and of the rivals in a checkout, or of other folders of it, by path; links are left
    out."""
    sources = []
    for top in tops:
        for path in sorted((root / top).rglob("*.py")):
            inside = path.relative_to(root)
            if not any((root / part).is_symlink() for part in (inside, *inside.parents)):
                sources.append(Source(str(inside), path.read_text(encoding="utf-8")))
    return sources


def folder_imports(sources: Sequence[Source]) -> dict[tuple[str, str], set[str]]:
    """(importing folder, imported folder) -> the modules that do it, for folders that differ."""
    folders = {source.name: source.folder for source in sources}
    edges: dict[tuple[str, str], set[str]] = {}
    for source in sources:
        for name in source.imports:
            if name in folders and folders[name] != source.folder:
                edges.setdefault((source.folder, folders[name]), set()).add(source.name)
    return edges


def circles(edges: Mapping[tuple[str, str], object]) -> list[list[str]]:
    """Sets of folders each of which reaches all others of its set by imports; empty when imports have a direction."""
    direct: dict[str, set[str]] = {}
    for importer, imported in edges:
        direct.setdefault(importer, set()).add(imported)
    reached = {folder: _reach(folder, direct) for folder in direct}
    found = {
        tuple(sorted(other for other in reached[folder] if folder in reached.get(other, set())))
        for folder in direct
        if folder in reached[folder]
    }
    return [list(circle) for circle in sorted(found)]


def _reach(start: str, direct: Mapping[str, set[str]]) -> set[str]:
    """Everything that can be reached from `start` in one import or more."""
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        for folder in direct.get(ahead.pop(), set()) - reached:
            reached.add(folder)
            ahead.append(folder)
    return reached


def missed_aims(sources: Sequence[Source], beside: Sequence[Source] = ()) -> list[str]:
    """One line for each aim that these modules miss; of those `beside` them the longest files and functions count."""
    everywhere = [*sources, *beside]
    bounds = [
        ("file", [Block(source.path, source.lines) for source in everywhere], aims.MAX_FILE),
        ("function", [block for source in everywhere for block in source.functions], aims.MAX_FUNCTION),
    ]
    missed = [f"folders import each other in a circle: {', '.join(one)}" for one in circles(folder_imports(sources))]
    for what, blocks, most in bounds:
        longest = max(blocks, key=lambda block: block.lines)
        if longest.lines > most:
            missed.append(f"the longest {what}, {longest.place}, has {longest.lines} lines; at most {most}")
    direct = sum(source.folder == "ds_hydra" for source in sources)
    if direct > aims.MAX_DIRECT:
        missed.append(f"{direct} files directly in ds_hydra/; at most {aims.MAX_DIRECT}")
    filled = sum(bool(line.strip()) for source in sources for line in source.text.splitlines())
    comments = sum(source.comments() for source in sources) / filled
    if comments < aims.MIN_COMMENTS:
        missed.append(f"{comments:.1%} of the lines hold a comment; at least {aims.MIN_COMMENTS:.1%}")
    blocks = [block for source in sources for block in source.functions]
    wide = sorted(block.place for block in blocks if block.positional > aims.MAX_POSITIONAL)
    if len(wide) > aims.MAX_WIDE:
        more = f"functions with more than {aims.MAX_POSITIONAL} positional parameters"
        missed.append(f"{len(wide)} {more}; at most {aims.MAX_WIDE}: {', '.join(wide)}")
    return missed
