"""Sequences and their order: contents, the global sampler with its cursor, sources of lengths."""
