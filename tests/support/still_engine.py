"""A host engine whose steps only move the optimizer, for tests of what stands around a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.config.hydra_block import ParsedConfig, parse_config
from ds_hydra.host.host_engine import HostEngine
from ds_hydra.host.launch import init_distributed
from ds_hydra.report.record import StepRecord
from ds_hydra.testing import run_ranks

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


def parsed_config(**settings: Any) -> ParsedConfig:
    parsed = parse_config({"hydra": HYDRA, "optimizer": ADAMW, **settings})
    assert parsed is not None
    return parsed


class StillEngine(HostEngine):
    """A host whose steps only move the optimizer along a gradient of ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.install_optimizer(shards_of(self.module, self.recipe, cut=1))

    def train_batch(self, data_iter: Any = None, skipped: bool = False) -> Tensor:
        assert self.optimizer is not None
        assert self.sampler is not None
        self.refuse_further_steps()
        lr = self.get_lr()[0]
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        if not skipped:
            self.optimizer.step()
        lengths = self.sampler.batch_lengths(self.global_steps)
        self.finish_step(
            StepRecord(
                step=self.global_steps + 1,
                loss=1.0,
                grad_norm=2.0,
                learning_rate=lr,
                num_tokens=sum(lengths),
                num_targets=sum(lengths),
                num_sequences=len(lengths),
                strategy="tp1",
                changed=False,
                step_ms=1.0,
                predicted_ms=1.0,
                skipped=skipped,
            )
        )
        return torch.tensor(1.0)


def on_one_rank(function: Callable[[], Any], num_ranks: int = 1) -> Any:
    def run(rank: int) -> Any:
        return function()

    return run_ranks(run, num_ranks)[0]


def make_engine(parsed: ParsedConfig, model: nn.Module | None = None, **arguments: Any) -> StillEngine:
    init_distributed(parsed.hydra, port=29500)
    data = [list(range(length)) for length in (5, 3, 9, 40, 7, 12)]
    return StillEngine(parsed, model or small_model(), training_data=data, **arguments)
