"""Hugging Face's own loops over the engine: a `transformers.Trainer` and an `accelerate.Accelerator`.

Needs the extra `hf` (accelerate). Each is the class that it is named after until its DeepSpeed config has a block
"hydra"; so one script serves both engines.
"""

from ds_hydra.hugging_face.accelerator import HydraAccelerator
from ds_hydra.hugging_face.host_configs import teach_hosts
from ds_hydra.hugging_face.trainer import HydraTrainer

teach_hosts()  # before a script makes TrainingArguments or a plugin

__all__ = ["HydraAccelerator", "HydraTrainer"]
