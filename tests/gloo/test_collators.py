"""What the collators of the installed TRL and transformers make of sequences, in every mode that they have, trains as
the same sequences apart."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
import trl
from datasets import Dataset
from torch import Tensor
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.data.columns import IGNORE_INDEX
from ds_hydra.data.sequences import read_share
from ds_hydra.data.tokens import Limits
from ds_hydra.hugging_face.sft import HydraSFTTrainer
from ds_hydra.testing import rank_environment, run_ranks
from tests.support.small_job import sequences, small_model
from tests.support.trainers import config
from tools.post_training.trl_trainers import word_tokenizer

LIMITS = Limits(None, "error", 97, 256)
LENGTHS = (7, 3, 12, 5, 9)
Labelled = list[tuple[list[int], list[int]]]  # token ids and labels of each sequence


def labelled() -> Labelled:
    """Sequences of which some have labels behind a prompt only."""
    rows = [one[:length].tolist() for one, length in zip(sequences()[2:], LENGTHS, strict=False)]
    return [(row, [IGNORE_INDEX] * (n % 3) + row[n % 3 :]) for n, row in enumerate(rows)]


def options(kind: Any, **each: Sequence[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Every combination of what this collator can be given in the installed release."""
    known = {name: values for name, values in each.items() if name in inspect.signature(kind).parameters}
    return [(kind, dict(zip(known, values, strict=True))) for values in itertools.product(*known.values())]


FLATTENING = [
    (kind, given)
    for kind, given in options(
        DataCollatorWithFlattening,
        return_position_ids=[True, False], return_flash_attn_kwargs=[True, False], return_seq_idx=[True, False],
    )
    if not given or any(given.values())  # else nothing says where a sequence ends
]  # fmt: skip
PADDING = options(
    DataCollatorForLanguageModeling,
    pad_token_id=[0], padding_free=[True, False], return_position_ids=[True, False], pad_to_multiple_of=[None, 16],
)  # fmt: skip


COLLATORS = [(*one, False) for one in FLATTENING + PADDING] + [
    (*one, True)
    for one in PADDING
    if one[1]["padding_free"]  # as TRL hands packed rows to it
]


@pytest.mark.parametrize(("kind", "given", "packed"), COLLATORS, ids=lambda of: str(getattr(of, "__name__", of)))
def test_a_collators_batch_is_the_sequences_apart(kind: Callable[..., Any], given: Any, packed: bool) -> None:
    """`packed`: rows of TRL's packing go in, of which each holds several sequences."""
    apart = labelled()
    rows: list[dict[str, Any]] = [{"input_ids": ids, "labels": labels} for ids, labels in apart]
    if packed:
        rows = [
            {
                "input_ids": [one for ids, _ in part for one in ids],
                "labels": [one for _, labels in part for one in labels],
                "seq_lengths": [len(ids) for ids, _ in part],
            }
            for part in (apart[:3], apart[3:])
        ]
    share = read_share(kind(**given)(rows), LIMITS)
    found = [(one.input_ids.tolist(), one.labels.tolist()[:-1]) for one in share.sequences]
    assert found == [(ids, labels[1:]) for ids, labels in apart]


def by_flattening(part: str) -> Callable[..., Any]:
    """A collator whose cuts at `part` contradict its positions."""

    def collate(rows: Sequence[Any]) -> dict[str, Tensor]:
        batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
        if part == "seq_idx":
            batch[part] = batch[part].clone().fill_(0)
        else:
            batch[part] = batch[part].clone()
            batch[part][1] += 1
        return dict(batch)

    return collate


@pytest.mark.parametrize("part", ["seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"])
def test_cuts_that_disagree_are_refused(part: str) -> None:
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in labelled()]
    with pytest.raises(ValueError, match=f"by position_ids, but of .* by {part}"):
        read_share(by_flattening(part)(rows), LIMITS)


MAX_LENGTH = 48
PROMPT = 3


def conversational() -> list[dict[str, Any]]:
    asked = {"role": "user", "content": "w7 w8"}
    answers = [{"role": "assistant", "content": f"w9 w{n + 20} w{n + 40}"} for n in range(6)]
    return [{"messages": [asked, answer]} for answer in answers]


TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }} w1 "
    "{% endgeneration %}{% else %}{{ message.content }} {% endif %}{% endfor %}"
)


BOTH: dict[str, dict[str, Any]] = {"padded": {}, "packed": {"packing": True}}


def words(row: Sequence[int]) -> str:
    return "".join(f"w{one} " for one in row)


def cut(rows: Sequence[list[int]], strategy: str | None) -> list[list[int]]:
    """What TRL's packing makes of sequences: cut at the maximum, split there, or one behind the other and split."""
    if strategy == "wrapped":
        rows = [[one for row in rows for one in row]]
    if strategy in ("wrapped", "bfd_split"):
        return [row[at : at + MAX_LENGTH] for row in rows for at in range(0, len(row), MAX_LENGTH)]
    return [row[:MAX_LENGTH] for row in rows]


# Name -> what SFTConfig has, the rows of the dataset, and the labelled sequences that it is to train on.
def modes() -> dict[str, tuple[dict[str, Any], list[dict[str, Any]], Labelled]]:
    rows = [one.tolist() for one in sequences()[:12]]
    plain = [{"input_ids": row} for row in rows]
    found: dict[str, tuple[dict[str, Any], list[dict[str, Any]], Labelled]] = {}
    for strategy in ("bfd", "bfd_split", "wrapped"):
        apart = [(row, row) for row in cut(rows, strategy)]
        for free in (False, True):
            own = {"packing": True, "packing_strategy": strategy, "padding_free": free}
            found[f"{strategy}{', padding-free' if free else ''}"] = own, plain, apart
    short = [(row, row) for row in rows]
    found["padded"] = {"max_length": None}, plain, short
    found["padding-free"] = {"max_length": None, "padding_free": True}, plain, short
    multiples = {"max_length": None, "padding_free": True, "pad_to_multiple_of": 64}
    found["padding-free, multiples"] = multiples, plain, short
    # The tokenizer finds w1, which ends a text, in w10 to w19 too.
    texts = [[20 + one % 70 for one in row] for row in rows if len(row) > PROMPT]
    halves = [{"prompt": words(row[:PROMPT]), "completion": words(row[PROMPT:])} for row in texts]
    ended = [[*row, 1] for row in texts]
    behind = [(row[:MAX_LENGTH], ([IGNORE_INDEX] * PROMPT + row[PROMPT:])[:MAX_LENGTH]) for row in ended]
    for name, own in BOTH.items():
        found[f"completions, {name}"] = own, halves, behind
    whole = [(row[:MAX_LENGTH], row[:MAX_LENGTH]) for row in ended]
    found["whole texts, packed"] = {"packing": True, "completion_only_loss": False}, halves, whole
    chats = [([7, 8, 9, n + 20, n + 40, 1], [IGNORE_INDEX] * 2 + [9, n + 20, n + 40, 1]) for n in range(6)]
    for name, own in BOTH.items():
        found[f"answers, {name}"] = {**own, "assistant_only_loss": True}, conversational(), chats
    return found


MODES = modes()


def losses(rank: int, folder: Path, names: Sequence[str]) -> dict[str, float]:
    """The loss of one update over the whole dataset, of an evaluation of it before, in each mode."""
    rank_environment(rank)
    found = {}
    for name in names:
        own, rows, _ = MODES[name]
        tokenizer = word_tokenizer()
        tokenizer.chat_template = TEMPLATE
        settings: dict[str, Any] = {
            "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "save_strategy": "no",
            "max_length": MAX_LENGTH, "per_device_train_batch_size": 32, **own,
        }  # fmt: skip
        arguments = trl.SFTConfig(
            str(folder), max_steps=1, logging_steps=1, gradient_checkpointing=False,
            deepspeed=config(strategies=["tp1"]), **settings,
        )  # fmt: skip
        data = Dataset.from_list(rows)
        trainer = HydraSFTTrainer(small_model(), arguments, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        found[name] = trainer.state.log_history[0]["loss"]
        trainer.deepspeed.destroy()
    return found


def expected(apart: Labelled) -> float:
    model, total, count = small_model(), 0.0, 0
    for ids, labels in apart:
        learnt = sum(label != IGNORE_INDEX for label in labels[1:])
        if learnt:
            with torch.no_grad():
                total += float(model(torch.tensor([ids]), labels=torch.tensor([labels])).loss) * learnt
            count += learnt
    return total / count


@pytest.mark.drawn
@pytest.mark.parametrize("part", range(3))
def test_trl_in_every_mode_trains_on_the_sequences_apart(part: int, tmp_path: Path) -> None:
    names = list(MODES)[part::3]
    for name, loss in run_ranks(losses, 1, tmp_path, names, timeout=300)[0].items():
        assert loss == pytest.approx(expected(MODES[name][2]), rel=1e-6), name
