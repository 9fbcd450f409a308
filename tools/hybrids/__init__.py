"""The parts of `tools.check_chunks`."""
