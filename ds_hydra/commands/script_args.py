"""What a script's training arguments say, in its code, in the file or options that it is started with, or by the
default of their class. Pure.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ds_hydra.commands.swapped import Swap
from ds_hydra.zero_hetero.errors import ConfigError

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
