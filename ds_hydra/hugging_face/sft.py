"""TRL's `SFTTrainer` on the engine; importing this needs TRL (the extra `trl`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ds_hydra.config.versions import refuse_older
from ds_hydra.hugging_face.trainer import HydraTrainer
from ds_hydra.zero_hetero.errors import ConfigError

refuse_older("trl")

from trl import SFTTrainer  # noqa: E402


class HydraSFTTrainer(HydraTrainer, SFTTrainer):
    """An `SFTTrainer` on the engine of the block "hydra" [Note: Trainer].

    TRL prepares the data; `packing` and `padding_free` train as the same sequences apart. What it takes from the logits
    of a batch (entropy, token accuracy) is not logged. Raises ConfigError for a loss of TRL's other than "nll", and for
    offloaded activations.
    """

    _num_tokens = 0  # of all ranks' sequences in the updates so far

    evaluates_each_rank = True  # TRL does not hand the number of all targets to its loss there, as Trainer does

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """As HydraTrainer's; the tokens of all ranks that were trained on are counted, as TRL does."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.plans_steps and self.accelerator.sync_gradients:
            self._num_tokens += model.last_step.num_tokens
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As HydraTrainer's, with `num_tokens` as TRL's."""
        for name in ("loss", "eval_loss"):
            if self.plans_steps and name in logs:
                logs[name.replace("loss", "num_tokens")] = float(self._num_tokens)
        super().log(logs, *args, **kwargs)

    def _refuse_unfit(self) -> None:
        super()._refuse_unfit()
        settings: Any = self.args
        if settings.loss_type != "nll":
            raise ConfigError(
                f"SFTConfig(loss_type={settings.loss_type!r}) needs the logits of whole batches, which no rank has: "
                'leave it at "nll", and pass loss_fn(logits, labels), which gives the loss of each token'
            )
        if settings.activation_offloading:
            raise ConfigError(
                "SFTConfig(activation_offloading=True): nothing is offloaded here; use gradient_checkpointing=True"
            )
