"""What is compared: a model on so many GPUs, a context, tokens of a step, a mix of lengths. Pure: no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ds_hydra.commands.shipped import FOLDER
from ds_hydra.data.length_sources import WEB_PAGES, read_lengths, sample_batches
from ds_hydra.rivals.setting import RivalModel
from tools.systems.devices import base_model, found_of, inside_of

MIXES = {
    "CommonCrawl": WEB_PAGES,
    "Wikipedia": str(FOLDER / "wikipedia_lengths.txt"),
    "pretraining": str(FOLDER / "pretraining_length_histogram.csv"),
    "rollouts": str(FOLDER / "rollout_length_histogram.csv"),
    "tail": str(FOLDER / "tail_length_histogram.csv"),  # 1.95 % above 32K: bench_tail
    "long": "lognormal:9.2,1.4",  # half of all sequences have 10K tokens and more
}
CLUSTERS = (("7b", 16), ("7b", 32), ("32b", 32), ("32b", 64))
CONTEXTS, TOKENS, SHORT_MIXES = (16384, 32768), (100_000, 200_000), ("CommonCrawl", "Wikipedia", "pretraining")
EVALUATED, SEEN_BEFORE = 77, 1  # seeds of batches that are reported, and of lengths that ours may prepare with
_SAMPLE = 60_000
_BETWEEN = 25.0


@dataclass(frozen=True)
class Cell:
    """One comparison; `model` is "7b" or "32b" of the A800 tables, or of H100s ("7b H100").

    `keys`: heads of keys and values over those of queries; `between`: GB/s of each GPU between nodes.
    """

    model: str
    gpus: int
    context: int
    tokens: int
    mix: str
    keys: float = 1.0
    between: float = 25.0

    def __str__(self) -> str:
        text = f"{self.model} {self.gpus} GPUs {self.context // 1024}K {self.tokens // 1000}K {self.mix}"
        text += f" GQA {self.keys:g}" if self.keys < 1.0 else ""
        return text + (f" {self.between:g} GB/s" if self.between != _BETWEEN else "")

    @property
    def of_model(self) -> RivalModel:
        """What costs of all systems are derived from."""
        return rival_model(self.model)

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


@lru_cache(maxsize=16)
def rival_model(model: str) -> RivalModel:
    """A model by its name in cells."""
    return RivalModel.of_shipped(f"a800-{base_model(model)}", found_of(model), inside_of(model))


LONG_CELLS = (
    Cell("32b", 64, 131_072, 800_000, "pretraining"),
    Cell("32b", 64, 131_072, 1_000_000, "long"),
)


# One thing changed at a time: keys and values shared by eight heads, small steps, slow links, other devices, and the
# longest context.
WIDE_CELLS = (
    Cell("32b", 64, 131_072, 800_000, "pretraining", keys=1 / 8),
    Cell("7b", 32, 32768, 50_000, "pretraining"),
    Cell("32b", 64, 32768, 50_000, "pretraining"),
    Cell("32b", 64, 32768, 200_000, "pretraining", between=12.0),
    Cell("7b H100", 32, 32768, 200_000, "pretraining", between=50.0),
    Cell("32b H100", 64, 32768, 200_000, "pretraining", between=50.0),
    Cell("32b", 64, 524_288, 4_000_000, "long"),
)


def all_cells() -> Iterator[Cell]:
    """Every cell: the largest cluster last, then those of long contexts, and then what is changed beside them."""
    for (model, gpus), context, tokens, mix in itertools.product(CLUSTERS, CONTEXTS, TOKENS, SHORT_MIXES):
        yield Cell(model, gpus, context, tokens, mix)
    yield from LONG_CELLS
    yield from WIDE_CELLS


def chosen_cells(words: Sequence[str] | None) -> list[Cell]:
    """Cells whose names hold all the words."""
    return [cell for cell in all_cells() if all(word.lower() in str(cell).lower() for word in words or ())]
