"""What is compared: models and devices with their tables, cells, public runs beside the tables. Pure: no torch.

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
by the token alone. That favours all systems alike. `rate_rows` compares tables with public runs.

[Note: what runs add]
A table says what forwards and backwards take. A run adds what its row names: layers computed again (all products of a
layer a third more, its attention 2/7, as the forward has two of seven products, or none where its outputs are kept),
every second product computed again (a sixth more), states on the host (Adam of 10^9 parameters of a rank a second), and
messages of TP: as in the table, or half of them where products hide them (async).
Rows 3 to 6 are met where attention is not run again; if it is, attention at these lengths reaches 565 to 595 TFLOP/s in
place of 447, and long sequences are cheaper still. Which of both was run is not published.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from ds_hydra.commands.figures import FOLDER, shipped
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
from ds_hydra.data.lengths import WEB_PAGES, read_lengths, sample_batches
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.rivals.costs import NODE, PUBLISHED, RivalModel
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
def rival_model(model: str, c: float = 1.0, node: int = NODE) -> RivalModel:
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
    return RivalModel(ShippedModel(found.shape, sizes.activations), own, table, inside_of(model), node)


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


MIXES = {
    "CommonCrawl": WEB_PAGES,
    "Wikipedia": str(FOLDER / "wikipedia_lengths.txt"),
    "pretraining": str(FOLDER / "pretraining_length_histogram.csv"),
    "rollouts": str(FOLDER / "rollout_length_histogram.csv"),
    "tail": str(FOLDER / "tail_length_histogram.csv"),  # 1.95 % above 32K: bench_tail
    "long": "lognormal:9.2,1.4",  # half of all sequences have 10K tokens and more
}
CLUSTERS = (("32b", 64), ("7b", 32))
SHORT_MIXES = ("CommonCrawl", "Wikipedia", "pretraining")
EVALUATED, SEEN_BEFORE = 77, 1  # seeds of batches that are reported, and of lengths that ours may prepare with
_SAMPLE = 60_000
_BETWEEN = 25.0


@dataclass(frozen=True)
class Cell:
    """One comparison; `model` is "32b" on A800s, or with the device behind it, "32b H200".

    `keys`: heads of keys and values over those of queries; `between`: GB/s of each GPU between nodes; `c`: times the
    table's charge for a micro-batch; `node`: GPUs of a node.
    """

    model: str
    gpus: int
    context: int
    tokens: int
    mix: str
    keys: float = 1.0
    between: float = 25.0
    c: float = 1.0
    node: int = NODE

    def __str__(self) -> str:
        text = f"{self.model} {self.gpus} GPUs {self.context // 1024}K {self.tokens // 1000}K {self.mix}"
        text += f" GQA {self.keys:g}" if self.keys < 1.0 else ""
        text += f" {self.between:g} GB/s" if self.between != _BETWEEN else ""
        text += f", nodes of {self.node}" if self.node != NODE else ""
        return text + (f" c {self.c:g}" if self.c != 1.0 else "")

    @property
    def device(self) -> str:
        """ "A800", "H100" or "H200"."""
        return self.model.partition(" ")[2] or "A800"

    @property
    def of_model(self) -> RivalModel:
        """What costs of all systems are derived from."""
        return rival_model(self.model, self.c, self.node)

    def lengths(self, seed: int) -> list[int]:
        """A sample of the data: tokens of sequences within the context."""
        return [int(x) for x in read_lengths(MIXES[self.mix], self.context, _SAMPLE, seed).lengths]

    @property
    def reported_lengths(self) -> list[int]:
        """The lengths that reported batches are drawn from, for systems that are set up in hindsight."""
        return self.lengths(EVALUATED)

    def batches(self, steps: int, seed: int = EVALUATED) -> list[list[int]]:
        """The batches that are reported, or others."""
        drawn = sample_batches(self.lengths(seed), self.tokens, steps, seed, self.context)
        return [[int(x) for x in batch] for batch in drawn]


LONG_CELLS = (
    Cell("32b", 64, 131_072, 800_000, "pretraining"),
    Cell("32b", 64, 131_072, 1_000_000, "long"),
)
_OF_HYBRID = 1 / 24  # four heads of 24, in a fourth of its layers
FLAGSHIP = Cell("32b", 64, 32768, 200_000, "CommonCrawl")


# One thing changed at a time: keys and values shared by heads, steps, links, the charge for a micro-batch, the longest
# context, and models whose tables are derived.
WIDE_CELLS = (
    Cell("7b", 16, 32768, 200_000, "pretraining"),
    Cell("7b", 32, 32768, 100_000, "pretraining"),
    Cell("32b", 64, 32768, 100_000, "pretraining"),
    Cell("32b", 64, 131_072, 800_000, "pretraining", keys=1 / 8),
    Cell("7b", 32, 32768, 50_000, "pretraining"),
    Cell("32b", 64, 32768, 50_000, "pretraining"),
    *(replace(FLAGSHIP, between=between) for between in (12.0, 50.0, 100.0)),
    *(replace(FLAGSHIP, c=c) for c in (0.25, 2.0)),
    Cell("7b", 32, 32768, 200_000, "rollouts"),
    *(Cell("32b", gpus, 32768, 200_000, "pretraining") for gpus in (56, 60)),  # a node fewer, and half a one
    Cell("32b", 64, 524_288, 4_000_000, "long"),
    Cell("8b", 32, 131_072, 800_000, "pretraining", keys=1 / 4),
    Cell("70b", 64, 32768, 400_000, "pretraining", keys=1 / 8),
    Cell("a3b", 64, 32768, 400_000, "pretraining", keys=1 / 8),
    Cell("hybrid", 64, 131_072, 800_000, "pretraining", keys=_OF_HYBRID),
)
_LINK = 50.0  # GB/s of each newer GPU between nodes: a card of 400 Gb/s


def _newer(device: str) -> Iterator[Cell]:
    """Cells of H100s or H200s."""
    for model, gpus, keys in (("32b", 64, 1.0), ("8b", 32, 1 / 4), ("70b", 64, 1 / 8)):
        of = f"{model} {device}"
        yield Cell(of, gpus, 32768, 200_000, "CommonCrawl", keys, _LINK)
        yield Cell(of, gpus, 32768, 400_000, "pretraining", keys, _LINK)
        yield Cell(of, gpus, 131_072, 800_000, "pretraining", keys, _LINK)
    yield Cell(f"7b {device}", 32, 32768, 200_000, "pretraining", 1.0, _LINK)
    yield Cell(f"8b {device}", 64, 524_288, 4_000_000, "long", 1 / 4, _LINK)
    yield Cell(f"8b {device}", 32, 32768, 50_000, "pretraining", 1 / 4, _LINK)
    for model, keys in (("a3b", 1 / 8), ("hybrid", _OF_HYBRID)):
        yield Cell(f"{model} {device}", 64, 32768, 400_000, "pretraining", keys, _LINK)
        yield Cell(f"{model} {device}", 64, 131_072, 800_000, "pretraining", keys, _LINK)


NEWER_CELLS = (*_newer("H100"), *_newer("H200"))


def all_cells() -> Iterator[Cell]:
    """Every cell: contexts of 32K, long contexts, what is changed beside them, and newer devices."""
    for (model, gpus), mix in itertools.product(CLUSTERS, SHORT_MIXES):
        yield Cell(model, gpus, 32768, 200_000, mix)
    yield from LONG_CELLS
    yield from WIDE_CELLS
    yield from NEWER_CELLS


def chosen_cells(words: Sequence[str] | None) -> list[Cell]:
    """Cells whose names hold all the words."""
    return [cell for cell in all_cells() if all(word.lower() in str(cell).lower() for word in words or ())]


_NONE, _ALL, _BUT_ATTENTION, _SECOND = "nothing", "all layers again", "all but attention again", "every second product"
_AGAIN = {_NONE: (0.0, 0.0), _ALL: (1 / 3, 2 / 7), _BUT_ATTENTION: (1 / 3, 0.0), _SECOND: (1 / 6, 0.0)}
_NORMS = "norms and activations again"
_AGAIN[_NORMS] = (0.04, 0.0)
_ADAM_S = 1e-9  # of a parameter of a rank on the host


class Run(NamedTuple):
    """A public run: tokens a second of each GPU (or TFLOP/s of the model, below 1,000 where `in_tflops`)."""

    number: str
    model: str
    length: int
    seen: float
    what: str
    source: str
    again: str = _NONE
    tp: int = 1
    hidden_messages: float = 0.0
    on_host: float = 0.0  # parameters of a rank whose states are there
    in_tflops: bool = False
    layers: float = 1.0  # times the model's


_ARCTIC, _TITAN = "stas00/ml-engineering, 8 H200s", "torchtitan's performance pages"
_HOST = "ZeRO-3, Adam on the host"
RUNS = (
    Run("1", "8b H200", 8192, 461, "ZeRO-2", _ARCTIC, in_tflops=True),
    *(Run(number, "8b H200", 1024 * length, seen, _HOST, _ARCTIC, _BUT_ATTENTION, on_host=1e9, in_tflops=True)
      for number, length, seen in
      (("2", 32, 324), ("3", 64, 391), ("4", 128, 420), ("5", 192, 422), ("6", 256, 419))),
    Run("7", "7b H100", 4096, 9600, "FSDP, 128 GPUs", "foundation-model-stack/fms-fsdp, issue 89"),
    Run("16", "70b H100", 8192, 389, "FSDP 32, CP 2, 64 GPUs", "NeMo Automodel", _NORMS, in_tflops=True),
    Run("19", "70b H100", 8192, 597, "TP 8, 256 GPUs", _TITAN, _ALL, tp=8),
    Run("19", "70b H100", 8192, 652, "TP 8 async, 256 GPUs", _TITAN, _ALL, tp=8, hidden_messages=0.5),
    Run("20", "8b H100", 8192, 6514, "FSDP, compile, 128 GPUs", _TITAN, _SECOND),
    Run("20", "8b H100", 8192, 4378, "FSDP 8 and TP 8, compile, 64 GPUs", _TITAN, _SECOND, tp=8),
    Run("20", "8b H100", 8192, 4809, "the same, TP async", _TITAN, _SECOND, tp=8, hidden_messages=0.5),
    Run("21", "8b H100", 1_048_576, 345, "ring of 8, activations on the host, 36 layers", "TRL, PR 6846", _ALL,
        layers=36 / 32),
    Run("8", "7b A800", 4096, 3760, "FSDP, 128 A100s", "fms-fsdp"),
    Run("9", "7b A800", 2048, 4078, "ZeRO-1, 8 A100s", "InternEvo"),
)  # fmt: skip
FITTED = ("1", "7")
NOT_COMPARABLE = {
    "11 to 15": "FP8", "17, 18": "LoRA: no gradients of weights", "22": "models without a table", "25": "TPU",
    "23, 24, 26": "a whole node, or reinforcement learning end to end", "10": "a length without its layout",
}  # fmt: skip


def flops_of(run: Run) -> float:
    """Of a token, as `Model.flops`."""
    return run.layers * split(run.model)[0].flops(run.length)


def seen(run: Run) -> float:
    """Tokens a second of each GPU."""
    return run.seen * 1e12 / flops_of(run) if run.in_tflops else run.seen


def predicted(run: Run) -> float:
    """Tokens a second of each GPU by the table, with what the run adds [Note: what runs add]."""
    table = found_of(run.model).table
    a, b = alone_of(table)
    of_rest, of_attention = _AGAIN[run.again]
    ms = run.layers * (b * (1 + of_rest) + a * run.length * (1 + of_attention))
    if run.tp > 1:
        messages = table[ParallelScheme(run.tp)].b * run.tp - b
        ms += (1 - run.hidden_messages) * messages * (1.5 if run.again == _ALL else 1.0)
    return 1e3 / (ms + 1e3 * _ADAM_S * run.on_host / run.length)


def rate_rows() -> list[dict[str, object]]:
    """A line for each run: seen, by the table, and the difference."""
    rows: list[dict[str, object]] = []
    for run in RUNS:
        rows.append({
            "row": run.number, "model": run.model, "length": run.length, "run": run.what, "computed again": run.again,
            "seen tokens/s": round(seen(run)), "by the table": round(predicted(run)),
            "off": f"{predicted(run) / seen(run) - 1:+.1%}", "TFLOP/s seen": round(seen(run) * flops_of(run) / 1e12),
            "fitted": run.number in FITTED, "source": run.source,
        })  # fmt: skip
    return rows


def median_off() -> float:
    """Of the runs on H100s and H200s that no number was fitted to."""
    held_out = [run for run in RUNS if "A800" not in run.model and run.number not in FITTED]
    return statistics.median(abs(predicted(run) / seen(run) - 1) for run in held_out)


def device_rows() -> list[dict[str, object]]:
    """What each device's tables are derived from."""
    return [
        {"device": one.name, "attention": _rate(one, one.attention), "the rest": _rate(one, one.rest),
         "as jobs reach it": f"{reached(one.name):.2f}", "kernel": one.kernel, "from": one.software, "date": one.date}
        for one in DEVICES.values()
    ]  # fmt: skip


def _rate(device: Device, rate: float) -> str:
    return f"{rate:.0f} TFLOP/s ({rate / device.peak:.0%})" if rate else "as published"


@lru_cache(maxsize=8)
def reached(device: str) -> float:
    """What jobs have of a table's speed, in the median of the device's runs: for ours and rivals alike."""
    return statistics.median(seen(run) / predicted(run) for run in RUNS if run.model.endswith(device))


def model_flops(model: str, lengths: Iterable[int]) -> float:
    """Operations that the model needs for sequences of these lengths, as `analytic.flops_of` counts them: what is
    computed again is not in it."""
    found, _ = split(model)
    return sum(length * found.flops(length) for length in lengths)


def tflops(cell: Cell, batches: Sequence[Sequence[int]], step_ms: float) -> float:
    """10^12 of the model's operations in a second on each GPU, where steps of these batches take `step_ms`."""
    return statistics.fmean(model_flops(cell.model, batch) for batch in batches) / cell.gpus / (1e9 * step_ms)


def most_tflops(model: str) -> float:
    """What a GPU of the model's table computes at most."""
    return split(model)[1].peak
