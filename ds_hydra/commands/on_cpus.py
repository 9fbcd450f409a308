"""Settings of this process for ranks on its CPUs; they count for libraries that are imported later. No torch."""

from __future__ import annotations

import os


def on_cpus() -> None:
    """Let torch and DeepSpeed see no device but the CPU, and let each rank have one thread."""
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
