"""The parts of `tools.check_load`."""
