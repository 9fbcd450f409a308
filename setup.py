"""Package map: the top-level folders pipe/ and zero_hetero/ become sub-packages of `ds_hydra`.

In a checkout ds_hydra/pipe and ds_hydra/zero_hetero are links to these folders. The map names the folders themselves
instead, each with all of its sub-folders, so that wheels and source archives hold every module once. An archive holds
no links: they are made anew here, so that an unpacked one is built, and tested, as a checkout is.
"""

import os
from pathlib import Path

from setuptools import find_packages, setup

LINKED = {"ds_hydra.pipe": "pipe", "ds_hydra.zero_hetero": "zero_hetero"}
LINKS = {package.replace(".", "/"): folder for package, folder in LINKED.items()}
LINKS["ds_hydra/commands/tables"] = "examples/cost_tables"

for link, target in LINKS.items():
    if not os.path.lexists(link):
        Path(link).symlink_to(os.path.relpath(target, Path(link).parent))


def below(package: str, folder: str) -> dict[str, str]:
    """A package and its sub-packages, with the folder of each; links are left to the map above."""
    names = find_packages(folder, exclude=[pattern for link in LINKED.values() for pattern in (link, f"{link}.*")])
    return {package: folder, **{f"{package}.{name}": f"{folder}/{name.replace('.', '/')}" for name in names}}


PACKAGES = {
    name: folder
    for package, top in {"ds_hydra": "ds_hydra", **LINKED}.items()
    for name, folder in below(package, top).items()
}

setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    # Cost tables and lengths that commands know by name, as in `ds-hydra preview --cost-table a800-32b`.
    package_data={
        "ds_hydra": ["py.typed"],
        "ds_hydra.commands": ["tables/llama_*.json", "tables/demo_*.json", "tables/*.csv"],
    },
)
