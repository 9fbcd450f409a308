"""A small training job for tests: model, sequences, streams, data that fail, engine, refused calls."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import ds_hydra
from ds_hydra.engine import engine as engines
from ds_hydra.engine import job as jobs
from ds_hydra.engine.costs import describe_job
from ds_hydra.engine.job import model_source
from ds_hydra.pipe.loss import IGNORED, TokenLoss
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.planner.recipe import warm_up
from ds_hydra.self_check.cache import fingerprint
from ds_hydra.testing import Sample, rank_environment
from ds_hydra.zero_hetero.errors import ConfigError

# --- Sources of stages that are found once, before ranks are forked, and not by each rank again. To find where
# a model's stages come from takes a rank several times as long as all else of an engine, and all ranks find the
# same. What is found, and how, has tests of its own.
# What a config's defaults ask for.
USUAL = StageOptions(token_sharding=True, functions="auto", sp_overlap=True, tiles=True)


@contextlib.contextmanager
def in_place_of_looking(known: ModelSource) -> Iterator[None]:
    """Engines within it take a source under the usual settings for models that differ in their values only.

    Under other settings, with another loss, for a model of other parameters and where strategies spread experts, the
    source is found anew. What is known needs no name by which ranks would tell each other of it: to make one takes half
    as long as all else.
    """
    assert isinstance(known, CausalLM)
    alike = {(spec.name, spec.shape, spec.trainable, known.dtype) for one in known.plan.buckets for spec in one.params}

    def is_known(model: Any, options: StageOptions) -> bool:
        named = dict(getattr(base_of(model), "named_parameters", dict)())
        own = {(name, tuple(one.shape), one.requires_grad, one.dtype) for name, one in named.items()}
        return options == USUAL and own == alike

    def find(model: Any, options: StageOptions, **arguments: Any) -> ModelSource:
        stages = (stage for shape in arguments.get("shapes", ()) for one in shape.pipelines for stage in one.stages)
        other = arguments.get("loss_fn") is not (None if known.valued else known.token_loss)
        if other or not is_known(model, options) or any(stage.ep > 1 for stage in stages):
            return model_source(model, options, **arguments)
        found = copy.copy(known)
        named = base_of(model).named_parameters()
        found.values = {name: parameter.detach() for name, parameter in named if not parameter.is_meta}
        return found

    def name(model: Any, what: str, *settings: Any) -> str | None:
        return None if is_known(model, StageOptions(*settings)) else fingerprint(model, what, *settings)

    with mock.patch.object(engines, "model_source", find), mock.patch.object(jobs, "fingerprint", name):
        yield


def shared_source(model: Any, loss_fn: TokenLoss | None = None) -> contextlib.AbstractContextManager[None]:
    """Engines within it, also those of ranks that are forked, take the source of this model for models like it.

    Only their values may differ, and what a source does not look at.
    """
    return in_place_of_looking(model_source(model, USUAL, loss_fn=loss_fn))


# --- A small training job for tests of checkpoints and faults: model, sequences, config, engine.
STRATEGIES = {
    1: ["tp1"],
    2: ["tp2", "pp2", "2*tp1"],
    3: ["3*tp1", "tp2 + tp1"],
    4: ["tp2 + 2*tp1", "2*sp2", "pp2 + sp2", "4*tp1"],
    6: ["tp2 + pp2 + 2*tp1", "6*tp1"],
    8: ["tp2pp2 + 2*sp2", "8*tp1", "tp2 + pp2 + sp2 + 2*tp1"],
}
"""Heterogeneous ones by number of ranks; with choose "cycle" the strategy changes in every step."""

_IMPORTED_LATE = (
    "deepspeed.comm.mori", "deepspeed.module_inject.auto_ep_config", "deepspeed.moe.ep_experts",
    "ds_hydra.engine.engine", "ds_hydra.entry",
)  # fmt: skip
LENGTHS = (3, 5, 120, 33, 90, 64, 9, 77, 31, 60, 50, 8, 90, 12, 45, 45) * 2


def small_model(tied: bool = True, hidden: int = 32) -> Any:
    """A Llama of four layers with fixed random weights in FP32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=97,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@functools.cache
def small_source() -> ModelSource:
    """Where the stages of the usual `small_model` come from; called before ranks are forked, it is found once."""
    return model_source(small_model(), USUAL)


@functools.cache
def find_before_forks() -> None:
    """What each rank of each job would load or find again, and shares if it is there before they are forked: modules,
    the planner's kernels, the source of the stages, versions of packages, and what our own sources hold."""
    for module in _IMPORTED_LATE:
        with contextlib.suppress(ModuleNotFoundError):  # of DeepSpeed, older releases have not all
            importlib.import_module(module)
    warm_up()
    describe_job(small_source(), torch.device("cpu"), torch.float32, 1)
    fingerprint(small_model())


def sequences() -> list[Tensor]:
    """The training data."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (n,), generator=generator) for n in LENGTHS]


QUIET: dict[str, Any] = {
    "self_check": "off", "steps_file": None, "planner": {"ahead": 0}, "faults": {"frozen_seconds": 0}
}  # fmt: skip
"""What a job does beside training is switched off; it has tests of its own."""


def small_config(num_ranks: int, **hydra: Any) -> dict[str, Any]:
    """A config that cycles through STRATEGIES; `hydra` adds to its block."""
    return {
        "optimizer": hydra.pop("optimizer", {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}),
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-2}},
        "gradient_clipping": 1.0,
        "hydra": {
            "tokens_per_step": 250,
            "strategies": hydra.get("strategies") or STRATEGIES[num_ranks],
            "choose": "best" if hydra.get("replay") else "cycle",
            **QUIET,
            **hydra,
        },
    }


def small_engine(
    rank: int,
    model: Any = None,
    config: dict[str, Any] | None = None,
    *,
    data: Any = ...,
    pre_step_callback: Any = None,
    **hydra: Any,
) -> Any:
    """An engine on this rank, with `sequences()` or other training data."""
    rank_environment(rank)
    config = config or small_config(dist.get_world_size(), **hydra)
    shared: Any = contextlib.nullcontext()
    if model is None:
        model = small_model()
        shared = in_place_of_looking(small_source())
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "norm" not in n]},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
    ]
    data = sequences() if data is ... else data
    with shared:
        return ds_hydra.initialize(
            model=model, training_data=data, config=config, model_parameters=groups, pre_step_callback=pre_step_callback
        )[0]


def start_deepspeed(rank: int) -> None:
    """DeepSpeed's own groups, without an operator that it would compile for half a minute."""
    import deepspeed

    rank_environment(rank)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def whole_state(engine: Any) -> dict[str, Tensor]:
    """Masters and moments in full, by name; every rank must call it."""
    masters, group = engine.crew.masters.trained, engine.crew.world.group
    found = {f"{name}/master": value for name, value in masters.gather_full(group).items()}
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "factored_sq", "step_avg"):
        source = masters.optimizer_state(engine.optimizer, key)
        values = masters.gather_full(group, source=source)
        if any(value.any() for value in values.values()):  # the optimizer has such
            found |= {f"{name}/{key}": value for name, value in values.items()}
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- Streams of sequences for tests: with a state of their own, with an epoch, with neither, and read once
# only.
class Plain:
    """A stream that says nothing of its place."""

    def __init__(self, items: Sequence[Any]):
        self.items, self.reads = items, 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.reads += 1
            yield item


class Stateful(torch.utils.data.IterableDataset):
    """Has the state_dict() of a loader; what it gives depends on the passes that it counts itself."""

    def __init__(self, items: Sequence[Any]):
        self.items, self.reads = items, 0
        self._at, self._passes, self._begin = 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        begin, self._begin = self._begin, 0
        for number in range(begin, len(self.items)):
            self._at = number + 1
            self.reads += 1
            yield self.items[(number * 7 + self._passes) % len(self.items)]
        self._passes, self._at = self._passes + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "passes": torch.tensor(self._passes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = self._begin = state["at"]
        self._passes = int(state["passes"])


class WithEpoch:
    """A stream as `datasets` has it: another order in each epoch, and a state that is of the last pass until the first
    item of the next was taken."""

    def __init__(self, items: Sequence[Any]):
        self.items, self.reads, self.epoch = items, 0, 0
        self._state: dict[str, int] | None = None
        self._from: dict[str, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        begin = self._from["at"] if self._from and self._from["epoch"] == self.epoch else 0
        for number in range(begin, len(self.items)):
            self._state = {"at": number + 1, "epoch": self.epoch}
            self.reads += 1
            yield self.items[(number * 5 + 3 * self.epoch) % len(self.items)]

    def state_dict(self) -> dict[str, int] | None:
        return self._state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._from = state


def of_datasets(items: Sequence[Any]) -> Any:
    """A stream of `datasets` in two shards, another order of them in each epoch."""
    import datasets

    rows = datasets.Dataset.from_dict({"input_ids": [torch.as_tensor(item).tolist() for item in items]})
    return rows.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=1)


def of_torchdata(items: Sequence[Any]) -> Any:
    """torchdata's loader of padded batches of three, in another order each pass, read by a worker process."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(2)
    return StatefulDataLoader(
        list(items), batch_size=3, shuffle=True, generator=generator, num_workers=1, collate_fn=padded
    )


def padded(items: Sequence[Any]) -> dict[str, torch.Tensor]:
    """A batch as collators make it."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.as_tensor(item) for item in items], batch_first=True)
    lengths = torch.tensor([len(item) for item in items])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


STREAMS = (Plain, Stateful, WithEpoch)
REAL_STREAMS = (of_datasets, of_torchdata)


# --- Batches of token sequences with prompts.
def prompted(lengths: Sequence[int], vocabulary: int, seed: int) -> list[Sample]:
    """Sequences of these lengths; the first third of each is a prompt."""
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for length in lengths:
        tokens = torch.randint(3, vocabulary, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length // 3] = IGNORED
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def num_targets(sample: Sample) -> int:
    """Tokens but the first that are targets."""
    return int((sample["labels"][1:] != IGNORED).sum())


def collated(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """As a collator of a script pads them."""
    size = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, value: int) -> Tensor:
        return torch.stack([torch.nn.functional.pad(s[name], (0, size - len(s[name])), value=value) for s in samples])

    mask = torch.stack([(torch.arange(size) < len(sample["input_ids"])).long() for sample in samples])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", IGNORED), "attention_mask": mask}


# --- Data that fail while they are read.
def failing(raised: BaseException) -> Callable[[int], Iterator[list[list[int]]]]:
    """Shares for `train_batch`; in step 3 the iterator of rank 1 fails."""

    def my_tokenizer(rank: int) -> Iterator[list[list[int]]]:
        for step in range(5):
            if step == 2 and rank == 1:
                raise raised
            yield [[3, 4, 5 + step, 6]] * 3

    return my_tokenizer


class Blinks(list[Any]):
    """A dataset whose storage fails on rank 1."""

    rank = 0
    error: BaseException = OSError(5, "Input/output error", "/data/tokens.bin")

    def __getitem__(self, index: Any) -> Any:
        if self.rank == 1 and index == 5:
            raise self.error
        return super().__getitem__(index)


# --- What calls and loggers say.
def told(call: Callable[[], Any]) -> str:
    """The error that a call raises, with its kind."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def lines_of(logger: str = "ds_hydra") -> list[str]:
    """The lines that a logger of this process gets from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    return lines


# --- Calls that an engine must refuse: what each has told, and that training goes on from where it was.
def refused_calls(
    engine: Any,
    calls: Iterable[Callable[[], Any]],
    trains: Callable[[], Any],
    errors: tuple[type[Exception], ...] = (ConfigError,),
) -> tuple[list[str], bool]:
    """The text of each call's error, or "done"; and whether nothing was changed by them and is by what `trains`, with
    a step of the optimizer after it. Every rank must call it."""
    before, told = whole_state(engine), list[str]()
    for call in calls:
        try:
            call()
            told.append("done")
        except errors as error:
            told.append(str(error))
    unchanged = same(before, whole_state(engine)) and not engine.gradients_wait()
    trains()
    engine.optimizer_step()
    return told, unchanged and not same(before, whole_state(engine))
