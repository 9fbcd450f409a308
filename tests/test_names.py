"""`import ds_hydra as deepspeed`: each name of DeepSpeed's is there, the same object or what stands in its place."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import deepspeed.checkpoint
import deepspeed.pipe
import deepspeed.profiling
import pytest

import ds_hydra
from ds_hydra.zero_hetero.deepspeed_names import BOTH

OWN = {"checkpoint", "dist", "init_distributed", "initialize", "pipe", "profiling", "zero"}
OWN_OF_ZERO = {"GatheredParameters", "Init", "register_external_parameter"}

TAKEN = {
    "accelerator": ("get_accelerator",),
    "checkpoint.utils": ("clone_tensors_for_torch_save",),
    "comm": ("TorchBackend", "get_rank"),
    "compile.passes": ("zero3_compile",),
    "compression.helper": ("recursive_getattr",),
    "constants": ("TORCH_DISTRIBUTED_DEFAULT_PORT",),
    "inference": ("RaggedInferenceEngineConfig",),
    "io": ("FastFileWriter",),
    "launcher.runner": ("DEEPSPEED_ENVIRONMENT_NAME",),
    "module_inject": ("replace_transformer_layer",),
    "moe.layer": ("MoE",),
    "moe.utils": ("split_params_into_different_moe_groups_for_optimizer",),
    "ops.adagrad": ("DeepSpeedCPUAdagrad",),
    "ops.adam": ("DeepSpeedCPUAdam", "FusedAdam"),
    "ops.lion": ("DeepSpeedCPULion",),
    "ops.op_builder": ("AsyncIOBuilder",),
    "pipe": ("LayerSpec", "PipelineModule", "TiedLayerSpec"),
    "profiling.flops_profiler": ("get_model_profile",),
    "runtime.engine": ("DeepSpeedEngine",),
    "runtime.lr_schedules": ("VALID_LR_SCHEDULES",),
    "runtime.pipe.topology": ("ProcessTopology",),
    "runtime.sequence_parallel.ulysses_sp": ("UlyssesSPDataLoaderAdapter",),
    "runtime.utils": ("see_memory_usage",),
    "runtime.zero.offload_config": ("OffloadStateTypeEnum",),
    "runtime.zero.partition_parameters": ("ZeroParamStatus",),
    "runtime.zero.stage3": ("estimate_zero3_model_states_mem_needs_all_live",),
    "sequence.layer": ("DistributedAttention",),
    "utils": ("RepeatingLoader", "groups", "logger", "safe_get_full_grad", "set_z3_leaf_modules"),
    "utils.logging": ("logger",),
    "utils.zero_to_fp32": ("get_fp32_state_dict_from_zero_checkpoint",),
}
"""What public scripts and DeepSpeed's pages take from its modules."""


def public(module: ModuleType) -> set[str]:
    return {name for name in dir(module) if not name.startswith("_")}


def test_all_that_deepspeed_has_is_there() -> None:
    theirs = public(deepspeed) | {"HAS_TRITON", "__git_hash__", "__version_major__"}
    assert len(theirs) > 60
    other = {name for name in theirs if getattr(ds_hydra, name) is not getattr(deepspeed, name)}
    assert other == OWN
    assert ds_hydra.dist is deepspeed.comm
    packages = ((ds_hydra.zero, deepspeed.zero), (ds_hydra.pipe, deepspeed.pipe),
                (ds_hydra.checkpoint, deepspeed.checkpoint), (ds_hydra.profiling, deepspeed.profiling))  # fmt: skip
    for ours, module in packages:
        other = {name for name in public(module) if getattr(ours, name) is not getattr(module, name)}
        assert other == (OWN_OF_ZERO if module is deepspeed.zero else set()), ours


@pytest.mark.parametrize(("module", "names"), TAKEN.items())
def test_modules_are_deepspeeds_own(module: str, names: tuple[str, ...]) -> None:
    ours: Any = importlib.import_module(f"ds_hydra.{module}")
    theirs: Any = importlib.import_module(f"deepspeed.{module}")
    assert all(getattr(ours, name) is getattr(theirs, name) for name in names)
    if module not in BOTH:
        assert ours is theirs
        assert theirs.__spec__.name == theirs.__name__ == f"deepspeed.{module}"


def test_names_of_nobody_are_refused() -> None:
    with pytest.raises(AttributeError, match=r"'initalize', and neither has deepspeed of DeepSpeed \d"):
        _ = ds_hydra.initalize
    for module in ("ds_hydra.nonsense", "ds_hydra.ops.nonsense", "ds_hydra.nonsense.adam"):
        with pytest.raises(ModuleNotFoundError, match=module.removesuffix(".adam")):
            importlib.import_module(module)


def test_no_module_hides_another_of_deepspeeds() -> None:
    def modules(module: ModuleType) -> set[str]:
        return {found.name for found in pkgutil.iter_modules(module.__path__)}

    assert modules(ds_hydra) & modules(deepspeed) == BOTH - {"zero"}  # `deepspeed.zero` is no file
    for name in sorted(BOTH - {"zero"}):
        ours, theirs = (importlib.import_module(f"{package}.{name}") for package in ("ds_hydra", "deepspeed"))
        assert not modules(ours) & (modules(theirs) | public(theirs)), name


def test_our_own_modules_are_imported_without_torch() -> None:
    code = (
        "import sys\nfrom ds_hydra import entry, pipe, checkpoint\nfrom ds_hydra.pipe import shape\n"
        "from ds_hydra.plan import step_plan\nsys.exit(' '.join({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.stderr == "\n"
