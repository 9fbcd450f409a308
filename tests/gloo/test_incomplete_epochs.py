"""An epoch's last update, of fewer batches, under Trainer and Accelerate: that of the plain ones on as many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer

from ds_hydra.hugging_face import HydraAccelerator, HydraTrainer
from ds_hydra.testing import rank_environment, run_ranks
from tests.support.small_job import sequences, small_model
from tests.support.trainers import collate, config, settings, trainer_of

ACCUMULATION, RANKS, RATE = 4, 2, 0.5
HYDRA: dict[str, Any] = {"strategies": ["2*tp1", "pp2"], "loss_norm": "batch"}

Parameters = dict[str, Tensor]


def by_accelerate(rank: int, hydra: bool) -> Parameters:
    """Six batches of each rank, in updates of four and two."""
    rank_environment(rank)
    if hydra:
        block = config(**HYDRA) | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": ACCUMULATION}
        block["zero_allow_untested_optimizer"] = True
        accelerator: Any = HydraAccelerator(deepspeed_plugin=DeepSpeedPlugin(block))
    else:
        accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    model: Any = small_model(tied=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE)
    loader: Any = DataLoader(sequences()[:24], batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        updates += accelerator.sync_gradients
    assert updates == 2
    if hydra:
        return dict(model.fp32_state_dict())
    return {name: value.detach() for name, value in accelerator.unwrap_model(model).named_parameters()}


def by_trainer(rank: int, hydra: bool, folder: Path) -> Parameters:
    """Seven batches of each rank, in updates of four and three; each batch counts by its own mean."""
    rank_environment(rank)
    many: dict[str, Any] = {"gradient_accumulation_steps": ACCUMULATION, "optim": "sgd", "learning_rate": RATE}
    many |= {"max_steps": -1, "num_train_epochs": 1, "weight_decay": 0.0, "max_grad_norm": 0.0, "save_strategy": "no"}
    many |= {"eval_strategy": "no", "lr_scheduler_type": "constant"}
    block = config(**HYDRA) | {"zero_allow_untested_optimizer": True}
    arguments = settings(folder / str(hydra), RANKS, block if hydra else None, **many)
    trainer = trainer_of(HydraTrainer if hydra else Trainer, arguments, small_model(tied=False))
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    assert trainer.state.global_step == 2
    if hydra:
        return dict(trainer.deepspeed.fp32_state_dict())
    return {name: value.detach() for name, value in trainer.model.named_parameters()}


@pytest.mark.drawn
@pytest.mark.parametrize("host", [by_accelerate, by_trainer])
def test_the_last_update_of_an_epoch_is_that_of_the_plain_host(host: Any, tmp_path: Path) -> None:
    given = (tmp_path,) if host is by_trainer else ()
    plain, own = (run_ranks(host, RANKS, hydra, *given)[0] for hydra in (False, True))
    start = {name: value.detach() for name, value in small_model(tied=False).named_parameters()}
    for name, value in plain.items():
        moved = float((value - start[name]).abs().max())
        assert moved > 0, name
        assert float((own[name] - value).abs().max()) < 1e-4 * moved, name
