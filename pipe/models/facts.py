"""What single runs of parts of a model tell of it, in a form that can be sent to other ranks.

None of it depends on the values of parameters: of ranks that have the same model by its fingerprint one runs it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ds_hydra.pipe.model_plan import ShardRule
from ds_hydra.pipe.models.boxes import Box, Boxes
from ds_hydra.pipe.models.draws import Place
from ds_hydra.pipe.models.flow import Door, Flow
from ds_hydra.pipe.models.recognise import Functions, Gate, Norm
from ds_hydra.pipe.models.token_rules import TokenRules, UnnamedRules


@dataclass(frozen=True)
class ModelFacts:
    """What was found of a model under the options of a job."""

    flow: Flow
    unnamed: UnnamedRules
    tokens: TokenRules
    functions: Functions
    boxes: Boxes

    def to_json(self) -> str:
        """A text from which `from_json` makes an equal object, in an equal order."""
        return json.dumps(_to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> ModelFacts:
        """From the text of `to_json`, of the same version of this file."""
        facts = _from_plain(json.loads(text))
        assert isinstance(facts, cls), "the text is that of a model's facts"
        return facts


_KINDS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (ModelFacts, Boxes, Box, Flow, Door, Place, UnnamedRules, ShardRule, TokenRules, Functions, Norm, Gate,
                 tuple, list, frozenset, dict)
}  # fmt: skip


def _to_plain(value: Any) -> Any:
    """Objects of _KINDS as their name and parts; JSON alone would make lists of all of them."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, type):
        return {"kind": value.__name__}
    if is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, frozenset):
        parts = sorted(value)
    else:
        parts = list(value.items() if isinstance(value, dict) else value)
    return {"kind": type(value).__name__, "parts": [_to_plain(part) for part in parts]}


def _from_plain(raw: Any) -> Any:
    if not isinstance(raw, dict):
        return raw
    kind = _KINDS[raw["kind"]]
    if "parts" not in raw:
        return kind
    parts = [_from_plain(part) for part in raw["parts"]]
    return kind(parts) if kind in (tuple, list, frozenset, dict) else kind(*parts)
