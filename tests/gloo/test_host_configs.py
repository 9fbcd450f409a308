"""A config with the block as README prints it, in every form and by every host: what each sees, and a step trained."""

from __future__ import annotations

import base64
import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
from accelerate import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.hugging_face.host_configs import for_engine
from ds_hydra.testing import free_port, run_ranks
from tests.support.pages import ROOT, printed_block
from tests.support.printed_hosts import (
    ACCELERATE,
    BY_TRAINER,
    FIRST_LOSS,
    LENGTHS,
    ROWS,
    SFT,
    SMALL,
    TRAINER,
    one_step,
    save_model,
)

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "steps_per_print": 1,
}
ZERO: dict[str, dict[str, Any]] = {
    "none": {},
    "1": {"zero_optimization": {"stage": 1}},
    "3": {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            "allgather_bucket_size": "auto",
            "offload_optimizer": {"device": "auto"},
        }
    },
}


def as_dict(config: dict[str, Any], folder: Path) -> Any:
    return config


def as_path(config: dict[str, Any], folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


def as_base64(config: dict[str, Any], folder: Path) -> Any:
    return base64.urlsafe_b64encode(json.dumps(config).encode()).decode()


def as_object(config: dict[str, Any], folder: Path) -> Any:
    return HfDeepSpeedConfig(config)


FORMS: tuple[Callable[..., Any], ...] = (as_dict, as_path, as_base64, as_object)


@pytest.mark.parametrize("form", [*FORMS, None], ids=str)
@pytest.mark.parametrize("zero", ZERO)
def test_the_block_is_nobodys_but_the_engines(
    form: Callable[..., Any] | None, zero: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever may be "auto" in it; a host has values for what is its own, and sees stage 1. None: a file named as
    Accelerate's launcher names it."""
    block = printed_block()["hydra"] | {"fast_paths": "auto", "chunks": "auto", "elastic": {"strategies": "auto"}}
    config = {"gradient_clipping": "auto", "steps_per_print": 5, "hydra": block} | ZERO[zero]
    written = copy.deepcopy(config)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", as_path(config, tmp_path))
    plugin = DeepSpeedPlugin(None if form is None else form(config, tmp_path))
    plugin.deepspeed_config_process(must_match=False, **{"gradient_clipping": 0.5})
    assert config == written
    assert (plugin.zero_stage, plugin.is_zero3_init_enabled()) == (1, False)
    assert plugin.deepspeed_config["hydra"] == written["hydra"]
    given = for_engine(plugin.deepspeed_config)
    assert (given["gradient_clipping"], given["steps_per_print"], given["hydra"]) == (0.5, 5, written["hydra"])
    zeros = given.get("zero_optimization")
    assert zeros == (None if zero == "none" else {"stage": int(zero)} | (zeros or {}))
    assert "auto" not in json.dumps(zeros)


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_a_model_is_loaded_whole_under_stage_3(form: Callable[..., Any], tmp_path: Path) -> None:
    for block, cut in ((printed_block(), False), ({}, True)):
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, deepspeed=form(AUTO | ZERO["3"] | block, tmp_path))
        assert is_deepspeed_zero3_enabled() == cut
        del arguments


@pytest.mark.drawn
@pytest.mark.parametrize("host", [*BY_TRAINER, ACCELERATE])
@pytest.mark.parametrize("zero", ["none", "3"])
def test_a_step_is_trained_with_the_block_as_printed(host: str, zero: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", **SMALL)
    config = AUTO | ZERO[zero] | printed_block()
    for found in run_ranks(one_step, 2, host, config, "model", str(tmp_path), timeout=300):
        logged = found.logged
        assert logged["loss"] == pytest.approx(FIRST_LOSS[host], abs=0.05)
        assert found.steps == 1
        if host != ACCELERATE:
            assert logged["hydra/strategy"] in ("2*tp1", "tp2", "sp2", "pp2")
            assert logged["hydra/step_ms"] > 0 <= logged["hydra/wait"] < 1
        if host == SFT:
            assert 2 * ROWS * min(LENGTHS) < logged["num_tokens"] < 2 * ROWS * max(LENGTHS)


@pytest.mark.drawn
@pytest.mark.parametrize("host", [TRAINER, ACCELERATE])
def test_so_is_one_that_accelerates_launcher_names_the_config_of(host: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", **SMALL)
    options = (
        f"--use_deepspeed --num_processes 2 --num_machines 1 --mixed_precision no --main_process_port {free_port()}"
    )
    config = as_path(AUTO | ZERO["3"] | printed_block(), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--deepspeed_config_file", config,
         "-m", "tests.support.printed_hosts", host, str(tmp_path / "model")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("LOSS ")]
    assert losses == pytest.approx([FIRST_LOSS[host]] * 2, abs=0.05)
