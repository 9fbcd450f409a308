"""Train a language model with transformers' Trainer; `trainer.diff` is all that swaps the engine.

deepspeed --num_gpus 2 examples/swap/trainer.py --deepspeed examples/swap/ds_trainer.json --output_dir runs/trainer
"""

from __future__ import annotations

from typing import Any

from task import collate, make_data, make_model
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer import Trainer


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train as the command line says; what was logged."""
    (settings,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)  # type: ignore[arg-type]
    trainer = Trainer(
        make_model(),
        settings,
        data_collator=collate,
        train_dataset=make_data(),  # type: ignore[arg-type]
        eval_dataset=make_data(24, seed=2),  # type: ignore[arg-type]
    )
    trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint)
    trainer.save_model()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
