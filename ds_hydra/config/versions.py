"""Releases of other packages that jobs run with, and those that are refused before anything is imported from them.

The bounds are pyproject.toml's; a test compares the two. Newer releases than were tried are pip's matter: here they
pass. Pure: no torch.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from ds_hydra.zero_hetero.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Needed:
    """The oldest release of a package that is supported, and why; releases above it that are not, each with a reason.

    `below` is the first release that was not tried, as pip is told. `extra` of ds-hydra installs the package.
    """

    package: str
    oldest: str
    why: str
    below: str = ""
    broken: tuple[tuple[str, str], ...] = ()
    extra: str = ""

    @property
    def requirement(self) -> str:
        """As pip takes it, e.g. transformers>=5.5,<6,!=5.6.0."""
        ends = [f"<{self.below}"] * bool(self.below) + [f"!={release}" for release, _ in self.broken]
        return ",".join([f"{self.package}>={self.oldest}", *ends])

    def objection(self, installed: str) -> str:
        """What is wrong with an installed release; "" where nothing is. An alpha or a build counts as its release."""
        for release, why in self.broken:
            if _numbers(installed) == _numbers(release):
                return f"{self.package} {installed} is broken: {why}"
        if _numbers(installed) < _numbers(self.oldest):
            oldest = ".".join(map(str, _numbers(self.oldest)))
            return f"{self.package} {installed} is older than {oldest}: {self.why}"
        return ""


NEEDED = (
    Needed(
        "torch", "2.11.0a0", "it cannot keep products in 16 bits from being split along what is summed", below="2.16",
    ),
    Needed(
        "transformers", "5.5", "no older release was compared with one process", below="6",
        broken=(("5.6.0", "FlashAttention ends in an AttributeError in every model without attention sinks"),),
    ),
    Needed("deepspeed", "0.18.6", "no older release was compared with one process", below="0.20"),
    Needed("accelerate", "1.13", "no older Trainer was compared with one process", extra="hf"),
    Needed("trl", "1.1", "no older trainers were compared with TRL's own", extra="trl"),
)  # fmt: skip
_BY_NAME = {one.package: one for one in NEEDED}


def refuse_older(*packages: str) -> None:
    """Raise ConfigError with the command to run where an installed package is too old or broken, or one of an extra is
    missing. To be called before anything is imported from them."""
    wrong = [(one, text) for one in map(_BY_NAME.__getitem__, packages) if (text := _objection(one))]
    if not wrong:
        return
    command = " ".join([sys.executable, "-m pip install", *(f'"{one.requirement}"' for one, _ in wrong)])
    raise ConfigError(f"ds-hydra cannot run in this environment: {'; '.join(text for _, text in wrong)}. Run {command}")


def _objection(needed: Needed) -> str:
    try:
        return needed.objection(metadata.version(needed.package))
    except metadata.PackageNotFoundError:
        if needed.extra and find_spec(needed.package) is None:
            return f'{needed.package} is not installed, which the extra "ds-hydra[{needed.extra}]" brings'
        return ""  # a checkout on the path, or missing: importing it tells


def _numbers(version: str) -> list[int]:
    """Of "2.11.0a0+cpu" [2, 11]: zeros at the end count for nothing."""
    found = [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0])]
    while found and not found[-1]:
        found.pop()
    return found
