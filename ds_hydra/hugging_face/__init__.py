"""Hugging Face's own loops over the engine: a `transformers.Trainer` and an `accelerate.Accelerator`.

Needs the extra `hf` (accelerate). Each is the class that it is named after until its DeepSpeed config has a block
"hydra"; so one script serves both engines.
"""

from ds_hydra.config.versions import refuse_older

refuse_older("torch", "transformers", "deepspeed", "accelerate")

from ds_hydra.host.launch import tell_locks  # noqa: E402
from ds_hydra.hugging_face.accelerator import HydraAccelerator, teach_hosts  # noqa: E402
from ds_hydra.hugging_face.trainer import HydraTrainer  # noqa: E402

teach_hosts()  # before a script makes TrainingArguments or a plugin
tell_locks()  # of operators that DeepSpeed compiles then

__all__ = ["HydraAccelerator", "HydraTrainer"]
