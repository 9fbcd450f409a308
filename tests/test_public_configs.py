"""Configs as people have them are taken, or refused by name; and all that the installed DeepSpeed reads is known."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from accelerate import DeepSpeedPlugin
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ds_hydra.config.deepspeed_keys import KNOWN_SETTINGS, REFUSED, TOLD
from ds_hydra.config.deepspeed_settings import PRECISION
from ds_hydra.config.hosts import ACCELERATE, FILLED, TRAINER, filled_in
from ds_hydra.config.zero_block import ZERO_SETTINGS
from ds_hydra.entry import accept
from ds_hydra.host.optimizers import is_known
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.public_configs import CONFIGS, Public

BLOCK = {"hydra": {"strategies": "auto"}}


@pytest.mark.parametrize("public", CONFIGS.values(), ids=list(CONFIGS))
def test_a_public_config_is_taken_or_refused_by_name(public: Public) -> None:
    if public.refused:
        with pytest.raises(ConfigError) as error:
            accept(public.config | BLOCK, ranks=8, host=public.host)
        assert all(word in str(error.value) for word in public.refused), error.value
        return
    accepted = accept(public.config | BLOCK, ranks=8, host=public.host)
    assert accepted is not None
    assert len(accepted.notes) <= 9
    assert not [note for note in accepted.notes if "unknown" in note]
    assert accepted.parsed.source == public.config | BLOCK


def test_each_stage_of_zero_is_told_in_a_few_lines() -> None:
    accepted = accept(CONFIGS["transformers ZeRO-3, offloaded"].config | BLOCK, ranks=8, host=TRAINER)
    assert accepted is not None
    lines = [note for note in accepted.notes if note.startswith("zero_optimization")]
    assert len(lines) == 4
    for line, words in zip(lines, ("stage 3: masters", "pull and push", "whole weights", "offloaded"), strict=True):
        assert words in line


OFF: tuple[Any, ...] = (None, False, {}, {"enabled": False}, {"enabled": "false"}, {"disable": True, "enabled": False})


@pytest.mark.parametrize("key", sorted({*REFUSED, *TOLD}))
def test_what_is_switched_off_asks_for_nothing(key: str) -> None:
    for value in OFF if key not in ("sparse_attention",) else OFF[:3]:
        accepted = accept({key: value, "gradient_clipping": 1.0} | BLOCK, ranks=1)
        assert accepted is not None
        assert accepted.notes == (), (key, value)
    on = {"data_efficiency": {
        "enabled": True, "data_routing": {"enabled": True, "random_ltd": {"enabled": True}}}}  # fmt: skip
    if key in REFUSED:
        with pytest.raises(ConfigError, match=f'"{key}".*Remove it'):
            accept({key: on.get(key, {"enabled": True})} | BLOCK, ranks=1)
    else:
        accepted = accept({key: {"enabled": True}, "gradient_clipping": 1.0} | BLOCK, ranks=1)
        assert accepted is not None
        (note,) = accepted.notes
        assert note.startswith(f'"{key}" has no effect here: ')


class Recorded(dict[str, Any]):
    """A config that knows which of its keys were asked for."""

    asked: set[str]

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # `in` of which is asked above

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


def test_all_that_the_installed_deepspeed_reads_is_known() -> None:
    config = Recorded(train_batch_size=1)
    config.asked = set()
    deepspeed_config.DeepSpeedConfig(config)
    config.asked.discard("optimizer_type")
    assert len(config.asked) > 40
    assert config.asked <= KNOWN_SETTINGS
    zero = DeepSpeedZeroConfig.model_fields
    gone = getattr(deepspeed_config, "_REMOVED_ZERO_CONFIG_KEYS", {})
    assert {*zero, *(field.alias for field in zero.values() if field.alias), *gone} <= ZERO_SETTINGS
    assert {*DeepSpeedBF16Config.model_fields} <= PRECISION["bf16"]
    assert {*DeepSpeedFP16Config.model_fields} <= PRECISION["fp16"]
    assert all(is_known(name) for name in deepspeed_config.DEEPSPEED_OPTIMIZERS)


def _at(config: dict[str, Any], place: str) -> Any:
    for name in place.split("."):
        config = config[name]
    return config


def _all_auto(places: Any) -> dict[str, Any]:
    """A config with "auto" at each of these places."""
    config: dict[str, Any] = {}
    for place in places:
        *outer, key = place.split(".")
        block = config
        for name in outer:
            block = block.setdefault(name, {})
        block[key] = "auto"
    return config


def test_trainer_and_accelerate_fill_in_what_is_taken_for_granted() -> None:
    config = HfTrainerDeepSpeedConfig(_all_auto([*FILLED[TRAINER], "optimizer.params.torch_adam"]))
    arguments = TrainingArguments("unused", use_cpu=True, report_to="none")
    config.trainer_config_process(arguments)
    config.trainer_config_finalize(arguments, None, 10)
    assert _at(config.config, "optimizer.params.torch_adam") == "auto"
    assert {place for place in FILLED[TRAINER] if _at(config.config, place) == "auto"} == set()
    source = inspect.getsource(DeepSpeedPlugin) + inspect.getsource(__import__("accelerate").Accelerator)
    assert {place for place in FILLED[ACCELERATE] if f'"{place}"' not in source} == set()
    assert '"optimizer.params.betas"' not in source
    for host in FILLED:
        filled = filled_in(_all_auto(FILLED[TRAINER]), host)
        left = {place for place in FILLED[TRAINER] if _at(filled, place) == "auto"}
        assert left == FILLED[TRAINER].keys() - FILLED[host].keys()


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"steps_per_print": 0}, "steps_per_print", 2**48),
        ({"steps_per_print": float("inf")}, "steps_per_print", 2**48),
        ({"steps_per_print": 1e30}, "steps_per_print", 2**48),
        ({"steps_per_print": 2e3}, "steps_per_print", 2000),
        ({"steps_per_print": "10"}, "steps_per_print", 10),
        ({"gradient_clipping": 0}, "gradient_clipping", 0.0),
        ({"gradient_clipping": False}, "gradient_clipping", 0.0),
        ({"gradient_clipping": "1.0"}, "gradient_clipping", 1.0),
        ({"gradient_clipping": float("inf")}, "gradient_clipping", 0.0),
        ({"communication_data_type": "FP32"}, "communication_data_type", "fp32"),
        ({"data_types": {"grad_accum_dtype": "torch.bfloat16"}}, "data_types", {"grad_accum_dtype": "bf16"}),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-5", "betas": ["0.9", 0.95]}}}, "optimizer",
         {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}}),
        ({"bf16": {"enabled": "true", "immediate_grad_update": False, "bf16_optimizer_states": False}}, "bf16",
         {"enabled": True}),
        ({"fp16": {"enabled": True, "auto_cast": False, "loss_scale": "0"}}, "fp16",
         {"enabled": True, "loss_scale": "0"}),
        ({"zero_optimization": {"stage": "3", "reduce_bucket_size": 5e8}}, "zero_optimization", None),
        ({"zero_optimization": {"stage": "auto", "sub_group_size": "auto"}}, "zero_optimization", None),
        ({"zero_optimization": True}, "zero_optimization", None),
    ],
)  # fmt: skip
def test_forms_of_values(settings: dict[str, Any], key: str, value: Any) -> None:
    accepted = accept(settings | BLOCK, ranks=1)
    assert accepted is not None
    assert accepted.parsed.deepspeed.get(key) == value
