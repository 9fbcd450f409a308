"""One pipeline: strategies, schedules, stages, tensor and sequence parallelism, attention, the runtime.

`strategy` and `schedule` are pure planning and import no torch.
"""

if __name__ != "ds_hydra.pipe":
    raise ImportError(f"import this package as 'ds_hydra.pipe', not as {__name__!r}")
