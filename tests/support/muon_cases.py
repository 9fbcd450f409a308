"""Rows of training with Muon, and what they are compared with: DeepSpeed's and torch's own optimizers, one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from tests.support import equivalence
from tests.support.case import CHANGING, CHANGING_8, CHANGING_WITHOUT_TP, FLOAT32, Case
from tests.support.families import ADAPTED_STACKS, LAYER_LIST

ITERATIONS = "deepspeed.runtime.zero.muon.original_muon.ns_compute_dtype"
SETTINGS = {"muon_lr": 0.01, "adam_lr": 2e-3, "weight_decay": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "momentum": 0.9}


class Both(torch.optim.Optimizer):
    """Two optimizers, each of its own parameters."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": [parameter for group in groups for parameter in group["params"]]}], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def of_deepspeed(**own: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """DeepSpeed's own groups, flags and optimizer, as it runs without ZeRO."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        torch.compiler.set_stance("force_eager")
        params = SETTINGS | own
        flagged = SimpleNamespace(optimizer_name="muon", optimizer_params=params)
        deepspeed.set_optimizer_flags(flagged, model)
        groups = DeepSpeedEngine._muon_param_groups(equivalence.decay_groups(model), params)
        made: torch.optim.Optimizer = with_heads(MuonWithAuxAdam(groups))
        return made

    return make


def with_heads(made: Any) -> Any:
    """DeepSpeed's optimizer, with the heads of each parameter, which its engine passes on in ZeRO 3 alone."""
    from deepspeed.runtime.zero.muon import muon_optimizer

    plain, step, of = muon_optimizer.muon_update, made.step, dict[int, Any]()

    def update(grad: Tensor, momentum: Tensor, **rest: Any) -> Tensor:
        updated: Tensor = plain(grad, momentum, num_heads=of[id(grad)], **rest)
        return updated

    def stepped(closure: Any = None) -> Any:
        of.update({id(p.grad): getattr(p, "muon_num_heads", None) for g in made.param_groups for p in g["params"]})
        with mock.patch.object(muon_optimizer, "muon_update", update):
            return step(closure)

    made.step = stepped
    return made


def of_torch(scale: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """`torch.optim.Muon` of the same matrices, beside AdamW."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        flagged = SimpleNamespace(optimizer_name="muon", optimizer_params={})
        deepspeed.set_optimizer_flags(flagged, model)
        halves: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in equivalence.decay_groups(model):
            for matrices, half in halves.items():
                half.append({**group, "params": [p for p in group["params"] if p.use_muon is matrices]})
        muon = torch.optim.Muon([g for g in halves[True] if g["params"]], lr=0.01, momentum=0.9,
                                weight_decay=0.1, adjust_lr_fn=scale)  # fmt: skip
        other = torch.optim.AdamW([g for g in halves[False] if g["params"]], lr=2e-3, betas=(0.9, 0.99), eps=1e-8,
                                  weight_decay=0.1)  # fmt: skip
        return Both(muon, other)

    return make


@contextlib.contextmanager
def iterating_in(dtype: torch.dtype) -> Iterator[None]:
    """Within it, DeepSpeed's and torch's own iterations are in this type; ours too, where it is not FP64."""
    from ds_hydra.matrices.newton_schulz import Method

    ours = mock.patch.object(Method, "computed_in", lambda self, given: given if given == torch.float64 else dtype)
    theirs = mock.patch(ITERATIONS, return_value=dtype)
    with ours, theirs, mock.patch.object(Tensor, "bfloat16", lambda self: self.to(dtype)):
        yield


def block(**own: Any) -> dict[str, Any]:
    """A config's block."""
    return {"type": "Muon", "params": {**SETTINGS, **own}}


for _method in ("gram", "standard"):
    equivalence.OTHERS[f"Muon, {_method}"] = block(ns_method=_method), of_deepspeed(ns_method=_method)
for _scale in ("original", "match_rms_adamw"):
    equivalence.OTHERS[f"Muon, {_scale}"] = block(adjust_lr_fn=_scale), of_torch(_scale)
# Adam magnifies rounding where a gradient is near zero, unless it adds more to what it divides by.
equivalence.OTHERS["Muon, rounded"] = (
    block(ns_method="standard", eps=1e-3),
    of_deepspeed(ns_method="standard", eps=1e-3),
)
equivalence.OTHERS["Muon, per head"] = block(per_head_muon=True), of_deepspeed(per_head_muon=True)


def _rows() -> Iterator[Case]:
    base = Case("", "llama", CHANGING, optimizer="Muon, gram")
    yield base.row("gram", quick=True)
    yield base.row("standard", optimizer="Muon, standard")
    yield base.row("original", optimizer="Muon, original")
    yield base.row("match_rms_adamw", optimizer="Muon, match_rms_adamw", quick=True)
    yield base.row("per head", optimizer="Muon, per head", quick=True)
    yield base.row("one key head", family="llama_1_key_head", optimizer="Muon, per head")
    yield base.row("one rank", "tp1")
    yield base.row("two ranks", "tp2", "2*tp1", "pp2")
    yield base.row("on 8 ranks", *CHANGING_8)
    yield base.row("on 7 ranks", "7*tp1", "tp2 + 5*tp1", steps=3)
    yield base.row("fused", family="phi3", quick=True)
    yield base.row("fused, biases", *CHANGING_WITHOUT_TP, family="gpt2")
    yield base.row("experts", family="mixtral", quick=True)
    yield base.row("experts, spread", "tp4ep4", "tp2sp2ep4", "sp2ep2 + 2*tp1", family="mixtral", steps=3)
    yield base.row("experts, standard", family="mixtral", optimizer="Muon, standard")
    yield base.row("tied", family="llama_tied")
    yield base.row("layer list", family=LAYER_LIST)
    yield base.row("lora", family="lora", quick=True)
    yield base.row("lora of fused layers", family="lora of fused layers")
    yield base.row("lora of stacks", "tp2pp2", "sp2 + 2*tp1", family=next(iter(ADAPTED_STACKS)), steps=3)
    yield base.row("slices, V", "tp2pp2/v", "sp2 + pp2/list", slices=True, recompute=True, steps=4, quick=True)
    yield base.row("split backward", "tp2pp2/zb-h1", "sp2 + pp2/zb-h1", steps=2)
    yield base.row("phases", "4*tp1 then 2*tp2 then tp4", "4*tp1 then 2*pp2", steps=4)
    yield base.row("no clipping", clip=0.0)
    yield base.row("latent", family="deepseek_v3", optimizer="Muon, per head", steps=3)
    yield base.row("linear attention", "pp2", "2*tp1", family="qwen3_next", steps=2)
    yield base.row("frozen", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield base.row("fp32", optimizer="Muon, rounded", dtype=FLOAT32, steps=2)


CASES = tuple(_rows())
