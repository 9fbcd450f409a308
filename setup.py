"""Package map: top-level folders become sub-packages of `ds_hydra`."""

from setuptools import setup

PACKAGES = {
    "ds_hydra": "ds_hydra",
    "ds_hydra.checkpoint": "ds_hydra/checkpoint",
    "ds_hydra.planner": "ds_hydra/planner",
    "ds_hydra.zero_hetero": "zero_hetero",
    "ds_hydra.pipe": "pipe",
}

setup(packages=list(PACKAGES), package_dir=PACKAGES)
