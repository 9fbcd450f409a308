"""A user's model in; the limits that it sets to token ids and positions, where it names any, out."""

from __future__ import annotations

from torch import nn


def vocab_size(model: nn.Module) -> int | None:
    """Rows of the model's input embedding; None when the model does not say which module that is."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return getattr(embedding, "num_embeddings", None)


def max_positions(model: nn.Module) -> int | None:
    """The number of positions that the model's config allows; None when it names none."""
    config = getattr(model, "config", None)
    text_config = getattr(config, "get_text_config", lambda: config)()
    positions = getattr(text_config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None
