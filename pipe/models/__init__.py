"""Stages made from the user's own model: a Hugging Face causal language model, or a DeepSpeed layer list."""
