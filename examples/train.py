"""Train a Hugging Face causal language model on text files, as an ordinary DeepSpeed script.

    deepspeed --num_gpus 8 examples/train.py --deepspeed_config examples/ds_hydra.json

The only lines about ds-hydra are `ds_hydra.initialize` where `deepspeed.initialize` would stand, and before it
`ds_hydra.check_config`, so that a wrong setting is told at once, and `tell_steps`, so that the log can say how long it
will take. Without a "hydra" block in the config the same script runs on plain DeepSpeed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from corpus import TokenFiles, load_corpus
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import ds_hydra
from ds_hydra.config.checks import read_config

HERE = Path(__file__).resolve().parent
logger = logging.getLogger("ds_hydra.examples")


def parse_args() -> argparse.Namespace:
    """Command line; the launcher adds --local_rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(HERE / "llama_tiny.json"), help="config JSON, or checkpoint folder")
    parser.add_argument("--data", help="folder or glob of text files (default: Python sources)")
    parser.add_argument("--max_files", type=int, default=400, help="sample this many of the files; 0: all")
    parser.add_argument("--steps", type=int, default=40, help="steps to train in all, those before a restart included")
    parser.add_argument("--seed", type=int, default=0, help="of the fresh model's weights and the sample of files")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return ds_hydra.add_config_arguments(parser).parse_args()


def tell_steps(args: argparse.Namespace) -> None:
    """Put the number of steps into the config, so that the log can say how long they will take."""
    config = read_config(args)
    config["hydra"].setdefault("total_steps", args.steps)
    args.deepspeed_config = config


def load_model(path: str) -> PreTrainedModel:
    """The model of a checkpoint folder with its weights, or of a config with fresh ones, in FP32."""
    weights = Path(path).is_dir() and any(Path(path).glob("*.safetensors"))
    if weights:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)


def load_data(args: argparse.Namespace) -> TokenFiles:
    """The corpus, tokenized by the model's own tokenizer where its folder has one."""
    own = Path(args.model) / "tokenizer.json"
    return load_corpus(
        args.data,
        tokenizer_file=own if own.is_file() else None,
        max_files=args.max_files,
        seed=args.seed,
        prepare=args.local_rank == 0,
    )


def collate(sequences: list[Any]) -> dict[str, torch.Tensor]:
    """One padded batch, for plain DeepSpeed."""
    rows = [torch.as_tensor(sequence) for sequence in sequences]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]  # (batch, longest)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def train_plain(engine: Any, loader: Any, steps: int, context_length: int) -> None:
    """The three-call loop of plain DeepSpeed."""
    for step, batch in enumerate(loader, start=1):
        batch = {key: value[:, :context_length].to(engine.device) for key, value in batch.items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        logger.info("step %d/%d | loss %.4f", step, steps, loss.item())
        if step == steps:
            break


def main() -> None:
    """Check the config, build model and data, train, take the process group down."""
    args = parse_args()
    with_hydra = ds_hydra.check_config(args)
    if with_hydra:
        tell_steps(args)
    logging.basicConfig(
        format=f"[%(asctime)s] [rank {os.environ.get('RANK', '0')}] %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stdout,
        level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING,
    )
    data = load_data(args)
    logger.info("corpus: %d files, %s tokens, manifest %s", len(data), f"{data.lengths.sum():,}", data.manifest)
    torch.manual_seed(args.seed)
    model = load_model(args.model)
    context_length = getattr(model.config, "max_position_embeddings", 2048)

    engine, _, loader, _ = ds_hydra.initialize(args=args, model=model, training_data=data, collate_fn=collate)
    if with_hydra:
        while engine.global_steps < args.steps:  # and not range(args.steps): a restart goes on where it was
            engine.train_batch()
    else:
        train_plain(engine, loader, args.steps, context_length)
    engine.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
