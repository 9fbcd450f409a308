"""The parts of `python -m tools.demo`: what ds-hydra is for, shown in two minutes on two CPU cores."""
