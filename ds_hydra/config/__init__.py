"""The config: the block "hydra", checks of its values, what becomes of DeepSpeed's own settings. Pure: no torch."""
