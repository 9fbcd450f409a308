"""The self-check's verdict on candidate strategies, and the source that gives up what it is refused with."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace

from ds_hydra.engine.job import Job
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.pipe.stage import ModelSource
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.ranks.channel import Texts
from ds_hydra.ranks.world import World
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.trial import told_boxes
from ds_hydra.self_check.verdicts import CheckResult, Verdict
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)


def listed_for_others(job: Job) -> list[StrategyShape]:
    """Strategies of other numbers of ranks, which training may go on with."""
    listed = () if job.config.elastic is None else job.config.elastic.strategies
    return [StrategyShape.parse(text) for _, strategies in listed for text in strategies]


def taught(job: Job, channel: Texts) -> Job:
    """An elastic job with what an assembly before has found of its strategies: a process that has joined since is told
    by the others. Every rank must call it."""
    record = ""
    if job.checked is not None:
        verdicts = {str(shape): verdict.to_json() for shape, verdict in job.checked.verdicts.items()}
        record = json.dumps([verdicts, job.checked.no_slices, asdict(job.source.options)])
    told = next((text for text in channel.texts(record) if text), "")
    if job.checked is not None or not told:
        return job
    verdicts, no_slices, given = json.loads(told)
    known = {PipelineShape.parse(shape): Verdict.from_json(raw) for shape, raw in verdicts.items()}
    source, options = job.source, StageOptions.from_json(given)
    if options != source.options:
        source = source.with_options(options, "the self-check at the job's start refuses it")
    return replace(job, source=source, checked=CheckResult(known, no_slices=no_slices))


def check_candidates(job: Job, world: World, candidates: Sequence[StrategyShape]) -> tuple[CheckResult, ModelSource]:
    """What the self-check says of the candidates, and of which source: the job's, or where it finds wrong what is right
    by a fallback of the job's stage options, one that computes by that.

    With the candidates of a job's start go those that it may go on with: after a loss nothing is checked again.
    """
    source = job.source
    off = job.config.self_check == "off"
    if job.checked is not None and (off or job.checked.knows(candidates)):
        return job.checked, source
    if off:
        return CheckResult({}), source
    candidates = [*candidates, *listed_for_others(job)]

    def check(options: StageOptions) -> CheckResult:
        found = check_strategies(
            job.model,
            candidates,
            options,
            mode=job.config.self_check,
            loss_given=isinstance(source, CausalLM) and source.token_loss is not None,
            channel=world.channel,
            node_size=world.node_size,
        )
        if found.boxed:
            _refuse_other_ways(found, source)
        return found

    asked = source.options
    if not any(stage.sp > 1 for shape in candidates for pipeline in shape.pipelines for stage in pipeline.stages):
        asked = replace(asked, sp_overlap=False)  # without effect
    checked = check(asked)
    objections, others = checked.objections(), asked.fallbacks()
    if not objections or not others:
        return checked, source
    # Most models to which it objects are none that can be trained: that takes one more check, not one for each option.
    best, found = others[0], check(others[0])
    if len(found.objections()) == len(objections):
        return checked, source
    for more in others[1:]:
        if len((other := check(more)).objections()) == len(found.objections()):
            best, found = more, other
            break
    why = f"the self-check refuses it ({objections[0]})"
    if best.sp_overlap != asked.sp_overlap and world.rank == 0:
        logger.info("sequence parallel ranks exchange all heads of a layer at once: %s", why)
    given_up = {name: value for name, value, *_ in best.differences(asked)}
    return found, source.with_options(replace(source.options, **given_up), why)


def _refuse_other_ways(found: CheckResult, source: ModelSource) -> None:
    """ConfigError where the small copy's tokens meet in another way than the model's: what was compared would not be
    what trains. A limit that 13 tokens do not reach, and that the copy has made smaller, is one that no trial sees."""
    own = set(told_boxes(source).split(", "))
    if others := sorted(set(found.boxed.split(", ")) - own - {""}):
        raise ConfigError(
            f"a small copy of the model runs {', '.join(others)} once for each sequence of a pack, as its tokens meet "
            "otherwise than by Hugging Face's attention interface; in the model itself that shows with longer "
            "sequences than are tried when it is examined, so packs of these would train another model. Only models "
            "whose attention tells its limits to the interface, such as sliding_window, are trained; set the model's "
            "own limit (a chunk, a block, a budget of tokens) in its config so that no sequence reaches it, and "
            'hydra.self_check to "off"'
        )
