"""The parts of `tools.check_swap`."""
