"""Which frameworks that train or serve can be installed in one environment with this package, by what they ask pip for.

For each, every package that both ask for must have a release that both take, on a Python that both take. The tables are
what the frameworks' metadata said on 29 November 2026. What the packages ask for in their turn is not followed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
EXCEPTIONS = ["areal==1.0.4", "mosaicml-streaming==0.13.0"]  # docs/support.md counts the others


class Host(NamedTuple):
    """What a framework asks for: Python, and packages."""

    python: str
    packages: str


# Names with a version are packages; the others are installed from a checkout, which has no metadata to ask for.
HOSTS: Mapping[str, Host] = {
    "accelerate==1.15.0": Host(">=3.10", "numpy>=1.17 torch>=2.0.0 safetensors>=0.4.3"),
    "trl==1.16.0": Host(">=3.11", "accelerate>=1.10.1 numpy>=1.26.0 transformers>=4.56.2"),
    "axolotl==0.21.0": Host(
        ">=3.12", "torch>=2.13.0,<2.15.0 transformers==5.20.1 accelerate==1.15.0 trl==1.14.1 peft==0.21.2 "
        "numba>=0.63.1,<1 numpy>=2.1,<3 pydantic==2.13.5 tokenizers==0.23.3",
    ),
    "vllm==0.33.0": Host(
        ">=3.11,<3.15", "torch==2.14.0 transformers>=5.16.1,<5.21 numba==0.65.0 pydantic>=2.12 safetensors>=0.6.2",
    ),
    "torchtitan==0.3.0": Host(">=3.11", "safetensors tokenizers>=0.15"),
    "open-instruct": Host(">=3.12,<3.13", "torch>=2.10 transformers>=5.4.0 deepspeed>=0.18.3 accelerate>=1.10.1"),
    "sglang==0.5.23": Host(">=3.11", "torch==2.14.1 transformers==5.19.0 numba==0.65.1 tokenizers==0.23.2"),
    "ms-swift==4.6.0": Host(">=3.9", "transformers>=4.33,<5.20 trl>=0.15,<1.0 peft>=0.11,<0.21 numpy matplotlib"),
    "nemo-automodel==0.7.0": Host(">=3.11", "torch>=2.8.0 transformers==5.18.0"),
    "unsloth==2026.10.9": Host(
        ">=3.9,<3.15", "torch>=2.4.0,<2.15 transformers>=4.52.4,<=5.17.0 trl>=0.18.2,<=1.15.0 "
        "accelerate>=0.34.1 peft>=0.18",
    ),
    "skyrl==0.4.0": Host(">=3.12,<3.15", "transformers>=5.6.1,<=5.16.1 peft==0.18.1 safetensors>=0.6.2"),
    "openrlhf==0.11.2": Host(">=3.10", "transformers==5.15.0 deepspeed==0.19.6"),
    "megatron-bridge==0.6.2": Host(">=3.12,<3.13", "torch>=2.6.0 transformers>=5.8,<=5.12.1 peft>=0.18.1"),
    "verl==0.9.1": Host(">=3.10,<3.13", "transformers>=5.5.3,<5.11,!=5.6.0 numpy>=2.0.0"),
    "NeMo-RL": Host(">=3.13.14,<3.14", "torch==2.11.0 transformers>=5.5.0,<5.9.0"),
    "llamafactory==0.9.5": Host(
        ">=3.11", "torch>=2.4.0 transformers>=4.55.0,<=5.6.0 accelerate>=1.3.0,<=1.11.0 trl>=0.18.0,<=0.24.0 "
        "peft>=0.18.0,<=0.18.1 matplotlib>=3.7",
    ),
    "areal==1.0.4": Host(">=3.11,<3.13", "torch>=2.9.1,<2.11 transformers>=5.0.0,<=5.3.0 peft<=0.18.1"),
    "mosaicml-streaming==0.13.0": Host(">=3.10", "torch>=1.10,<3 transformers>=4.21.3,<5 numpy>=1.21.5,<2.2"),
}  # fmt: skip
# Of the packages that both sides bound: the last releases of each minor, and those that are named above.
RELEASES: Mapping[str, str] = {
    "torch": "2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.0 2.14.1 2.15.0",
    "transformers": "4.57.6 5.3.0 5.4.0 5.5.4 5.6.0 5.6.2 5.7.0 5.8.1 5.9.0 5.10.4 5.11.0 5.12.1 5.13.1 5.14.1 5.15.0 "
    "5.15.1 5.16.1 5.17.0 5.18.0 5.19.0 5.20.1 5.20.2 5.21.1 5.22.2 5.23.0 5.24.0",
    "deepspeed": "0.18.5 0.18.6 0.18.9 0.19.6 0.19.8",
    "numpy": "1.26.4 2.0.2 2.1.3 2.2.6 2.3.5 2.4.6",
    "numba": "0.61.2 0.63.1 0.65.0 0.65.1 0.68.1",
    "pydantic": "2.12.5 2.13.5 2.14.3",
    "safetensors": "0.7.0 0.8.0",
    "matplotlib": "3.10.9",
    "tqdm": "4.70.1",
}
ROOT = Path(__file__).resolve().parents[2]


def own_packages() -> list[Requirement]:
    """What this package asks for, without its extras."""
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text("utf-8"), re.M | re.S)
    return [Requirement(line) for line in re.findall(r'"(.+)"', block)]


def disagreement(host: Host, own: Sequence[Requirement], releases: Mapping[str, str]) -> tuple[str, str]:
    """The newest Python on which both can be installed, and ""; or "" and what they disagree about there."""
    found = "no Python is taken by both"
    for python in reversed(PYTHONS):
        patches = (f"{python}.{patch}" for patch in range(30))
        if not any(SpecifierSet(host.python).contains(patch) for patch in patches):
            continue
        wanted = [one for one in map(Requirement, host.packages.split()) if one.name in releases]
        refused = [
            f"{mine.name}: {mine.specifier} and {theirs.specifier}"
            for mine in own
            for theirs in wanted
            if mine.name == theirs.name
            and not any((mine.specifier & theirs.specifier).contains(one) for one in releases[mine.name].split())
        ]
        if not refused:
            return python, ""
        found = "; ".join(refused)
    return "", found


def installed(own: Sequence[Requirement]) -> dict[str, tuple[str, str]]:
    """Each framework's `disagreement`."""
    return {name: disagreement(host, own, RELEASES) for name, host in HOSTS.items()}


def test_most_frameworks_install_beside_this_package() -> None:
    found = installed(own_packages())
    assert sorted(name for name, (python, _) in found.items() if not python) == EXCEPTIONS, found


def test_frameworks_are_shut_out_by_bounds_that_are_too_narrow() -> None:
    own = [Requirement(text) for text in ("torch>=2.13,<2.15", "deepspeed>=0.19.8,<0.20", "transformers>=5.20,<6")]
    found = installed(own)
    assert sum(bool(python) for python, _ in found.values()) == 6
    assert found["verl==0.9.1"] == ("", "transformers: <6,>=5.20 and !=5.6.0,<5.11,>=5.5.3")
