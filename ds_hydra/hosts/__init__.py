"""Frameworks in which the engine is one of several that they can train with."""
