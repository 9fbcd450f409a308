"""Fine-tune a language model with TRL's SFTTrainer; `sft.diff` is all that swaps the engine.

deepspeed --num_gpus 2 examples/swap/sft.py --deepspeed examples/swap/ds_trainer.json --output_dir runs/sft
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from task import make_data, make_model
from tokenizers import Tokenizer, models
from transformers import HfArgumentParser, PreTrainedTokenizerFast
from trl import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One with a word for each id of the task."""
    words = {f"w{number}": number for number in range(97)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w0")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train as the command line says; what was logged."""
    (settings,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(arguments)  # type: ignore[arg-type]
    data = Dataset.from_list([{"input_ids": sequence.tolist()} for sequence in make_data()])
    trainer = SFTTrainer(make_model(), settings, train_dataset=data, processing_class=make_tokenizer())
    trainer.train()
    trainer.save_model()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
