"""How the stages of a model compute, which changes what they compute in rounding alone. Pure: no torch.

[Note: stage options]
The options of a job travel whole, from the config to the stages, the profiler, the self-check and the fingerprint of
cost tables, and nobody on the way names one of them. So a new one is a field here, whose name `hydra.fast_paths` then
takes, and what it does where stages are built. Its default is what a model computes by itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

FUNCTIONS = ("auto", "recompute", "off")
RECOMPUTE_MLP = "recompute_mlp"  # the path of functions="recompute"
# Asked for to save memory: without it a job may not fit.
_NEVER_GIVEN_UP = frozenset({"activation_checkpointing", "host_activations", "keep_attention"})
_SETTINGS = {"host_activations": "hydra.offload", "keep_attention": "hydra.activation_checkpointing"}


@dataclass(frozen=True)
class StageOptions:
    """What a job's settings ask of its stages; what a source says of itself is what its model has allowed of it."""

    activation_checkpointing: bool = False
    functions: str = "off"  # one of FUNCTIONS [Note: functions]
    token_sharding: bool = False  # among tensor parallel ranks, where the model allows it [Note: token sharding]
    sp_overlap: bool = False  # of messages and attention [Note: exchange in groups]
    tiles: bool = False  # of rows, where layers are computed again [Note: tiles]
    host_activations: bool = False  # what layers that are computed again keep lies on the host [Note: fetched layers]
    keep_attention: bool = False  # what attention makes in such layers stays [Note: kept attention]

    @classmethod
    def paths(cls) -> tuple[str, ...]:
        """The names that `hydra.fast_paths` takes of them."""
        return (*(one.name for one in fields(cls) if one.name not in _NEVER_GIVEN_UP), RECOMPUTE_MLP)

    @classmethod
    def of_settings(
        cls, activation_checkpointing: bool, paths: Collection[str], host_activations: bool = False,
        keep_attention: bool = False,
    ) -> StageOptions:  # fmt: skip
        """From a config's settings."""
        on: dict[str, Any] = {name: True for name in cls.paths() if name in paths}
        functions = "recompute" if on.pop(RECOMPUTE_MLP, False) else "auto" if "functions" in on else "off"
        on |= {"activation_checkpointing": activation_checkpointing, "host_activations": host_activations}
        on["keep_attention"] = keep_attention
        return cls(**{**on, "functions": functions})

    def as_paths(self) -> tuple[str, ...]:
        """`hydra.fast_paths` that asks for these."""
        on = [name for name in self.paths() if name != RECOMPUTE_MLP and getattr(self, name) not in (False, "off")]
        return (*on, *[RECOMPUTE_MLP] * (self.functions == "recompute"))

    @classmethod
    def from_json(cls, record: Any) -> StageOptions:
        """From an object with any of the fields, as `dataclasses.asdict` makes it; TypeError for anything else."""
        options = cls(**record)
        wrong = [one.name for one in fields(cls) if type(getattr(options, one.name)) is not type(one.default)]
        if wrong:
            raise TypeError(f"{', '.join(wrong)} of another type than a stage's options have")
        return options

    def differences(self, other: StageOptions) -> list[tuple[str, Any, Any, str]]:
        """Name, own value, the other's and the setting that says which of all that differ."""
        again = self.activation_checkpointing or other.activation_checkpointing
        if not again and self.tiles != other.tiles:  # which are of layers that are computed again
            return self.differences(replace(other, tiles=self.tiles))
        both = ((one.name, getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        settings = dict.fromkeys(self.paths(), "hydra.fast_paths") | _SETTINGS
        return [(name, own, others, settings.get(name, f"hydra.{name}")) for name, own, others in both if own != others]

    def fallbacks(self) -> tuple[StageOptions, ...]:
        """What to try in place of these where a model trains otherwise with them.

        First the model's own way of computing, in which most models that are refused are refused too; then these but
        for one option. Empty where there is nothing to give up.
        """
        off: dict[str, Any] = {one.name: one.default for one in fields(self) if one.name not in _NEVER_GIVEN_UP}
        tried = (off, *({name: value} for name, value in off.items()))
        return tuple(dict.fromkeys(one for change in tried if (one := replace(self, **change)) != self))


AS_WRITTEN = StageOptions()  # all as the model's own code computes it
