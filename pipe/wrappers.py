"""What stands around the forwards of a stage's modules: one list, in order, and which modules have what of it.

[Note: forward wrappers]
A stage is a copy of the user's model. Its modules compute by their own forwards, around which these are put one after
the other. Whoever replaces a forward does it by `wrap`, which refuses another order than that of the list, so what a
module runs can be read from its chain, the outermost first:

  layers.0             recomputed
  layers.0.mlp         tensor parallel: one copy for its columns <- packed: forgets
  layers.0.mlp.up_proj tensor parallel: column <- packed: one of several <- summed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

WRAPPERS: Mapping[str, str] = {
    "function": "first: what was recognised is a class's own forward, which it replaces, and others take as their own",
    "draws": "around the call and not the forward, since hooks draw too: counted whatever the forward becomes",
    "boxed": "inside what is computed again: each sequence is given its own part of what the layer is handed",
    "recomputed": "after what stands for the layer's own code, which is what the backward computes again",
    "summed": "of linear layers and embeddings that are plain so far: what wraps them hands its input to it and reads "
    "its output, and its weight's gradient waits, or is added up where it is made",
    "packed": "after it, since layers that are computed together put their gradients off together",
    "tensor parallel": "after all that computes: it moves what enters and leaves",
    "in tiles": "of modules that look at no other token: around the messages that one tile needs",
    "by length": "of rotary embeddings and of attention that counts tokens: it needs the pack that runs",
    "handed on": "last: a layer of another stage runs nothing, whatever it has",
}
_PLACES = {name: place for place, name in enumerate(WRAPPERS)}
_CHAIN = "_hydra_chain"


def wrap(module: nn.Module, forward: Callable[..., Any], by: str, what: str = "") -> None:
    """Let a module run `forward`, one of WRAPPERS, in place of the one that it has; `what` says more of it."""
    note(module, by, what)
    module.forward = forward  # type: ignore[method-assign]


def note(module: nn.Module, by: str, what: str = "") -> None:
    """The same where not the forward is replaced."""
    chain: tuple[tuple[str, str], ...] = vars(module).get(_CHAIN, ())
    last = chain[-1][0] if chain else by
    assert _PLACES[last] <= _PLACES[by], f"{by} would stand around {last}, but comes before it [Note: forward wrappers]"
    object.__setattr__(module, _CHAIN, (*chain, (by, what)))


def chains(model: nn.Module) -> dict[str, str]:
    """What stands around the forward of each module that has anything, the outermost first, by path."""
    found = {path: reversed(vars(module).get(_CHAIN, ())) for path, module in model.named_modules()}
    told = {path: " <- ".join(f"{by}: {what}" if what else by for by, what in chain) for path, chain in found.items()}
    return {path: chain for path, chain in told.items() if chain}
