"""Compares the packed stages with the user's own model on real sequences of the job: an error where they differ.

See [Note: real sequences]. Training data whose lengths are known are tried before step 0, others as they come: the
first, and then each that is twice as long as any before.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ds_hydra.data.tokens import Sequences, TokenSequence
from ds_hydra.engine.job import Job
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.layer_list import LayerList
from ds_hydra.pipe.models.positions import tried_tokens
from ds_hydra.pipe.models.refusals import failing
from ds_hydra.pipe.models.whose_code import own_code
from ds_hydra.pipe.placement import Strategy
from ds_hydra.plan.step_plan import Phase, StepPlan
from ds_hydra.ranks.channel import agree
from ds_hydra.ranks.world import World
from ds_hydra.self_check.layer_kinds import kept_layers
from ds_hydra.self_check.real import OwnModel, RealData, difference_on
from ds_hydra.self_check.small_copy import few_entries, with_layers
from ds_hydra.step.delivery import runners
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

# What the four runs on one rank may take: operations of one, and memory.
_OPERATIONS = {"cpu": 3e9, "cuda": 1e14}
_BYTES = 4 * 2**30
_LIVE = 40  # numbers of a token and a feature that a layer keeps, about


class _Few(NamedTuple):
    """What is tried of a model: all of its layers, or one of each kind."""

    names: Mapping[str, str]  # by path of a parameter: its name among the masters
    most: int  # tokens of a sequence that one rank can compute
    made: Callable[[], tuple[Any, CausalLM | LayerList]]  # the model in these layers, and its stages
    fewer: bool = True


class RealSequences:
    """Tries real sequences of a job on one rank; all ranks call the same methods and get the same errors."""

    def __init__(self, job: Job, world: World, masters: ModelMasters, hidden: int):
        self._job, self._world, self._masters, self._hidden = job, world, masters, hidden
        self._tried = 0  # tokens of the longest
        # None: nothing is tried. Code of a script is, whatever is asked for: each strategy rests on packs.
        known = isinstance(job.source, CausalLM | LayerList)
        tried = known and (job.config.self_check != "off" or own_code(job.model))
        self._source = cast("CausalLM | LayerList", job.source) if tried else None

    def before_training(self) -> None:
        """Try the longest and the shortest of training data whose lengths are known."""
        data = self._job.data
        if data is None or self._source is None:
            return
        used = [int(index) for index in data.lengths.argsort(kind="stable") if data.lengths[index]]
        self._try(
            self._source, [int(data.lengths[index]) for index in used], self._job.config.tokens_per_step or 0, 0,
            lambda at: data.load_sequence(used[at]),
        )  # fmt: skip
        self._tried = int(data.lengths.max())  # no longer one comes

    def before_step(self, plan: StepPlan, data: Sequences, strategy_of: Callable[[Phase], Strategy]) -> None:
        """Try the longest sequence of a step, if it is twice as long as any before, and the shortest beside it."""
        if self._source is None or max(plan.lengths) < 2 * max(1, self._tried):
            return
        by_length = sorted(range(len(plan.lengths)), key=lambda position: plan.lengths[position])
        ranks = runners(plan, [strategy_of(phase) for phase in plan.phases])
        who = min(ranks[by_length[-1]])
        here = [position for position in by_length if who in ranks[position]]
        self._try(self._source, [plan.lengths[at] for at in here], sum(plan.lengths), who,
                  lambda at: data.load_sequence(plan.sequence_ids[here[at]]))  # fmt: skip
        self._tried = max(plan.lengths)

    def _try(
        self, source: CausalLM | LayerList, lengths: Sequence[int], row: int, who: int,
        load: Callable[[int], TokenSequence],
    ) -> None:  # fmt: skip
        """Try the first of sequences that are sorted by length, the last that one rank can compute, and others that
        fill a row of `row` tokens with them."""
        few = self._few(source, lengths[-1])
        fitting = sum(length <= few.most for length in lengths)
        if fitting < len(lengths) and self._world.rank == 0:
            told = f"the longest tried has {lengths[fitting - 1]}" if fitting else "none is tried"
            logger.info("self-check: sequences of up to %d tokens, of which one rank can compute %d in seconds: %s",
                        lengths[-1], few.most, told)  # fmt: skip
        if not fitting:
            return
        values = self._masters.gather(self._world.group, set(few.names.values()), [who])
        mine: Exception | None = None
        if self._world.rank == who:
            try:
                # The shortest on both sides: what stands before a sequence may change it, and what comes after another.
                picked, left = [0, fitting - 1], min(row, few.most) - lengths[fitting - 1] - 2 * lengths[0]
                for at in range(fitting - 2, 0, -1):
                    if left < lengths[1]:
                        break
                    if lengths[at] <= left:
                        picked, left = [*picked, at], left - lengths[at]
                given = [load(at)._replace(images=None) for at in (*picked, 0)]
                if special := self._special(source):
                    given.insert(1, special)
                mine = self._difference(few, values, RealData.of(given))
            except Exception as raised:  # the other ranks wait for this one
                mine = raised
        agree(self._world.channel, mine, "comparing real sequences", alike=True)

    def _special(self, source: CausalLM | LayerList) -> TokenSequence | None:
        """A sequence of the tokens that count as special, and of both ends of the vocabulary, each twice."""
        if isinstance(source, LayerList):  # it does not say how many tokens it knows
            return None
        tokens = 2 * [token for token in tried_tokens(self._job.model) if token not in source.uncounted]
        return TokenSequence(np.array(tokens), np.array([*tokens[1:], IGNORED])) if tokens else None

    def _difference(self, few: _Few, values: Mapping[str, Tensor], data: RealData) -> ConfigError | None:
        began, where = time.process_time(), " (in one layer of each kind)" if few.fewer else ""
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                model, stages = few.made()
                given = {path: values[name] for path, name in few.names.items()}
                what = difference_on(OwnModel(model, given, stages), data, self._job.types.compute, self._world.device)
        except Exception as raised:
            # Such as a type or an attention that the model's own forward does not know on this device.
            logger.warning("self-check: real sequences could not be tried: %s", failing(raised))
            return None
        if what is None:
            logger.info("self-check: on real sequences of %d and %d tokens the model%s trains as by its own forward; "
                        "%.1f s of CPU time", min(data.lengths), max(data.lengths), where,
                        time.process_time() - began)  # fmt: skip
            return None
        return ConfigError(
            f"on real sequences of {min(data.lengths)} and {max(data.lengths)} tokens{where} the model is not trained "
            f"as by its own forward: {what}. Something in it depends on tokens or lengths in a way that packing "
            "changes: take that out"
        )

    def _few(self, source: CausalLM | LayerList, longest: int) -> _Few:
        """All layers, or where one rank cannot compute the longest sequence with them, one of each kind."""
        plan, model = source.plan, self._job.model
        total = sum(param.numel for bucket in plan.buckets for param in bucket.params)
        if (most := self._most_tokens(total, plan.num_layers)) >= longest:
            return _Few(source.aliases, most, lambda: (model, copy.copy(source)), fewer=False)
        if isinstance(source, LayerList):
            with torch._C.DisableTorchFunctionSubclass():
                fewer, paths = few_entries(model, source.options)
            numel = sum(param.numel for bucket in fewer.plan.buckets for param in bucket.params)
            most = self._most_tokens(numel, fewer.plan.num_layers)
            return _Few({path: source.aliases[whole] for path, whole in paths.items()}, most, lambda: (None, fewer))
        path, layers = source.layers_path, model.get_submodule(source.layers_path)
        params = {param.name: param for bucket in plan.buckets for param in bucket.params}
        per_layer = sum(params[name].numel for names in plan.layers for name in names) / plan.num_layers
        kept, _ = kept_layers(model, layers, min(2, plan.num_layers))
        most = self._most_tokens(total + per_layer * (len(kept) - plan.num_layers), len(kept))
        names = {few: name for whole, name in source.aliases.items() if (few := _in_few(whole, path, kept)) is not None}

        def made() -> tuple[Any, CausalLM]:
            with torch._C.DisableTorchFunctionSubclass():  # to it a released parameter is one of the meta device
                few = with_layers(model, path, kept)
            return few, stages_of_few(few, path, kept, source)

        return _Few(names, most, made)

    def _most_tokens(self, weights: float, num_layers: int) -> int:
        """Tokens of a sequence that can be computed with so many weights."""
        device = self._world.device
        free = 0.5 * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _BYTES
        width = 8 if self._job.types.compute in (torch.float32, torch.float64) else 4
        vocabulary = self._job.source.vocab_size or 1
        heads = self._job.source.plan.num_heads or 1
        source, eager = self._source, False
        if isinstance(source, CausalLM):
            own = self._job.model.config.get_text_config()._attn_implementation
            eager = own == "eager" or bool(source.flow.attention_dropout)

        def fits(tokens: int) -> bool:
            of_layers = _LIVE * self._hidden * tokens + eager * 3 * heads * tokens**2
            kept = 4 * vocabulary * tokens + num_layers * of_layers
            operations = 6.0 * tokens * (weights + self._hidden * num_layers * tokens)
            return width * (3 * weights + kept) <= free and operations <= _OPERATIONS[device.type]

        low, high = 0, 1 << 24
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low


def _in_few(name: str, path: str, kept: Sequence[int]) -> str | None:
    """The name, in a copy with some of the layers at `path`, of what has this one; None: it is in another layer."""
    if not name.startswith(f"{path}."):
        return name
    index, dot, rest = name.removeprefix(f"{path}.").partition(".")
    return f"{path}.{kept.index(int(index))}{dot}{rest}" if int(index) in kept else None


def stages_of_few(few: Any, path: str, kept: Sequence[int], whole: CausalLM) -> CausalLM:
    """Stages of a model in few layers that compute as those of the whole model, with what was recognised there."""
    options = replace(whole.options, token_sharding=False, functions="off")
    source = CausalLM(few, options, token_loss=whole.token_loss, by_one_rank=True, computed_in=whole.computed_in)
    source.functions = whole.functions.moved(partial(_in_few, path=path, kept=kept))
    source.options = replace(source.options, functions=whole.options.functions)
    return source
