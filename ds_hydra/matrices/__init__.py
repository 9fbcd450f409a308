"""Optimizers that need whole parameters, over masters that stay where they are; the core imports none of it."""
