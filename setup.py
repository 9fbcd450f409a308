"""Package map: the top-level folders pipe/ and zero_hetero/ become sub-packages of `ds_hydra`."""

from setuptools import find_packages, setup

LINKED = {"ds_hydra.pipe": "pipe", "ds_hydra.zero_hetero": "zero_hetero"}
INSIDE = find_packages("ds_hydra", exclude=("pipe", "pipe.*", "zero_hetero", "zero_hetero.*"))
PACKAGES = {
    "ds_hydra": "ds_hydra",
    **{f"ds_hydra.{name}": f"ds_hydra/{name.replace('.', '/')}" for name in INSIDE},
    **LINKED,
    **{f"{p}.{name}": f"{d}/{name.replace('.', '/')}" for p, d in LINKED.items() for name in find_packages(d)},
}

setup(packages=list(PACKAGES), package_dir=PACKAGES)
