"""What is compared: a model on so many GPUs, a context, tokens of a step, a mix of lengths. Pure: no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ds_hydra.commands.figures import FOLDER
from ds_hydra.data.lengths import WEB_PAGES, read_lengths, sample_batches
from ds_hydra.rivals.costs import RivalModel
from tools.systems.devices import rival_model

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
    """One comparison; `model` is "32b" on A800s, or with the device behind it, "32b H200" (`tools.systems.devices`).

    `keys`: heads of keys and values over those of queries; `between`: GB/s of each GPU between nodes; `c`: times the
    table's charge for a micro-batch.
    """

    model: str
    gpus: int
    context: int
    tokens: int
    mix: str
    keys: float = 1.0
    between: float = 25.0
    c: float = 1.0

    def __str__(self) -> str:
        text = f"{self.model} {self.gpus} GPUs {self.context // 1024}K {self.tokens // 1000}K {self.mix}"
        text += f" GQA {self.keys:g}" if self.keys < 1.0 else ""
        text += f" {self.between:g} GB/s" if self.between != _BETWEEN else ""
        return text + (f" c {self.c:g}" if self.c != 1.0 else "")

    @property
    def device(self) -> str:
        """ "A800", "H100" or "H200"."""
        return self.model.partition(" ")[2] or "A800"

    @property
    def of_model(self) -> RivalModel:
        """What costs of all systems are derived from."""
        return rival_model(self.model, self.c)

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
