"""How many of how many held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """One figure: how many of how many held, and what did not."""

    name: str
    passed: int = 0
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def count(self, good: bool, what: str) -> None:
        self.tried += 1
        self.passed += good
        if not good:
            self.failures.append(what)
            print(f"  {self.name}: {what}", flush=True)


def refused(action: Callable[[], object], words: Sequence[str], kind: type[Exception]) -> str:
    """What is wrong if `action` does not raise a `kind` whose message has all `words`; "" when nothing is."""
    try:
        action()
    except kind as error:
        return "" if all(word in str(error) for word in words) else f"the message is not clear: {error}"
    return "was not refused"
