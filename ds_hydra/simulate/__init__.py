"""A step before it runs: what every rank would do and when, what it would hold, and pictures of it. Pure: no torch."""
