"""The commands that users call: `ds-hydra profile`, `preview`, `report`, `memory` and `convert`."""
