"""What is reused of DeepSpeed and what stands in its place: optimizers, schedules, names; configs as people have."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import deepspeed.checkpoint
import deepspeed.pipe
import deepspeed.profiling
import pytest
import torch
from accelerate import DeepSpeedPlugin
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

import ds_hydra
from ds_hydra.config.deepspeed_settings import KNOWN_SETTINGS, PRECISION, REFUSED, TOLD, ZERO_SETTINGS
from ds_hydra.config.hosts import ACCELERATE, FILLED, TRAINER, filled_in
from ds_hydra.entry import accept
from ds_hydra.host import launch
from ds_hydra.host.optimizers import (
    ELEMENT_WISE,
    Lion,
    is_element_wise,
    is_known,
    optimizer_of_block,
    optimizer_recipe,
    parameter_groups,
)
from ds_hydra.host.settings import refuse_metrics_scheduler
from ds_hydra.zero_hetero.deepspeed_names import BOTH
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.public_configs import CONFIGS, Public

HYDRA = {"tokens_per_step": 20, "strategies": ["tp1"], "steps_file": None}
ADAMW = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}}


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 3))


def shards_of(model: nn.Module, recipe: Any, cut: int) -> list[list[Tensor]]:
    """Masters as a rank might own them: each parameter flat and cut in two at `cut`."""
    named = dict(model.named_parameters())
    flat = [[named[name].detach().clone().view(-1) for name in group.names] for group in recipe.groups]
    return [[nn.Parameter(part) for f in own for part in (f[:cut], f[cut:])] for own in flat]


# --- What is reused of DeepSpeed and what stands in its place: optimizers over shards, schedules, the engine's
# face.
def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Biases without weight decay, the usual two groups."""
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return [{"params": weights}, {"params": biases, "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("name", "params", "reference"),
    [
        ("AdamW", {"lr": 0.1, "torch_adam": True}, lambda g: torch.optim.AdamW(g, lr=0.1)),
        ("AdamW", {"lr": 0.1}, lambda g: torch.optim.AdamW(g, lr=0.1, weight_decay=0.0)),
        ("Adam", {"lr": 0.1, "weight_decay": 0.1}, lambda g: torch.optim.AdamW(g, lr=0.1, weight_decay=0.1)),
        ("Adam", {"lr": 0.1, "adam_w_mode": False}, lambda g: torch.optim.Adam(g, lr=0.1)),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9)),
        ("Lion", {"lr": 0.1, "weight_decay": 0.1}, lambda g: Lion(g, lr=0.1, weight_decay=0.1)),
    ],
)
def test_update_of_shards_is_the_update_of_parameters(
    name: str, params: dict[str, Any], reference: Callable[[Any], torch.optim.Optimizer]
) -> None:
    model = small_model()
    recipe = optimizer_recipe(model, name=name, params=params, model_parameters=decay_groups(model))
    shards = shards_of(model, recipe, cut=2)
    optimizer, whole = recipe.build(shards), reference(decay_groups(model))
    for _ in range(3):
        for shard_group, group in zip(optimizer.param_groups, whole.param_groups, strict=True):
            for index, parameter in enumerate(group["params"]):
                parameter.grad = torch.randn_like(parameter)
                flat = parameter.grad.view(-1)
                for part, grad in zip(shard_group["params"][2 * index :], (flat[:2], flat[2:]), strict=False):
                    part.grad = grad.clone()
        optimizer.step()
        whole.step()
    for shard_group, group in zip(optimizer.param_groups, whole.param_groups, strict=True):
        parts = torch.cat(shard_group["params"])
        assert torch.allclose(parts, torch.cat([p.view(-1) for p in group["params"]]), atol=1e-6)


def test_lion_by_hand() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 1.0]))
    lion = Lion([parameter], lr=0.1, betas=(0.9, 0.5), weight_decay=0.2)
    for gradient in ([1.0, -1.0], [-4.0, -4.0]):
        parameter.grad = torch.tensor(gradient)
        lion.step()
    # momentum after step 1: [0.5, -0.5]; step 2 moves by sign(0.9 * momentum + 0.1 * gradient) = [+, -]
    expected = [((1.0 * 0.98 - 0.1) * 0.98) - 0.1, ((1.0 * 0.98 + 0.1) * 0.98) + 0.1]
    assert parameter.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_bias_correction_by_hand(decoupled: bool) -> None:
    params = {"lr": 0.1, "betas": [0.5, 0.75], "eps": 0.5, "weight_decay": 0.2, "bias_correction": False}
    parameter = nn.Parameter(torch.tensor([1.0]))
    optimizer = optimizer_of_block("Adam", {**params, "adam_w_mode": decoupled})([{"params": [parameter]}])
    value, first, second = 1.0, 0.0, 0.0
    for gradient in (2.0, -3.0):
        parameter.grad = torch.tensor([gradient])
        optimizer.step()
        gradient += 0.0 if decoupled else 0.2 * value
        first, second = 0.5 * first + 0.5 * gradient, 0.75 * second + 0.25 * gradient**2
        value = value * (0.98 if decoupled else 1.0) - 0.1 * first / (second**0.5 + 0.5)
    assert parameter.tolist() == pytest.approx([value])


def test_client_optimizer_keeps_identity_groups_and_scheduler() -> None:
    model = small_model()
    client = torch.optim.AdamW(decay_groups(model), lr=0.2, weight_decay=0.3)
    scheduler = LambdaLR(client, lambda step: 0.5**step)
    recipe = optimizer_recipe(model, client=client)
    assert [group.names for group in recipe.groups] == [("0.weight", "1.weight"), ("1.bias",)]
    shards = shards_of(model, recipe, cut=1)
    optimizer = recipe.build(shards)
    assert optimizer is client
    assert optimizer.param_groups[0]["params"][0] is shards[0][0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.1)


def test_groups_name_trainable_parameters_only() -> None:
    model = small_model()
    model[0].weight.requires_grad_(False)
    assert parameter_groups(model)[0].names == ("1.weight", "1.bias")
    assert parameter_groups(model, model.named_parameters())[0].names == ("1.weight", "1.bias")
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        parameter_groups(model)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "LARS"}, "LARS scales each parameter's step by its norm.*AdamW"),
        ({"name": "MuonClip"}, "MuonClip rescales queries and keys by each head's largest logit"),
        ({"client": lambda groups: type("Muon", (torch.optim.SGD,), {})(groups, lr=1)}, 'orthogonalizes.*type "Muon"'),
        ({"name": "OneBitAdam"}, "communication"),
        ({"name": "AdmW"}, "optimizer.type \"AdmW\".*mean 'AdamW'"),
        ({"name": "AdamW", "params": {"learning_rate": 1.0}}, "learning_rate"),
        ({"name": "AdamW", "params": {"bias_correction": False, "amsgrad": True}}, "amsgrad.*it takes lr, betas"),
        ({"client": lambda groups: "no"}, "returned a str"),
        ({}, "no optimizer"),
    ],
)
def test_optimizers_that_shards_do_not_allow(arguments: dict[str, Any], words: str) -> None:
    def build() -> None:
        model = small_model()
        recipe = optimizer_recipe(model, **arguments)
        recipe.build(shards_of(model, recipe, cut=1))

    with pytest.raises(ConfigError, match=words):
        build()


def test_client_optimizers_are_checked() -> None:
    model = small_model()

    class Own(torch.optim.SGD):
        pass

    with pytest.raises(ConfigError, match=r"Own is not known to be element-wise.*zero_allow_untested_optimizer"):
        optimizer_recipe(model, client=Own(model.parameters(), lr=1))
    assert optimizer_recipe(model, client=Own(model.parameters(), lr=1), allow_untested=True).name == "Own"
    with pytest.raises(ConfigError, match=r"shape \(3, 4\).*not one of the model's"):
        optimizer_recipe(model, client=torch.optim.SGD([nn.Parameter(torch.zeros(3, 4))], lr=1))
    hooked = torch.optim.SGD(model.parameters(), lr=1)
    hooked.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    with pytest.raises(ConfigError, match=r"has the step hook .*flat parts of the ranks' masters"):
        optimizer_recipe(model, client=hooked)
    wrapped = torch.optim.SGD(model.parameters(), lr=1)
    torch.optim.lr_scheduler.StepLR(wrapped, 2)  # which wraps the step, too
    optimizer_recipe(model, client=wrapped)
    plain = wrapped.step
    wrapped.step = lambda closure=None: plain(closure)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"the step of optimizer SGD is .*<lambda> .*gradient_clipping"):
        optimizer_recipe(model, client=wrapped)
    used = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    next(model.parameters()).grad = torch.zeros(50, 4)
    used.step()
    assert list(optimizer_recipe(model, client=used).states) == [next(model.named_parameters())[0]]


class _Scaled(torch.optim.SGD):
    """Scales a gradient by the norm of its whole weight."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.grad.mul_(param.detach().norm())
        super().step()


class _Clipped(torch.optim.SGD):
    """Clips by the norm of all that it has."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        super().step()


class _Signs(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.grad.sign_()
        super().step()


class _OnGpus(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("needs CUDA")


def test_an_optimizer_that_the_user_answers_for_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    for kind in (_Signs, _OnGpus):
        assert optimizer_recipe(model, client=kind(model.parameters(), lr=1), allow_untested=True).name == kind.__name__
    assert [record.getMessage()[:41] for record in caplog.records] == ["optimizer _OnGpus could not be tried on a"]
    for mixing in (_Scaled, _Clipped):
        with pytest.raises(
            ConfigError, match=rf"{mixing.__name__} updates a weight otherwise in pieces.*Adagrad, .*SGD"
        ):
            optimizer_recipe(model, client=mixing(model.parameters(), lr=1), allow_untested=True)
    kinds: list[Any] = [*ELEMENT_WISE.values()]
    assert all(is_element_wise(kind(model.parameters(), lr=0.01)) for kind in kinds)


def test_an_optimizer_that_begins_with_a_state_has_it_for_the_shards() -> None:
    model, shard = small_model(), nn.Parameter(torch.ones(7))
    client = torch.optim.Adagrad(model.parameters(), lr=1, initial_accumulator_value=3.0)
    assert optimizer_recipe(model, client=client).build([[shard]]) is client
    assert list(client.state) == [shard]
    shard.grad = torch.ones(7)
    client.step()
    assert shard.tolist() == [0.5] * 7, "1 - 1 / sqrt(3 + 1)"


def test_schedulers_that_want_a_metric_are_refused() -> None:
    optimizer = torch.optim.SGD(small_model().parameters(), lr=1)
    refuse_metrics_scheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau wants metrics in each step.* between steps"):
        refuse_metrics_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheduler": {"type": "WarmpLR"}}, "scheduler.type.*mean 'WarmupLR'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}, "'warmup'.*warmup_num_steps"),
        ({"scheduler": {"type": "StepLR"}}, "step_size"),
        ({"scheduler": {"type": "ReduceLROnPlateau"}}, "wants metrics"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}}, "warmup_num_steps.*-1"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2], "warmup_min_lr": [1]}}}, "warmup_min"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "OneBitAdam compresses.*AdamW"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "ns_metod": "gram"}}}, "'ns_metod'.*mean 'ns_method'"),
        ({"optimizer": {"type": "Lamb", "params": {"momentum": 0.9}}}, "'momentum'.*DeepSpeed's FusedLamb"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-3}}}, "'learning_rate'.*it takes"),
        ({"csv_monitor": {"enabld": True}}, "enabld"),
        ({"comet": {"enabled": True}}, "comet_ml"),
    ],
)
def test_what_deepspeed_would_refuse_late_or_badly(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        accept({"hydra": HYDRA, "optimizer": ADAMW, **settings}, ranks=1)


@pytest.mark.drawn
def test_initialize_refuses_before_there_is_a_process_group(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"hydrra": HYDRA}, "Rename it"),
        ({"hydra": {**HYDRA, "sede": 1}}, "did you mean 'seed'"),
        ({"hydra": HYDRA, "optimizer": ADAMW}, "the environment lacks RANK"),
    ]
    code = (
        "import ds_hydra, torch\n"
        f"for config in {[config for config, _ in refused]!r}:\n"
        "    try: ds_hydra.initialize(model=torch.nn.Linear(1, 1), config=config)\n"
        "    except ds_hydra.ConfigError as error: print(f'told: {error} [{torch.distributed.is_initialized()}]')"
    )
    environment = {"PATH": "/usr/bin:/bin", "DS_ACCELERATOR": "cpu", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    _, *told = done.stdout.split("told: ")
    for (_, words), text in zip(refused, told, strict=True):
        assert words.lower() in text.lower(), done.stdout + done.stderr
        assert "[False]" in text


def test_without_the_block_deepspeed_gets_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    import ds_hydra

    seen: dict[str, Any] = {}
    monkeypatch.setattr(deepspeed, "initialize", lambda **arguments: seen.update(arguments) or (1, 2, 3, 4))
    model, config = small_model(), {"train_batch_size": 8}
    assert ds_hydra.initialize(model=model, config=config, collate_fn=len, mpu="m") == (1, 2, 3, 4)
    assert seen["model"] is model
    assert seen["config"] is config
    assert (seen["collate_fn"], seen["mpu"], len(seen)) == (len, "m", 13)


@pytest.mark.parametrize(
    ("backend", "num_ranks", "device"), [("nccl", 4, torch.device("cuda", 1)), ("nccl", 1, None), ("gloo", 4, None)]
)
def test_groups_under_torchrun_get_their_device(
    monkeypatch: pytest.MonkeyPatch, backend: str, num_ranks: int, device: torch.device | None
) -> None:
    """As under DeepSpeed's launcher; no device is needed to be told one."""
    given: dict[str, Any] = {}
    for name, value in {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": num_ranks, "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(torch.distributed, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **options: given.update(options))
    launch._meet_in_this_attempt(backend, timedelta(seconds=5))
    assert (given["rank"], given["world_size"], given["device_id"]) == (3, num_ranks, device)


# --- `import ds_hydra as deepspeed`: each name of DeepSpeed's is there, the same object or what stands in its
# place.
OWN = {"checkpoint", "dist", "init_distributed", "initialize", "pipe", "profiling", "zero"}
OWN_OF_ZERO = {"GatheredParameters", "Init", "register_external_parameter"}

TAKEN = {
    "accelerator": ("get_accelerator",),
    "checkpoint.utils": ("clone_tensors_for_torch_save",),
    "comm": ("TorchBackend", "get_rank"),
    "ops.adam": ("DeepSpeedCPUAdam", "FusedAdam"),
    "pipe": ("LayerSpec", "PipelineModule", "TiedLayerSpec"),
    "profiling.flops_profiler": ("get_model_profile",),
    "runtime.zero.partition_parameters": ("ZeroParamStatus",),
    "utils": ("RepeatingLoader", "groups", "logger", "safe_get_full_grad", "set_z3_leaf_modules"),
}
"""Some of what public scripts and DeepSpeed's pages take: of its modules, and of those whose names are ours too."""


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


# --- Configs as people have them are taken, or refused by name; and all that the installed DeepSpeed reads is
# known.
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
    for line, words in zip(lines, ("stage 3: FP32", "all-gathers", "whole weights", "NVMe"), strict=True):
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
