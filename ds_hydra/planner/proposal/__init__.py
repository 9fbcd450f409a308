"""Length data in, candidate strategies out; `by_paper` is the paper's method, kept as a baseline. Pure: no torch."""
