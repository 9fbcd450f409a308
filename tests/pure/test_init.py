"""`ds-hydra init`: scripts are told apart, configs are translated, what is written is accepted; hosts' rollouts."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hjson
import numpy as np
import pytest

from ds_hydra.commands import preview
from ds_hydra.commands.__main__ import main
from ds_hydra.commands.figures import shipped
from ds_hydra.commands.init_job import Job
from ds_hydra.commands.job_config import refuse_all
from ds_hydra.commands.scripts import Swap, diff_of, swap_of, swappable, training_args
from ds_hydra.commands.translated import (
    Asked,
    OwnLayout,
    Translated,
    config_of,
    now_ms,
    packed_in_order,
    planned,
    translated,
)
from ds_hydra.config.hosts import ACCELERATE, CALLS, STEPS, TRAINER
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.data.lengths import LengthSample, read_lengths
from ds_hydra.entry import accept
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner import PlannerOptions
from ds_hydra.simulate.hosts import (
    DEALT,
    EQUAL_COUNTS,
    EQUAL_TOKENS,
    SHARED,
    hosts_ways,
    in_equal_counts,
    in_equal_tokens,
)
from ds_hydra.zero_hetero.errors import ConfigError

# --- `ds-hydra init`: scripts are told apart, configs are translated, and what is written is what a job
# accepts.
SWAP = Path(__file__).resolve().parents[2] / "examples" / "swap"
HOSTED = SWAP.parents[1] / "ds_hydra" / "hugging_face"
DEEPSPEED = {"train_batch_size": 64, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
             "zero_optimization": {"stage": 1}}  # fmt: skip
ZERO_3: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupLR",
                  "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")},
    "zero_optimization": {
        "stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}, "overlap_comm": True,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "sub_group_size": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 2000, "wall_clock_breakdown": False,
}  # fmt: skip
SFT = """from trl import (
    ModelConfig,
    SFTConfig,
    SFTTrainer,
    TrlParser,
)
settings, model = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config()
SFTTrainer(model.model_name_or_path, settings).train()
"""


def read(folder: Path, text: str, others: Mapping[str, str] = MappingProxyType({})) -> Swap:
    """The swap of a script of this text, beside other files."""
    for name, content in {"script.py": text, **others}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return swap_of(folder / "script.py")


def swapped(folder: Path, swap: Swap) -> dict[str, str]:
    """The files that `patch` changes, as they are then."""
    diff = diff_of(swap.spans)
    subprocess.run(["patch", "-p0", "--quiet"], input=diff, text=True, check=True)
    return {path.name: path.read_text() for path in swap.spans}


@pytest.mark.parametrize(
    ("script", "kind"),
    [("three_calls", CALLS), ("lora", CALLS), ("trainer", "Trainer"), ("sft", "SFTTrainer"),
     ("accelerated", ACCELERATE)],
)  # fmt: skip
def test_the_lines_to_change_are_those_of_the_diffs(script: str, kind: str) -> None:
    found = swap_of(SWAP / f"{script}.py")
    assert (found.kind, found.handed_in) == (kind, True)
    changed = {line for line in diff_of(found.spans).splitlines() if line[:1] in "+-" and line[1:2] not in "+-"}
    assert len(changed) == 2
    assert changed <= set((SWAP / f"{script}.diff").read_text().splitlines())


@pytest.mark.parametrize(
    ("text", "kind", "changed"),
    [
        ("import deepspeed as ds\ne, *_ = ds.initialize(model=m)\nfor b in d:\n    e.backward(e(b))\n", CALLS,
         "import ds_hydra as ds\n"),
        ("import torch, deepspeed as ds, os\nds.initialize()[0].backward(1)\n", CALLS,
         "import torch, os\nimport ds_hydra as ds\n"),
        ("try:\n    from deepspeed import initialize, comm\nexcept ImportError:\n    raise\ninitialize(); backward()\n",
         CALLS, "try:\n    from deepspeed import comm\n    from ds_hydra import initialize\nexcept"),
        ("from transformers import AutoModel, Trainer\nTrainer(AutoModel.from_pretrained('m'))\n", TRAINER,
         "from transformers import AutoModel\nfrom ds_hydra.hugging_face import HydraTrainer as Trainer\n"),
        ("import transformers\nmodel = 1\ntransformers.Trainer(model)\n", TRAINER,
         "import transformers\nfrom ds_hydra.hugging_face import HydraTrainer\nmodel = 1\nHydraTrainer(model)\n"),
        ("import transformers as hf\n\n\nclass Own(hf.Trainer):\n    pass\n\n\nOwn()\n", TRAINER,
         "import transformers as hf\nfrom ds_hydra.hugging_face import HydraTrainer\n\n\nclass Own(HydraTrainer):\n"),
        ("from trl.trainer import DPOTrainer as T, DPOConfig\nT(args=DPOConfig())\n", "DPOTrainer",
         "from trl.trainer import DPOConfig\nfrom ds_hydra.hugging_face.scores import HydraDPOTrainer as T\n"),
        ("from trl import GRPOConfig, GRPOTrainer, SFTTrainer\nGRPOTrainer(); SFTTrainer()\n", "GRPOTrainer",
         "from trl import GRPOConfig\nfrom ds_hydra.hugging_face.scores import HydraGRPOTrainer as GRPOTrainer\n"
         "from ds_hydra.hugging_face.sft import HydraSFTTrainer as SFTTrainer\n"),
        ("from accelerate import Accelerator\r\na = Accelerator()\r\na.prepare(1)\r\n", ACCELERATE,
         "from ds_hydra.hugging_face import HydraAccelerator as Accelerator\n"),
        # What is imported for a hint, or to ask whose rank this is, is no loop.
        ("import deepspeed\nfrom transformers import Trainer\n\n\ndef f(t: Trainer) -> Trainer: ...\n\n\n"
         "deepspeed.initialize()[0].train_batch()\n", STEPS, "import ds_hydra as deepspeed\nfrom transformers"),
        ("import deepspeed\nfrom accelerate import Accelerator\nrank = Accelerator().process_index\n"
         "deepspeed.initialize()[0].backward(1)\n", CALLS, "import ds_hydra as deepspeed\nfrom accelerate import Acc"),
    ],
)  # fmt: skip
def test_scripts_that_are_written_otherwise(
    text: str, kind: str, changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    swap = read(tmp_path, text)
    assert swap.kind == kind
    assert swapped(tmp_path, swap)["script.py"].startswith(changed)
    assert swap_of(tmp_path / "script.py")._replace(spans={}) == swap._replace(spans={}), "a swapped script is known"
    assert not swap_of(tmp_path / "script.py").spans


def test_a_loop_in_another_file_of_the_project_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = "from transformers import Trainer\nfrom .base import Base\n\n\nclass Own(Base):\n    x: int = 1\n"
    base = "from transformers import Trainer as T\n\n\nclass Base(T):\n    pass\n"
    parts = {"parts/__init__.py": "", "parts/own.py": own, "parts/base.py": base}
    swap = read(tmp_path, "from parts.own import Own\nOwn(model='folder').train()\n", parts)
    assert (swap.kind, swap.models) == (TRAINER, ("folder",))
    assert list(swapped(tmp_path, swap)) == ["base.py"]
    assert (tmp_path / "parts" / "own.py").read_text() == own, "where Trainer is imported and not used"
    engine = "import deepspeed\n\n\ndef start(m):\n    return deepspeed.initialize(model=m)[0]\n"
    text = "from helpers import start\nengine = start(1)\nengine.backward(engine(2))\n"
    calls = read(tmp_path, text, {"helpers.py": engine})
    assert (calls.kind, calls.host, [path.name for path in calls.spans]) == (CALLS, "script", ["helpers.py"])
    fed = read(tmp_path, "import deepspeed\ne = deepspeed.initialize(training_data=d)[0]\ne.backward(e(b))\n")
    assert "call engine.train_batch() in place of the three calls" in fed.note
    assert not fed.handed_in


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print(1)", "neither calls deepspeed.initialize"),
        ("def", "no Python script"),
        ("import deepspeed", "nor constructs"),
        (
            "from trl.experimental.kto import KTOTrainer\nKTOTrainer()",
            "trains by KTOTrainer, which this engine does not",
        ),
        ("from transformers import Seq2SeqTrainer\nSeq2SeqTrainer()", "by models with an encoder"),
    ],
)
def test_scripts_without_a_loop_that_runs_here_are_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text)


def test_all_classes_of_this_package_can_stand_before_another() -> None:
    names = {path.stem: re.findall(r"^class Hydra(\w+)\(", path.read_text(), re.M) for path in HOSTED.glob("*.py")}
    assert {name for _, name in swappable()} == {name for found in names.values() for name in found}
    for (library, theirs), (module, ours) in swappable().items():
        assert issubclass(getattr(__import__(module, fromlist=[ours]), ours), getattr(__import__(library), theirs))


def test_training_arguments_are_read_where_they_stand(tmp_path: Path) -> None:
    text = (
        "from trl import SFTConfig, SFTTrainer\nMOST = 4096\nSFTTrainer(args=SFTConfig(max_length=MOST, lr=rate()))\n"
    )
    args = training_args(read(tmp_path, text), None)
    assert args.get("max_length") == (4096, "SFTConfig(max_length=...)")
    assert args.get("gradient_checkpointing") == (True, "SFTConfig's default")
    file = tmp_path / "args.yaml"
    file.write_text("model_name_or_path: some/model\nmax_length: 2048\ngradient_checkpointing: false\nlr: 1e-5\n")
    args = training_args(read(tmp_path, SFT), str(file))
    assert [args.get(name).value for name in ("max_length", "gradient_checkpointing", "lr", "bf16")] == [
        2048, False, 1e-5, True
    ]  # fmt: skip
    assert args.models == ("some/model",)
    args = training_args(read(tmp_path, SFT), "--max-length=512 --no_gradient_checkpointing --bf16 false")
    assert [args.get(name).value for name in ("max_length", "gradient_checkpointing", "bf16")] == [512, False, False]
    own = (
        "from transformers import Trainer, TrainingArguments\n\n\nclass A(TrainingArguments):\n    bf16: bool = True\n"
    )
    args = training_args(read(tmp_path, f"{own}\n\nTrainer(args=A())\n"), None)
    assert [args.get(name).value for name in ("bf16", "gradient_checkpointing", "max_length")] == [True, False, None]
    with pytest.raises(ConfigError, match="cannot read the script's arguments"):
        training_args(read(tmp_path, SFT), "none.yaml")


def change(config: Mapping[str, Any], host: str = TRAINER, **said: Any) -> Translated:
    """What becomes of a config."""
    return translated(config, host, said.get)


def test_zero_3_of_a_trainer_keeps_its_autos_and_is_accepted() -> None:
    found = change(ZERO_3)
    kept = {key: value for key, value in ZERO_3.items() if key not in ("zero_optimization", "wall_clock_breakdown")}
    assert found.config == {**kept, "zero_optimization": {"stage": 1}}
    assert found.layout == OwnLayout(3)
    assert accept({**found.config, "hydra": {}}, 8, "SFTTrainer") is not None
    told = " ".join(f"{row.key} {row.becomes} {row.why}" for row in found.rows)
    assert all(key in told for key in (*ZERO_3["zero_optimization"], "wall_clock_breakdown", "optimizer.params.betas"))


def test_what_nobody_fills_in_becomes_the_scripts_constant_or_the_default() -> None:
    found = change(ZERO_3, CALLS, learning_rate=3e-5, max_grad_norm=1.0)
    assert found.config["optimizer"]["params"] == {"lr": 3e-5}
    assert found.config["gradient_clipping"] == 1.0
    assert found.config["scheduler"]["params"] == {"warmup_max_lr": 3e-5}
    rows = {row.key: row for row in found.rows}
    assert rows['optimizer.params.betas "auto"'].why.endswith("default is [0.9, 0.999]")
    assert accept({**found.config, "train_micro_batch_size_per_gpu": 1, "hydra": {}}, 8, CALLS) is not None
    betas = change(ZERO_3, ACCELERATE).config["optimizer"]["params"]
    assert betas == {"lr": "auto", "weight_decay": "auto"}, "Accelerate fills in no others"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, {"zero_optimization": {"stage": 1}}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}},
         {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
        ({"zero_optimization": {"stage": "auto"}}, {"zero_optimization": {"stage": 1}}),
        ({"zero_optimization": {"stage": 0}}, {"zero_optimization": {"stage": 0}}),
        ({"amp": {"enabled": False}}, {}),
        ({"amp": {"enabled": "auto", "opt_level": "auto"}}, {}),
        ({"compile": {"disable": True}}, {}),
        ({"pipeline": {"stages": 2}, "sequence_parallel_size": 4, "tensor_parallel": {"autotp_size": 2}}, {}),
        ({"flops_profiler": {"enabled": True}, "aio": {}, "autotuning": {"enabled": True}}, {}),
        ({"bf16": {"enabled": True, "auto_cast": False}, "fp16": {"enabled": False, "loss_scale": 0}},
         {"bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0}}),
        ({"activation_checkpointing": {"partition_activations": True}}, {}),
        ({"wandb": {"enabled": True}, "communication_data_type": "fp32"},
         {"wandb": {"enabled": True}, "communication_data_type": "fp32"}),
    ],
)  # fmt: skip
def test_keys_are_kept_or_dropped_each_with_a_row(given: dict[str, Any], left: dict[str, Any]) -> None:
    found = change(given, CALLS)
    assert found.config == left
    gone = [key for key in given if key not in left]
    assert {row.key for row in found.rows} >= set(gone)
    assert all(row.why for row in found.rows)


OFFLOADED = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "nvme", "buffer_size": "auto"},
}
SCALING = {"loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
BATCHES: dict[str, Any] = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)


@pytest.mark.parametrize(
    ("host", "config", "refused"),
    [
        ("SFTTrainer", {**BATCHES, "zero_optimization": {**OFFLOADED, "sub_group_size": 1e9, "leaf_module": {}}}, ""),
        ("SFTTrainer", {**BATCHES, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", **SCALING}}, ""),
        ("SFTTrainer", {**BATCHES, "bf16": {"enabled": True, "auto_cast": False, **SCALING}}, ""),
        ("Trainer", {"fp16": {"enabled": True, **SCALING}, "steps_per_print": 1e5, "zero_optimization": OFFLOADED}, ""),
        ("Trainer", {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}, "comms_config": {}}, ""),
        ("Trainer", {"sequence_parallel": {"enabled": True, "size": 4}, "monitor_config": {"enabled": True}}, ""),
        (ACCELERATE, {**BATCHES, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "overlap_comm": 1}}, ""),
        (CALLS, {**BATCHES, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        ("SFTTrainer", {**BATCHES, "fp8": {"enabled": True}}, "fp8"),
        (CALLS, {"train_batch_size": 8, "bfloat16": {"enabled": True}, "hybrid_engine": {"enabled": False}}, ""),
        (CALLS, {"train_batch_size": 1, "zero_optimization": OFFLOADED, "aio": {"queue_depth": 32}}, ""),
        ("SFTTrainer", {**BATCHES, "compile": {"disable": False, "backend": "inductor"}}, "compile"),
        (CALLS, {"train_batch_size": 8, "data_efficiency": {"enabled": True, "data_sampling": {
            "enabled": True, "curriculum_learning": {"enabled": True}}}}, "data_efficiency"),
        (CALLS, {"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "OneBitAdam"),
        (CALLS, {"train_batch_size": 8, "amp": {"enabled": True}}, "(?i)amp"),
    ],
)  # fmt: skip
def test_configs_as_people_have_them_are_accepted_or_refused_by_name(
    host: str, config: dict[str, Any], refused: str
) -> None:
    found = change(config, host)
    whole = {**found.config, "hydra": found.block}
    if not refused:
        refuse_all(whole, host, 8)
        return
    with pytest.raises(ConfigError, match=refused):
        refuse_all(whole, host, 8)


def test_the_yaml_of_accelerate_is_a_config_too(tmp_path: Path) -> None:
    path = tmp_path / "zero3.yaml"
    path.write_text("deepspeed_config:\n  zero_stage: 3\n  offload_param_device: cpu\nmixed_precision: bf16\n")
    made = config_of(path, ACCELERATE)
    assert made["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}
    assert made["bf16"] == {"enabled": True}
    assert config_of(path, "SFTTrainer")["bf16"] == {"enabled": "auto"}
    for host in (ACCELERATE, "SFTTrainer"):
        refuse_all({**change(config_of(path, host), host).config, "hydra": {}}, host, 8)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    path.write_text("deepspeed_config:\n  deepspeed_config_file: ds.json\n")
    assert config_of(path, ACCELERATE) == {"train_batch_size": 8}
    path.write_text("fsdp_config: {}\n")
    with pytest.raises(ConfigError, match="has no block deepspeed_config"):
        config_of(path, ACCELERATE)


def test_what_the_config_runs_now_is_read_off_it() -> None:
    config = {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 4, "tensor_parallel": {"autotp_size": 2}}
    assert change(config).layout == OwnLayout(3, tp=2, sp=4)
    assert str(OwnLayout(3, sp=4)) == "ZeRO-3, sequence parallel 4"
    assert change({"activation_checkpointing": {"partition_activations": True}}).recomputed
    assert not change({"activation_checkpointing": {"partition_activations": False}}).recomputed


def test_a_step_now_waits_for_its_slowest_rank() -> None:
    assert packed_in_order([70, 40, 50, 60], 100) == [[70], [40, 50], [60]]
    tp1, sp2 = ParallelScheme(1), ParallelScheme(1, 1, 2)
    table = CostTable((SchemeCost(tp1, 0.0, 1.0, 0.0, 1000), SchemeCost(sp2, 0.0, 0.5, 0.0, 1000)))
    lengths = [100]
    assert now_ms(table, OwnLayout(3), 4, lengths, 400, 100, 2) == pytest.approx(100.0), "a sequence each"
    assert now_ms(table, OwnLayout(3), 2, lengths, 400, 100, 2) == pytest.approx(200.0)
    assert now_ms(table, OwnLayout(1), 3, lengths, 400, 100, 2) == pytest.approx(200.0)
    assert now_ms(table, OwnLayout(3, sp=2), 4, lengths, 400, 100, 2) == pytest.approx(100.0)
    assert now_ms(table, OwnLayout(1, tp=2), 4, lengths, 400, 100, 2) is None


def block_of(swap: Swap, config: Mapping[str, Any], lengths: list[int], gpus: int, tokens: int | None = None,
             too_long: int = 0) -> dict[str, Any]:  # fmt: skip
    """The settings that are planned."""
    sample = LengthSample(np.array(lengths), too_long, max(lengths) + 1000 * too_long)
    found = planned(swap, training_args(swap, None), Translated(dict(config), dict(config.get("hydra", {}))), sample,
                    Asked(gpus, tokens))  # fmt: skip
    return {one.name: one.value for one in found}


def test_a_step_has_the_tokens_of_the_batches_that_the_config_names(tmp_path: Path) -> None:
    swap = read(tmp_path, "import deepspeed\ndeepspeed.initialize(training_data=d)\nengine.train_batch()")

    def tokens(asked: int | None = None, **config: Any) -> int:
        return int(block_of(swap, config, [100, 300], 8, asked)["tokens_per_step"])

    assert tokens(train_batch_size=64) == 64 * 200
    assert tokens(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4) == 8 * 8 * 200
    assert tokens(train_micro_batch_size_per_gpu="auto") == 8 * 300
    assert tokens(train_batch_size=1) == 300, "a step holds the longest sequence"
    assert tokens(7000, train_batch_size=64) == 7000
    sft = read(tmp_path, "from trl import SFTConfig, SFTTrainer\nSFTTrainer(args=SFTConfig(packing=True))\n")
    assert block_of(sft, {}, [100, 300], 8)["tokens_per_step"] == 8 * 8 * 1024


def test_a_block_is_taken_over_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    swap = read(tmp_path, SFT)
    block = block_of(swap, {"hydra": {"context_length": 200, "seed": 3, "tokens_per_step": 0}}, [100], 2, too_long=4)
    assert block == {"context_length": 200, "seed": 3, "tokens_per_step": 1600, "too_long": "skip",
                     "strategies": "auto", "plans_file": "plans.jsonl"}  # fmt: skip
    assert "loss_norm" not in block
    assert (
        block_of(read(tmp_path, "import deepspeed\ndeepspeed.initialize()\nbackward()\n"), {}, [5], 1)["loss_norm"]
        == "batch"
    )


def model_file(folder: Path, positions: int = 32768, **sizes: Any) -> Path:
    """A Llama's config."""
    path = folder / "model.json"
    usual = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    llama = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": positions}
    path.write_text(json.dumps({**llama, **usual, **sizes}))
    return path


@pytest.mark.parametrize(
    "config",
    [
        {}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}, {"bf16": {"enabled": "auto"}}, ZERO_3,
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
        {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
        {"bf16": {"enabled": True}, "hydra": {"activation_checkpointing": True}},
        {"bf16": {"enabled": True}, "hydra": {"fast_paths": "off"}},
        {"bf16": {"enabled": True}, "hydra": {"fast_paths": ["recompute_mlp"], "expert_imbalance": 2.0}},
    ],
)  # fmt: skip
def test_limits_are_those_of_ds_hydra_memory(config: dict[str, Any], tmp_path: Path) -> None:
    model = model_file(tmp_path, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_key_value_heads=4)
    found = change(config)
    file, figures = tmp_path / "ds.json", tmp_path / "figures.json"
    file.write_text(json.dumps({**found.config, "hydra": found.block}))
    job = Job.of(str(model), json.loads(file.read_text()), 4, 8, 2.0)
    command = ["memory", "--model", str(model), "--gpus", "4", "--device-memory", "2", "--deepspeed-config", str(file)]
    assert main([*command, "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())["rows"]
    own = job.limits(bool(found.block.get("activation_checkpointing")))
    assert {str(scheme): limit for scheme, limit in own.items()} == {row["replica"]: row["max tokens"] for row in rows}
    assert len(rows) > 5
    assert job.limits(True)[ParallelScheme(1)] > job.limits(False)[ParallelScheme(1)]


@pytest.mark.drawn
@pytest.mark.parametrize("script", ["three_calls", "trainer"])
def test_a_config_is_written_that_a_job_accepts(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, model = tmp_path / "ds.json", model_file(tmp_path)
    config.write_text(json.dumps(DEEPSPEED))
    command = ["init", str(SWAP / f"{script}.py"), str(config), "--model", str(model), "--gpus", "4",
               "--device-memory", "24", "--lengths", "pretraining"]  # fmt: skip
    assert main(command) == 0
    told = capsys.readouterr().out
    low, high = map(float, re.findall(r"half to twice as fast ds-hydra is ([\d.]+) to ([\d.]+) times", told)[0])
    assert low < high, "a faster device waits longer for the same links"
    assert "AN ESTIMATE from FLOPs, nothing was measured" in told
    assert "Assumed for each GPU: 24 GiB and an A100 at 0.48 of its peak, 150 TFLOP/s, 150 GB/s within a node" in told
    text = (tmp_path / "ds_hydra.json").read_text()
    written: dict[str, Any] = dict(hjson.loads(text))
    block = written.pop("hydra")
    assert written == DEEPSPEED
    assert accept({**written, "hydra": dict(block)}, 4, CALLS) is not None
    if script == "trainer":
        assert json.loads(text), "Trainer and Accelerate read JSON without comments"
    reasons = text if script == "three_calls" else (tmp_path / "ds_hydra.txt").read_text()
    assert all(name in told for name in block)
    assert "your script hands its batches in" in reasons
    assert ("loss_norm" in block) == (script == "three_calls")
    assert main([*command[:2], str(tmp_path / "ds_hydra.json"), *command[3:], "--out", str(tmp_path / "new.json")]) == 0
    assert "as your block has it" in capsys.readouterr().out
    assert dict(hjson.loads((tmp_path / "new.json").read_text()))["hydra"] == block


@pytest.mark.drawn
def test_a_zero_3_job_of_trl_is_translated_in_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model_file(tmp_path)
    Path("ds.json").write_text(json.dumps(ZERO_3))
    Path("sft.py").write_text(SFT)
    lengths = np.minimum(np.random.default_rng(0).lognormal(6.5, 1.4, 2000), 16384).astype(int)
    np.savetxt("lengths.txt", lengths)
    command = ["init", "sft.py", "ds.json", "--model", "model.json", "--gpus", "8", "--device-memory", "12",
               "--lengths", "lengths.txt"]  # fmt: skip
    assert main(command) == 0
    told = capsys.readouterr().out
    cut = lengths[lengths > 1024]
    shares = len(cut) / len(lengths), 1 - np.minimum(lengths, 1024).sum() / lengths.sum()
    assert f"TRL cuts {shares[0]:.0%} of your sequences and {shares[1]:.0%} of your tokens" in told
    assert f"--max_length {lengths.max()}" in told
    assert "now: ZeRO-3" in told
    rows = [line for line in told.splitlines() if line.startswith(("what you run", "best fixed", "ds-hydra  "))]
    assert len(rows) == 4
    subprocess.run(["patch", "-p0", "--quiet", "-i", "ds_hydra.diff"], check=True)
    assert "from ds_hydra.hugging_face.sft import HydraSFTTrainer as SFTTrainer" in Path("sft.py").read_text()
    assert accept(json.loads(Path("ds_hydra.json").read_text()), 8, "SFTTrainer") is not None


def test_all_refusals_are_told_at_once_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    refused = {"torch_autocast": {"enabled": True}, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}},
               "weight_quantization": {"enabled": True}, "hydra": {"chosen": "best"}}  # fmt: skip
    config.write_text(json.dumps({**DEEPSPEED, **refused}))
    command = ["init", str(SWAP / "sft.py"), str(config), "--model", str(model_file(tmp_path)), "--gpus", "2",
               "--lengths", "pretraining"]  # fmt: skip
    assert main(command) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ("4 settings", "torch_autocast", "OneBitAdam", "weight_quant", "'chosen'"))
    config.write_text(json.dumps(DEEPSPEED))
    long = tmp_path / "long.txt"
    long.write_text("30000\n")
    assert main([*command[:-1], str(long), "--device-memory", "2"]) == 2
    assert "on 4 of them" in (told := capsys.readouterr().err), told
    assert {path.name for path in tmp_path.iterdir()} == {"ds.json", "model.json", "long.txt"}


@pytest.mark.drawn
def test_a_gain_says_whose_costs_it_follows_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(DEEPSPEED))
    model = model_file(tmp_path, 8192, hidden_size=256, intermediate_size=704, num_hidden_layers=4, vocab_size=320)
    command = ["init", str(SWAP / "trainer.py"), str(config), "--model", str(model), "--gpus", "8", "--lengths",
               "pretraining", "--out", str(tmp_path / "new.json")]  # fmt: skip
    assert main([*command, "--device", "H100"]) == 0
    told = capsys.readouterr().out
    assert "H100 at 0.48 of its peak, 475 TFLOP/s" in told
    assert re.search(r'too_long +"skip" +\d[\d,]* of 100,000 sequences \(\d+%\) are longer than the model', told)
    assert main([*command, "--device", "Abacus"]) == 2
    assert "the peak of a 'Abacus' is not known here: name one of B200" in capsys.readouterr().err
    assert main([*command, "--cost-table", shipped("a800-7b")]) == 0
    told = capsys.readouterr().out
    assert "By the costs of " in told
    assert "ESTIMATE" not in told
    assert json.loads((tmp_path / "new.json").read_text())["hydra"]["cost_table"] == shipped("a800-7b")


# --- What hosts of reinforcement learning do with rollouts, as `ds-hydra preview --rollouts` shows it.
LENGTHS = [9, 1, 1, 8, 2, 7, 3]


def test_ranks_get_equal_counts_in_the_order_drawn_or_equal_tokens() -> None:
    assert in_equal_counts(LENGTHS, 3) == [[0, 3, 6], [1, 4], [2, 5]]
    dealt = in_equal_tokens(LENGTHS, 3)
    assert sorted(at for own in dealt for at in own) == list(range(len(LENGTHS)))
    assert sorted(sum(LENGTHS[at] for at in own) for own in dealt) == [10, 10, 11]


def test_every_way_runs_each_rollout_once_in_a_plan_that_is_valid() -> None:
    table, seen = CostTable.load(shipped("a800-7b")), set[str]()

    def step_ms(plan: StepPlan, costs: CostTable) -> float:
        validate_plan(plan, costs, 16)
        assert sorted(plan.sequence_ids) == list(range(len(plan.lengths)))
        seen.add(plan.strategy)
        return plan.predicted_ms

    batches = [[16_384, *[300] * 40, 9_000, 2_000], [500] * 60]
    ways = hosts_ways(table, 16, batches, 16_384, PlannerOptions(kernels="compiled"), step_ms)
    assert tuple(ways) == (EQUAL_COUNTS, EQUAL_TOKENS, SHARED)
    assert any("sp" in strategy for strategy in seen)
    means = [float(ways[name].step_ms.mean()) for name in ways]
    assert means == sorted(means, reverse=True), "each knows more of the step than the one before it"


def test_the_shipped_rollouts_have_the_quantiles_that_they_are_fitted_to() -> None:
    lengths = read_lengths(shipped("rollouts"), 32_768).lengths
    assert np.percentile(lengths, 75) == pytest.approx(8_192, rel=0.02)
    assert np.median(lengths) == pytest.approx(4_202, rel=0.03)
    assert (lengths == 32_768).mean() == pytest.approx(0.019, abs=0.002), "what is longer ends at the limit"


def test_preview_shows_what_hosts_do_with_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "--cost-table a800-7b --rollouts --gpus 16 --tokens 150000 --context 32768 --steps 2 --tp-across-nodes"
    found = tmp_path / "found.json"
    assert preview.main([*command.split(), "--strategies", "2*tp8", "4*tp4", "--json", str(found)]) == 0
    shown = capsys.readouterr().out
    assert all(f"rollouts placed as {name} does" in shown for name in DEALT)
    assert SHARED in shown
    assert {name: len(times) for name, times in json.loads(found.read_text())["hosts_ms"].items()} == dict.fromkeys(
        (*DEALT, SHARED), 2
    )
