"""verl trains by this engine: `strategy: hydra` of a language or a value model, registered when verl is imported.

[Note: verl's engine]
verl gives an engine mini-batches and a loss of log-probabilities, and takes metrics and weights back. Its own engines
cut a mini-batch among data parallel ranks beforehand, by counts or by tokens. Here all ranks are told that there is one
data parallel rank: each gets the whole mini-batch, rank 0 hands it in, and the plan says which rank computes what. The
loss is called once, on rank 0, for the whole mini-batch, whose log-probabilities a forward has found; the gradients of
the loss by these are what the engine then trains by [Note: losses of log-probabilities]. `micro_batch_size_per_gpu` and
its like have no part in that.

  forward_backward_batch   with a loss: `engine.forward_backward`; without, or forward only: `engine.log_probs`, or of a
                           critic `engine.values`
  optimizer_step           `engine.optimizer_step`; verl itself calls `lr_scheduler_step`
  get_per_tensor_param     `engine.full_parameters`
  to                       `engine.to`, for verl's offloading

verl's own place i of a sequence is about token i + 1; the engine's is about token i.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from ds_hydra.config.checks import read_config
from ds_hydra.zero_hetero.errors import ConfigError

NAME = "hydra"
_TYPES = ("bfloat16", "float16", "float32")
_IMAGES = "multi_modal_inputs"  # verl's field of what a processor makes of each sequence's images, or None
_COUNTS = "images_seqlens"  # which verl puts among them for its own figures
_PROPOSED = {"hydra": {"strategies": "auto"}}
_WEIGHTS = "hf_model"  # what verl's `save_contents` calls a Hugging Face folder
LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


@dataclass
class HydraEngineConfig(EngineConfig):
    """`_target_: ds_hydra.hosts.verl.HydraEngineConfig` in verl's YAML.

    `deepspeed_config` is a file, or its content, with the block "hydra"; verl's own settings say what the optimizer is,
    what gradients are clipped to, and in which type the model computes. Left out, candidates are proposed.
    """

    strategy: str = NAME
    deepspeed_config: Any = field(default_factory=lambda: dict(_PROPOSED))


@EngineRegistry.register(model_type="language_model", backend=NAME, device=["cuda", "cpu"])
class HydraVerlEngine(BaseEngine):  # type: ignore[misc]  # verl brings no types
    """See [Note: verl's engine]. Every rank must make the same calls, with the same data."""

    valued = False  # whether the model gives values in place of logits

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any, **_: Any
    ) -> None:
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.images = False  # whether the model trains on images
        self.mode: str | None = None
        self.engine: Any = None
        # A real group: verl asks for its rank and size, and gathers metrics in it.
        self._alone = dist.new_subgroups(group_size=1)[0]
        self._saved: list[Path] = []

    def initialize(self) -> None:
        """Load the model and make the engine. ConfigError for settings that it cannot train by."""
        import ds_hydra

        if self.model_config.lora_rank > 0 or self.model_config.lora_adapter_path is not None:
            raise ConfigError("adapters (lora_rank, lora_adapter_path) are not made for verl here: train all weights")
        if self.valued:  # as verl's own engines have it
            self.model_config.hf_config.num_labels = 1
            self.model_config.hf_config.classifier_dropout = 0.0
        config = job_config(self.engine_config, self.optimizer_config)
        self.images = bool(config["hydra"].get("images"))
        if self.images and self.valued:
            raise ConfigError("hydra.images: a critic's values are of tokens alone: leave images out of its block")
        kind: Any = AutoModelForTokenClassification if self.valued else (
            AutoModelForImageTextToText if self.images else AutoModelForCausalLM)  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a head that the folder has not is drawn alike on all ranks
            model = kind.from_pretrained(
                self.model_config.local_path, config=self.model_config.hf_config, dtype=torch.float32,
                attn_implementation="sdpa",  # the engine puts its own in the place of any
            )  # fmt: skip
        self.engine = ds_hydra.initialize(model=model, config=config, lr_scheduler=self._schedule)[0]

    def _schedule(self, optimizer: Any) -> Any:
        """The schedule of verl's optimizer config."""
        given = self.optimizer_config
        if given is None:
            return get_constant_schedule_with_warmup(optimizer, num_warmup_steps=0)
        total, warm_up = given.total_training_steps, given.lr_warmup_steps
        if warm_up is None or warm_up <= 0:
            warm_up = int(given.lr_warmup_steps_ratio * total)
        kind = getattr(given, "lr_scheduler_type", "constant")
        if kind == "constant":
            return get_constant_schedule_with_warmup(optimizer, num_warmup_steps=warm_up)
        if kind != "cosine":
            raise ConfigError(f'lr_scheduler_type {kind!r}: a schedule is "constant" or "cosine"')
        return get_cosine_schedule_with_warmup(
            optimizer, num_warmup_steps=warm_up, num_training_steps=total, num_cycles=getattr(given, "num_cycles", 0.5),
            min_lr_ratio=getattr(given, "min_lr_ratio", None) or 0.0,
            zero_indexed_step=getattr(given, "zero_indexed_step", True),
        )  # fmt: skip

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether verl moves the parameters to the host between uses."""
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether verl moves the optimizer's states to the host between uses."""
        return bool(self.engine_config.optimizer_offload)

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        """A context in which the model trains."""
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        """A context in which the model only computes."""
        return _Mode(self, "eval", **kwargs)

    def optimizer_zero_grad(self) -> None:
        """Drop gradients that wait for an update."""
        self.engine.zero_grad()

    def optimizer_step(self) -> float:
        """Update the parameters; the norm of the gradients before clipping."""
        return float(self.engine.optimizer_step())

    def lr_scheduler_step(self) -> float:
        """Move the schedule on by a step; the learning rate then."""
        self.engine.lr_scheduler.step()
        return float(self.engine.lr_scheduler.get_last_lr()[0])

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Log-probabilities and entropies, or values, loss and metrics of a mini-batch, on rank 0; with a loss, and
        unless `forward_only`, its gradients are added to those that wait for an update. ConfigError, on all ranks, for
        inputs beside tokens and images."""
        rows = _Rows.of(data, tempered=not self.valued, images=self.images)
        tu.assign_non_tensor(data, batch_num_tokens=data["loss_mask"].sum().item(), dp_size=1)
        call = _Call(data, rows, loss_function, self._alone, self.valued)
        mine = rows.items if dist.get_rank() == 0 else []
        forward_only = forward_only or loss_function is None
        if forward_only and self.valued:
            values = self.engine.values(mine)
            if mine:
                call.answer(_of_targets(values))
        elif forward_only:
            with_entropy = bool(tu.get_non_tensor_data(data, "calculate_entropy", False))
            log_probs, entropy = self.engine.log_probs(mine, entropy=with_entropy, temperature=rows.temperature)
            if mine:
                call.answer(_of_targets(log_probs), None if entropy is None else _of_targets(entropy))
        else:
            self.engine.forward_backward(
                mine, call.losses, normaliser=1.0, temperature=rows.temperature, mixes_tokens=True
            )
        return call.result

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """The weights by their Hugging Face names, one after the other, whole, on all ranks; adapters are merged."""
        return self.engine.full_parameters(), None

    def get_data_parallel_size(self) -> int:
        """1: the plan decides which rank computes what."""
        return 1

    def get_data_parallel_rank(self) -> int:
        """0, on all ranks."""
        return 0

    def get_data_parallel_group(self) -> Any:
        """A group of this rank alone."""
        return self._alone

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank has what was computed: rank 0 has."""
        return dist.get_rank() == 0

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move states to the host ("cpu") or back."""
        super().to(device, model, optimizer, grad)
        if self.engine is not None and (model or optimizer or grad):
            self.engine.to(device, model=model, optimizer=optimizer, grad=grad)

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:  # fmt: skip
        """Save all states, and with "hf_model" in verl's `save_contents` a Hugging Face folder beside them. ConfigError
        for a path of HDFS."""
        if hdfs_path is not None:
            raise ConfigError(f"checkpoints are written to a file system, not to {hdfs_path}: leave hdfs_path out")
        self.engine.save_checkpoint(local_path, tag=f"step{global_step}")
        if _WEIGHTS in (getattr(self.checkpoint_config, "save_contents", None) or ()):
            self.engine.save_16bit_model(str(Path(local_path, "huggingface")))
        self._saved = [*(path for path in self._saved if path != Path(local_path)), Path(local_path)]
        if max_ckpt_to_keep is not None and max_ckpt_to_keep > 0:
            for old in self._saved[:-max_ckpt_to_keep] if dist.get_rank() == 0 else ():
                shutil.rmtree(old, ignore_errors=True)
            self._saved = self._saved[-max_ckpt_to_keep:]

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False, **_: Any
    ) -> None:
        """Load what `save_checkpoint` has written, on any number of ranks. ConfigError for a path of HDFS."""
        if hdfs_path is not None:
            raise ConfigError(f"checkpoints are read from a file system, not from {hdfs_path}: copy it here before")
        self.engine.load_checkpoint(local_path)


@EngineRegistry.register(model_type="value_model", backend=NAME, device=["cuda", "cpu"])
class HydraVerlCritic(HydraVerlEngine):
    """A critic: a head of one output for each token (`AutoModelForTokenClassification`), whose values a loss is of."""

    valued = True


class _Mode(BaseEngineCtx):  # type: ignore[misc]
    """Training, or computing only: gradients that no update took are dropped when training ends."""

    def __exit__(self, *raised: Any) -> None:
        if self.mode == "train" and self.zero_grad_on_exit:
            self.engine.optimizer_zero_grad()
        super().__exit__(*raised)


@dataclass(frozen=True)
class _Rows:
    """The sequences of a mini-batch."""

    ids: Tensor  # (B, j), jagged
    temperature: float | None  # of all
    items: list[dict[str, Any]]  # as the engine takes them

    @classmethod
    def of(cls, data: TensorDict, *, tempered: bool, images: bool) -> _Rows:
        """`tempered`: logits are divided by the batch's temperature; `images`: sequences may have some. ConfigError for
        what the engine does not read."""
        ids = data["input_ids"]
        if not ids.is_nested:
            raise ConfigError("sequences are padded (use_remove_padding: False with a pad mode): verl's engines hand "
                              "them on jagged; leave pad_mode at no_padding")  # fmt: skip
        seen = tu.get(data, _IMAGES) or [None] * len(ids)
        if any(seen) and not images:
            raise ConfigError(f"{_IMAGES}: the model trains on tokens alone: set hydra.images to true")
        given = tu.get(data, "temperature", 1.0) if tempered else None
        each = given.flatten().tolist() if isinstance(given, Tensor) and given.numel() > 1 else None
        items: list[dict[str, Any]] = []
        for number, row in enumerate(ids.unbind()):
            tokens = row.detach().cpu()
            own = {name: column for name, column in (seen[number] or {}).items() if name != _COUNTS}
            items.append({"input_ids": tokens, "labels": tokens, **own})
            if each is not None:
                items[-1]["temperature"] = each[number]
        return cls(ids, None if given is None or each is not None else float(given), items)

    def at_places(self, found: Tensor) -> Tensor:
        """(B, j), jagged as verl has it: what is about token i + 1 at place i, 0 at the last of a sequence. `found` has
        it for all tokens but the first of each sequence."""
        jagged: Any = self.ids  # whose methods torch does not type
        offsets = jagged.offsets()
        targets = torch.ones(jagged.values().shape[0], dtype=torch.bool, device=found.device)
        targets[offsets[1:].to(found.device) - 1] = False
        values = found.new_zeros(len(targets)).masked_scatter(targets, found)
        return torch.nested.nested_tensor_from_jagged(values.to(self.ids.device), offsets=offsets)


@dataclass
class _Call:
    """One call of the host's, and what it is to get back."""

    data: TensorDict
    rows: _Rows
    loss_function: LossFunction | None
    group: Any
    valued: bool
    result: dict[str, Any] = field(default_factory=lambda: {"model_output": {}, "loss": [], "metrics": {}})

    def losses(self, *found: Any) -> Tensor:
        """The loss of the mini-batch, (1,), as the engine asks for it: of log-probabilities and entropies, or values,
        and fields of all targets in the order of the sequences."""
        return self.answer(*found[:-1])

    def answer(self, scores: Tensor, entropy: Tensor | None = None) -> Tensor:
        """Keep what the host is to get of log-probabilities or values; the loss."""
        output = {"values" if self.valued else "log_probs": self.rows.at_places(scores)}
        if entropy is not None and tu.get_non_tensor_data(self.data, "calculate_entropy", False):
            output["entropy"] = self.rows.at_places(entropy)
        loss, metrics = torch.zeros(()), dict[str, Any]()
        if self.loss_function is not None:
            loss, metrics = self.loss_function(model_output=output, data=self.data, dp_group=self.group)
            self.result["loss"] = [loss.detach().item()]
        self.result["model_output"] = {key: value.detach() for key, value in output.items()}
        self.result["metrics"] = {key: [value] for key, value in metrics.items()}
        return loss.reshape(1).to(scores.device)


def _of_targets(sequences: list[Tensor]) -> Tensor:
    """What the engine has found of the tokens of sequences, but the first of each, which follows none."""
    return torch.cat([found[1:] for found in sequences])


def job_config(engine_config: Any, optimizer_config: Any) -> dict[str, Any]:
    """DeepSpeed's config of a job, from verl's. ConfigError for a type or an optimizer that it cannot be."""
    given = getattr(engine_config, "deepspeed_config", None) or _PROPOSED
    config = read_config(config=OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given)
    if "hydra" not in config:
        raise ConfigError('deepspeed_config has no block "hydra": add it, {"hydra": {"strategies": "auto"}} at least')
    if engine_config.dtype not in _TYPES:
        raise ConfigError(f"dtype {engine_config.dtype!r}: a model computes in {', '.join(_TYPES)}")
    for name, key in (("bf16", "bfloat16"), ("fp16", "float16")):
        config.setdefault(name, {"enabled": engine_config.dtype == key})
    if optimizer_config is None:  # a reference, which is never updated: no states
        return config | {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "gradient_clipping": 0.0}
    name = getattr(optimizer_config, "optimizer", "AdamW")
    if name.lower() != "adamw":
        raise ConfigError(f"optimizer {name!r}: verl's settings are read for AdamW; others stand in deepspeed_config")
    config.setdefault("optimizer", {"type": "AdamW", "params": {
        "lr": optimizer_config.lr, "betas": list(optimizer_config.betas),
        "weight_decay": optimizer_config.weight_decay, "torch_adam": True,
    }})  # fmt: skip
    config.setdefault("gradient_clipping", optimizer_config.clip_grad)
    return config
