"""`ds_hydra.initialize`: the arguments and the 4-tuple of `deepspeed.initialize`."""

from __future__ import annotations

import logging
import os
from typing import Any

from ds_hydra.config.hydra_block import parse_config
from ds_hydra.config.read import read_config
from ds_hydra.report.log import show_log
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29500  # torch.distributed's


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
) -> tuple[Any, Any, Any, Any]:
    """(engine, optimizer, training_dataloader, lr_scheduler) for a model and a DeepSpeed config.

    Without a block "hydra" in the config this is `deepspeed.initialize`. With it, `training_data` is a map-style
    dataset of token sequences (see `ds_hydra.data.SequenceData`) and `engine.train_batch()` runs a step. The config
    is checked before any process group exists; ConfigError says what is wrong and what to do.
    """
    raw = read_config(args, config, config_params)
    parsed = parse_config(raw)
    if parsed is None:
        import deepspeed

        return deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=config,
            mesh_param=mesh_param,
            config_params=config_params,
        )
    _refuse_arguments(mpu=mpu, mesh_param=mesh_param)
    if not hasattr(model, "named_parameters"):
        raise ConfigError(
            f"initialize() needs a model, but was given {type(model).__name__}: pass a Hugging Face causal language "
            "model or a DeepSpeed PipelineModule"
        )
    rank = int(os.environ.get("RANK", "0"))
    show_log(rank)
    if rank == 0:
        for note in parsed.notes:
            logger.warning("%s", note)
        if collate_fn is not None:
            logger.info("collate_fn is not called: sequences are packed, not collated")

    from ds_hydra.host.launch import init_distributed
    from ds_hydra.host.settings import deepspeed_config

    deepspeed_config(parsed)  # refuse what DeepSpeed itself would, while there is nothing to take down
    init_distributed(parsed.hydra, port=distributed_port, required=dist_init_required)

    from ds_hydra.engine.engine import HydraEngine

    engine = HydraEngine(
        parsed,
        model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        args=args,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _refuse_arguments(**arguments: Any) -> None:
    """Arguments of `deepspeed.initialize` that have no meaning here; ignoring them would change the result."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f'initialize({name}=...) cannot be used with a "hydra" block: process groups follow from '
                "hydra.strategies"
            )
