"""Lengths of the first steps that are handed in; a line, once, where all are short against hydra.context_length."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

STEPS = 50
SHORT = 8  # times the longest sequence is no more than the context


class ShortData:
    """What a job's first steps hold. A script may hand in one step in several parts."""

    def __init__(self, context_length: int | None):
        self._context, self._begin = context_length or 0, -1  # no context: nothing to tell
        self._count = self._longest = 0

    def see(self, step: int, lengths: tuple[int, ...]) -> None:
        """Sequences of a step, before it runs. The line comes with the first one that is too late to count."""
        if not self._context:
            return
        if self._begin < 0:
            self._begin = step
        if step < self._begin + STEPS:
            self._count, self._longest = self._count + len(lengths), max((self._longest, *lengths))
            return
        if SHORT * self._longest <= self._context:
            logger.warning(
                "the longest of the %d sequences of the first %d steps has %d tokens, and hydra.context_length is %d: "
                "strategies and memory are kept for sequences that do not come, and without long ones there is little "
                "to gain. If something cuts them, such as max_length of TRL (1024 unless set) or a tokenizer's "
                "truncation, raise that; else set hydra.context_length to what comes",
                self._count, STEPS, self._longest, self._context,
            )  # fmt: skip
        self._context = 0
