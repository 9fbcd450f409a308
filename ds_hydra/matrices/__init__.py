"""Optimizers that need whole matrices, over masters that stay where they are; the core imports none of it by itself."""
