"""The folder for DeepSpeed's internals: its engine's surface, launch, settings, optimizers, loss scale."""
