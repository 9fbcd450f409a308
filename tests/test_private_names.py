"""Private names of other packages that the library leans on: each is still there, or the test says who misses it.

A private name may vanish with any release. What is found here is read from the sources, so that a name that is new in
them is asked for too.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
from collections.abc import Iterator
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import datasets
import deepspeed
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from packaging.version import Version
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import LlamaConfig, PreTrainedModel, Qwen2VLProcessor, Trainer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_hydra
from tests.support.structure import Source, read_sources

ROOT = Path(__file__).resolve().parents[1]
SOURCES = read_sources(ROOT)
# The standard library documents these, underscore or not.
DOCUMENTED = {"_asdict", "_replace", "_fields", "_make", "_exit", "_current_frames"}
# The project has attributes of these names too.
SHARED = {"_parameters", "_buffers", "_modules"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.startswith("_hydra")


def own_names() -> set[str]:
    """Names that the library defines: functions, classes, variables, fields, and attributes that are set."""
    names: set[str] = set()
    for node in (node for source in SOURCES for node in ast.walk(source.tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names - SHARED


def private_attributes(source: Source) -> Iterator[tuple[str, str]]:
    """Each private attribute that a module reads or sets, with the place."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            yield node.attr, f"{source.path}:{node.lineno}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if private(str(name)):
                yield str(name), f"{source.path}:{node.lineno}"


def private_imports(source: Source) -> Iterator[tuple[str, str, str]]:
    """Each import of a private module, or of a private name of one that is not ours: module, name, place."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] != "ds_hydra":
            for alias in node.names:
                if any(private(part) for part in (*node.module.split("."), alias.name)):
                    yield node.module, alias.name, f"{source.path}:{node.lineno}"


def holders() -> list[Any]:
    """Objects of other packages, one of each kind whose private names are read."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    dataset = datasets.Dataset.from_list([{"a": 1}])
    options = torch.distributed.ProcessGroupGloo._Options  # type: ignore[attr-defined]
    return [torch, deepspeed, torch._C, torch._C._autograd, torch.ops.aten, torch.autograd.Variable,
            torch.distributed.distributed_c10d,
            torch.distributed.ProcessGroup, options, torch.nn.Linear(1, 1), parameter, argparse.ArgumentParser(),
            LlamaConfig(), torch.compile(torch.nn.Linear(1, 1)), PreTrainedModel, Trainer, DeepSpeedEngine, dataset,
            dataset.to_iterable_dataset(), BaseTunerLayer, ALL_ATTENTION_FUNCTIONS, torch.nn.modules.batchnorm,
            Qwen2VLProcessor]  # fmt: skip


def test_private_names_of_other_packages_are_there() -> None:
    own, holding = own_names(), holders()
    used = [(name, place) for source in SOURCES for name, place in private_attributes(source) if name not in own]
    assert {"_C", "_fused_rms_norm", "_forward_hooks"} <= {name for name, _ in used}  # the sources were read
    gone = [
        f"{place} uses {name}, which no object of torch, transformers, DeepSpeed, PEFT, datasets or argparse has"
        for name, place in used
        if name not in DOCUMENTED and not any(hasattr(one, name) for one in holding)
    ]
    assert not gone, "\n".join(gone)


# Names that are newer than the oldest release that is supported, so that the library asks whether they are there.
SINCE = {
    "torch.distributed.all_gather_single": "2.13",
    "torch.distributed.reduce_scatter_single": "2.13",
    "torch.nn.attention.activate_flash_attention_impl": "2.11",
    "deepspeed.runtime.engine.DeepSpeedEngine.log_level": "0.19",
    "deepspeed.runtime.engine.DeepSpeedEngine._configure_python_gc": "0.19",
}


@pytest.mark.parametrize("path", SINCE)
def test_a_newer_name_is_there_since_the_release_that_is_said(path: str) -> None:
    package, _, name = path.partition(".")
    of_what, _, last = path.rpartition(".")
    assert hasattr(resolve_name(of_what), last) == (Version(version(package)) >= Version(SINCE[path])), name


def test_every_module_is_imported() -> None:
    """With the releases that are here; verl and Ray have environments of their own."""
    for module in pkgutil.walk_packages(ds_hydra.__path__, "ds_hydra."):
        if not module.name.startswith(("ds_hydra.hosts.", "ds_hydra.ray.")) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def test_private_modules_of_other_packages_are_there() -> None:
    for source in SOURCES:
        for module, name, place in private_imports(source):
            found = importlib.import_module(module)
            assert hasattr(found, name), f"{place} imports {name} from {module}, which is gone"


@pytest.mark.parametrize("path", ["distributed.distributed_c10d._get_default_store", "_C.DisableTorchFunction"])
def test_private_functions_of_torch_are_there(path: str) -> None:
    assert callable(reduce(getattr, path.split("."), torch))


def patched(path: Path) -> Iterator[tuple[str, str]]:
    """Each name of the project that a test or a tool puts something else in place of: of what, and which."""
    tree = ast.parse(path.read_text("utf-8"))
    modules = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }  # fmt: skip
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        match ast.unparse(node.func).rpartition(".")[2], node.args:
            case "patch", [ast.Constant(value=str(where)), *_]:
                of_what, _, name = where.rpartition(".")
                yield of_what, name
            case "object" | "setattr", [ast.Name(id=of), ast.Constant(value=str(name)), *_]:
                yield modules.get(of, ""), name


def test_what_tests_patch_is_there() -> None:
    """A test that is rarely drawn would not say so."""
    missing = []
    for path in (path for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py")):
        for of_what, name in patched(path):
            if of_what.startswith("ds_hydra.") and not hasattr(resolve_name(of_what), name):
                missing.append(f"{path.relative_to(ROOT)}: {of_what} has no {name}")
    assert missing == []
