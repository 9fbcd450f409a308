"""Measurements on GPUs in parts: a bench, with a device and a budget of seconds, in; figures and missed aims out."""
