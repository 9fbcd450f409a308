"""The commands that users call: `ds-hydra profile`, `preview`, `report`, `memory`, `check` and `convert`."""
