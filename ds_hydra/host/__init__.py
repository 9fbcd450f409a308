"""The folder for DeepSpeed's internals: its engine's surface, launch, settings, optimizers, loss scale."""

from ds_hydra.config.versions import refuse_older

refuse_older("torch", "transformers", "deepspeed")
