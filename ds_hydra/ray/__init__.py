"""Jobs on a Ray cluster: `train` runs a script or a function, one actor a rank; lost ones are replaced.

Nothing here imports Ray before it is asked to train; the extra `ds-hydra[ray]` installs it.
"""

from ds_hydra.ray.job import train

__all__ = ["train"]
