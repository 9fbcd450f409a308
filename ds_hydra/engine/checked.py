"""The self-check's verdict on candidate strategies, and what a source gives up where it is refused with it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ds_hydra.engine.job import Job
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.options import StageOptions
from ds_hydra.pipe.rows import AT_ONCE
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.ranks.world import World
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.verdicts import CheckResult

logger = logging.getLogger(__name__)


def check_candidates(job: Job, world: World, candidates: Sequence[StrategyShape]) -> CheckResult:
    """What the self-check says of the candidates. Where it finds wrong what is right without shared tokens, computed as
    the model's code says, or with all heads exchanged at once, the source of the job does so from then on."""
    source = job.source

    def check(options: StageOptions) -> CheckResult:
        return check_strategies(
            job.model,
            candidates,
            mode=job.config.self_check,
            **options._asdict(),
            context_length=job.config.context_length,
            loss_given=isinstance(source, CausalLM) and source.token_loss is not None,
            channel=world.channel,
            node_size=world.node_size,
        )

    stages = {stage for shape in candidates for pipeline in shape.pipelines for stage in pipeline.stages}
    asked = StageOptions(sp_overlap=source.overlap.groups > 1 and any(stage.sp > 1 for stage in stages))
    if isinstance(source, CausalLM):
        asked = asked._replace(
            activation_checkpointing=source.activation_checkpointing,
            token_sharding=source.plan.token_sharding,
            functions=source.functions.asked,
        )
    checked = check(asked)
    objections = checked.objections()
    bare = asked._replace(token_sharding=False, functions="off", sp_overlap=False)
    if not objections or bare == asked:
        return checked
    # Most models to which it objects are none that can be trained: that takes one more check, not four.
    best, found = bare, check(bare)
    if len(found.objections()) == len(objections):
        return checked
    single = ({"functions": "off"}, {"token_sharding": False}, {"sp_overlap": False})
    for more in (asked._replace(**change) for change in single):
        if more not in (asked, bare) and len((other := check(more)).objections()) == len(found.objections()):
            best, found = more, other
            break
    why = f"the self-check refuses it ({objections[0]})"
    if isinstance(source, CausalLM) and best.functions != asked.functions:
        source.compute_as_written(why)
    if isinstance(source, CausalLM) and best.token_sharding != asked.token_sharding:
        source.hold_all_tokens(why)
    if best.sp_overlap != asked.sp_overlap:
        source.overlap = AT_ONCE
        if world.rank == 0:
            logger.info("sequence parallel ranks exchange all heads of a layer at once: %s", why)
    return found
