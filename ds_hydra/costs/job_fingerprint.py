"""For which job a cost table was measured: all that decides whether its times and limits hold for another. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.zero_hetero.errors import ConfigError

# What must be equal between a table and a job, and what to do when it is not. Other things, such as the versions of
# libraries, are written down for a reader and refuse nothing.
_MUST_MATCH = {
    "model": "profile this model",
    "device": "profile on this device",
    "dtype": "profile with this job's dtype, or change bf16/fp16 in the config",
    "attention": "profile with the same attention backend",
}


@dataclass(frozen=True, slots=True)
class JobFingerprint:
    """All that decides whether the times and limits of a measured cost table hold for a job."""

    model: str  # hash of its parameters and heads
    device: str
    dtype: str
    attention: str
    stages: StageOptions = AS_WRITTEN
    num_ranks: int = 0  # MaxLen was made for this many: the masters are shared by them
    threads: int = 0  # of a rank, on a CPU
    versions: tuple[tuple[str, str], ...] = ()  # library, version

    def differences(self, job: JobFingerprint) -> list[str]:
        """What forbids a table that was measured for this job to be used for another, one line each."""
        found = [
            (name, getattr(self, name), getattr(job, name), remedy)
            for name, remedy in _MUST_MATCH.items()
            if getattr(self, name) != getattr(job, name)
        ]
        found += [
            (name, own, other, f"profile with the same {setting}")
            for name, own, other, setting in self.stages.differences(job.stages)
        ]
        return [f"{name}: the table has {own!r}, the job {other!r} ({remedy})" for name, own, other, remedy in found]


def read_job(job: object, place: str) -> JobFingerprint:
    """The fingerprint in a file's JSON; `place` is what errors call the file. ConfigError for anything else."""
    # Newer fields have defaults, so that tables written before there were such fields still load.
    names = {field.name for field in fields(JobFingerprint)}
    if isinstance(job, Mapping) and "stages" not in job:
        beside = {field.name for field in fields(StageOptions)} & set(job)
        job = {name: value for name, value in job.items() if name not in beside} | {
            "stages": {name: job[name] for name in beside}
        }
    if not isinstance(job, Mapping) or not set(_MUST_MATCH) <= set(job) <= names:
        raise ConfigError(f'{place}: "job" must hold {", ".join(sorted(_MUST_MATCH))}; profile again')
    try:
        stages, versions = StageOptions.from_json(job["stages"]), tuple(dict(job.get("versions", {})).items())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f'{place}: "stages" or "versions" of "job" cannot be read ({error}); profile again'
        ) from error
    return JobFingerprint(**{**job, "stages": stages, "versions": versions})
