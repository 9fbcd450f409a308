"""Hugging Face's own loops over the engine: a `transformers.Trainer` and an `accelerate.Accelerator`.

Needs the extra `hf` (accelerate). Each is the class that it is named after until its DeepSpeed config has a block
"hydra"; so one script serves both engines.
"""

from ds_hydra.hugging_face.accelerator import HydraAccelerator
from ds_hydra.hugging_face.trainer import HydraTrainer

__all__ = ["HydraAccelerator", "HydraTrainer"]
