"""Training scripts, read without running them: their loop, their arguments, and the lines to change. Pure: no torch.

A class is followed through imports and bases to the library that it comes from, whatever it is called on the way. An
argument is what the script gives it, what the file or options give that it is started with, or its class's default.

The classes that can be swapped are those that `ds_hydra/hugging_face` has: HydraX stands for the X that its file
imports. A script counts by what it constructs; what it only imports, for a type hint say, does not.
"""

from __future__ import annotations

import ast
import difflib
import functools
import itertools
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ds_hydra.config.hosts import ACCELERATE, CALLS, STEPS
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


_ACCELERATOR = "Accelerator"
Import = ast.Import | ast.ImportFrom
_PREFIX = "Hydra"
_CLASSES = Path(__file__).resolve().parent.parent / "hugging_face"
_MODULE = "ds_hydra.hugging_face"
_SUBCLASS = {
    "Seq2SeqTrainer": "it generates while it evaluates, by models with an encoder: a causal language model trains by "
    "Trainer",
    "RewardTrainer": "it trains a model that classifies, by the logits of a whole batch, which no rank has",
}
_NO_SWAP = "its loss needs the logits of a whole batch, which no rank has"
_LOADER = (
    "it hands training_data to initialize(), whose loader yields no batches here: call engine.train_batch() in place "
    "of the three calls, for which this config is written, or leave training_data out and loop over a DataLoader"
)


class Span(NamedTuple):
    """Bytes of a file's text, and what stands there after the swap."""

    start: int
    stop: int
    new: str


class Arguments(NamedTuple):
    """What a script says of its training in code: the classes of arguments, and constants that it gives them."""

    classes: tuple[str, ...]
    given: Mapping[str, Any]
    constants: Mapping[str, Any]  # of any other name: options' defaults, fields, values of names, arguments of calls
    recomputes: bool  # whether it calls gradient_checkpointing_enable()
    parsed: bool  # whether the command line gives them


class Swap(NamedTuple):
    """What is to be done to a script."""

    kind: str  # the class whose loop it is, or ACCELERATE, CALLS, STEPS
    host: str  # who reads the config before the engine: "trainer", "accelerate" or "script"
    spans: Mapping[Path, frozenset[Span]]  # of each file that is to be changed
    handed_in: bool  # whether the script hands its batches in, so that no setting says how large a step is
    models: tuple[str, ...]  # texts that it loads models or their configs from
    arguments: Arguments
    note: str = ""  # what else is to be done, where no line says it


@functools.cache
def swappable() -> dict[tuple[str, str], tuple[str, str]]:
    """(library, class): (module, class) that stands for it here, as the files of ds_hydra/hugging_face say."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(_CLASSES.glob("*.py"))}
    exported = {one.name for path, tree in trees.items() if path.name == "__init__.py"
                for node in tree.body if isinstance(node, ast.ImportFrom) for one in node.names}  # fmt: skip
    for path, tree in trees.items():
        libraries = {one.name: (node.module or "").split(".")[0] for node in ast.walk(tree)
                     if isinstance(node, ast.ImportFrom) for one in node.names}  # fmt: skip
        for node in tree.body:
            theirs = node.name.removeprefix(_PREFIX) if isinstance(node, ast.ClassDef) else ""
            if isinstance(node, ast.ClassDef) and node.name != theirs and libraries.get(theirs):
                module = _MODULE if node.name in exported else f"{_MODULE}.{path.stem}"
                found[libraries[theirs], theirs] = module, node.name
    return found


def swap_of(script: Path) -> Swap:
    """Read a script, and what it imports of its project. ConfigError where it has no such loop, or is no Python."""
    program = Program(script)
    uses = list(_uses(program))
    arguments = _arguments(program)
    models = tuple(_models(program))
    loops = [use for use in uses if _ours(use) is not None]
    trainers = [use for use in loops if _ours(use)[1] != _PREFIX + _ACCELERATOR]  # type: ignore[index]
    if trainers:
        name = _ours(trainers[0])[1].removeprefix(_PREFIX)  # type: ignore[index]
        return Swap(name, "trainer", _changes(program, trainers), True, models, arguments)
    engines = [(file, call, found) for file in program.files.values() for call in file.calls()
               if (found := program.origin(file, call.func)) and found.name == "initialize"
               and found.library in ("deepspeed", "ds_hydra")]  # fmt: skip
    called = {_called(call) for file in program.files.values() for call in file.calls()}
    if loops and not (engines and "prepare" not in called):
        return Swap(ACCELERATE, "accelerate", _changes(program, loops), True, models, arguments)
    if engines:
        calls = "backward" in called and "train_batch" not in called
        indexed = any(keyword.arg == "training_data" for _, call, _ in engines for keyword in call.keywords)
        kind, note = CALLS if calls else STEPS, _LOADER if calls and indexed else ""
        return Swap(
            kind, "script", _changes(program, [one for *_, one in engines]), not indexed, models, arguments, note
        )
    others = sorted({use.name for use in uses if use.name.endswith("Trainer")})
    if others:
        why = _SUBCLASS.get(others[0], _NO_SWAP)
        raise ConfigError(
            f"{script} trains by {', '.join(others)}, which this engine does not run: {why}. It runs "
            f"{', '.join(name for _, name in sorted(swappable()))}, and loops of deepspeed.initialize()"
        )
    raise ConfigError(
        f"{script} neither calls deepspeed.initialize() nor constructs {', '.join(n for _, n in sorted(swappable()))}, "
        "nor does a file of its project that it imports: name the script that does"
    )


def swapped_text(text: str, spans: Iterable[Span]) -> str:
    """A file's text after the swap."""
    new = text.encode()
    for span in sorted(spans, reverse=True):
        new = new[: span.start] + span.new.encode() + new[span.stop :]
    return new.decode()


def diff_of(spans: Mapping[Path, Iterable[Span]]) -> str:
    """The changes as a unified diff, which `patch -p0` takes."""
    told = []
    for path, of_file in spans.items():
        text = path.read_bytes().decode("utf-8-sig")
        old, new = (one.splitlines(keepends=True) for one in (text, swapped_text(text, of_file)))
        name = os.path.relpath(path)
        for line in difflib.unified_diff(old, new, name, name, n=1):
            told.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(told)


def renamed(script: Path, old: str, new: str) -> dict[Path, frozenset[Span]]:
    """Where a script names a file by a constant: the other name in its place."""
    found: dict[Path, frozenset[Span]] = {}
    for file in Program(script).files.values():
        places = [node for node in ast.walk(file.tree) if isinstance(node, ast.Constant)
                  and isinstance(node.value, str) and Path(node.value).name == Path(old).name
                  and node.value.endswith(".json")]  # fmt: skip
        spans = frozenset(Span(*_extent(file, node), _quoted(file, node, new)) for node in places)
        if spans:
            found[file.path] = spans
    return found


def _ours(origin: Origin) -> tuple[str, str] | None:
    """The class here that stands for what a script uses, or is that already."""
    if origin.library == "ds_hydra":
        return ("", origin.name) if origin.name in {name for _, name in swappable().values()} else None
    return swappable().get((origin.library, origin.name))


def _uses(program: Program) -> Iterator[Origin]:
    """What trainers and accelerators a script constructs, the script's own file first; without any, those that it uses
    otherwise than for a type hint."""
    found: list[Origin] = []
    beside: list[Origin] = []
    for file in program.files.values():
        hints = {id(inner) for node in _hints(file.tree) for inner in ast.walk(node)}
        made = {id(call.func) for call in file.calls()}
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.Name | ast.Attribute) or id(node) in hints or not _loaded(node):
                continue
            origin = program.origin(file, node)
            if origin is None or not (origin.name.endswith("Trainer") or origin.name.endswith(_ACCELERATOR)):
                continue
            if origin.library in ("trl", "transformers", "accelerate", "ds_hydra"):
                (found if id(node) in made else beside).append(origin)
    yield from found or beside


def _loaded(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load)


def _hints(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


def _changes(program: Program, origins: Sequence[Origin]) -> dict[Path, frozenset[Span]]:
    """Of each file: imports that bring another class under the script's name for it, and uses by a module's name."""
    taken: dict[tuple[Path, Import], dict[ast.alias, str]] = {}
    spans: dict[Path, set[Span]] = {}
    for origin in origins:
        module, name = _ours(origin) or ("ds_hydra", origin.name)
        if origin.library == "ds_hydra":
            continue  # swapped already
        path, first = origin.file.path, origin.node
        while isinstance(first, ast.Attribute):
            first = first.value
        assert isinstance(first, ast.Name), "an origin is a dotted name"
        statement = origin.file.names[first.id].statement
        assert statement is not None, "a library's names are imported"
        alias = next(one for one in statement.names if (one.asname or one.name.split(".")[0]) == first.id)
        if module == "ds_hydra":
            new = f"import ds_hydra as {first.id}" if origin.node is not first else f"from ds_hydra import {name}"
            if origin.node is first and alias.asname:
                new += f" as {alias.asname}"
            taken.setdefault((path, statement), {})[alias] = new
        elif origin.node is first:
            taken.setdefault((path, statement), {})[alias] = f"from {module} import {name} as {first.id}"
        else:
            spans.setdefault(path, set()).add(Span(*_extent(origin.file, origin.node), name))
            end = _extent(origin.file, statement)[1]
            spans[path].add(Span(end, end, _then(origin.file, statement) + f"from {module} import {name}"))
    for (path, statement), by_alias in taken.items():
        spans.setdefault(path, set()).add(_import_without(program.files[path], statement, by_alias))
    return {path: frozenset(of_file) for path, of_file in spans.items()}


def _import_without(file: ScriptFile, statement: Import, taken: Mapping[ast.alias, str]) -> Span:
    """An import less some of its names, and what brings these; the rest stays as it is written."""
    start, stop = _extent(file, statement)
    new = list(taken.values())
    if len(taken) < len(statement.names):
        places = [_extent(file, one) for one in statement.names]
        kept = [at for at, one in enumerate(statement.names) if one not in taken]
        data = file.text.encode()
        names = b"".join(data[places[at - 1][1] if at != kept[0] else places[at][0] : places[at][1]] for at in kept)
        rest = data[start : places[0][0]] + names + data[places[-1][1] : stop]
        new.insert(0, rest.decode())
    return Span(start, stop, _then(file, statement).join(new))


def _then(file: ScriptFile, statement: ast.stmt) -> str:
    """What stands between a statement and one that is put behind it."""
    line = file.text.encode().splitlines()[statement.lineno - 1]
    before = line[: statement.col_offset].decode()
    return ("\r\n" if "\r\n" in file.text else "\n") + before if not before.strip() else "; "


def _extent(file: ScriptFile, node: ast.stmt | ast.expr | ast.alias) -> tuple[int, int]:
    """First byte of a node in its file's text, and the one behind it."""
    lines = file.text.encode().splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    assert node.end_lineno is not None, "of a parsed file"
    assert node.end_col_offset is not None, "of a parsed file"
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def _quoted(file: ScriptFile, node: ast.Constant, new: str) -> str:
    """A text in the quotes that another one has."""
    start, _ = _extent(file, node)
    quote = file.text.encode()[start : start + 1].decode()
    return f"{quote}{new}{quote}" if quote in "\"'" else repr(new)


def _called(call: ast.Call) -> str:
    """The last name of what is called: "step" of engine.step()."""
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def _models(program: Program) -> Iterator[str]:
    """Folders and names that a model, or its config, is loaded from."""
    for file in program.files.values():
        for call in file.calls():
            first = call.args[0] if call.args else None
            given = [first, *(one.value for one in call.keywords if one.arg in ("model", *_MODEL_NAMES))]
            origin = program.origin(file, call.func)
            loads = _called(call) == "from_pretrained" or (origin is not None and origin.name.endswith("Trainer"))
            for node in given if loads else ():
                value = ... if node is None else file.value_of(node)
                if isinstance(value, str):
                    yield value


_MODEL_NAMES = ("pretrained_model_name_or_path", "model_name_or_path")


def _arguments(program: Program) -> Arguments:
    """The training arguments that a script makes, as a class of its own or of a library's."""
    classes: dict[str, None] = {}
    given: dict[str, Any] = {}
    options: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    keywords: dict[str, Any] = {}
    names: dict[str, Any] = {}
    called: set[str] = set()
    for file in program.files.values():
        for node, call in _arguments_of(program, file):
            classes[node.name] = None
            given = {**({} if call is None else _keywords(file, call)), **given}
        for definition in file.classes.values():
            of_class = _fields(file, definition)
            fields = {**of_class, **fields}
            if any(one is not None and _says(one.name) for one in map(functools.partial(program.origin, file),
                                                                     definition.bases)):  # fmt: skip
                given = {**of_class, **given}
        for call in file.calls():
            called.add(_called(call))
            options = {**_option(file, call), **options}
            keywords = {**_keywords(file, call), **keywords}
        names = {**file.constants, **names}
    constants = {**keywords, **names, **fields, **options}
    parsed = not called.isdisjoint(("HfArgumentParser", "TrlParser"))
    return Arguments(tuple(classes), given, constants, "gradient_checkpointing_enable" in called, parsed)


def _arguments_of(program: Program, file: ScriptFile) -> Iterator[tuple[Origin, ast.Call | None]]:
    """Where a file names classes of training arguments, and the call that makes one."""
    hints = {id(inner) for node in _hints(file.tree) for inner in ast.walk(node)}
    calls = {id(call.func): call for call in file.calls()}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in hints:
            origin = program.origin(file, node)
            if origin is not None and origin.library in ("trl", "transformers") and _says(origin.name):
                yield origin, calls.get(id(node))


def _keywords(file: ScriptFile, call: ast.Call) -> dict[str, Any]:
    found = ((one.arg, file.value_of(one.value)) for one in call.keywords if one.arg)
    return {name: value for name, value in found if value is not ...}


def _fields(file: ScriptFile, definition: ast.ClassDef) -> dict[str, Any]:
    """Of a dataclass: its fields with a constant for a default."""
    found = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            call = node.value if isinstance(node.value, ast.Call) else None
            value = file.value_of(node.value) if call is None else _keywords(file, call).get("default", ...)
            if value is not ...:
                found[node.target.id] = value
    return found


def _option(file: ScriptFile, call: ast.Call) -> dict[str, Any]:
    """The default of an option of argparse."""
    if _called(call) != "add_argument":
        return {}
    names = [value for value in map(file.value_of, call.args) if isinstance(value, str)]
    name = next((one for one in names if one.startswith("--")), "").lstrip("-").replace("-", "_")
    keywords = _keywords(file, call)
    return {name: keywords["default"]} if name and "default" in keywords else {}


def _says(name: str) -> bool:
    return name.endswith("TrainingArguments") or name in (
        "SFTConfig", "DPOConfig", "GRPOConfig", "RLOOConfig", "RewardConfig", "KTOConfig"
    )  # fmt: skip


_TRAINING = "TrainingArguments"
_OF_TRL = {"gradient_checkpointing": True, "bf16": True}
_KNOWN: dict[str, dict[str, Any]] = {  # where the library is not installed
    _TRAINING: {"gradient_checkpointing": False, "bf16": False, "fp16": False, "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 1},
    "SFTConfig": {**_OF_TRL, "max_length": 1024, "packing": False},
    "DPOConfig": {**_OF_TRL, "max_length": 1024},
    "RewardConfig": {**_OF_TRL, "max_length": 1024},
    "GRPOConfig": _OF_TRL,
    "RLOOConfig": _OF_TRL,
}  # fmt: skip


class Said(NamedTuple):
    """A value, and who says it; None: nobody does."""

    value: Any
    where: str


@dataclass(frozen=True)
class TrainingArgs:
    """A script's training arguments."""

    name: str  # of their class; empty for a loop that has none
    in_code: Mapping[str, Any]
    in_file: Mapping[str, Any]
    file: str  # as the user named it
    constants: Mapping[str, Any]  # that the script has for other uses, such as defaults of options
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of the installed class

    def get(self, name: str) -> Said:
        """The value of an argument."""
        if name in self.in_code:
            return Said(self.in_code[name], f"{self.name or 'the script'}({name}=...)")
        if name in self.in_file:
            return Said(self.in_file[name], self.file)
        if not self.name:
            return Said(self.constants.get(name), "the script")
        known = {**_KNOWN[_TRAINING], **_KNOWN.get(self.name, {})}
        value = self.defaults.get(name)
        return Said(known.get(name) if value is None else value, f"{self.name}'s default")

    def constant(self, name: str) -> Any:
        """What the script, or the file that it is started with, says of a name, whatever it is for; None: nothing."""
        return next((one[name] for one in (self.in_code, self.in_file, self.constants) if name in one), None)

    @property
    def models(self) -> tuple[str, ...]:
        """That the file or the options name."""
        named = (self.in_file.get(name) for name in ("model_name_or_path", "model", "base_model"))
        return tuple(one for one in named if isinstance(one, str))

    def precise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config whose types are those that Trainer would fill in, where it leaves them to the arguments."""
        if not self.name:
            return dict(config)
        fp16 = bool(self.get("fp16").value)
        values = {"fp16": fp16, "bf16": bool(self.get("bf16").value) and not fp16}
        return {
            key: {**block, "enabled": values[key]}
            if key in values and isinstance(block, Mapping) and block.get("enabled") == "auto" else block
            for key, block in config.items()
        }  # fmt: skip


def training_args(swap: Swap, given: str | None) -> TrainingArgs:
    """`given` is a YAML or JSON file, or options as on a command line. ConfigError for a file that cannot be read."""
    name = ""
    if swap.host == "trainer":
        expected = _TRAINING if swap.kind == "Trainer" else swap.kind.replace("Trainer", "Config")
        name = expected if expected in swap.arguments.classes else next(iter(swap.arguments.classes), expected)
    return TrainingArgs(
        name, swap.arguments.given, _read(given), given or "", swap.arguments.constants, _defaults(name)
    )


def _read(given: str | None) -> dict[str, Any]:
    if given is None:
        return {}
    if given.lstrip().startswith("-"):
        return _of_options(shlex.split(given))
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the script's arguments {given}: {error}") from error
    try:
        import yaml

        found = yaml.safe_load(text)  # JSON is YAML, too
    except ImportError:
        found = json.loads(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{given} is no YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{given} must have a key a line, such as `max_length: 4096`")
    return {str(key).replace("-", "_"): _number(value) for key, value in found.items()}


def _of_options(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while words:
        option, equals, value = words.pop(0).partition("=")
        if not option.startswith("--"):
            continue
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        name = option[2:].replace("-", "_")
        found[name.removeprefix("no_")] = False if name.startswith("no_") and value == "true" else _number(value)
    return found


def _number(value: Any) -> Any:
    """A text as what it says; YAML takes 1e-5 for one."""
    if not isinstance(value, str):
        return value
    words = {"true": True, "false": False, "none": None, "null": None}
    if value.lower() in words:
        return words[value.lower()]
    try:
        return float(value) if set(value.lower()) & set(".e") else int(value)
    except ValueError:
        return value


def _defaults(name: str) -> dict[str, Any]:
    """Of the installed class; nothing where it is not installed."""
    if name not in _KNOWN:
        return {}
    import dataclasses
    from importlib import import_module

    try:
        found = getattr(import_module("transformers" if name == _TRAINING else "trl"), name)
    except (ImportError, AttributeError, RuntimeError):
        return {}
    return {one.name: one.default for one in dataclasses.fields(found) if one.default is not dataclasses.MISSING}
