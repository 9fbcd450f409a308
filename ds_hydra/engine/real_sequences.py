"""The sequences of a job in; an error where a stage does not train the longest of them as the user's model does.

See [Note: real sequences]. Training data whose lengths are known are tried before step 0, others as they come: the
first, and then each that is twice as long as any before.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ds_hydra.data.tokens import Sequences, TokenSequence
from ds_hydra.engine.job import Job
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.refusals import failing
from ds_hydra.pipe.placement import Strategy
from ds_hydra.plan.step_plan import Phase, StepPlan
from ds_hydra.ranks.together import agree
from ds_hydra.ranks.world import World
from ds_hydra.self_check.few_layers import with_layers
from ds_hydra.self_check.layer_kinds import kept_layers
from ds_hydra.self_check.real import OwnModel, RealData, difference_on
from ds_hydra.step.delivery import runners
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

# What the four runs on one rank may take: operations of one, and memory.
_OPERATIONS = {"cpu": 3e9, "cuda": 1e14}
_BYTES = 4 * 2**30
_LIVE = 40  # numbers of a token and a feature that a layer keeps, about


class RealSequences:
    """Tries real sequences of a job on one rank; all ranks call the same methods and get the same errors."""

    def __init__(self, job: Job, world: World, masters: ModelMasters, hidden: int):
        self._job, self._world, self._masters, self._hidden = job, world, masters, hidden
        self._tried = 0  # tokens of the longest
        # None: nothing is tried. A layer list has no forward but its layers' own.
        self._source = job.source if isinstance(job.source, CausalLM) and job.config.self_check != "off" else None

    def before_training(self) -> None:
        """Try the longest and the shortest of training data whose lengths are known."""
        data = self._job.data
        if data is None or self._source is None:
            return
        used = [int(index) for index in data.lengths.argsort(kind="stable") if data.lengths[index]]
        self._try(
            self._source, [int(data.lengths[index]) for index in used], 0, lambda at: data.load_sequence(used[at])
        )
        self._tried = int(data.lengths.max())  # no longer one comes

    def before_step(self, plan: StepPlan, data: Sequences, strategy_of: Callable[[Phase], Strategy]) -> None:
        """Try the longest sequence of a step, if it is twice as long as any before, and the shortest beside it."""
        if self._source is None or max(plan.lengths) < 2 * max(1, self._tried):
            return
        by_length = sorted(range(len(plan.lengths)), key=lambda position: plan.lengths[position])
        ranks = runners(plan, [strategy_of(phase) for phase in plan.phases])
        who = min(ranks[by_length[-1]])
        here = [position for position in by_length if who in ranks[position]]
        self._try(self._source, [plan.lengths[at] for at in here], who,
                  lambda at: data.load_sequence(plan.sequence_ids[here[at]]))  # fmt: skip
        self._tried = max(plan.lengths)

    def _try(self, source: CausalLM, lengths: Sequence[int], who: int, load: Callable[[int], TokenSequence]) -> None:
        """Try the first of sequences that are sorted by length, and the last that one rank can compute."""
        kept, most = self._extent(source, lengths[-1])
        fitting = sum(length <= most for length in lengths)
        if fitting < len(lengths) and self._world.rank == 0:
            told = f"the longest tried has {lengths[fitting - 1]}" if fitting else "none is tried"
            logger.info("self-check: sequences of up to %d tokens, of which one rank can compute %d in seconds: %s",
                        lengths[-1], most, told)  # fmt: skip
        if not fitting:
            return
        path, num_layers = source.layers_path, source.plan.num_layers
        everywhere = [name for name, _ in self._job.model.named_parameters(remove_duplicate=False)]
        names = {few: name for name in everywhere if (few := _in_few(name, path, kept)) is not None}
        wanted = {source.aliases[whole] for whole in names.values()}
        values = self._masters.gather(self._world.group, wanted, [who])
        mine: Exception | None = None
        if self._world.rank == who:
            try:
                with torch._C.DisableTorchFunctionSubclass():  # to it a released parameter is one of the meta device
                    few = with_layers(self._job.model, path, kept)
                # The shortest on both sides: what stands before a sequence may change it, and what comes after another.
                data = RealData.of([load(at)._replace(images=None) for at in (0, fitting - 1, 0)])
                given = {name: values[source.aliases[whole]] for name, whole in names.items()}
                stages = partial(
                    copy.copy if len(kept) == num_layers else partial(stages_of_few, few, path, kept), source
                )
                mine = self._difference(lambda: OwnModel(few, given, stages()), data, len(kept) < num_layers)
            except Exception as raised:  # the other ranks wait for this one
                mine = raised
        agree(self._world.channel, mine, "comparing real sequences", alike=True)

    def _difference(self, own: Callable[[], OwnModel], data: RealData, in_few: bool) -> ConfigError | None:
        began, where = time.process_time(), " (in one layer of each kind)" if in_few else ""
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                what = difference_on(own(), data, self._job.types.compute, self._world.device)
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

    def _extent(self, source: CausalLM, longest: int) -> tuple[list[int], int]:
        """The layers that are tried, and the tokens that one rank can compute with them."""
        plan, model = source.plan, self._job.model
        layers = model.get_submodule(source.layers_path)
        params = {param.name: param for bucket in plan.buckets for param in bucket.params}
        per_layer = sum(params[name].numel for names in plan.layers for name in names) / plan.num_layers
        ends = sum(param.numel for param in params.values()) - per_layer * plan.num_layers
        everything = list(range(plan.num_layers))
        if self._most_tokens(ends + per_layer * plan.num_layers, plan.num_layers) >= longest:
            return everything, longest
        kept, _ = kept_layers(model, layers, min(2, plan.num_layers))
        return kept, self._most_tokens(ends + per_layer * len(kept), len(kept))

    def _most_tokens(self, weights: float, num_layers: int) -> int:
        """Tokens of a sequence that can be computed with so many weights."""
        device = self._world.device
        free = 0.5 * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _BYTES
        width = 8 if self._job.types.compute in (torch.float32, torch.float64) else 4
        vocabulary = self._job.source.vocab_size or 1
        heads = self._job.source.plan.num_heads or 1
        flow, config = getattr(self._job.source, "flow", None), self._job.model.config.get_text_config()
        eager = config._attn_implementation == "eager" or bool(flow and flow.attention_dropout)

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
