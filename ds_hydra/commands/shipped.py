"""Cost tables and lengths that come with the package: a name in, the path of its file out. Pure: no torch."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "tables"
FILES = {
    "a800-7b": "llama_7b_a800.json",  # LLaMA 7B and 32B on A800-80GB, as Hydraulis published them
    "a800-32b": "llama_32b_a800.json",
    "pretraining": "pretraining_length_histogram.csv",  # lengths of 13 million documents
    "rollouts": "rollout_length_histogram.csv",  # of reasoning models, a distribution fitted to published quantiles
}


def shipped(name: str) -> str:
    """The path of the file shipped under `name`. Any other text is returned unchanged: it is the user's own path."""
    return str(FOLDER / FILES[name]) if name in FILES else name
