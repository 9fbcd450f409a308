"""Which of the tests that are marked drawn a run takes."""

from __future__ import annotations

import hashlib
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

SHARE = 1 / 6


def commit(root: Path) -> str:
    """That which is tried, which draws: each run of it takes the same tests, and the next commit takes others."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return ""
    return done.stdout.strip()


def drawn(names: Sequence[str], share: float, seed: str, *, least: int = 0) -> set[str]:
    """As near to this share of the names as can be, but at least so many; each is as likely as any other."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    return set(ordered[: max(least, round(share * len(ordered)))])


def number(seed: str) -> int:
    """A number below a million that the seed draws."""
    return int(hashlib.sha256(seed.encode()).hexdigest(), 16) % 10**6


def taken(names: Sequence[str], seed: str) -> set[str]:
    """`SHARE` of each test's rows, told by what stands in brackets: where that is no whole number, one more in so many
    of the commits; and `SHARE` of all others."""
    alone, rows = list[str](), defaultdict[str, list[str]](list)
    for name in names:
        test, bracket, _ = name.partition("[")
        (rows[test] if bracket else alone).append(name)
    found = drawn(alone, SHARE, seed)
    for test, some in rows.items():
        least, rest = divmod(SHARE * len(some), 1.0)
        found |= drawn(some, 0.0, seed, least=int(least) + (number(f"{seed} {test}") < rest * 10**6))
    return found


def add_option(parser: pytest.Parser) -> None:
    """The option that says of how many tests a run takes some."""
    parser.addoption(
        "--share", type=float,
        help="draw this share of the tests, 1 for all; without it a sixth of those marked drawn, if no test is named",
    )  # fmt: skip


def draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave in `items` what the run takes, behind all else that leaves some out."""
    share, seed, kept = config.getoption("--share"), commit(config.rootpath), {item.nodeid for item in items}
    if share is not None:
        kept = drawn(sorted(kept), share, seed)
    elif not config.getoption("keyword") and not any("::" in argument for argument in config.args):
        marked = [item.nodeid for item in items if "drawn" in item.keywords]
        kept -= set(marked) - taken(marked, seed)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]
