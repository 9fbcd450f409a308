"""Scripts with pictures in files: on two ranks of the engine, and on as many of plain DDP."""

from __future__ import annotations

import json
import logging
import os
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
import transformers
import trl
from datasets import Dataset, List
from datasets import Image as ImageColumn
from peft import LoraConfig
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainingArguments
from transformers.trainer import Trainer

import ds_hydra
from ds_hydra.commands import init, lengths, preview
from ds_hydra.commands.figures import shipped
from ds_hydra.hugging_face import HydraTrainer, scores
from ds_hydra.testing import float64_throughout, rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.gloo.test_images import NEAR, SGD, Row, apart, config_of
from tests.support.image_chats import chat_model, chats, processor
from tests.support.pages import blocks

STEPS = 3
QUIET: dict[str, Any] = {
    "max_steps": STEPS, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "optim": "sgd", "logging_steps": 1,
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False,
    "gradient_checkpointing": False,
}  # fmt: skip
OF_TESTS: dict[str, Any] = {"self_check": "off", "steps_file": None, "planner": {"ahead": 0}}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "hydra": {"images": True, "context_length": 512, "strategies": ["tp2", "pp2", "sp2"], "choose": "cycle",
              **OF_TESTS},
}  # fmt: skip
OF_ADAPTERS = 1e-6  # which PEFT makes in FP32
Found = tuple[list[float], dict[str, Tensor]]


def _found(trainer: Any, *, ours: bool) -> Found:
    """What is logged of losses and norms; and the weights at the end."""
    values = trainer.deepspeed.fp32_state_dict() if ours else trainer.model.state_dict()
    names = ("loss", "grad_norm", "eval_loss", "rewards/margins", "reward", "kl")
    logged = [float(entry[name]) for entry in trainer.state.log_history for name in names if name in entry]
    return logged, {name: value.detach().clone() for name, value in values.items() if ".ref." not in name}


def _begin(rank: int) -> None:
    rank_environment(rank)
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()


def _same(job: Any, *given: Any, near: float) -> None:
    """A job is the same on the engine and on plain ranks."""
    with float64_throughout(chat_model()):
        (logged, found), (expected, plain) = (run_ranks(job, 2, ours, *given, timeout=300)[0] for ours in (True, False))
    assert len(logged) >= STEPS
    assert logged == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert not apart(found, plain, near)


# --- TRL's SFT: the page's script.
class Case(NamedTuple):
    """What a user may change in the page's script."""

    settings: Mapping[str, Any] = {}
    data: str = ""  # behind what it reads
    lora: str | list[str] = ""


SFT = {
    "as printed": Case(),
    "assistant's answers": Case({"assistant_only_loss": True}),
    "recomputed": Case({"gradient_checkpointing": True}),
    "evaluated": Case({"eval_strategy": "steps", "eval_steps": 2}),
    "made by a transform": Case(data=".with_transform(turned)"),
    "prompts and completions": Case(data=".map(parted, remove_columns='messages')"),
    "LoRA": Case(lora="all-linear"),
    "LoRA of the encoder": Case(lora=["qkv", "linear_fc1"]),
}  # fmt: skip


def turned(rows: dict[str, Any]) -> dict[str, Any]:
    return {**rows, "images": [[one.rotate(90) for one in images] for images in rows["images"]]}


def parted(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["messages"][:1], "completion": row["messages"][1:]}


def _sft(rank: int, ours: bool, folder: str, name: str) -> Found:
    _begin(rank)
    os.chdir(folder)
    case = SFT[name]
    (script,) = (block.text for block in blocks() if "test_image_trainers.py" in block.comment)
    script = script.replace("List(Image()))", f"List(Image())){case.data}")
    if not ours:
        (line,) = (line for line in script.splitlines() if "# was: " in line)
        script = script.replace(line, line.partition("# was: ")[2]).replace("deepspeed=config", "deepspeed=None")
    script = script.replace('"choose": "cycle"', f'"choose": "cycle", **{OF_TESTS}')
    script = script.replace("train_dataset=data", "train_dataset=data, eval_dataset=data.select(range(8)), **more")
    lora = LoraConfig(r=4, target_modules=case.lora) if case.lora else None
    names = {"turned": turned, "parted": parted, "more": {"peft_config": lora}}
    settings = partial(trl.SFTConfig, **{**QUIET, **case.settings})
    with (
        mock.patch.object(trl, "SFTConfig", settings),
        mock.patch.object(AutoProcessor, "from_pretrained", return_value=processor()),
    ):
        exec(compile(script, "docs/images.md", "exec"), names)
    return _found(names["trainer"], ours=ours)


def _data(folder: str) -> Dataset:
    return Dataset.from_list(_rows(folder)).cast_column("images", List(ImageColumn()))


def _rows(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{folder}/chats.jsonl").read_text().splitlines()]


def _written(folder: Path) -> None:
    """What the page's script reads."""
    chat_model().save_pretrained(folder / "my_model")
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in chats(folder)))


@pytest.mark.drawn
@pytest.mark.parametrize("name", SFT)
def test_sft_by_the_pages_script(name: str, tmp_path: Path) -> None:
    _written(tmp_path)
    _same(_sft, str(tmp_path), name, near=OF_ADAPTERS if SFT[name].lora else NEAR)


# --- DPO, of all weights and with adapters.
def _dpo(rank: int, ours: bool, folder: str, adapters: bool) -> Found:
    _begin(rank)
    rejected = [{"role": "assistant", "content": "No, a dog."}]
    data = _data(folder).map(lambda row: {**parted(row), "chosen": row["messages"][1:], "rejected": rejected})
    trainer: Any = (scores.HydraDPOTrainer if ours else trl.DPOTrainer)(
        AutoModelForImageTextToText.from_pretrained(f"{folder}/my_model"),
        args=trl.DPOConfig(f"{folder}/{ours}", max_length=None, deepspeed=CONFIG if ours else None, **QUIET),
        train_dataset=data.select_columns(["images", "prompt", "chosen", "rejected"]), processing_class=processor(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "qkv"]) if adapters else None,
    )  # fmt: skip
    trainer.train()
    return _found(trainer, ours=ours)


@pytest.mark.drawn
@pytest.mark.parametrize("adapters", [False, True])
def test_dpo(adapters: bool, tmp_path: Path) -> None:
    _written(tmp_path)
    _same(_dpo, str(tmp_path), adapters, near=OF_ADAPTERS if adapters else NEAR)


# --- GRPO and RLOO, with answers that transformers generates.
POLICIES: dict[str, dict[str, Any]] = {
    "GRPO": {"beta": 0.1, "loss_type": "grpo"},
    "GRPO, older policy": {"num_iterations": 2},
    "RLOO": {"beta": 0.05},
}


def _reward(completions: list[Any], **_: Any) -> list[float]:
    """The share of letters of the alphabet's first half."""
    texts = [one[0]["content"].lower() for one in completions]
    return [sum("a" <= letter <= "m" for letter in text) / (1 + len(text)) for text in texts]


def _policy(rank: int, ours: bool, folder: str, name: str) -> Found:
    _begin(rank)
    kind, reader = name.partition(",")[0], processor()
    reader.tokenizer.padding_side = "left"  # as TRL asks for
    data = _data(folder).map(parted).filter(lambda row: row["images"])  # TRL's own ends where a prompt has none
    settings = {**QUIET, **POLICIES[name], "per_device_train_batch_size": 4, "num_generations": 2,
                "max_completion_length": 8, "generation_kwargs": {"suppress_tokens": [3, 4, 5, 6]},
                "deepspeed": CONFIG if ours else None}  # fmt: skip
    trainer: Any = getattr(scores if ours else trl, f"{'Hydra' * ours}{kind}Trainer")(
        AutoModelForImageTextToText.from_pretrained(f"{folder}/my_model"),
        args=getattr(trl, f"{kind}Config")(f"{folder}/{ours}", **settings), reward_funcs=_reward,
        train_dataset=data.select_columns(["images", "prompt"]), processing_class=reader,
    )  # fmt: skip
    trainer.train()
    return _found(trainer, ours=ours)


@pytest.mark.drawn
@pytest.mark.parametrize("name", POLICIES)
def test_policies(name: str, tmp_path: Path) -> None:
    _written(tmp_path)
    _same(_policy, str(tmp_path), name, near=NEAR)


# --- Trainer, the three calls and train_batch, over chats whose pictures a transform opens as they come.
def opened(rows: dict[str, Any]) -> dict[str, Any]:
    found = []
    for (user, answer), paths in zip(rows["messages"], rows["images"], strict=True):
        parts = [{"type": "image", "image": Image.open(path)} for path in paths]
        asked = [*parts, {"type": "text", "text": user["content"]}]
        answered = [{"type": "text", "text": answer["content"]}]
        found.append([{"role": "user", "content": asked}, {"role": "assistant", "content": answered}])
    return {"chat": found}


def collated(rows: list[Any]) -> Any:
    """As Qwen3-VL's own script collates chats."""
    made = processor().apply_chat_template(
        [row["chat"] for row in rows], tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs={"padding": True},
    )  # fmt: skip
    labels = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
    made["labels"] = labels.masked_fill(torch.isin(labels, torch.tensor([3, 4, 5])), -100)
    return made


def _trainer(rank: int, ours: bool, folder: str) -> Found:
    _begin(rank)
    arguments = TrainingArguments(f"{folder}/{ours}", remove_unused_columns=False, ddp_find_unused_parameters=True,
                                  eval_strategy="epoch", deepspeed=CONFIG if ours else None, **QUIET)  # fmt: skip
    data: Any = Dataset.from_list(_rows(folder)).with_transform(opened)
    kind: Any = HydraTrainer if ours else Trainer
    trainer = kind(chat_model(), arguments, train_dataset=data, eval_dataset=data, data_collator=collated)
    trainer.train()
    predicted = trainer.predict(data)
    logged, values = _found(trainer, ours=ours)
    return [*logged, predicted.metrics["test_loss"], float(predicted.predictions.shape[0])], values


def _calls(rank: int, ours: bool, folder: str, form: str) -> Found:
    """The engine takes what the processor returns; in plain PyTorch each rank trains on all."""
    _begin(rank)
    data, model, losses = Dataset.from_list(_rows(folder)).with_transform(opened), chat_model(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    if ours:
        row = Row("calls", "qwen3_vl", ("tp2", "pp2"), 2, ())
        engine, *_ = ds_hydra.initialize(model=model, config=config_of(row, tokens_per_step=1000, context_length=512))
    for step in range(STEPS):
        chats = [data[4 * step + at] for at in range(4)]
        own = chats[2 * rank : 2 * rank + 2]
        if not ours:
            losses.append(_plain_step(model, optimizer, [collated([one]) for one in chats]))
            continue
        if form == "three calls":
            engine.backward(engine(**collated(own)))
            engine.step()
        else:
            engine.train_batch(collated(own) if form == "batch" else [collated([one]) for one in own])
        losses.append(engine.last_step.loss)
    values = engine.fp32_state_dict() if ours else model.state_dict()
    return losses, {name: value.detach().clone() for name, value in values.items()}


def _plain_step(model: Any, optimizer: Any, batches: list[Any]) -> float:
    labels = torch.cat([batch.pop("labels")[0, 1:] for batch in batches])
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(torch.cat([model(**one).logits[0, :-1] for one in batches]), labels)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.drawn
@pytest.mark.parametrize("form", ["Trainer", "three calls", "batch", "list of calls"])
def test_batches_as_the_processor_returns_them(form: str, tmp_path: Path) -> None:
    _written(tmp_path)
    _same(*(_trainer, str(tmp_path)) if form == "Trainer" else (_calls, str(tmp_path), form), near=NEAR)


# --- What a data set with pictures has, before a job: ds-hydra lengths, init and preview.
def _counted(folder: Path) -> tuple[list[dict[str, Any]], Any, Path]:
    rows, own, out = chats(folder), processor(), folder / "lengths.jsonl"
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    asked = Namespace(data=folder / "chats.jsonl", model="", out=out)
    assert lengths.run(asked, own, 1) == 0
    return rows, own, out


def test_lengths_and_patches_are_those_that_a_processor_makes(tmp_path: Path) -> None:
    rows, own, out = _counted(tmp_path)
    for row, line in zip(rows, out.read_text().splitlines(), strict=True):
        messages = trl.data_utils.prepare_multimodal_messages(row["messages"], [None] * len(row["images"]))
        for part in (part for one in messages for part in one["content"]):
            part.pop("image", None)
        text = own.apply_chat_template(messages, tokenize=False)
        made = own(text=[text], images=[Image.open(path) for path in row["images"]] or None, return_tensors="pt")
        patches = made["image_grid_thw"].prod(-1).tolist() if row["images"] else []
        assert json.loads(line) == {"length": made["input_ids"].shape[1], "patches": patches}
    with pytest.raises(ConfigError, match=r"line 3: the picture 'none.png' cannot be read"):
        lengths.counted({"images": ["none.png"], "text": "a"}, own, 1, "line 3")
    with pytest.raises(ConfigError, match='line 4 has neither "text" nor "messages"'):
        lengths.counted({}, own, 1, "line 4")
    tiled = SimpleNamespace(
        tokenizer=own.tokenizer,
        _get_num_multimodal_tokens=lambda **_: SimpleNamespace(num_image_tokens=[32], num_image_patches=[2]),
    )
    whole = lengths.counted({"images": rows[0]["images"], "text": "a" + _IMAGE}, tiled, 64, "")
    assert whole == (33, (64, 64))


_IMAGE = "<|image_pad|>"


def test_init_and_preview_plan_with_what_images_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, out = _counted(tmp_path)
    text = tmp_path / "text.jsonl"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    text.write_text("\n".join(json.dumps({"length": row["length"]}) for row in rows))
    chat_model(torch.float32).save_pretrained(tmp_path / "model")
    (script,) = (
        block.text for block in blocks()
        if block.page == "docs/images.md" and "test_image_trainers.py" in block.comment
    )  # fmt: skip
    (tmp_path / "train.py").write_text(script)
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": true}}')
    given = [str(tmp_path / "train.py"), str(config), "--model", str(tmp_path / "model"), "--gpus", "4"]
    assert init.main([*given, "--lengths", str(out), "--out", str(tmp_path / "new.json")]) == 0
    assert json.loads((tmp_path / "new.json").read_text())["hydra"]["images"] is True
    assert "not known of images" in capsys.readouterr().out
    table = json.loads(Path(shipped("a800-7b")).read_text()) | {"images": {"a": 0.01, "b": 1.0, "keep": 1.0}}
    (tmp_path / "table.json").write_text(json.dumps(table))
    found = {}
    for name, costs, data in (("all", str(tmp_path / "table.json"), out), ("text", str(tmp_path / "table.json"), text),
                              ("unpriced", "a800-7b", out)):  # fmt: skip
        asked = ["--cost-table", costs, "--lengths", str(data), "--gpus", "4", "--tokens", "4096", "--context", "512"]
        assert preview.main([*asked, "--steps", "2", "--count", "2", "--json", str(tmp_path / name)]) == 0
        found[name] = json.loads((tmp_path / name).read_text())
    told = capsys.readouterr().out
    assert "says nothing of images" in told
    assert "images are in these times" in told
    per_token = sum(0.01 * p * p + p for row in rows for p in row["patches"]) / sum(row["length"] for row in rows)
    beside = [mean(found[name]["step_ms"]) for name in ("all", "text")]
    assert beside[0] - beside[1] == pytest.approx(4096 * per_token / 4, rel=0.25)
    assert list(found["all"]["rivals"]) in ([], ["ds-hydra, one layout in every step"])
    assert "best fixed layout, balanced by our costs" in found["text"]["rivals"]
