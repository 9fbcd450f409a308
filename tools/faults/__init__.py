"""The parts of `tools.check_faults`: what is set off, and what survived."""
