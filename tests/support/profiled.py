"""The small model that profiles of tests measure, and the links that they take for measured."""

from __future__ import annotations

import json
from pathlib import Path

from ds_hydra.profiling.links import LinkFigure, Links

LINKS = Links(tuple(LinkFigure(op, 2, 100.0, 1e9) for op in ("all_reduce", "all_gather", "all_to_all", "p2p")))
SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip


def write_model(folder: Path) -> Path:
    """The config of the small model, as a file."""
    path = folder / "model.json"
    path.write_text(json.dumps(SMALL))
    return path
