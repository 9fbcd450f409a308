"""Positions of packed tokens: what a model makes of none given, and rotary tables that follow the longest one."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_hydra.pipe.attention.interface import NotPackedError, tell_pack
from ds_hydra.pipe.models.cut import ForwardEnded
from ds_hydra.pipe.models.flow import tensors_in
from ds_hydra.pipe.models.refusals import known_tokens
from ds_hydra.pipe.pinned import on_device
from ds_hydra.pipe.rows import Pack, position_ids
from ds_hydra.pipe.wrappers import wrap
from ds_hydra.zero_hetero.errors import ConfigError

_LENGTHS = (5, 7)  # of two sequences in a row; no other dimension is likely to have 12
_ENDS = 4  # tokens at each end of a vocabulary that are tried
_SPECIAL = ("bos", "eos", "sep", "pad", "cls", "unk", "mask")


def uncounted_tokens(model: Any, layers_path: str, first: int) -> tuple[int, ...]:
    """Tokens that the model leaves out when it numbers those of a sequence, which begins with `first`.

    RoBERTa's kind counts no padding tokens; tried are the special tokens of the config, and the first ones of the
    vocabulary. `model` holds real values.
    """
    device, vocab = next(model.parameters()).device, known_tokens(model)
    special = sorted({n for n in (*special_tokens(model), *range(4)) if n < vocab})
    plain = _ordinary(vocab, special)

    def counted(tokens: list[int]) -> bool:
        ids = torch.tensor([[plain[0], *(part for token in tokens for part in (token, plain[1])), plain[2]]]).to(device)
        length = ids.shape[1]
        positions = torch.arange(first, first + length, device=device)[None]
        alone = _entering(model, layers_path, ids, None, (length,))
        return _same_rows([alone], _entering(model, layers_path, ids, positions, (length,)), (length,))

    if len(plain) < 3 or counted(special):
        return ()
    return tuple(token for token in special if not counted([token]))


def special_tokens(model: Any) -> tuple[int, ...]:
    """Ids that the model's config names as special ones of texts: padding, both ends, separators."""
    config, vocab = model.config.get_text_config(), known_tokens(model)
    named = [getattr(config, f"{name}_token_id", None) for name in _SPECIAL]
    numbers = [number for one in named for number in (one if isinstance(one, list | tuple) else [one])]
    return tuple(dict.fromkeys(n for n in numbers if isinstance(n, int) and 0 <= n < vocab))


def tried_tokens(model: Any) -> tuple[int, ...]:
    """Special tokens and both ends of the vocabulary, which code of a script may count, or look for."""
    known = known_tokens(model)
    ends = (*special_tokens(model), *range(_ENDS), *range(known - _ENDS, known))
    return tuple(token for token in dict.fromkeys(ends) if 0 <= token < known)


def _ordinary(vocab: int, special: Collection[int]) -> list[int]:
    """A few tokens from the end of the vocabulary, without the special ones."""
    others = (token for token in range(vocab - 1, vocab // 2, -1) if token not in special)
    return list(itertools.islice(others, _LENGTHS[0]))


def counts_padding(model: Any, layers_path: str, start: int) -> bool:
    """Whether the model numbers padding before a sequence too, where a mask tells it and no positions are given, so
    that what enters its layers is another than without the padding. A sequence begins with the position `start`;
    `model` holds real values."""
    device, vocab = next(model.parameters()).device, known_tokens(model)
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    padding = padding if isinstance(padding, int) and 0 <= padding < vocab else 0
    plain = _ordinary(vocab, special_tokens(model))
    if len(plain) < _LENGTHS[0]:
        return False
    before, length = 2, len(plain)
    ids = torch.tensor([[padding] * before + plain], device=device)
    mask = (torch.arange(before + length, device=device) >= before).long()[None]
    alone, later = (
        _entering(
            model, layers_path, ids[:, before:], torch.arange(first, first + length, device=device)[None], (length,)
        )
        for first in (start, start + before)
    )
    if _same_rows([alone[:1]], later[:1], (length,)):  # positions are not in what enters, such as a rotary embedding's
        return False
    try:
        padded = _entering(model, layers_path, ids, None, (before + length,), attention_mask=mask)[:1]
    except Exception:  # it takes no mask like this
        return True
    return not _same_rows([alone[:1]], [part[..., before:, :] for part in padded], (length,))


def first_position(model: Any, layers_path: str) -> int:
    """What the model counts as a sequence's first position when it is given none: 0, or padding_idx + 1 (RoBERTa).

    Compared is what enters the first layer: for one sequence alone without positions, and for two in one row with
    positions that restart. Raises NotPackedError where neither numbering gives the same: packing would then train
    another model. `model` holds real values.
    """
    name = type(model).__name__
    device = next(model.parameters()).device
    vocab = known_tokens(model)
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    plain = [token for token in range(vocab // 2, vocab) if token != padding]  # special ones stand at the ends
    ids = torch.tensor(plain[: sum(_LENGTHS)], device=device)
    if len(ids) < sum(_LENGTHS):
        return 0
    alone, start = [], 0
    for length in _LENGTHS:
        alone.append(_entering(model, layers_path, ids[None, start : start + length], None, (length,)))
        start += length
    candidates = [0] + ([padding + 1] if isinstance(padding, int) and padding >= 0 else [])
    for first in candidates:
        positions = torch.cat([torch.arange(first, first + length, device=device) for length in _LENGTHS])[None]
        try:
            packed = _entering(model, layers_path, ids[None], positions, _LENGTHS)
        except IndexError:  # beyond the model's positions
            continue
        if _same_rows(alone, packed):
            return first
    raise NotPackedError(
        f"{name} numbers the tokens of a sequence neither from 0 nor from its padding token, or ignores position_ids: "
        "packed sequences would be trained at other positions than alone; not supported"
    )


def _entering(
    model: Any, layers_path: str, ids: Tensor, positions: Tensor | None, lengths: tuple[int, ...], **given: Any
) -> list[Tensor]:
    """Floating tensors that the first layer is handed: hidden states, rotary tables."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        found = [tensor.detach().clone() for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        raise ForwardEnded(found)

    handle = model.get_submodule(layers_path)[0].register_forward_pre_hook(enter, with_kwargs=True)
    given |= {} if positions is None else {"position_ids": positions}
    training = model.training
    tell_pack(model, lambda: Pack(lengths))
    try:
        with torch.no_grad():
            model.eval()(input_ids=ids, use_cache=False, **given)
    except ForwardEnded as ended:
        return ended.value  # type: ignore[no-any-return]
    finally:
        handle.remove()
        model.train(training)
    return []


def _same_rows(alone: list[list[Tensor]], packed: list[Tensor], lengths: tuple[int, ...] = _LENGTHS) -> bool:
    """Whether the rows of each sequence are the same alone and packed, in every tensor."""
    start = 0
    for length, tensors in zip(lengths, alone, strict=True):
        if len(tensors) != len(packed):
            return False
        for mine, row in zip(tensors, packed, strict=True):
            part = row
            for dim, size in enumerate(mine.shape):
                if size == length and row.shape[dim] == sum(lengths):
                    part = part.narrow(dim, start, length)
            near = max(1e-5, 8 * torch.finfo(mine.dtype).eps)  # other positions are off by a tenth and more
            if part.shape != mine.shape or float((part - mine).abs().max()) > near * float(mine.abs().max()):
                return False
        start += length
    return True


def refuse_dynamic_rotary(model: nn.Module) -> None:
    """ConfigError for rotary tables that depend on the sequences seen before."""
    for name, module in model.named_modules():
        if any("dynamic" in kind for kind in _rotary_types(module).values()):
            raise ConfigError(
                f"{name} has rotary frequencies of type 'dynamic', which follow the longest sequence seen so far: "
                "plain training would depend on the order of the sequences; use rope_type 'yarn' or 'linear'"
            )


def split_rotary_by_length(model: nn.Module, pack_of: Callable[[], Pack]) -> None:
    """Make rotary tables of type 'longrope' follow each sequence of the pack, not the longest position in the row.

    Such a module has two sets of frequencies and takes one for all it is given, by its largest position. So it is asked
    for both, and each row takes the table of its own sequence's length. `pack_of` tells the pack that is running.
    """
    for module in model.modules():
        kinds = _rotary_types(module)
        if "longrope" in kinds.values():
            wrap(module, _by_length(module, kinds, pack_of), "by length")


def _rotary_types(module: nn.Module) -> dict[str | None, str]:
    """Rotary type by layer type (None: one for all); empty for other modules."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {None: kinds}
    return {key: kind for key, kind in kinds.items() if isinstance(kind, str)} if isinstance(kinds, dict) else {}


def _by_length(module: Any, kinds: dict[str | None, str], pack_of: Callable[[], Pack]) -> Callable[..., Any]:
    forward: Callable[..., Any] = module.forward

    def tables(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, ...]:
        extra = {} if layer_type is None else {"layer_type": layer_type}
        if kinds.get(layer_type) != "longrope":
            return forward(x, position_ids, **extra)  # type: ignore[no-any-return]
        parameters = module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        limit = int(parameters["original_max_position_embeddings"])
        pack = pack_of()
        short = forward(x, position_ids.clamp(max=limit - 1), **extra)
        if max(pack.whole_lengths) <= limit:
            return short  # type: ignore[no-any-return]
        beyond = torch.cat([position_ids, torch.full_like(position_ids[:, :1], limit)], dim=1)
        long = tuple(table[..., :-1, :] for table in forward(x, beyond, **extra))
        start, stop = pack.local
        sizes = zip(pack.whole_lengths, pack.lengths, strict=True)
        of_row = [whole > limit for whole, length in sizes for _ in range(length)][start:stop]
        is_long = on_device(torch.tensor(of_row), position_ids.device)[:, None]
        return tuple(torch.where(is_long, a, b) for a, b in zip(long, short, strict=True))

    return tables


def scale_noise_by_length(model: nn.Module, pack_of: Callable[[], Pack]) -> None:
    """Let noise that transformers' hook adds to embeddings (NEFTune, arXiv 2310.05914) follow the length of each
    sequence of the pack, as its paper has it, and not that of the row."""
    for module in model.modules():
        for handle in noise_hooks(module):
            module._forward_hooks[handle] = partial(_noise, pack_of)


def noise_hooks(module: nn.Module) -> list[int]:
    """The module's hooks that are transformers' own for noise of embeddings."""
    named = ((handle, getattr(hook, "__name__", "")) for handle, hook in module._forward_hooks.items())
    return [handle for handle, name in named if name == "neftune_post_forward_hook"]


def _noise(pack_of: Callable[[], Pack], module: Any, _: Any, out: Tensor) -> Tensor:
    if not module.training:
        return out
    pack, scaled = pack_of(), {}
    for whole in set(pack.whole_lengths):  # in FP32, as the hook itself
        scaled[whole] = float(module.neftune_noise_alpha / torch.sqrt(torch.tensor(whole * out.shape[-1])))
    start, stop = pack.local
    sizes = zip(pack.whole_lengths, pack.lengths, strict=True)
    of_row = [scaled[whole] for whole, length in sizes for _ in range(length)][start:stop]
    most = on_device(torch.tensor(of_row, dtype=out.dtype), out.device)[:, None]
    return out + torch.zeros_like(out).uniform_(-1.0, 1.0) * most


class _Counted:
    """In place of a cache: how far a row's tokens are into their sequences, beyond their place in the row."""

    def __init__(self, pack: Pack, device: torch.device):
        start, stop = pack.local
        places = position_ids(pack.lengths, start, stop, past=pack.past) - np.arange(stop - start)
        self._beyond = on_device(torch.from_numpy(places), device)

    def get_seq_length(self, layer: int = 0) -> Tensor:
        """What the layer adds to the numbers 0, 1, ... of the tokens that it is given, (T_local,)."""
        return self._beyond

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What the layer attends to."""
        return key, value


def count_by_sequence(model: nn.Module, pack_of: Callable[[], Pack]) -> None:
    """Make layers that scale queries by their position (Llama 4's without rotary embedding) take it from the sequence:
    by themselves they count the row's tokens, behind those that a cache holds."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False):
            named = inspect.signature(type(module).forward).parameters
            name = "cache" if "cache" in named else "past_key_values"  # before transformers 5.24
            wrap(module, partial(_counting, module.forward, name, pack_of), "by length", "counts by sequence")


def _counting(
    forward: Callable[..., Any],
    name: str,
    pack_of: Callable[[], Pack],
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    kwargs[name] = _Counted(pack_of(), hidden_states.device)
    return forward(hidden_states, *args, **kwargs)
