"""Schedules: in which order each stage of a pipeline runs its micro-batches. Pure: no torch."""
