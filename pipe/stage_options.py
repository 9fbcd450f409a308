"""How the stages of a model compute, which changes what they compute in rounding alone. Pure: no torch.

[Note: stage options]
The options of a job travel whole, from the config to the stages, the profiler, the self-check and the fingerprint of
cost tables, and nobody on the way names one of them. So a new one is a field here, the setting of the same name in
`HydraConfig`, and what it does where stages are built. Its default is what a model computes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

FUNCTIONS = ("auto", "recompute", "off")
_NEVER_GIVEN_UP = frozenset({"activation_checkpointing"})  # asked for to save memory: without it a job may not fit


@dataclass(frozen=True)
class StageOptions:
    """What a job's settings ask of its stages; what a source says of itself is what its model has allowed of it."""

    activation_checkpointing: bool = False
    functions: str = "off"  # one of FUNCTIONS [Note: functions]
    token_sharding: bool = False  # among tensor parallel ranks, where the model allows it [Note: token sharding]
    sp_overlap: bool = False  # of messages and attention [Note: exchange in groups]

    @classmethod
    def of_settings(cls, settings: Any) -> StageOptions:
        """From a config's settings, which have the same names and say "auto" or "off" of what is on or off here."""
        asked: dict[str, Any] = {one.name: getattr(settings, one.name) for one in fields(cls)}
        for one in fields(cls):
            if isinstance(one.default, bool):
                asked[one.name] = asked[one.name] in (True, "auto")
        return cls(**asked)

    @classmethod
    def from_json(cls, record: Any) -> StageOptions:
        """From an object with any of the fields, as `dataclasses.asdict` makes it; TypeError for anything else."""
        options = cls(**record)
        wrong = [one.name for one in fields(cls) if type(getattr(options, one.name)) is not type(one.default)]
        if wrong:
            raise TypeError(f"{', '.join(wrong)} of another type than a stage's options have")
        return options

    def differences(self, other: StageOptions) -> list[tuple[str, Any, Any]]:
        """Name, own value and the other's of all that differ."""
        both = ((one.name, getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        return [(name, own, others) for name, own, others in both if own != others]

    def fallbacks(self) -> tuple[StageOptions, ...]:
        """What to try in place of these where a model trains otherwise with them.

        First the model's own way of computing, in which most models that are refused are refused too; then these but
        for one option. Empty where there is nothing to give up.
        """
        off: dict[str, Any] = {one.name: one.default for one in fields(self) if one.name not in _NEVER_GIVEN_UP}
        tried = (off, *({name: value} for name, value in off.items()))
        return tuple(dict.fromkeys(one for change in tried if (one := replace(self, **change)) != self))


AS_WRITTEN = StageOptions()  # all as the model's own code computes it
