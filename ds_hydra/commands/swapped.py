"""A training script's text in; which loop it has of those that ds-hydra runs, and the lines to change, out. Pure."""

from __future__ import annotations

import ast
from typing import NamedTuple

from ds_hydra.zero_hetero.errors import ConfigError

TRAINER, SFT, ACCELERATE, CALLS, STEPS = "Trainer", "SFTTrainer", "Accelerate", "three calls", "train_batch"
_CLASSES = {  # of another library: (kind, the module of ours, our class)
    ("trl", "SFTTrainer"): (SFT, "ds_hydra.hugging_face.sft", "HydraSFTTrainer"),
    ("transformers", "Trainer"): (TRAINER, "ds_hydra.hugging_face", "HydraTrainer"),
    ("accelerate", "Accelerator"): (ACCELERATE, "ds_hydra.hugging_face", "HydraAccelerator"),
}


_LOADER = (
    "it hands training_data to initialize(), whose loader yields no batches here: call engine.train_batch() in place "
    "of the three calls, for which this config is written, or leave training_data out and loop over a DataLoader"
)


class Line(NamedTuple):
    """One line of the script, counted from 1, and what stands there after the swap."""

    number: int
    old: str
    new: str


class Swap(NamedTuple):
    """What is to be done to a script."""

    kind: str
    lines: tuple[Line, ...]
    handed_in: bool  # whether the script hands its batches in, so that no setting says how large a step is
    models: tuple[str, ...]  # texts that it loads models or their configs from
    note: str = ""  # what else is to be done, where no line says it


def swap_of(text: str, name: str) -> Swap:
    """Read a script without running it. ConfigError where it has no such loop, or is no Python."""
    try:
        tree = ast.parse(text, name)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{name} is no Python script: {error}") from error
    nodes, lines = list(ast.walk(tree)), text.splitlines()
    models = tuple(
        call.args[0].value
        for call in nodes
        if isinstance(call, ast.Call) and _called(call) == "from_pretrained" and call.args
        and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    )  # fmt: skip
    for (package, taken), (kind, module, ours) in _CLASSES.items():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                others = [one for one in node.names if one.name != taken]
                if len(others) < len(node.names):
                    by = f"from {module} import {ours} as {taken}"
                    return Swap(kind, _taken(node, others, lines, by), True, models)
    for node in nodes:
        named = [one for one in node.names if one.name == "deepspeed"] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.Import) and named:
            called = {_called(call) for call in nodes if isinstance(call, ast.Call)}
            indexed = any(
                keyword.arg == "training_data"
                for call in nodes if isinstance(call, ast.Call) and _called(call) == "initialize"
                for keyword in call.keywords
            )  # fmt: skip
            if "initialize" in called:
                calls = "backward" in called and "train_batch" not in called
                others = [one for one in node.names if one is not named[0]]
                new = f"import ds_hydra as {named[0].asname or 'deepspeed'}"
                line = Line(node.lineno, lines[node.lineno - 1].strip(),
                            f"{ast.unparse(ast.Import(others))}; {new}" if others else new)  # fmt: skip
                kind, note = CALLS if calls else STEPS, _LOADER if calls and indexed else ""
                return Swap(kind, (line,), not indexed, models, note)
    raise ConfigError(
        f"{name} neither imports deepspeed and calls deepspeed.initialize, nor imports Trainer of transformers, "
        "SFTTrainer of trl or Accelerator of accelerate: name the script that does"
    )


def _called(call: ast.Call) -> str:
    """The last name of what is called: "step" of engine.step()."""
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def _taken(node: ast.ImportFrom, others: list[ast.alias], lines: list[str], ours: str) -> tuple[Line, ...]:
    """An import whose one name comes from ours then, and what is left of it."""
    old = " ".join(line.strip() for line in lines[node.lineno - 1 : node.end_lineno])
    rest = ast.unparse(ast.ImportFrom(node.module, others, node.level)) if others else ""
    return (Line(node.lineno, old, f"{rest}; {ours}" if rest else ours),)
