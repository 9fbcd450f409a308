"""How the stages of a language model compute, which changes what they compute in rounding alone. Pure: no torch."""

from __future__ import annotations

from typing import NamedTuple

FUNCTIONS = ("auto", "recompute", "off")


class StageOptions(NamedTuple):
    """What a job's settings ask of the stages of a Hugging Face model."""

    activation_checkpointing: bool = False
    token_sharding: bool = False  # among tensor parallel ranks, where the model allows it [Note: token sharding]
    functions: str = "off"  # one of FUNCTIONS [Note: functions]
    sp_overlap: bool = False  # of messages and attention [Note: exchange in groups]
