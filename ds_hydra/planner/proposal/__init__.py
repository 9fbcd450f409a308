"""Length data in, candidate strategies out. Pure: no torch."""
