"""`ds_hydra.initialize`: the arguments and the 4-tuple of `deepspeed.initialize`; `ds_hydra.check_config` before it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ds_hydra.config.checks import MAX_INT, read_config
from ds_hydra.config.deepspeed_settings import BATCH_KEYS
from ds_hydra.config.hosts import CALLS
from ds_hydra.config.hydra_block import ParsedConfig, check_num_ranks, parse_config
from ds_hydra.host.ending import show_refusals_plainly
from ds_hydra.host.environment import check_environment, launched_number
from ds_hydra.report.record import show_log
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.ranks.channel import Texts

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29500  # torch.distributed's


class Accepted(NamedTuple):
    """A config that the job takes, as far as that can be known without its model and its data."""

    parsed: ParsedConfig
    notes: tuple[str, ...]  # one line each, for the log: what becomes of settings


def accept(config: Mapping[str, Any], ranks: int | None = None, host: str | None = None) -> Accepted | None:
    """Say yes or no to a config: `initialize`, `check_config` and `ds-hydra init` ask here.

    `ranks` is how many the job has; None: as many as the launcher says. `host` is who reads the config before the
    engine, one of `hosts.HOSTS`: what that one fills in for "auto" is filled in, for the checks. None for a config
    without a block "hydra", which is a plain DeepSpeed job's. Raises ConfigError, naming the key and the remedy, for
    all that the job would refuse.
    """
    parsed = parse_config(config, host)
    if parsed is None:
        return None

    from ds_hydra.costs.cost_table import read_table_file
    from ds_hydra.data.lengths import read_lengths
    from ds_hydra.host.launch import check_launched_ranks
    from ds_hydra.host.settings import batch_sizes, check_updates, deepspeed_config, deepspeed_defaults

    if ranks is None:
        check_environment()
        check_launched_ranks(parsed.hydra)
    else:
        check_num_ranks(parsed.hydra, ranks)
    table = parsed.hydra.cost_table
    for path in table.values() if isinstance(table, Mapping) else (table,) if table else ():
        read_table_file(path)
    if parsed.hydra.lengths is not None and not parsed.hydra.strategies:
        read_lengths(parsed.hydra.lengths, parsed.hydra.context_length or MAX_INT)
    settings = deepspeed_config(parsed)
    check_updates(parsed, settings)
    if host == CALLS and ranks is not None:
        batch_sizes(config, ranks)
    return Accepted(parsed, (*parsed.notes, *deepspeed_defaults(parsed, settings)))


def check_config(source: Any, host: str | None = None) -> bool:
    """Whether a config has a block "hydra", after all checks that need neither a model nor data.

    `source` is the script's parsed arguments, or a config as `initialize` takes it: a dict, a path or base64 text. For
    a config with "auto" name the `host` that fills in the values: "Trainer", "SFTTrainer", "DPOTrainer", "GRPOTrainer",
    "RewardTrainer" or "Accelerate". Call it before model and data are built: a wrong setting is told without waiting
    for them. Raises ConfigError. One that the script does not catch is printed once, without a traceback, and ends the
    script with exit code 78.
    """
    show_refusals_plainly()
    alone = isinstance(source, (str, os.PathLike, Mapping))
    return accept(read_config(None if alone else source, source if alone else None), host=host) is not None


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    loss_fn: Any = None,
    pre_step_callback: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Make an engine of a model and a DeepSpeed config; returns (engine, optimizer, training_dataloader, lr_scheduler).

    Takes the arguments of `deepspeed.initialize`, and is that function where the config has no block "hydra". `mpu` and
    `mesh_param` are refused with the block.

    With `hydra.tokens_per_step`, `training_data` is a map-style dataset of token sequences, or a stream of them [Note:
    streams]: then `engine.train_batch()` draws and runs a step, and `collate_fn` is not called, as sequences are
    packed. With DeepSpeed's batch sizes in its place, training_dataloader is DeepSpeed's: this rank's batches of the
    dataset, made by `collate_fn`. Without training data the script passes the sequences of each step. `loss_fn`
    takes the place of the cross entropy: from logits (T, V) and labels (T,) it gives the loss of each token, (T,).
    `pre_step_callback(step, sequence_ids, lengths)`, called on rank 0, returns the step's `StepPlan` in place of the
    planner [Note: the pre-step callback].

    The config is checked before any process group exists. ConfigError says what is wrong and what to do. Every rank
    must call it.
    """
    show_refusals_plainly()
    accepted = accept(read_config(args, config, config_params))
    show_log(rank := launched_number("RANK") or 0)
    own = {"loss_fn": loss_fn, "pre_step_callback": pre_step_callback}
    made = {"optimizer": optimizer, "model_parameters": model_parameters, "lr_scheduler": lr_scheduler}
    if accepted is None:
        theirs = {
            "training_data": training_data, "distributed_port": distributed_port, "mpu": mpu, "collate_fn": collate_fn,
            "dist_init_required": dist_init_required, "config": config, "mesh_param": mesh_param,
            "config_params": config_params,
        }  # fmt: skip
        return _plain_deepspeed(own, rank, model=model, args=args, **theirs, **made)
    batched = _in_batches(accepted.parsed, training_data)
    model = _uncompiled(model, rank)
    _refuse_arguments(model, pre_step_callback, mpu=mpu, mesh_param=mesh_param)
    if rank == 0:
        for note in accepted.notes:
            logger.warning("%s", note)
        if collate_fn is not None and not batched:
            logger.info("collate_fn is not called: sequences are packed, not collated")

    arguments = {"port": distributed_port, "required": dist_init_required}
    drawn = None if batched else training_data
    engine = _engine(accepted.parsed, model, arguments, training_data=drawn, args=args, **own, **made)
    loader = engine.deepspeed_io(training_data, collate_fn=collate_fn) if batched else engine.training_dataloader
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _in_batches(parsed: ParsedConfig, training_data: Any) -> bool:
    """Whether the script reads training data as DeepSpeed's engine does: in batches, by a loader of which it hands each
    one in."""
    from ds_hydra.data.stream import is_stream

    if training_data is None or parsed.hydra.tokens_per_step or parsed.hydra.elastic is not None:
        return False
    return not is_stream(training_data) and any(key in parsed.source for key in BATCH_KEYS)


def _engine(parsed: ParsedConfig, model: Any, of_group: Mapping[str, Any], **given: Any) -> Any:
    """The engine, of ranks that watch each other from when they have met; `of_group` as `init_distributed` has it."""
    from ds_hydra.engine.engine import HydraEngine
    from ds_hydra.engine.guard import Guard
    from ds_hydra.host.devices import out_of_modes
    from ds_hydra.host.launch import init_distributed

    guards = list[Guard]()

    def begin(channel: Texts) -> None:
        guards.append(Guard.before_groups(channel, parsed.hydra))

    init_distributed(parsed.hydra, begin=begin, **of_group)
    made = out_of_modes("ds_hydra.initialize()")(HydraEngine)
    return made(parsed, model, starting=guards.pop() if guards else None, **given)


def _plain_deepspeed(own: Mapping[str, Any], rank: int, **arguments: Any) -> tuple[Any, Any, Any, Any]:
    for name, value in own.items():
        if value is not None:
            raise ConfigError(
                f'initialize({name}=...) needs a config with a block "hydra": plain DeepSpeed has no such argument'
            )
    if rank == 0:
        logger.info('the config has no block "hydra": plain DeepSpeed trains')
    import deepspeed

    return deepspeed.initialize(**arguments)


def _uncompiled(model: Any, rank: int) -> Any:
    """What `torch.compile` wraps, for a module that it returned."""
    own = getattr(model, "_orig_mod", None)
    if own is None:
        return model
    if rank == 0:
        logger.warning("the module that torch.compile returned is taken as the %s that it wraps: stages of it are not "
                       "compiled, and its parameters go by their plain names", type(own).__name__)  # fmt: skip
    return own


def _refuse_arguments(model: Any, pre_step_callback: Any, **without_meaning: Any) -> None:
    """A model or callback that is none, and arguments of `deepspeed.initialize` that have no meaning here: ignoring
    them would change the result."""
    for name, value in without_meaning.items():
        if value is not None:
            raise ConfigError(
                f'initialize({name}=...) cannot be used with a "hydra" block: process groups follow from '
                "hydra.strategies. Leave it out"
            )
    if pre_step_callback is not None and not callable(pre_step_callback):
        raise ConfigError(
            f"initialize(pre_step_callback=...) must be a callable of a step's number, ids and lengths, but is a "
            f"{type(pre_step_callback).__name__}"
        )
    if not hasattr(model, "named_parameters"):
        raise ConfigError(
            f"initialize() needs a model, but was given {type(model).__name__}: pass a Hugging Face causal language "
            "model or a DeepSpeed PipelineModule"
        )
