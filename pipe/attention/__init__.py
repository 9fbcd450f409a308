"""Attention over packed rows: the door that Hugging Face calls, and the backends behind it."""
