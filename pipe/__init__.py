"""One pipeline: strategies, schedules, stages, tensor and sequence parallelism, attention, the runtime.

`shape`, `placement`, `model_plan` and `schedules` are pure planning and import no torch.
"""

from ds_hydra.zero_hetero.deepspeed_names import handed_on

if __name__ != "ds_hydra.pipe":
    raise ImportError(f"import this package as 'ds_hydra.pipe', not as {__name__!r}")

__getattr__ = handed_on(__name__)
