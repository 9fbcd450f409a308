"""Adapters of PEFT: the layer inside a wrapped module, and how tensor parallel ranks share what is beside it.

[Note: adapters]
LoRA (Hu et al. 2021, arXiv 2106.09685) keeps the weight W of a linear layer and trains two narrow ones beside it, A and
B, for y = W x + s B A x. With 64 features in, 96 out and the rank 8, tp = 2 ranks hold

                      W          A         B          a rank makes
  alone               (96, 64)   (8, 64)   (96, 8)    y
  column-parallel     (48, 64)   (8, 64)   (48, 8)    its 48 features of y
  row-parallel        (96, 32)   (8, 32)   (96, 8)    its part of the sum that is y: of W x, and of B A x

So an adapter adds no collective to those of its layer: one copy of x on the way in, or one sum on the way out, is for
both. What is cut has its own gradient on each rank. Of what is not cut each rank has a part of the gradient (the A of
the first sees only what 48 rows of B ask for, the B of the second only a part of A x), and the push adds the parts up.

Where ranks share tokens [Note: token sharding] a row-parallel layer is the same, but for the sum that is scattered. A
column-parallel one gets a rank's own tokens: A makes 8 features of each of them, and these are gathered for B. That is
less than to gather x for A, which a frozen W needs no more in the backward.

[Note: adapters of stacks]
A stack (E, out, in) of E experts has one A and one B for all of them: A (r E, in), of each expert r rows, one expert
after the other, and B (out, r E), of each of r columns those of all experts. With 4 experts that make 96 features of
64, r = 2 and two ranks:

                      W               A          B
  alone               (4, 96, 64)     (8, 64)    (96, 8)
  by outputs          (4, 48, 64)     (8, 64)    (48, 8)     of A each rank has a part of the gradient
  by inputs           (4, 96, 32)     (8, 32)    (96, 8)     of B
  whole experts       (2, 96, 64)     (4, 64)    (96, 4)     columns 0, 1, 4, 5 on the first rank

[Note: magnitudes]
DoRA (Liu et al. 2024, arXiv 2402.09353) trains a magnitude m for each output, of y = m / |W + s B A| (W x + s B A x),
where |.| is the norm of a row and has no gradient. A column-parallel layer has whole rows, and m as it has B. Of a
row-parallel one each rank has a part of each row: the squares are summed over the ranks, and as y is a sum over them
each has a part of the gradient of m. PEFT runs A and B on a unit matrix for B A; here it is their product.

PEFT's own forward runs beside linear layers. Nothing here imports PEFT: its classes are told by their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.pipe.model_plan import ShardRule
from ds_hydra.pipe.wrappers import wrap

Rows = Callable[[Tensor], Tensor]
Within = Callable[[], AbstractContextManager[None]]

LORA_LINEAR = "peft.tuners.lora.layer.Linear"
LORA_EMBEDDING = "peft.tuners.lora.layer.Embedding"
LORA_STACK = "peft.tuners.lora.layer.ParamWrapper"
DORA = "peft.tuners.lora.variants.DoraLinearVariant"
MAGNITUDE = "peft.tuners.lora.dora.DoraLinearLayer"
TOKENS = "peft.tuners.trainable_tokens.layer.TrainableTokensLayer"
AROUND_TOKENS = "peft.utils.other.TrainableTokensWrapper"
SAVED_WHOLE = "peft.utils.other.ModulesToSaveWrapper"

# What a parameter's name has inside a wrapped linear layer: base_layer.weight, lora_A.default.weight.
_PART = re.compile(r"\.(base_layer|(?:lora_[AB]|lora_magnitude_vector)\.[^.]+)(?=\.(weight|bias)$)")
_INSIDE = re.compile(r"(\.base_layer)+(?=\.[^.]+$)")  # of a stack, which may have several adapters around it
# By its inputs, as a row-parallel layer is; by its outputs, as a column-parallel one.
_CUT_DIM = {"lora_A": 1, "lora_B": 0, "lora_magnitude_vector": 0}


def class_path(module: object) -> str:
    """Where the class of an object is defined, and its name."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_lora(module: nn.Module) -> bool:
    """Whether PEFT has put a LoRA adapter beside a linear layer."""
    return class_path(module) == LORA_LINEAR


def linear_of(module: nn.Module) -> nn.Module:
    """The linear layer beside which an adapter stands; a module without one is its own."""
    return module.base_layer if is_lora(module) else module  # type: ignore[return-value]


def plain_name(name: str) -> str:
    """The name that a parameter's weight or bias had, or that of the layer it is beside, before PEFT wrapped it."""
    return _PART.sub("", _INSIDE.sub("", name))


def stack_path(path: str) -> str:
    """Where a module of stacks stood before PEFT put adapters around it."""
    return re.sub(r"(\.base_layer)+$", "", path)


def run_stacks(model: nn.Module) -> None:
    """Let the adapters of stacks add to what their module reads, and not take the place of its parameter meanwhile, as
    PEFT's own forward does."""
    for module in model.modules():
        if class_path(module) == LORA_STACK:
            wrap(module, partial(_on_stack, module), "function", "adapter of a stack")


def _on_stack(module: Any, *args: Any, **kwargs: Any) -> Any:
    if module.disable_adapters:
        return module.base_layer(*args, **kwargs)
    experts, name = module.get_base_layer(), module.parameter_name
    weight = module.get_param()
    for adapter in module.active_adapters:
        if adapter in module.lora_A:
            if hasattr(module, "get_delta_factors"):
                left, right, scale = module.get_delta_factors(adapter)
                weight = torch.baddbmm(weight, left, right, alpha=scale)
            else:  # before PEFT 0.21
                weight = weight + module.get_delta_weight(adapter)
    vars(experts)[name] = weight  # which Python finds before the parameter
    try:
        return module.base_layer(*args, **kwargs)
    finally:
        del vars(experts)[name]


def run_magnitudes(model: nn.Module) -> None:
    """Let the magnitudes of DoRA compute as [Note: magnitudes] says."""
    for module in model.modules():
        if class_path(module) == MAGNITUDE:
            wrap(module, partial(_magnitudes, module), "function", "magnitudes")


def _magnitudes(
    module: Any, x: Tensor, *, lora_A: Any, lora_B: Any, scaling: float, base_layer: Any,
    base_result: Tensor | None = None, adapter_name: str = "",
    share_of: Rows | None = None, gather: Rows | None = None, added: Rows | None = None,
) -> Tensor:  # fmt: skip
    """What an adapter adds to its layer's own output. `share_of` and `gather` as of `run_on_own_rows`; `added` sums
    over the ranks that have parts of a weight's rows, whose layer has no bias yet."""
    if share_of is not None and base_result is not None:  # else dropout has taken the own rows
        x = share_of(x)
    beside = lora_B(lora_A(x))
    weight = base_layer.weight.T if module.fan_in_fan_out else base_layer.weight
    if base_result is None:  # x was dropped in part
        base_result = F.linear(x if gather is None else gather(x), weight)
    elif base_layer.bias is not None and added is None:
        base_result = base_result - base_layer.bias
    with torch.no_grad():
        whole = torch.addmm(weight, lora_B.weight, lora_A.weight, alpha=scaling)
        wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
        squares = torch.einsum("oi,oi->o", wide, wide)  # and no `sum`, which would be taken for one of a part of a row
        norms = (squares if added is None else added(squares)).sqrt().to(whole.dtype)
    scale = module.weight / norms
    return (scale - 1) * base_result + scale * beside * scaling


def share_magnitudes(lora: Any, **how: Rows) -> None:
    """Let the magnitudes beside a layer that tensor parallel ranks share run with more arguments [Note: magnitudes]."""
    for magnitudes in getattr(lora, "lora_magnitude_vector", {}).values():
        wrap(magnitudes, partial(magnitudes.forward, **how), "tensor parallel", "magnitudes")


def run_tokens(model: nn.Module) -> None:
    """Let rows of embeddings and heads that PEFT trains alone (`trainable_token_indices`) stand beside the whole
    weight, which ranks may share, and not be copied into it."""
    for module in model.modules():
        if class_path(module) == TOKENS:
            wrap(module, partial(_with_tokens, module), "function", "trained tokens")


def _with_tokens(module: Any, x: Tensor) -> Tensor:
    base = module.base_layer
    out: Tensor = base(x)
    for name in () if module.disable_adapters else module.active_adapters:
        words = torch.tensor(module.token_indices[name], device=out.device)
        rows = module.trainable_tokens_delta[name].to(out.dtype)
        if isinstance(base, nn.Linear):
            out = out.index_copy(-1, words, F.linear(x, rows))
            continue
        place = torch.full((base.num_embeddings,), -1, device=out.device).index_copy(
            0, words, torch.arange(len(words), device=out.device)
        )[x]
        scale = module._get_embed_scale()
        own = F.embedding(place.clamp(min=0), rows)
        own = own if scale is None else own * scale.to(own.dtype)
        out = torch.where((place >= 0).unsqueeze(-1), own, out)
    return out


def linear_path(path: str, module: nn.Module) -> str:
    """Path of `linear_of(module)`."""
    return f"{path}.base_layer" if is_lora(module) else path


def adapter_rule(name: str, rule: ShardRule) -> ShardRule:
    """The rule of a parameter of a wrapped layer, from that of the layer's own weight or bias [Note: adapters]."""
    part = _PART.search(name)
    cut = _CUT_DIM.get(part[1].partition(".")[0]) if part else None
    return rule if cut is None or rule.dim in (None, cut) else ShardRule(gradient="partial")


def run_on_own_rows(lora: Any, share_of: Rows, outside: Within, gather: Rows) -> None:
    """Let the A of a column-parallel layer's adapters run on a rank's own tokens, and B on all [Note: adapters].

    `share_of` gives the own rows of what stands for all rows, `gather` all rows of own ones; within `outside` random
    numbers are those of the own tokens.
    """
    for name in lora.active_adapters:
        if name in lora.lora_A:
            first, last = lora.lora_dropout[name], lora.lora_B[name]
            wrap(first, _own(first.forward, share_of, outside), "tensor parallel", "own rows")
            wrap(last, _gathered(last.forward, gather), "tensor parallel", "all rows")
    share_magnitudes(lora, share_of=share_of, gather=gather)


def _own(forward: Rows, share_of: Rows, outside: Within) -> Rows:
    def own(x: Tensor) -> Tensor:
        with outside():
            return forward(share_of(x))

    return own


def _gathered(forward: Rows, gather: Rows) -> Rows:
    return lambda x: forward(gather(x))


@contextmanager
def switched_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within it the adapters of these modules add nothing, as within PEFT's `disable_adapter()`."""
    found: list[Any] = [module for module in modules if class_path(module).startswith("peft.")]
    found = [module for module in found if hasattr(module, "_disable_adapters")]
    for module in found:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in found:
            module._disable_adapters = False


def trained_copy(module: nn.Module) -> nn.Module:
    """What runs in place of a module that PEFT keeps whole beside a trained copy, or has put around one of which it
    trains some rows; any other module is its own."""
    if class_path(module) == AROUND_TOKENS:
        return module.token_adapter.base_layer  # type: ignore[union-attr, return-value]
    if class_path(module) != SAVED_WHOLE:
        return module
    wrapper: Any = module
    active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    return wrapper.modules_to_save[active[0]] if active else wrapper.original_module


def head_of(model: Any) -> Any:
    """What makes logits of hidden states; of a model without such an end what makes a value of each token's: its only
    child that is a linear layer of one output (`score`, `classifier`). None where there is neither."""
    head = model.get_output_embeddings()
    if head is not None:
        return head
    plain = ((child, linear_of(trained_copy(child))) for child in model.children())
    found = [child for child, own in plain if isinstance(own, nn.Linear) and own.out_features == 1]
    return found[0] if len(found) == 1 else None


def ends_of(model: Any) -> tuple[nn.Module, nn.Module]:
    """The embedding and the head of a language model, as they are run."""
    return trained_copy(model.get_input_embeddings()), trained_copy(head_of(model))
