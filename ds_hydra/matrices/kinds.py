"""Makes the optimizer of whole parameters that a user asked for, over masters.

By a config's type: "Muon", "Lamb", and "Adafactor", which DeepSpeed takes to be torch's. By an object of `torch.optim`,
transformers or DeepSpeed, which keeps its identity, for a scheduler that was made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ds_hydra.matrices import muon
from ds_hydra.matrices.lamb_adafactor import Adafactor, Lamb, TorchAdafactor
from ds_hydra.matrices.sums import OfSums
from ds_hydra.zero_hetero.errors import ConfigError

Group = tuple[tuple[str, ...], dict[str, Any]]  # names and settings
Make = Callable[[list[dict[str, Any]]], Optimizer]
_BLOCKS: Mapping[str, tuple[type[OfSums], str]] = {
    "lamb": (Lamb, "; names and meaning are those of DeepSpeed's FusedLamb"),
    "adafactor": (
        TorchAdafactor,
        "; a config's Adafactor is torch's, as in DeepSpeed: transformers' comes by Trainer's optim or as an object",
    ),
}
_OF_CLASSES: Mapping[str, type[OfSums]] = {"FusedLamb": Lamb, "Adafactor": TorchAdafactor}


def of_block(
    kind: str, params: Mapping[str, Any], groups: Sequence[Group] = (), model: nn.Module | None = None
) -> tuple[Sequence[Group], Make]:
    """The groups of a config's optimizer, and what makes it; without a model for a look at its settings alone.

    ConfigError for settings that it refuses, before anything is allocated.
    """
    if kind != "muon":
        return groups, _of_sums(*_BLOCKS[kind], dict(params))
    settings = muon.checked(params)
    if model is None:
        return groups, muon.maker(settings, {})
    halves = muon.halves(dict(model.named_parameters()), groups, settings)
    matrices = [own for names, half in halves if half["use_muon"] for own in names]
    return halves, muon.maker(settings, muon.heads_of(model, matrices, per_head=bool(settings.get("per_head_muon"))))


def _of_sums(kind: type[OfSums], hint: str, params: dict[str, Any]) -> Make:
    made: Any = kind
    params |= {"betas": tuple(params["betas"])} if "betas" in params else {}

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        try:
            return made(groups, **params)  # type: ignore[no-any-return]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"config: optimizer.params of {kind.__name__}: {error}{hint}") from None

    make([{"params": [nn.Parameter(torch.zeros(1))]}])
    return make


def of_client(client: Any, names: Sequence[str]) -> Make:
    """What makes a script's optimizer, of parameters with these names, the engine's; it keeps its settings.

    ConfigError for settings that the engine's refuses.
    """
    if isinstance(client, torch.optim.Muon):
        return muon.of_torch(client, dict.fromkeys(names, 1))
    kind = Adafactor if type(client).__module__.startswith("transformers.") else _OF_CLASSES[type(client).__name__]
    own: Any = kind
    more = {"eps_inside_sqrt": client.eps_mode == 0} if kind is Lamb else {}

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        try:
            return muon.become(client, own([{**more, **group} for group in groups]))
        except ValueError as error:
            raise ConfigError(f"optimizer {type(client).__name__}: {error}") from None

    return make
