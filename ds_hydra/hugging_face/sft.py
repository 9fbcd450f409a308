"""TRL's `SFTTrainer` on the engine; importing this needs TRL (the extra `trl`)."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pyarrow.compute
from datasets import Dataset
from torch import Tensor

from ds_hydra.config.hydra_block import ACTIVATIONS
from ds_hydra.config.versions import refuse_older
from ds_hydra.hugging_face.trainer import HydraTrainer
from ds_hydra.zero_hetero.errors import ConfigError

refuse_older("trl")

from trl import SFTTrainer  # noqa: E402

logger = logging.getLogger(__name__)


class HydraSFTTrainer(HydraTrainer, SFTTrainer):
    """An `SFTTrainer` on the engine of the block "hydra" [Note: Trainer].

    Takes the arguments of `SFTTrainer`, and prepares the data as that does: **sequences are cut at `max_length`, 1,024
    tokens by default.** Packs are taken apart into their sequences. What TRL computes of the logits of a batch
    (entropy, token accuracy) is not logged. `activation_offloading` is "activations" in `hydra.offload`. Raises
    ConfigError for a `loss_type` other than "nll".
    """

    _num_tokens = 0  # of all ranks' sequences in the updates so far

    evaluates_each_rank = True  # TRL does not hand the number of all targets to its loss there, as Trainer does

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        settings: Any = self.args
        if self.plans_steps and settings.activation_offloading:
            block = self._deepspeed_config["hydra"]
            block["offload"] = [*block.get("offload", ()), ACTIVATIONS]
            self.maybe_activation_offload_context: Any = nullcontext()  # TRL's own would move what stages keep
        is_not_cut = settings.packing or (settings.dataset_kwargs or {}).get("skip_prepare_dataset")
        if self.plans_steps and settings.process_index == 0 and not is_not_cut:
            self._tell_cut(settings.max_length, self._deepspeed_config["hydra"].get("context_length"))

    def _tell_cut(self, most: int | None, context: Any) -> None:
        """A line on sequences that TRL has cut to `most` tokens, where those of `context` tokens could be trained."""
        data: Any = self.train_dataset
        if most is None or (isinstance(context, int) and context <= most):
            return
        if not isinstance(data, Dataset) or "input_ids" not in data.column_names:
            return
        found = [
            pyarrow.compute.list_value_length(batch["input_ids"]).to_numpy()
            for batch in data.select_columns("input_ids").with_format("arrow").iter(10_000)
        ]
        cut = sum(int((lengths == most).sum()) for lengths in found)
        if cut:
            logger.warning(
                "%d of %d sequences have exactly max_length=%d tokens, to which TRL cuts longer ones: to train on them "
                "whole write SFTConfig(max_length=None)%s",
                cut, len(data), most, f" or {context} (hydra.context_length)" if isinstance(context, int) else "",
            )  # fmt: skip

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
