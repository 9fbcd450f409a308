"""A training script in; which loop it has of those that ds-hydra runs, and the lines to change, out. Pure.

The classes that can be swapped are those that `ds_hydra/hugging_face` has: HydraX stands for the X that its file
imports. A script counts by what it constructs; what it only imports, for a type hint say, does not.
"""

from __future__ import annotations

import ast
import difflib
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ds_hydra.commands.script_files import Origin, Program, ScriptFile
from ds_hydra.config.hosts import ACCELERATE, CALLS, STEPS
from ds_hydra.zero_hetero.errors import ConfigError

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
