"""Models and devices that are compared: a name in, its measured or derived table and its sizes out. Pure: no torch.

[Note: tables of devices]
T(l) of <TP, PP> is published for LLaMA 7B and 32B on A800s alone. For other models, and for H100s and H200s, a table is
derived from two numbers of the device, TFLOP/s of causal attention and of the rest, as jobs have reached them in steps:

  a of TP 1    6 * width * attending layers over the rate of attention. Other schemes differ from it as in the A800
               table of the nearest size, since ranks with fewer heads are slower
  b of TP 1    6 * parameters of a token over the rate of the rest
  b of others  messages of TP besides: what the A800 table has of them, by hidden * layers, over NVLink of the device
  c            the A800's by the layer; two thirds of it on newer devices. Never measured for this engine: cells with
               "c" in their names say what it decides
  MaxLen       the formula of the A800 tables, by parameters, hidden * layers and the device's memory
  ZeRO-3       what a micro-batch takes besides, by parameters and links between nodes
  A800s        the rates of its own table of the nearest size

`MODELS` has a mixture of experts and a hybrid. Experts count as one wide MLP of which a token computes its share, at
the rate of dense products, and are pulled by all, as no system here spreads them; layers without attention take time
by the token alone. That favours all systems alike. `tools.systems.published_rates` compares tables with public runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.analytic import ModelShape
from ds_hydra.costs.cost_table import (
    ATTENTION_OF_PEAK,
    CAUSAL_FLOPS,
    SIBLINGS_APART,
    CostTable,
    Peak,
    SchemeCost,
    TableFile,
    peak_tflops,
    read_table_file,
    square_of,
)
from ds_hydra.rivals.costs import PUBLISHED, RivalModel
from ds_hydra.simulate.job import SHIPPED, ShippedModel
from ds_hydra.simulate.links import INSIDE, Speed
from ds_hydra.zero_hetero.errors import ConfigError

MODEL_FLOPS = (
    6.0  # of a layer for each token, token before and unit of width, causal: without the backward's own forward
)


@dataclass(frozen=True)
class Device:
    """What a table is derived from: rates in TFLOP/s (0: those of the published table), and where they are from."""

    name: str
    attention: float
    rest: float
    memory_bytes: float
    nvlink: float  # times an A800's
    between: float  # GB/s of each GPU between nodes, where ZeRO-3's gathers are
    c: float  # times an A800's
    kernel: str
    software: str
    date: str

    @property
    def peak(self) -> float:
        """TFLOP/s of the data sheet, dense BF16."""
        found = peak_tflops(self.name)
        assert found is not None, "its data sheet is known"
        return found


_H = 900 / 400
_GATHERED = 25.0  # GB/s at which what ZeRO-3 takes was measured
DEVICES = {
    device.name: device
    for device in (
        Device("A800", 0.0, 0.0, 85_198_897_152, 1.0, 25.0, 1.0, "FlashAttention 2", "Hydraulis' tables of LLaMA",
               "2024-12"),
        Device("H100", 447.0, 409.0, 85_198_897_152, _H, 50.0, 2 / 3, "FlashAttention 3 (as on an H200)",
               "FSDP of Llama-2 7B on 128 H100s, 9,600 tokens/s at 4K (foundation-model-stack/fms-fsdp, issue 89)",
               "2024-06"),
        Device("H200", 447.0, 463.0, 150e9, _H, 50.0, 2 / 3, "FlashAttention 3",
               "DeepSpeed ZeRO-2 of Llama-3.1 8B on 8 H200s, 461 TFLOP/s at 8K, torch 2.13 (stas00/ml-engineering)",
               "2026-08"),
    )
}  # fmt: skip
"""From the oldest to the newest."""


@dataclass(frozen=True)
class Model:
    """Sizes, the A800 table that it stands on, and of how many heads a rank's share is taken."""

    shape: ModelShape
    base: str
    heads: int
    attending: int = 0  # layers with attention; 0: all

    @property
    def square(self) -> float:
        """Units of width times layers that attention takes time for."""
        return (self.shape.width or self.shape.hidden) * (self.attending or self.shape.layers)

    def flops(self, length: int) -> float:
        """Of a token in a sequence of so many, forward and backward, causal; what is computed again is not in it."""
        return MODEL_FLOPS * (self.active + self.square * length)

    @property
    def of_layer(self) -> float:
        """Parameters of a layer over hidden^2."""
        shape = self.shape
        return (shape.params - 2 * shape.vocab * shape.hidden) / (shape.layers * shape.hidden**2)

    @property
    def active(self) -> float:
        """Parameters that a token is computed with; a row of the embeddings is looked up."""
        return (self.shape.active or self.shape.params) - self.shape.vocab * self.shape.hidden


# TP 8 and 16 were measured for the model of 52 heads, which none of them divides: 64 of the same size are meant.
MODELS = {
    "7b": Model(SHIPPED["a800-7b"].shape, "7b", 32),
    "32b": Model(SHIPPED["a800-32b"].shape, "32b", 64),
    # Llama-3.1 8B and 70B, Qwen3-30B-A3B and Qwen3.5-27B, of which every fourth layer attends, as published.
    "8b": Model(ModelShape(4096, 32, 32, 8, 14336, 128_256, 8_030_261_248), "7b", 32),
    "70b": Model(ModelShape(8192, 80, 64, 8, 28672, 128_256, 70_553_706_496), "32b", 64),
    "a3b": Model(
        ModelShape(2048, 48, 32, 4, 128 * 768, 151_936, 30_532_122_624, active=3_345_000_000, width=4096), "7b", 32
    ),
    "hybrid": Model(ModelShape(5120, 64, 24, 4, 17408, 248_320, 27_400_000_000, width=6144), "32b", 24, attending=16),
}


def split(model: str) -> tuple[Model, Device]:
    """ "8b H200" is an 8B model on H200s; "32b" one on A800s."""
    name, _, device = model.partition(" ")
    return MODELS[name], DEVICES[device or "A800"]


def alone_of(table: CostTable) -> tuple[float, float]:
    """a and b of TP 1, times its ranks: of the fewest stages that a table has."""
    alone = min((cost for cost in table.costs if cost.uniform.tp == 1), key=lambda cost: cost.scheme.pp)
    return square_of(alone), alone.b * alone.scheme.num_ranks


@lru_cache(maxsize=32)
def rival_model(model: str, c: float = 1.0) -> RivalModel:
    """What costs of all systems are derived from, with c so many times the table's [Note: tables of devices]."""
    (found, device), before = split(model), MODELS[split(model)[0].base]
    sizes, published = SHIPPED[f"a800-{found.base}"], PUBLISHED[f"a800-{found.base}"]
    table = found_of(model)
    if c != 1.0:
        costs = tuple(replace(cost, c=c * cost.c) for cost in table.table.costs)
        table = replace(table, table=CostTable(costs, table.table.source))
    own = published._replace(
        heads=found.heads,
        zero_3_ms=published.zero_3_ms * found.shape.params / before.shape.params * _GATHERED / device.between,
        room_bytes=published.room_bytes + (device.memory_bytes - DEVICES["A800"].memory_bytes),
        state_bytes=published.state_bytes * found.of_layer / before.of_layer,
    )
    return RivalModel(ShippedModel(found.shape, sizes.activations), own, table, inside_of(model))


def inside_of(model: str) -> Speed:
    """The link between two GPUs of a node."""
    return INSIDE._replace(bytes_per_s=split(model)[1].nvlink * INSIDE.bytes_per_s)


@lru_cache(maxsize=32)
def found_of(model: str) -> TableFile:
    """The table of a model: as published, or derived [Note: tables of devices]. ConfigError where it cannot be true."""
    found, device = split(model)
    published = read_table_file(shipped(f"a800-{found.base}"))
    if found is MODELS[found.base] and device.name == "A800":
        return published
    before, costs = MODELS[found.base], published.table.costs
    square, alone = alone_of(published.table)
    if device.attention:
        a, b = 1e-9 * MODEL_FLOPS * found.square / device.attention, 1e-9 * MODEL_FLOPS * found.active / device.rest
    else:
        a, b = square * found.square / before.square, alone * found.active / before.active
    of_messages = found.shape.hidden * found.shape.layers / (before.shape.hidden * before.shape.layers) / device.nvlink
    of_layers = device.c * found.shape.layers / before.shape.layers

    def derived(cost: SchemeCost) -> SchemeCost:
        own = cost.scheme.num_ranks
        messages = of_messages * max(0.0, cost.b * own - alone)
        return replace(
            cost, a=a / square * cost.a, b=(b + messages) / own, c=of_layers * cost.c,
            derived=f"TP 1 of {device.name}s, and messages and c of the A800's",
        )  # fmt: skip

    table = CostTable(tuple(map(derived, costs)), f"{model}, derived from {device.software}; {device.kernel}")
    peak = Peak(CAUSAL_FLOPS * found.square, 1e12 * device.peak, device.name)
    if wrong := impossible(model, table):
        raise ConfigError(f"the table of {model} cannot be true: {'; '.join(wrong)}")
    return TableFile(table, peak=peak)


def impossible(model: str, table: CostTable) -> list[str]:
    """Why a table cannot be true: attention above the share of the peak that kernels reach, rows with as many heads on
    a rank too far apart, or slower in any row than the same model on an older device."""
    found, device = split(model)
    squares = {cost.uniform: square_of(cost) for cost in table.costs}
    wrong = [
        f"{scheme} has {rate:.0f} TFLOP/s of causal attention, above {ATTENTION_OF_PEAK} of {device.peak:.0f}"
        for scheme, square in squares.items()
        if (rate := 1e-9 * MODEL_FLOPS * found.square / square) > ATTENTION_OF_PEAK * device.peak
    ]
    wrong += [
        f"a * ranks of {one} and {other} is {max(apart, 1 / apart):.2f} times apart, above {SIBLINGS_APART}"
        for one, other in combinations(squares, 2)
        if one.tp == other.tp and not 1 / SIBLINGS_APART <= (apart := squares[one] / squares[other]) <= SIBLINGS_APART
    ]
    newest = list(DEVICES).index(device.name)
    if newest:
        older = list(DEVICES)[newest - 1]
        before = {cost.scheme: cost for cost in found_of(f"{model.split()[0]} {older}").table.costs}
        wrong += [
            f"{name} of {cost.scheme} is {own:.3g} ms, on an {older} {its:.3g}"
            for cost in table.costs if cost.scheme in before
            for name in ("a", "b", "c")
            if (own := getattr(cost, name)) > (1 + 1e-9) * (its := getattr(before[cost.scheme], name))
        ]  # fmt: skip
    return wrong
