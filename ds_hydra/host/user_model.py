"""What the engine asks of the user's model before training: its limits, its types, and whole parameters on each rank.

`deepspeed.zero.Init`, and transformers' `from_pretrained` under a ZeRO-3 config, leave of each parameter a part on each
rank and an empty tensor in the model. The engine takes values from whole parameters.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses, zero3_linear_wrap
from torch import nn

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.data.columns import ModelInput
from ds_hydra.data.tokens import Limits
from ds_hydra.host.environment import launched_node_size
from ds_hydra.pipe.adapters import trained_copy
from ds_hydra.ranks.channel import Texts, together
from ds_hydra.ranks.host_memory import available_bytes
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)


def limits_of(config: HydraConfig, model: nn.Module) -> Limits:
    """What a job can train on. ConfigError for a context that is longer than the model's positions."""
    # Models of BERT's kind take tokens without types for tokens of type 0; GPT-2 takes a type for one more token.
    has_types = hasattr(_text_config(model), "type_vocab_size")
    inputs = ModelInput(arguments_of(model), has_types)
    return Limits(config.context_length, config.too_long, vocab_size(model), max_positions(model), inputs)


def vocab_size(model: nn.Module) -> int | None:
    """Rows of the model's input embedding; None when the model does not say which module that is."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    embedding = embedding if embedding is None else trained_copy(embedding)
    return getattr(embedding, "num_embeddings", None)


def max_positions(model: nn.Module) -> int | None:
    """The number of positions that the model's config allows; None when it names none."""
    positions = getattr(_text_config(model), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "get_text_config", lambda: config)()


def arguments_of(model: nn.Module) -> frozenset[str]:
    """Names that a Hugging Face model's forward takes, also where it hands on what it does not name itself.

    Of other models, whose forward takes one thing, there are none.
    """
    if not hasattr(model, "config") or not isinstance(model, nn.Module):
        return frozenset()
    names, hands_on = _named_by(_forwards(model))
    if hands_on:
        inner = [module for module in model.modules() if not type(module).__module__.startswith("torch.")]
        names |= _named_by({forward: None for module in inner for forward in _forwards(module)})[0]
    return frozenset(names)


def _named_by(forwards: Iterable[Callable[..., Any]]) -> tuple[set[str], bool]:
    """The arguments of these functions, and whether one hands others on."""
    names, hands_on = set[str](), False
    for forward in forwards:
        for parameter in inspect.signature(forward).parameters.values():
            if parameter.kind == inspect.Parameter.VAR_KEYWORD:
                hands_on = True
                # kwargs["langs"] and kwargs.get("langs") have the name among their constants.
                code = getattr(inspect.unwrap(forward), "__code__", None)
                names |= {text for text in getattr(code, "co_consts", ()) if isinstance(text, str)}
            elif parameter.kind != inspect.Parameter.VAR_POSITIONAL:
                names.add(parameter.name)
    return names - {"self"}, hands_on


def _forwards(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """A module's forward and those of its classes, which it may call."""
    if "forward" in vars(module):
        yield module.forward
    for kind in type(module).__mro__:
        if "forward" in vars(kind) and not kind.__module__.startswith("torch."):
            yield vars(kind)["forward"]


class DataTypes(NamedTuple):
    """The types of a job's tensors."""

    compute: torch.dtype
    grads: torch.dtype  # of the gradients of micro-batches as they add up on a rank
    masters: torch.dtype
    wire: torch.dtype  # of gradients on their way to the masters [Note: gradients on the wire]

    @classmethod
    def of(cls, compute: torch.dtype, *, grads: str | None, wire: torch.dtype | None) -> DataTypes:
        """`grads`: data_types.grad_accum_dtype; `wire`: communication_data_type; None where the config has none."""
        masters = torch.float64 if compute == torch.float64 else torch.float32
        return cls(compute, choose_grad_dtype(compute, grads), masters, wire or compute)


def choose_dtype(model: nn.Module, *, fp16: bool, bf16: bool) -> torch.dtype:
    """BF16 or FP16 if its block is enabled, else the model's own: FP32, or FP64 if all of it is FP64.

    Raises ConfigError if the device cannot compute in that type, or if a 16 bit model comes without its block.
    """
    accelerator = get_accelerator()
    if fp16:
        # On CPU the accelerator knows of fast kernels only; torch computes without them.
        if accelerator.device_name() != "cpu" and not accelerator.is_fp16_supported():
            raise ConfigError("config: fp16 is enabled but this device does not support it; disable it, or use bf16")
        return torch.float16
    if bf16:
        if not accelerator.is_bf16_supported():
            raise ConfigError("config: bf16 is enabled but this device does not support it; disable it")
        return torch.bfloat16
    types = {parameter.dtype for parameter in model.parameters()}
    if types == {torch.float64}:
        return torch.float64
    if types & {torch.bfloat16, torch.float16}:
        raise ConfigError(
            f"the model's parameters are {', '.join(sorted(map(str, types)))} but the block bf16 is not enabled: "
            'set "bf16": {"enabled": true}, or load the model in float32'
        )
    return torch.float32


_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_grad_dtype(compute: torch.dtype, asked: str | None) -> torch.dtype:
    """Where the gradients of micro-batches add up: FP32 (FP64 for an FP64 model), or data_types.grad_accum_dtype.

    Raises ConfigError for a type that is neither that nor the one which the model is computed in.
    """
    wide = torch.promote_types(compute, torch.float32)
    if asked is None:
        return wide
    if _NAMES[asked] not in (compute, wide):
        raise ConfigError(
            f'config: data_types.grad_accum_dtype is "{asked}" but the model is computed in '
            f"{str(compute).removeprefix('torch.')}: its gradients add up in that type or in "
            f"{str(wide).removeprefix('torch.')}; give one of these, or leave the key out"
        )
    return _NAMES[asked]


_OF_INIT = frozenset((
    "all_gather", "all_gather_coalesced", "partition", "reduce_gradients_at_owner", "partition_gradients",
    "aligned_size", "padding_size", "partition_numel", "item", "convert_to_zero_parameters", "is_external_param",
    "nvme_swapper",
))  # fmt: skip
"""What `zero.Init` sets on a parameter, besides attributes that begin with ds_."""

REMEDY = (
    "take out `with deepspeed.zero.Init()` (transformers' from_pretrained does the same where the config says ZeRO "
    'stage 3: say stage 1), build the model under torch.device("meta") and name its folder in hydra.initial_weights: '
    "then each rank reads its share alone"
)


def make_whole(model: Any, channel: Texts) -> None:
    """Gather each parameter that is cut, on all ranks, in CPU memory; it stays the same object, as optimizers hold it.

    All ranks call it. ConfigError on all where a host's memory does not hold its ranks' models, or for a model that
    an engine of ZeRO stage 3 trains.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    held: list[Any] = [own for module in modules for own in module._parameters.values() if hasattr(own, "ds_id")]
    cut = list({id(own): own for own in held}.values())
    with together(channel, "gathering the model"):
        if any(isinstance(module._parameters, ZeROOrderedDict) for module in modules):
            raise ConfigError(
                "the model was given to an engine of ZeRO stage 3 before, whose hooks cut and gather it: build another "
                "one for ds_hydra.initialize()"
            )
        _refuse_too_large(sum(one.ds_numel * one.element_size() for one in cut), channel.num_ranks)
    for parameter in cut:
        parameter.all_gather()
        parameter.data = parameter.data.detach().to("cpu", copy=True)
        for name in [name for name in vars(parameter) if name in _OF_INIT or name.startswith("ds_")]:
            delattr(parameter, name)
    if cut and torch.nn.functional.linear is zero3_linear_wrap:  # which Init leaves there, for models that stay cut
        torch.nn.functional.linear = InsertPostInitMethodToModuleSubClasses.linear_bk
    if cut and channel.rank == 0:
        logger.warning(
            "deepspeed.zero.Init had cut %d parameters of the model: they were gathered, and are shared out again as "
            "masters. To spare this, %s", len(cut), REMEDY,
        )  # fmt: skip


def _refuse_too_large(size: int, num_ranks: int) -> None:
    """ConfigError where models of this many bytes, one for each rank of this host, are more than it has left."""
    here, left = launched_node_size() or num_ranks, available_bytes()
    if size * here > left:
        raise ConfigError(
            f"deepspeed.zero.Init has cut the model, which takes {size / 2**30:.1f} GiB whole: for {here} ranks of "
            f"this host that is more than the {left / 2**30:.1f} GiB that it has left. To train it, {REMEDY}"
        )
