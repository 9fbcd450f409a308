"""Training with optimizers of whole parameters: rows, the originals in one process, jobs that skip or save and load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import torch
from deepspeed.ops.lamb import FusedLamb, fused_lamb
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from transformers.optimization import Adafactor

from ds_hydra.matrices.exchange import Method
from ds_hydra.zero_hetero.errors import CheckpointError
from tests.support import equivalence
from tests.support.case import CHANGING, CHANGING_8, CHANGING_WITHOUT_TP, FLOAT32, Case
from tests.support.families import ADAPTED_STACKS, LAYER_LIST
from tests.support.small_job import same, small_engine, whole_state

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


def muon_of_deepspeed(**own: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
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


def muon_of_torch(scale: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
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
    ours = mock.patch.object(Method, "computed_in", lambda self, given: given if given == torch.float64 else dtype)
    theirs = mock.patch(ITERATIONS, return_value=dtype)
    with ours, theirs, mock.patch.object(Tensor, "bfloat16", lambda self: self.to(dtype)):
        yield


def block(**own: Any) -> dict[str, Any]:
    """A config's block."""
    return {"type": "Muon", "params": {**SETTINGS, **own}}


for _method in ("gram", "standard"):
    equivalence.OTHERS[f"Muon, {_method}"] = block(ns_method=_method), muon_of_deepspeed(ns_method=_method)
for _scale in ("original", "match_rms_adamw"):
    equivalence.OTHERS[f"Muon, {_scale}"] = block(adjust_lr_fn=_scale), muon_of_torch(_scale)
# Adam magnifies rounding where a gradient is near zero, unless it adds more to what it divides by.
equivalence.OTHERS["Muon, rounded"] = (
    block(ns_method="standard", eps=1e-3),
    muon_of_deepspeed(ns_method="standard", eps=1e-3),
)
equivalence.OTHERS["Muon, per head"] = block(per_head_muon=True), muon_of_deepspeed(per_head_muon=True)


def _muon_rows() -> Iterator[Case]:
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


LAMB = {"lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.99]}
OF_TORCH = {"lr": 0.02, "weight_decay": 0.1}
OF_TRAINER = {"lr": 0.005, "scale_parameter": False, "relative_step": False}


class Kernel:
    """DeepSpeed's, in torch (`csrc/lamb/fused_lamb_cuda_kernel.cu`): line by line, of a whole parameter."""

    def load(self) -> Kernel:
        return self

    def lamb(
        self, p: Tensor, out: Tensor, m: Tensor, v: Tensor, g: Tensor, lr: float, beta1: float, beta2: float,
        max_coeff: float, min_coeff: float, eps: float, grad_scale: float, step: int, mode: int, bias_correction: int,
        decay: float,
    ) -> Tensor:  # fmt: skip
        step_size = lr
        if bias_correction == 1:
            step_size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        scaled_grad = g / grad_scale
        m.copy_(beta1 * m + (1 - beta1) * scaled_grad)
        v.copy_(beta2 * v + (1 - beta2) * scaled_grad * scaled_grad)
        denom = (v + eps).sqrt() if mode == 0 else v.sqrt() + eps
        update = m / denom + decay * p
        reg_w, reg_u = (p * p).sum().sqrt(), (update * update).sum().sqrt()
        lamb_coeff = torch.tensor(1.0)
        if reg_w != 0 and reg_u != 0:
            lamb_coeff = torch.clamp(reg_w / reg_u, min_coeff, max_coeff)
        p.sub_(step_size * lamb_coeff * update)
        return lamb_coeff


def lamb_of_deepspeed(**own: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """DeepSpeed's own class, with its kernel in torch."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        with mock.patch.object(fused_lamb, "FusedLambBuilder", Kernel):
            made: torch.optim.Optimizer = FusedLamb(equivalence.decay_groups(model), **own)
        return made

    return make


def of_trainer(**own: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """transformers'."""
    return lambda model: Adafactor(equivalence.decay_groups(model), **own)


equivalence.OTHERS |= {
    "LAMB": ({"type": "Lamb", "params": LAMB}, lamb_of_deepspeed(**LAMB)),
    "LAMB, by an object": (
        None, lamb_of_deepspeed(lr=0.01, eps_inside_sqrt=True, max_coeff=0.5, bias_correction=False),
    ),
    "LAMB, rounded": ({"type": "Lamb", "params": LAMB | {"eps": 1e-3}}, lamb_of_deepspeed(**LAMB, eps=1e-3)),
    "Adafactor": (
        {"type": "Adafactor", "params": OF_TORCH},
        lambda model: torch.optim.Adafactor(equivalence.decay_groups(model), **OF_TORCH),  # type: ignore[arg-type]
    ),
    "Adafactor of Trainer": (None, of_trainer(**OF_TRAINER)),
    "Adafactor, its own rate": (None, of_trainer()),
    "Adafactor, momentum": (None, of_trainer(**OF_TRAINER, beta1=0.9, weight_decay=0.1)),
    # Biases of keys have gradients of rounding alone.
    "Adafactor, biases": (None, of_trainer(**OF_TRAINER | {"eps": (1e-12, 1e-3)})),
    "Adafactor, rounded": (None, of_trainer(**OF_TRAINER | {"eps": (1e-6, 1e-3)})),
}  # fmt: skip


def _sum_rows() -> Iterator[Case]:
    base = Case("", "llama", CHANGING, optimizer="LAMB")
    yield base.row("LAMB", quick=True)
    yield base.row("LAMB, by an object", optimizer="LAMB, by an object")
    yield base.row("LAMB, 8 ranks", *CHANGING_8)
    yield base.row("LAMB, experts", family="mixtral")
    yield base.row("LAMB, fused, biases", *CHANGING_WITHOUT_TP, family="gpt2")
    yield base.row("LAMB, lora", family="lora", quick=True)
    yield base.row("LAMB, tied", family="llama_tied")
    yield base.row("LAMB, slices, V", "tp2pp2/v", "sp2 + pp2/list", slices=True, recompute=True, steps=4)
    yield base.row("LAMB, no clipping", clip=0.0)
    yield base.row("LAMB, fp32", optimizer="LAMB, rounded", dtype=FLOAT32, steps=2)
    torchs, base = base.row("", optimizer="Adafactor"), base.row("", optimizer="Adafactor of Trainer")
    yield torchs.row("torch's")
    yield torchs.row("torch's, experts", family="mixtral", quick=True)
    yield torchs.row("torch's, one rank", "tp1")
    yield torchs.row("torch's, two ranks", "tp2", "2*tp1", "pp2")
    yield torchs.row("torch's, lora of stacks", "tp2pp2", "sp2 + 2*tp1", family=next(iter(ADAPTED_STACKS)), steps=3)
    yield base.row("transformers'", quick=True)
    yield base.row("its own rate", optimizer="Adafactor, its own rate", quick=True)
    yield base.row("momentum", optimizer="Adafactor, momentum")
    yield base.row("on 7 ranks", "7*tp1", "tp2 + 5*tp1", steps=3)
    yield base.row("on 8 ranks", *CHANGING_8)
    yield base.row("one key head", family="llama_1_key_head")
    yield base.row("fused", family="phi3", quick=True)
    yield base.row("experts, spread", "tp4ep4", "tp2sp2ep4", "sp2ep2 + 2*tp1", family="mixtral", steps=3)
    yield base.row("tied", family="llama_tied")
    yield base.row("layer list", family=LAYER_LIST, optimizer="Adafactor, biases")
    yield base.row("lora", family="lora")
    yield base.row("slices, V", "tp2pp2/v", "sp2 + pp2/list", slices=True, recompute=True, steps=4)
    yield base.row("phases", "4*tp1 then 2*tp2 then tp4", "4*tp1 then 2*pp2", steps=4)
    yield base.row("latent", family="deepseek_v3", steps=3)
    yield base.row("linear attention", "pp2", "2*tp1", family="qwen3_next", steps=2)
    yield base.row("frozen", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield base.row("fp32", optimizer="Adafactor, rounded", dtype=FLOAT32, steps=2)


CASES = (*_muon_rows(), *_sum_rows())


def trained(rank: int, folder: Path, optimizer: Any, steps: int, load: str = "") -> tuple[dict[str, Tensor], str]:
    """The state after so many steps, which is saved, and what a refused checkpoint says."""
    engine, said = small_engine(rank, optimizer=optimizer), ""
    if load:
        try:
            engine.load_checkpoint(str(folder), load)
        except CheckpointError as error:
            said = str(error)
    for _ in range(steps):
        engine.train_batch()
    if steps:
        engine.save_checkpoint(str(folder), f"of{engine.global_steps}")
        engine.wait_for_checkpoint()
    state = whole_state(engine)
    engine.destroy()
    return state, said


class Skipped(NamedTuple):
    """A rank whose second of three steps had a gradient that was not finite."""

    was_skipped: bool
    unchanged: bool  # by it
    moved: bool  # by the third
    before: dict[str, Tensor]  # the state after the first


def skipping(rank: int, exchange: type, **given: Any) -> Skipped:
    """Three steps, in the second of which this kind of exchange must not run."""
    engine = small_engine(rank, **given)
    engine.train_batch()
    before = whole_state(engine)
    with mock.patch.object(exchange, "run", side_effect=AssertionError("nothing is exchanged")):
        infinite = torch.tensor(float("inf"), dtype=torch.float64)
        with mock.patch("ds_hydra.step.update.norm_of", return_value=infinite):
            engine.train_batch()
    was, unchanged = engine.last_step.skipped, same(before, whole_state(engine))
    engine.train_batch()
    moved = not same(before, whole_state(engine))
    engine.destroy()
    return Skipped(was, unchanged, moved, before)
