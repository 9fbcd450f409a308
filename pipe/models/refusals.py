"""Refuses models that packed and sharded training would get wrong.

In one process an update writes to that memory, and both tensors have the new values. Masters hold each parameter by
itself, and stages hold what is no parameter as it was: there the two part at the first update.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Collection, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ds_hydra.pipe.adapters import head_of, trained_copy
from ds_hydra.pipe.attention.interface import CHUNKED
from ds_hydra.pipe.model_plan import ParamSpec
from ds_hydra.pipe.models.adapted import refuse_adapters
from ds_hydra.pipe.models.state import held_by, leaves_of
from ds_hydra.pipe.models.whose_code import (
    HOOKS,
    called_by,
    globals_of,
    is_of_package,
    is_own_class,
    names_of,
    own_code,
    own_functions,
)
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.told import message_of


def failing(error: BaseException) -> str:
    """Type and message of an error, and the module in whose forward it was raised, if it was in one."""
    path = module_of(error)
    return f"{type(error).__name__}: {message_of(error)}{f' (in {path})' if path else ''}"


def module_of(error: BaseException) -> str:
    """The path of the module that ran when an error was raised, in the outermost one that has it; empty if none ran."""
    held = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    running = [one for one in held if isinstance(one, nn.Module)]
    paths = (path for root in running for path, module in root.named_modules() if path and module is running[-1])
    return next(paths, "")


class _Span(NamedTuple):
    """The memory from the first to the last byte of a tensor."""

    device: str
    first: int  # addresses
    end: int
    name: str
    tensor: Tensor
    trained: bool


def refuse_shared_memory(model: nn.Module) -> None:
    """ConfigError for a trained parameter that lies over another tensor, by both names, or over itself.

    The same Parameter in several places is tied, and is no other tensor; parts of one memory that do not meet are as
    good as memory of their own.
    """
    reached: list[_Span] = []  # those that the next may begin within
    for span in sorted(_spans(model), key=lambda one: one[:3]):
        if span.trained and span.tensor.numel() * span.tensor.itemsize > span.end - span.first:
            raise ConfigError(
                f"{span.name} is an expanded view, of which several elements are one number in memory: no update can "
                "be written to it. Make the parameter of what is expanded, and expand it in forward()"
            )
        reached = [one for one in reached if one.device == span.device and one.end > span.first]
        for other in reached:
            if (span.trained or other.trained) and _meet(span, other):
                raise ConfigError(
                    f"{other.name} and {span.name} share memory: where one process updates a parameter, the other "
                    "changes with it, but ranks hold each by itself. To tie two parameters use one nn.Parameter in "
                    "both places; else give each a copy, with .clone(), or compute the one of the other in forward()"
                )
        reached.append(span)


def _spans(model: nn.Module) -> Iterator[_Span]:
    named: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    known: set[int] = set()
    for name, value in [*named, *_held(model)]:
        array = np.asarray(value) if isinstance(value, np.ndarray | memoryview) else None
        numeric = array is not None and array.dtype.kind in "biuf" and array.flags.writeable
        tensor = (
            torch.from_numpy(array) if array is not None and numeric and min(array.strides, default=1) > 0 else value
        )
        if not isinstance(tensor, Tensor) or id(value) in known or tensor.is_meta or not tensor.numel():
            continue
        known.add(id(value))
        if tensor.layout == torch.strided:
            steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            first, trained = tensor.data_ptr(), isinstance(tensor, nn.Parameter) and tensor.requires_grad
            yield _Span(str(tensor.device), first, first + (steps + 1) * tensor.itemsize, name, tensor, trained)


def _held(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What stands beside parameters and buffers: in attributes and hooks, in scripts' classes, and in what these, their
    methods and the functions that are called there close over or read as globals."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if is_own_class(kind)}
    of_kinds = [(f"{kind.__qualname__}.{key}", value) for kind in kinds for key, value in vars(kind).items()]
    for name, value in [*held_by(model), *sorted(of_kinds, key=lambda one: one[0])]:
        for held in (value, *own_functions(value)):
            yield from leaves_of(held, name)


def _meet(one: _Span, other: _Span) -> bool:
    """Whether some byte is of both."""
    first = min(one.first, other.first)
    marks = torch.zeros(max(one.end, other.end) - first, dtype=torch.bool)
    _bytes(marks, one, first).fill_(True)
    return bool(_bytes(marks, other, first).any())


def _bytes(marks: Tensor, span: _Span, first: int) -> Tensor:
    size = span.tensor.itemsize
    steps = (*(step * size for step in span.tensor.stride()), 1)
    return marks.as_strided((*span.tensor.shape, size), steps, span.first - first)


# Settings of an embedding that packs and stages would not keep -> why.
_EMBEDDINGS = {
    "max_norm": "its forward would shorten rows of its own weight, but parameters are sent to stages anew in each step",
    "scale_grad_by_freq": "its gradient would depend on which sequences are packed together",
    "sparse": "gradients are summed in dense buffers",
}
_COMMUNICATION = ("torch.distributed.distributed_c10d", "torch.distributed._functional", "torch.distributed.nn",
                  "deepspeed.comm")  # fmt: skip
_LAYER_COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers", "num_layers", "num_blocks")
_GROUPED_ALIGNMENT = 16  # bytes
_MIXING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.RNNBase, nn.MultiheadAttention)
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", CHUNKED})


def refuse_unsupported(model: Any) -> None:
    """ConfigError for what can be told from the model's class and config, before anything is run."""
    name = type(model).__name__
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(f"{path} is a ScriptModule, of which stages cannot be made: use what it was made of")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder; only causal language models are supported")
    if model.get_output_embeddings() is None and head_of(model) is None:
        raise ConfigError(
            f"{name} has no language modelling head; use its ...ForCausalLM class, or for a value of each token its "
            "...ForTokenClassification class with num_labels=1"
        )
    if getattr(model, "is_quantized", False):
        raise ConfigError(f"{name} has quantized weights, which ranks cannot share: load it without quantization")
    _refuse_skipped_layers(model)
    refuse_own_attention(model)
    _refuse_ranks(model)
    refuse_adapters(model)
    _refuse_embeddings(model)
    refuse_parameters(model)


def refuse_parameters(model: nn.Module) -> None:
    """ConfigError for parameters that no FP32 master could stand for."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"{name} has values of {str(parameter.dtype).removeprefix('torch.')}, and masters are real numbers: "
                "make it a buffer if it is not trained, or two parameters, of its real and its imaginary part"
            )
        if not parameter.numel():
            raise ConfigError(f"{name} has the shape {tuple(parameter.shape)} and no element to share: remove it")


def may_mix_otherwise(model: Any) -> bool:
    """Whether the model's class or config says that tokens may meet otherwise than by the attention interface."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    interface = getattr(model, "_supports_attention_backend", False)
    return bool(kinds) or getattr(model, "_is_stateful", False) or not interface


def may_mix_beside(model: Any, layers_path: str) -> bool:
    """Whether what a script has put into the layers may let tokens meet beside the attention."""
    mixing = any(isinstance(module, _MIXING) for module in model.get_submodule(layers_path).modules())
    return mixing or any(path.startswith(f"{layers_path}.") for path in own_code(model))


def refuse_parts_in_evaluation(model: nn.Module, drawing: Collection[str]) -> None:
    """ConfigError for modules that a script has put into evaluation in a model that trains, if they are `drawing`
    random numbers, or their code asks: stages are in one mode as a whole."""
    if model.training and (path := in_evaluation(model, drawing)) is not None:
        raise ConfigError(
            f"{path} is in evaluation while the rest of {type(model).__name__} trains, and computes something else "
            "then; stages train as a whole: set its rate to 0 in place of calling eval(), or call train() on it"
        )


def in_evaluation(model: nn.Module, drawing: Collection[str]) -> str | None:
    """What is in evaluation and computes something else in training, the model or a part of it: modules that are by
    path among those `drawing` random numbers, or whose code of a script asks."""
    for path, module in model.named_modules():
        if not module.training and (path in drawing or any("training" in names_of(r.__code__) for r in _own(module))):
            return path if model.training else type(model).__name__
    return None


def _refuse_skipped_layers(model: nn.Module) -> None:
    for path, module in model.named_modules():
        rate = getattr(module, "layerdrop", 0.0)
        if isinstance(rate, float | int) and rate > 0:
            raise ConfigError(
                f"{path or type(model).__name__} skips whole layers at random (layerdrop {rate}), which stages on "
                "different ranks would not do together; set layerdrop to 0"
            )


def _refuse_ranks(model: nn.Module) -> None:
    """ConfigError for code of a script in a model that asks for its rank or talks to others: what one process is,
    several are."""
    if not own_code(model):
        return
    for path, module in model.named_modules():
        for function in _own(module):
            for name, value in globals_of(function):
                if callable(value) and (getattr(value, "__module__", None) or "").startswith(_COMMUNICATION):
                    raise ConfigError(
                        f"the code of {path or type(model).__name__} ({function.__qualname__}) has {name}, but how a "
                        "model is laid out over ranks changes from step to step, and each of them runs a part of it on "
                        "some sequences: let nothing in the model depend on ranks, and talk to others outside of it"
                    )


def _own(module: nn.Module) -> Iterator[FunctionType]:
    """The functions of scripts that run as a module does."""
    hooks = [hook for key in HOOKS for hook in (getattr(module, key) or {}).values()]
    runs = [*called_by(module), *(one for value in (module.forward, *hooks) for one in own_functions(value))]
    return (function for function in runs if not is_of_package(function.__code__.co_filename))


def _refuse_embeddings(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for setting, why in _EMBEDDINGS.items():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and getattr(module, setting):
                raise ConfigError(f"{path} has {setting}={getattr(module, setting)}: {why}. Take the setting back")


def refuse_own_attention(model: Any) -> None:
    """ConfigError for attention that a script has put in place of transformers' own: stages would not run it."""
    for path, module in model.named_modules():
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        for function in () if name is None else attention_functions(module, name):
            # A partial of transformers' own hands it something else than the model does.
            own = own_functions(function) or (function,) * isinstance(function, functools.partial)
            if own:
                raise ConfigError(
                    f"{path or type(model).__name__} computes its attention by {name!r}, which is "
                    f"{getattr(own[0], '__qualname__', own[0])} of {getattr(own[0], '__module__', 'no module')}: "
                    "stages compute transformers' own attention in packs, and would train another model. Use "
                    'attn_implementation="sdpa", or write it into the forward of the attention module'
                )


def attention_functions(module: nn.Module, name: str) -> list[Any]:
    """What runs as the attention of this name in a module, and makes its masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = [table[name] for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS) if name in table]
    if name == "eager":  # each model's file has its own
        tables.append(getattr(inspect.unwrap(type(module).forward), "__globals__", {}).get("eager_attention_forward"))
    return [one for one in tables if one is not None]


def known_tokens(model: Any) -> int:
    """Tokens that a model knows: rows of its embedding, or what its config says where that is wrapped."""
    weight = getattr(trained_copy(model.get_input_embeddings()), "weight", None)
    return int(model.config.get_text_config().vocab_size if weight is None else weight.shape[0])


def find_layers(model: Any) -> str:
    """Path of the decoder layers: the outermost module list of a length that the config has for them, in modules that
    have the config of the text where there are some; an encoder beside it may have as many layers."""
    config = model.config.get_text_config()
    owners = tuple(f"{name}." for name, m in model.named_modules() if name and getattr(m, "config", None) is config)
    # Decoders of encoder-decoder kinds have a number of their own.
    numbers = dict.fromkeys(getattr(config, key, None) for key in _LAYER_COUNTS)
    lists = [(name, len(m)) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    lists.sort(key=lambda one: (not one[0].startswith(owners), one[0].count(".")))
    for number in numbers:
        paths = [name for name, length in lists if length == number]
        if paths:
            return paths[0]
    found = "".join(f"; {name} has {length}: if it is these, correct the config" for name, length in lists[:1])
    raise ConfigError(
        f"{type(model).__name__} has no module list of the {config.num_hidden_layers} layers that its config says, to "
        f"cut into stages{found}"
    )


def refuse_misaligned_experts(model: nn.Module, specs: Iterable[ParamSpec], tp: int, dtype: torch.dtype) -> None:
    """ConfigError for stacked experts whose shards torch's grouped matrix product cannot take.

    It wants rows of a multiple of 16 bytes: of weights, of what goes in, and of its gradient.
    """
    if getattr(getattr(model, "config", None), "_experts_implementation", None) != "grouped_mm":
        return
    step = max(1, _GROUPED_ALIGNMENT // dtype.itemsize)
    for spec in specs:
        if len(spec.shape) != 3 or spec.rule.dim not in (1, 2):  # whole experts, or channels of a convolution
            continue
        shapes = (spec.shard_shape(rank, tp) for rank in range(tp))
        wrong = sorted({size for shape in shapes for size in shape[1:] if size % step})
        if wrong:
            raise ConfigError(
                f"tp={tp} leaves of {spec.name} {spec.shape} experts of width {wrong[0]}, but their grouped matrix "
                f"product takes multiples of {step} in {str(dtype).removeprefix('torch.')} only: use another tp, "
                + (f"write tp{tp}ep{tp}, which leaves whole experts, " if spec.shape[0] % tp == 0 else "")
                + 'or build the model with experts_implementation="eager"'
            )
