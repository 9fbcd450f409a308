"""`ds-hydra init`: scripts are told apart, the config that is written is one that a job accepts, and says why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hjson
import pytest

from ds_hydra.commands.__main__ import main
from ds_hydra.commands.init import settings
from ds_hydra.commands.shipped import shipped
from ds_hydra.commands.swapped import ACCELERATE, CALLS, SFT, STEPS, TRAINER, swap_of
from ds_hydra.config.hydra_block import parse_config
from ds_hydra.zero_hetero.errors import ConfigError

SWAP = Path(__file__).resolve().parents[2] / "examples" / "swap"
DEEPSPEED = {"train_batch_size": 64, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
             "zero_optimization": {"stage": 1}}  # fmt: skip


@pytest.mark.parametrize(
    ("script", "kind"),
    [("three_calls", CALLS), ("lora", CALLS), ("trainer", TRAINER), ("sft", SFT), ("accelerated", ACCELERATE)],
)
def test_the_lines_to_change_are_those_of_the_diffs(script: str, kind: str) -> None:
    found = swap_of((SWAP / f"{script}.py").read_text(), script)
    assert (found.kind, found.handed_in) == (kind, True)
    diff = (SWAP / f"{script}.diff").read_text().splitlines()
    (line,) = found.lines
    assert "-" + line.old in diff
    assert "+" + line.new in diff
    assert (SWAP / f"{script}.py").read_text().splitlines()[line.number - 1].strip() == line.old


def test_scripts_that_are_written_otherwise() -> None:
    own = (
        "import deepspeed as ds\ne, *_ = ds.initialize(model=m, training_data=data)\nfor _ in range(9): e.train_batch()"
    )
    assert swap_of(own, "own")[:3] == (STEPS, ((1, "import deepspeed as ds", "import ds_hydra as ds"),), False)
    beside = "import torch, deepspeed as ds\ne = ds.initialize(training_data=d)[0]\ne.backward(e(b))\ne.step()"
    drawn = swap_of(beside, "beside")
    assert (drawn.kind, drawn.handed_in) == (CALLS, False)
    assert drawn.lines[0].new == "import torch; import ds_hydra as ds"
    assert "call engine.train_batch() in place of the three calls" in drawn.note
    assert [one.name for one in settings(drawn, {}, [5], 1, None)][2:] == ["strategies"]
    assert "a step draws sequences" in settings(drawn, {}, [5], 1, None)[0].why
    both = "from transformers import (\n    AutoModel,\n    Trainer,\n)\nAutoModel.from_pretrained('folder')"
    found = swap_of(both, "both")
    assert found.models == ("folder",)
    assert found.lines[0].new == (
        "from transformers import AutoModel; from ds_hydra.hugging_face import HydraTrainer as Trainer"
    )
    for text, words in (("print(1)", "neither imports"), ("def", "no Python script"),
                        ("import deepspeed", "calls deepspeed.initialize")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            swap_of(text, "bad.py")


@pytest.mark.drawn
@pytest.mark.parametrize("script", ["three_calls", "trainer"])
def test_a_config_is_written_that_a_job_accepts(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, model = tmp_path / "ds.json", tmp_path / "model.json"
    config.write_text(json.dumps(DEEPSPEED))
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    model.write_text(
        json.dumps({"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 32768, **sizes})
    )
    command = ["init", str(SWAP / f"{script}.py"), str(config), "--model", str(model), "--gpus", "4",
               "--device-memory", "24", "--lengths", "pretraining"]  # fmt: skip
    assert main(command) == 0
    told = capsys.readouterr().out
    assert re.search(r"[\d.]+ times as fast as \S+ with balanced sequences", told)
    low, high = map(float, re.findall(r"\(([\d.]+) to ([\d.]+) on a device half to twice as fast\)", told)[0])
    assert low < high, "a faster device waits longer for the same links"
    assert "AN ESTIMATE from FLOPs, nothing was measured" in told
    assert "It assumes 24 GiB and an A100 at 0.48 of its peak, 150 TFLOP/s, 150 GB/s within a node" in told
    text = (tmp_path / "ds_hydra.json").read_text()
    written: dict[str, Any] = dict(hjson.loads(text))
    block = written.pop("hydra")
    assert written == DEEPSPEED
    parsed = parse_config({**written, "hydra": dict(block)})
    assert parsed is not None
    assert len(block) <= 5
    reasons = text if script == "three_calls" else (tmp_path / "ds_hydra.txt").read_text()
    if script == "trainer":
        assert json.loads(text), "Trainer and Accelerate read JSON without comments"
    for name in block:
        assert f"  {name} = " in told
    assert "your script hands its batches in" in reasons
    assert ("loss_norm" in block) == (script == "three_calls")
    assert main([*command[:2], str(tmp_path / "ds_hydra.json"), *command[3:]]) == 2
    assert 'has a block "hydra" already' in capsys.readouterr().err


@pytest.mark.drawn
def test_a_gain_says_whose_costs_it_follows_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, model = tmp_path / "ds.json", tmp_path / "model.json"
    config.write_text(json.dumps(DEEPSPEED))
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
    model.write_text(json.dumps({"model_type": "llama", "vocab_size": 320, "max_position_embeddings": 8192, **sizes}))
    command = ["init", str(SWAP / "trainer.py"), str(config), "--model", str(model), "--gpus", "8", "--lengths",
               "pretraining", "--out", str(tmp_path / "new.json")]  # fmt: skip
    assert main([*command, "--device", "H100"]) == 0
    assert "H100 at 0.48 of its peak, 475 TFLOP/s" in capsys.readouterr().out
    assert main([*command, "--device", "Abacus"]) == 2
    assert "the peak of a 'Abacus' is not known here: name one of B200" in capsys.readouterr().err
    assert main([*command, "--cost-table", shipped("a800-7b")]) == 0
    told = capsys.readouterr().out
    assert "By the costs of " in told
    assert "ESTIMATE" not in told
    assert "assumes" not in told
    assert json.loads((tmp_path / "new.json").read_text())["hydra"]["cost_table"] == shipped("a800-7b")


def test_a_step_has_the_tokens_of_the_batches_that_the_config_names() -> None:
    text = "import deepspeed\ndeepspeed.initialize(training_data=d)\nengine.train_batch()"
    swap = swap_of(text, "steps")

    def tokens(asked: int | None = None, **config: Any) -> int:
        return int(settings(swap, config, [100, 300], 8, asked)[0].value)

    assert tokens(train_batch_size=64) == 64 * 200
    assert tokens(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4) == 8 * 8 * 200
    assert tokens(train_micro_batch_size_per_gpu="auto") == 8 * 300
    assert tokens(train_batch_size=1) == 300, "a step holds the longest sequence"
    assert tokens(7000, train_batch_size=64) == 7000
