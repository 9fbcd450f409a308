"""A training script and the files of its project that it imports, read without running them. Pure.

A class is followed through imports and bases to the library that it comes from, whatever it is called on the way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ds_hydra.zero_hetero.errors import ConfigError

LIBRARIES = frozenset({"accelerate", "datasets", "deepspeed", "ds_hydra", "peft", "torch", "transformers", "trl"})
_MOST_FILES = 300
_ROOTS = 3  # the script's folder, and those above it, which a package may be imported from
_Statement = ast.Import | ast.ImportFrom


class Binding(NamedTuple):
    """What a name of a file stands for."""

    module: str  # dotted, of another library; empty: of the file `local`
    name: str  # in it; empty: the module itself
    local: Path | None = None
    statement: _Statement | None = None


@dataclass
class ScriptFile:
    """One file of Python."""

    path: Path
    text: str  # with the ends of its lines as they are
    tree: ast.Module
    names: dict[str, Binding] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)  # of names that are given one value

    def calls(self) -> Iterator[ast.Call]:
        """Every call, in the order of a walk."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))

    def value_of(self, node: ast.expr) -> Any:
        """A constant as it stands there, or by a name that has one value; ... where it is none."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.constants[node.id]
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return ...


class Origin(NamedTuple):
    """Where a class or function comes from."""

    library: str  # first part of its module's name
    name: str
    file: ScriptFile  # that names the library
    node: ast.expr  # which stands for it there


class Program:
    """A script and what it imports of its project, the script first."""

    def __init__(self, script: Path) -> None:
        """ConfigError for a script that cannot be read or is no Python; other files that are none are passed over."""
        self.folder = script.parent
        self.files: dict[Path, ScriptFile] = {}
        try:
            waiting = [self._read(script)]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the script {script}: {error}") from error
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{script} is no Python script: {error}") from error
        while waiting and len(self.files) < _MOST_FILES:
            for path in self._imported(waiting.pop(0)):
                try:
                    waiting.append(self._read(path))
                except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
                    continue

    @property
    def script(self) -> ScriptFile:
        """The file that is started."""
        return next(iter(self.files.values()))

    def origin(self, file: ScriptFile, node: ast.expr, seen: frozenset[int] = frozenset()) -> Origin | None:
        """What an expression stands for in a library: the thing itself, or the first base of a class that is in one."""
        dotted = _dotted(node)
        if dotted is None or id(node) in seen:
            return None
        first, *rest = dotted
        bound = file.names.get(first)
        if bound is not None and bound.local is None:
            path = [*bound.module.split("."), *filter(None, [bound.name]), *rest]
            return Origin(path[0], path[-1], file, node)
        if bound is not None:
            there = self.files.get(bound.local) if bound.local else None
            name = bound.name or (rest[-1] if rest else "")
            return self._defined(there, name, seen | {id(node)}) if there is not None and name else None
        return self._defined(file, first, seen | {id(node)}) if not rest else None

    def _defined(self, file: ScriptFile, name: str, seen: frozenset[int]) -> Origin | None:
        """What a name of a file stands for: a class by its bases, or what the file itself imports."""
        if name in file.classes:
            origins = (self.origin(file, base, seen) for base in file.classes[name].bases)
            return next((one for one in origins if one is not None and one.library in LIBRARIES), None)
        bound = file.names.get(name)
        if bound is None:
            return None
        node = next((n for n in ast.walk(file.tree) if isinstance(n, ast.Name) and n.id == name), ast.Name(name))
        return self.origin(file, node, seen)

    def _read(self, path: Path) -> ScriptFile:
        text = path.read_bytes().decode("utf-8-sig")
        tree = ast.parse(text, str(path))
        file = ScriptFile(path, text, tree)
        self.files[path] = file
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for one in node.names:
                    module = one.name if one.asname else one.name.split(".")[0]
                    local = self._locate(file, one.name, 0)
                    file.names[one.asname or module] = Binding("" if local else module, "", local, node)
            elif isinstance(node, ast.ImportFrom):
                self._bind(file, node)
            elif isinstance(node, ast.ClassDef):
                file.classes[node.name] = node
        _bind_constants(file)
        return file

    def _bind(self, file: ScriptFile, node: ast.ImportFrom) -> None:
        local = self._locate(file, node.module or "", node.level)
        for one in node.names:
            inside = self._locate(file, f"{node.module or ''}.{one.name}".strip("."), node.level)
            if inside is not None and inside != local:  # a file of a package
                bound = Binding("", "", inside, node)
            elif local is not None or node.level:
                bound = Binding("", one.name, local, node)
            else:
                bound = Binding(node.module or "", one.name, None, node)
            file.names[one.asname or one.name] = bound

    def _imported(self, file: ScriptFile) -> Iterator[Path]:
        for bound in list(file.names.values()):
            if bound.local is not None and bound.local not in self.files:
                yield bound.local

    def _locate(self, file: ScriptFile, module: str, level: int) -> Path | None:
        """The file of a module of the project."""
        parts = module.split(".") if module else []
        if level:
            above = file.path.parent
            for _ in range(level - 1):
                above = above.parent
            roots = [above]
        elif not parts or parts[0] in LIBRARIES:
            return None
        else:
            roots = [self.folder, *list(self.folder.absolute().parents)[: _ROOTS - 1]]
        for root in roots:
            at = root.joinpath(*parts)
            for path in (at.with_name(at.name + ".py") if parts else at / "__init__.py", at / "__init__.py"):
                if path.is_file():
                    return path
        return None


def _dotted(node: ast.expr) -> list[str] | None:
    """The names of `a.b.c`; None for any other expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else None


def _bind_constants(file: ScriptFile) -> None:
    """Names that one statement gives a constant, and no other statement anything."""
    given: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            plain = None if isinstance(node, ast.AugAssign) else node.value
            for target in targets:
                if isinstance(target, ast.Name):
                    given.setdefault(target.id, []).append(plain)
    for name, values in given.items():
        if len(values) == 1 and isinstance(values[0], ast.Constant) and values[0].value is not None:
            file.constants[name] = values[0].value
