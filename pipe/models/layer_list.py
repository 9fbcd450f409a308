"""Stages of a DeepSpeed `PipelineModule`: its list of layer specs, tied layers and loss function.

Layers run one after the other on (1, T_local, ...) tensors. A layer that names `position_ids` or `hydra` in its
forward is given them; with the pack it can call `ds_hydra.pipe.attention.backends.varlen_attention`. Tensor
parallel ranks hold and compute the same, since a layer list publishes no plan.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.model_plan import ModelPlan, ParamSpec, make_buckets
from ds_hydra.pipe.models.cut import Recomputing
from ds_hydra.pipe.models.draws import Draws, Keys, Notes, Recorder
from ds_hydra.pipe.models.refusals import refuse_parameters
from ds_hydra.pipe.rows import AT_ONCE, MicroBatch, Overlap, Pack
from ds_hydra.pipe.stage import StageModule, StagePlace
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.zero_hetero.errors import ConfigError

_GIVEN = ("position_ids", "hydra")


class LayerList:
    """A `PipelineModule` as a source of stages; every entry of its list counts as one layer."""

    vocab_size: int | None = None  # a layer list does not say
    valued = False
    notes: tuple[str, ...] = ()
    balances = False  # its loss is its own
    wide: frozenset[str] = frozenset()  # of parameters that compute in a wider type

    def __init__(self, model: Any, options: StageOptions = AS_WRITTEN):
        """Reads specs, buffers and values of the layers that this rank has built.

        Of the options only `sp_overlap` is for such layers: the others change modules that are known by their class.
        Raises ConfigError without a loss function, and for layers that hand on anything but (1, T, width).
        """
        if model.loss_fn is None:
            raise ConfigError(
                "the PipelineModule has no loss_fn; give it one that means over the targets of its labels"
            )
        refuse_parameters(model)
        self.options = StageOptions(sp_overlap=options.sp_overlap)
        self.overlap = Overlap() if options.sp_overlap else AT_ONCE
        self.specs, self.loss_fn = list(model._layer_specs), model.loss_fn
        self._buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        self.values: Mapping[str, Tensor] = {n: p.detach() for n, p in model.named_parameters() if not p.is_meta}
        self.aliases: Mapping[str, str] = {name: name for name, _ in model.named_parameters()}
        self.layers = [self.layer(index, torch.device("meta")) for index in range(len(self.specs))]
        self._widths = self._trace()
        trained = {name: p.requires_grad for name, p in model.named_parameters()}  # as the user left them
        names: dict[str, ParamSpec] = {}
        per_layer: list[frozenset[str]] = []
        for index, layer in enumerate(self.layers):
            mine: set[str] = set()
            for path, parameter in _parameters(layer):
                name = self.name(index, path)
                trainable = trained.get(name, parameter.requires_grad)
                names.setdefault(name, ParamSpec(name, tuple(parameter.shape), trainable=trainable))
                mine.add(name)
            per_layer.append(frozenset(mine))
        groups: list[tuple[str, frozenset[str]]] = []
        placed: frozenset[str] = frozenset()
        for index, members in enumerate(per_layer):
            groups.append((f"layers.{index}", members - placed))
            placed |= members
        self.plan = ModelPlan(
            make_buckets(groups, names), frozenset(), tuple(per_layer), frozenset(),
            no_slices="layers of a PipelineModule attend by themselves, and keep no keys and values for later slices",
        )  # fmt: skip

    def name(self, index: int, path: str) -> str:
        """Name that PipelineModule gives a parameter of layer `index`."""
        key = getattr(self.specs[index], "key", None)
        return f"tied_modules.{key}.{path}" if key is not None else f"{index}.{path}"

    def layer(self, index: int, device: torch.device) -> Any:
        """A fresh copy of one layer, parameters on the meta device and buffers on `device`, or a plain function."""
        spec = self.specs[index]
        if not hasattr(spec, "build") and not isinstance(spec, nn.Module):
            return spec
        if hasattr(spec, "build"):
            with torch.device("meta"):
                layer = spec.build()
        else:
            with torch._C.DisableTorchFunctionSubclass():  # of a released parameter no value is asked for
                layer = copy.deepcopy(spec).to("meta")
        for path, _ in list(layer.named_buffers()):
            owner, _, leaf = path.rpartition(".")
            buffer = self._buffers.get(self.name(index, path))
            if buffer is None:
                raise ConfigError(f"layer {index}: buffer {path} is on no stage of this rank; build with num_stages=1")
            # DeepSpeed builds a layer list on a GPU where there is one, and the self-check runs on the CPU.
            layer.get_submodule(owner)._buffers[leaf] = buffer.to(device)
        return layer

    def width(self, layer: int) -> int:
        """Features of the hidden states (1, T, width) that enter a layer."""
        return self._widths[layer]

    def _trace(self) -> list[int]:
        """Features after each layer, by running four tokens through the list without data."""
        batch = MicroBatch(Pack((4,)), torch.zeros(1, 4, dtype=torch.long, device="meta"))
        x: Any = torch.zeros(1, 4, dtype=torch.long, device="meta")
        widths = [0]
        running: list[str] = []
        recorder = Recorder(4, "", running)
        for index, layer in enumerate(self.layers):
            running[:] = [f"layer {index}"]
            with torch.no_grad(), Notes(recorder):
                x = _call(layer, getattr(self.specs[index], "forward_fn", None))(
                    x, position_ids=batch.position_ids, hydra=batch.pack
                )
            if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[:2] != (1, 4):
                shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ConfigError(
                    f"layer {index} hands on {shape} for 4 tokens; layers must hand on one tensor (1, 4, width)"
                )
            widths.append(x.shape[2])
        if recorder.obstacle:
            raise ConfigError(recorder.obstacle)
        self.draws = recorder.widths
        return widths

    @property
    def drawing(self) -> frozenset[str]:
        """The list and its layers, by path, if any of them draws random numbers."""
        return frozenset(("", *map(str, range(len(self.specs)))) if self.draws else ())

    def with_options(self, options: StageOptions, why: str) -> LayerList:
        """The same list, whose stages compute by these options, which ask for less than its own."""
        other = copy.copy(self)
        other.options, other.overlap = options, AT_ONCE
        return other

    def build(self, place: StagePlace, device: torch.device, dtype: torch.dtype) -> StageModule:
        """One rank's share of a stage."""
        return _LayerListStage(self, place, device)


class _LayerListStage(StageModule):
    def __init__(self, source: LayerList, place: StagePlace, device: torch.device):
        stage = place.stage
        layers = nn.ModuleDict()
        self._calls: list[tuple[Callable[..., Any], list[str]]] = []  # with the names of the layer's parameters
        names: dict[str, str] = {}
        for index in range(stage.first_layer, stage.last_layer):
            layer, spec = source.layer(index, device), source.specs[index]
            if isinstance(layer, nn.Module):
                layers[str(index)] = layer
                names |= {f"{index}.{path}": source.name(index, path) for path, _ in _parameters(layer)}
            used = [source.name(index, path) for path, _ in _parameters(layer)]
            self._calls.append((_call(layer, getattr(spec, "forward_fn", None)), used))
        super().__init__(layers, place, names)
        self._loss_fn, self._draws = source.loss_fn, Draws(source.draws)
        self._recomputing = Recomputing(len(self._calls))

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        x = batch.input_ids if self.place.is_first else hidden
        draws = self._draws.widths and self.module.training
        keys = Keys.of(batch.pack, batch.position_ids.device) if draws else None
        self._recomputing.take(batch.recompute)
        for place, (call, used) in enumerate(self._calls):
            for name in used:  # a tied layer's forward_fn may read a weight of a module that it does not call
                self._use(name)
            x = self._recomputing.run(place, self._draw_in(place, call, keys), x, batch)
        assert isinstance(x, Tensor), "layers hand one tensor on"
        return self._loss(x, batch) if self.place.is_last else x

    def _draw_in(self, place: int, call: Callable[..., Any], keys: Keys | None) -> Callable[[Any, MicroBatch], Any]:
        index = self.place.stage.first_layer + place

        def run(x: Any, batch: MicroBatch) -> Any:
            with self._draws.of_entry(index, keys):
                return call(x, position_ids=batch.position_ids, hydra=batch.pack)

        return run

    def _loss(self, out: Tensor, batch: MicroBatch) -> Tensor:
        """The user's mean over the targets of each sequence, weighted by what they count in the step."""
        assert batch.labels is not None, "the last stage was given no labels"
        assert batch.weights is not None, "the last stage was given no weights"
        start, stop = batch.pack.local
        loss = out.sum() * 0.0
        for begin, end in zip(batch.pack.offsets, batch.pack.offsets[1:], strict=False):
            part = slice(max(begin, start) - start, max(0, min(end, stop) - start))
            weight = (batch.weights[part] * (batch.labels[part] != IGNORED)).sum()
            if part.stop <= part.start:
                continue
            targets = batch.labels[part] != IGNORED
            if weight != 0 or (batch.token_losses is not None and bool(targets.any())):
                mean = self._loss_fn(out[:, part], batch.labels[None, part])
                loss = loss + mean * weight
                if batch.token_losses is not None:
                    batch.token_losses[part] = mean.detach().to(batch.token_losses) * targets
        return loss


def _parameters(layer: Any) -> list[tuple[str, nn.Parameter]]:
    return list(layer.named_parameters()) if isinstance(layer, nn.Module) else []


def _call(layer: Any, forward_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """Call with those of the extra arguments that the layer names."""
    function = forward_fn or (layer.forward if isinstance(layer, nn.Module) else layer)
    wanted = [name for name in _GIVEN if name in inspect.signature(function).parameters]

    def call(x: Any, **given: Any) -> Any:
        extra = {name: given[name] for name in wanted}
        return forward_fn(layer, x, **extra) if forward_fn is not None else layer(x, **extra)

    return call
