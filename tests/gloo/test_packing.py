"""Packed equals separate: rows of sequences, and what the collators of TRL and transformers make of them."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
import torch.distributed as dist
import trl
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.data.columns import IGNORE_INDEX
from ds_hydra.data.sequences import read_share
from ds_hydra.data.tokens import Limits
from ds_hydra.hugging_face.sft import HydraSFTTrainer
from ds_hydra.pipe.attention.backends import varlen_attention
from ds_hydra.pipe.rows import Overlap, Pack, position_ids, split_tokens
from ds_hydra.testing import rank_environment, run_ranks
from tests.support.small_job import sequences, small_model
from tests.support.trainers import config, word_tokenizer

# --- Packed equals separate: sequences in one row give what each gives alone, whoever holds which tokens.
FLOAT64 = torch.float64


@dataclass(frozen=True)
class Example:
    """Attention over one pack."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    window: int | None
    softcap: float | None
    groups: int = 1  # of heads, at most

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output; v is wider than q and k."""
        generator = torch.Generator().manual_seed(sum(self.lengths))
        shapes = ((self.heads, 6), (self.kv_heads, 6), (self.kv_heads, 10), (self.heads, 10))
        q, k, v, grad = (torch.randn(sum(self.lengths), *shape, generator=generator, dtype=FLOAT64) for shape in shapes)
        return q * 3, k, v, grad

    def separately(self) -> tuple[Tensor, ...]:
        """Output and gradients of q, k, v, each sequence alone, by the definition of attention."""
        q, k, v, grad = self.tensors()
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        outs: list[Tensor] = []
        start = 0
        groups = self.heads // self.kv_heads
        for length in self.lengths:
            part = slice(start, start + length)
            start += length
            scores = torch.einsum("qhd,khd->hqk", q[part], k[part].repeat_interleave(groups, 1)) * 6**-0.5
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            distance = torch.arange(length)[:, None] - torch.arange(length)[None]
            seen = (distance >= 0) & (distance < (self.window or length))
            weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v[part].repeat_interleave(groups, 1)))
        out = torch.cat(outs)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def packed(case: Example, sp_rank: int = 0, sp: int = 1, group: dist.ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """What one rank gets for its own tokens."""
    pack = Pack(case.lengths, sp_rank, sp, group, overlap=Overlap(case.groups, least_tokens=0))
    start, stop = pack.local
    q, k, v, grad = (x[start:stop].clone() for x in case.tensors())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = varlen_attention(q, k, v, pack, window=case.window, softcap=case.softcap)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def examples() -> st.SearchStrategy[Example]:
    heads = st.sampled_from([(8, 8), (8, 4), (8, 2), (8, 1), (4, 4), (4, 1)])
    return st.builds(
        lambda lengths, heads, *masks: Example(tuple(lengths), heads[0], heads[1], *masks),
        st.lists(st.integers(1, 40), min_size=1, max_size=6),
        heads,
        st.one_of(st.none(), st.integers(1, 30)),
        st.sampled_from([None, 2.0]),
    )


def assert_same(values: Sequence[Tensor], expected: Sequence[Tensor], what: object) -> None:
    for name, value, reference in zip(("out", "q", "k", "v"), values, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=0, atol=1e-12, msg=partial("{} {}: {}".format, what, name))


@settings(max_examples=60)
@given(examples())
@example(Example((1500, 1, 300), 2, 1, 1100, None))  # longer than a block of query rows
@example(Example((1500, 1, 300), 2, 1, None, 5.0))
def test_attention_in_a_pack_is_attention_alone(case: Example) -> None:
    assert_same(packed(case), case.separately(), case)


@pytest.mark.parametrize("sp", [2, 4])
def test_attention_over_sequence_parallel_ranks(sp: int) -> None:
    rng = random.Random(sp)
    cases = [
        Example(
            tuple(rng.randint(1, 30) for _ in range(rng.randint(1, 6))),
            *rng.choice([(8, 8), (8, 4), (8, 2), (8, 1), (4, 1)]),
            rng.choice([None, 1, 5, 12]),
            rng.choice([None, 2.0]),
            groups=rng.choice([1, 2, 4]),
        )
        for _ in range(25)
    ]
    cases += [Example((sp,), 4, 2, None, None), Example((1,) * sp, 4, 1, 3, None), Example((sp + 1,), 8, 2, None, 2.0)]

    def run(rank: int) -> list[tuple[Tensor, ...]]:
        return [packed(case, rank, sp, dist.group.WORLD) for case in cases]

    ranks = run_ranks(run, sp)
    for index, case in enumerate(cases):
        whole = [torch.cat([ranks[rank][index][part] for rank in range(sp)]) for part in range(4)]
        assert_same(whole, case.separately(), (sp, case))


@given(st.integers(0, 5000), st.integers(1, 64))
def test_token_splits_are_even_and_whole(num_tokens: int, num_ranks: int) -> None:
    split = split_tokens(num_tokens, num_ranks)
    assert sum(split) == num_tokens
    assert max(split) - min(split) <= 1
    assert len(split) == num_ranks


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 8))
def test_positions_restart_and_tile(lengths: list[int], sp: int) -> None:
    whole = [position for length in lengths for position in range(length)]
    parts: list[int] = []
    for sp_rank in range(sp):
        start, stop = Pack(tuple(lengths), sp_rank, sp).local
        parts += position_ids(lengths, start, stop).tolist()
    assert parts == whole


# --- What the collators of the installed TRL and transformers make of sequences, in every mode that they have,
# trains as the same sequences apart.
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
