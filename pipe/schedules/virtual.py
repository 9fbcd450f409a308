"""Where the ranges of a model's layers are in a pipeline whose stages hold one each, or two. Pure: no torch.

[Note: virtual stages]
A stage that holds two ranges of layers is visited twice by each micro-batch. The ranges are virtual stages, numbered as
the model goes. In a V the first half of them goes down the pipeline and the second half comes up again, so stage r of S
holds the virtual stages r and 2S - 1 - r, its parts 0 and 1. Three stages:

  stage 0   0           5        a micro-batch enters, and its loss is computed
  stage 1     1       4
  stage 2       2   3            from one part to the other without a message

A forward passes half as many layers in each of them, so the last stage begins in half of the time.
"""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """One range of layers: a stage, and which of its ranges; 0 is the only one, or the first of a V."""

    stage: int
    part: int


def virtual_stage(stage: int, part: int, num_stages: int) -> int:
    """The number of a range of layers, from 0 at the model's beginning [Note: virtual stages]."""
    return 2 * num_stages - 1 - stage if part else stage


def place_of(virtual: int, num_stages: int) -> Place:
    """Inverse of `virtual_stage`."""
    return Place(virtual, 0) if virtual < num_stages else Place(2 * num_stages - 1 - virtual, 1)
