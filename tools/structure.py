"""The shape of the code in figures: folders, imports between them, the longest of everything, comments.

  python -m tools.structure [--root DIR] [--json FILE] [--quick]

Reads the files of a checkout without importing them, so `--root` may be another one, to compare before and after.
A folder is a directory of modules. Every import statement counts, inside functions too, except those under
`if TYPE_CHECKING`. `--quick` leaves the table of folders out.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from ds_hydra.zero_hetero.errors import ConfigError
from tools import aims

LINKED = ("pipe", "zero_hetero")  # imported as parts of ds_hydra
TOPS = ("ds_hydra", *LINKED, "benchmarks")
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")  # where nodes of the syntax tree hold statements
BESIDE = ("tools", "tests", "examples", "docs")  # of which only lengths are judged


@dataclass(frozen=True)
class Block:
    """A file, class or function: where it stands and how long it is; `positional` counts without self and cls."""

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

    def classes(self) -> Iterator[Block]:
        """Classes, nested ones too."""
        return (self._block(node) for node in _statements(self.tree) if isinstance(node, ast.ClassDef))

    def _block(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, positional: int = 0) -> Block:
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
    out. ConfigError where there is none."""
    sources = []
    for top in tops:
        for path in sorted((root / top).rglob("*.py")):
            inside = path.relative_to(root)
            if not any((root / part).is_symlink() for part in (inside, *inside.parents)):
                sources.append(Source(str(inside), path.read_text(encoding="utf-8")))
    if not sources:
        raise ConfigError(f"--root {root}: no module below {', '.join(tops)}; give the root of a checkout")
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


@dataclass(frozen=True)
class Structure:
    """All figures of one checkout; lengths in lines."""

    files: int
    lines: int
    folders: dict[str, int]  # files of each
    edges: int  # pairs of folders with an import
    circles: list[list[str]]
    mutual: list[str]  # pairs of folders that import each other
    longest_file: Block
    longest_function: Block
    longest_class: Block
    comments: float  # share of the lines that are not empty
    wide: list[str]  # functions with more than aims.MAX_POSITIONAL positional parameters


def measure(sources: Sequence[Source], beside: Sequence[Source] = ()) -> Structure:
    """All figures of these modules; those `beside` them count where files and functions are longest."""
    edges = folder_imports(sources)
    everywhere = [*sources, *beside]
    files = [Block(source.path, source.lines) for source in everywhere]
    functions = [block for source in sources for block in source.functions]
    filled = sum(bool(line.strip()) for source in sources for line in source.text.splitlines())
    return Structure(
        files=len(sources),
        lines=sum(source.lines for source in sources),
        folders=dict(Counter(source.folder for source in sources)),
        edges=len(edges),
        circles=circles(edges),
        mutual=sorted(f"{a} <-> {b}" for a, b in edges if a < b and (b, a) in edges),
        longest_file=_longest(files),
        longest_function=_longest([block for source in everywhere for block in source.functions]),
        longest_class=_longest([block for source in sources for block in source.classes()]),
        comments=sum(source.comments() for source in sources) / filled,
        wide=sorted(block.place for block in functions if block.positional > aims.MAX_POSITIONAL),
    )


def _longest(blocks: Sequence[Block]) -> Block:
    return max(blocks, key=lambda block: block.lines, default=Block("none", 0))


def missed_aims(found: Structure) -> list[str]:
    """One line for each aim that these figures miss."""
    bounds = [
        ("file", found.longest_file, aims.MAX_FILE),
        ("function", found.longest_function, aims.MAX_FUNCTION),
    ]
    missed = [f"folders import each other in a circle: {', '.join(circle)}" for circle in found.circles]
    missed += [
        f"the longest {what}, {block.place}, has {block.lines} lines; at most {most}"
        for what, block, most in bounds
        if block.lines > most
    ]
    if found.folders.get("ds_hydra", 0) > aims.MAX_DIRECT:
        missed.append(f"{found.folders['ds_hydra']} files directly in ds_hydra/; at most {aims.MAX_DIRECT}")
    if found.comments < aims.MIN_COMMENTS:
        missed.append(f"{found.comments:.1%} of the lines hold a comment; at least {aims.MIN_COMMENTS:.1%}")
    if len(found.wide) > aims.MAX_WIDE:
        more = f"functions with more than {aims.MAX_POSITIONAL} positional parameters"
        missed.append(f"{len(found.wide)} {more}; at most {aims.MAX_WIDE}: {', '.join(found.wide)}")
    return missed


def show(found: Structure, *, folders: bool) -> None:
    """Print the figures, and the files of each folder if asked."""
    blocks = {
        "longest file": found.longest_file,
        "longest function": found.longest_function,
        "longest class": found.longest_class,
    }
    rows: list[tuple[str, object, str]] = [
        ("files", found.files, f"{found.lines} lines in {len(found.folders)} folders"),
        ("files directly in ds_hydra/", found.folders.get("ds_hydra", 0), ""),
        ("pairs of folders with an import", found.edges, ""),
        ("pairs that import each other", len(found.mutual), ", ".join(found.mutual)),
        ("circles of folders", len(found.circles), "; ".join(" ".join(circle) for circle in found.circles)),
        *((name, block.lines, block.place) for name, block in blocks.items()),
        ("comments, % of lines", round(100 * found.comments, 1), ""),
        (f"more than {aims.MAX_POSITIONAL} positional", len(found.wide), ""),
    ]
    print_table(("figure", "value", "where"), rows)
    if folders:
        print()
        print_table(("folder", "files"), sorted(found.folders.items()))
        print()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures of a checkout; 1 when an aim is missed, 2 where there is no code."""
    parser = figures_parser(__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout to read (default: here)")
    args = parser.parse_args(arguments)
    return guarded("structure", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """What `main` does once its options are read."""
    found = measure(read_sources(args.root), read_sources(args.root, BESIDE))
    show(found, folders=not args.quick)
    summary = (
        f"{found.files} files, {len(found.circles)} circles of folders, longest file {found.longest_file.lines} and "
        f"function {found.longest_function.lines} lines, {found.comments:.1%} comments"
    )
    return finish("structure", summary, asdict(found), missed_aims(found), args.json)


if __name__ == "__main__":
    sys.exit(main())
