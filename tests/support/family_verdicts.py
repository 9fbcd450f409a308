"""A class of language models in, what training a tiny model of it in stages comes to out: equal, refused, or wrong."""

from __future__ import annotations

import json
import random
import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ds_hydra.pipe.models import meta_copy
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.positions import special_tokens
from ds_hydra.pipe.placement import Strategy, place_pipeline
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.compare import compare, finite
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.precision import doubled
from ds_hydra.self_check.runs import Data, Outcome, run_pipeline
from ds_hydra.self_check.subjects import tried_data
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.adapted_models import ADAPTED, ADAPTED_WITHOUT_TP
from tests.support.case import UNUSUAL
from tests.support.changed_models import CHANGED, CHANGED_LINEARS
from tests.support.families import build_model
from tests.support.tiny_families import class_names, tiny_model

EXPECTED = Path(__file__).with_name("families_expected.json")
# What the list calls a pipeline -> its shape, for four layers.
SHAPES: Mapping[str, str] = {
    "tp3": "tp3",
    "pp3": "(tp1[0:1] > tp1[1:3] > tp1[3:4])",
    "sp3": "sp3",
    "mixed": "(tp3[0:2] > sp3[2:4])",
}
_EIGHT_HEADS = {"tp2": "tp2", "mixed": "(sp2[0:1] > tp2[1:3] > tp1[3:4])"}
_WITHOUT_TP = {"pp3": SHAPES["pp3"], "mixed": "(sp2[0:1] > tp1[1:3] > sp2[3:4])"}
# Unusual models, models that their users changed or adapted: all are to be equal.
ROWS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys((*UNUSUAL, *CHANGED, *ADAPTED), _EIGHT_HEADS),
    **dict.fromkeys((*CHANGED_LINEARS, *ADAPTED_WITHOUT_TP), _WITHOUT_TP),
}
EQUAL, DIFFERS, CRASHES = "equal", "differs", "crashes"
# What a refusal's sentence must hold -> the reason that the list gives.
REASONS = (
    ("no tiny model", "a tiny config of it is at odds with itself"),
    ("once for each sequence", "its layers cannot run once for each sequence of a pack"),
    ("is not causal", "its attention has a feature that packs lack"),
    ("draws random numbers|of type 'dynamic'", "plain training of it depends on chance or order"),
    ("with tp1 for this model", "tensor parallel ranks cannot share it"),
    ("with pp1 for this model", "its layers cannot be cut apart"),
    (
        "encoder-decoder|no language modelling head|cannot run one packed|module list|numbers the tokens"
        "|computes its logits in",
        "it is no language model of one stack of layers over tokens",
    ),
)


def drawn_names(one_in: int = 10, seed: int = 7) -> list[str]:
    """One in `one_in` of the classes, drawn by a fixed seed."""
    names = list(class_names())
    return sorted(random.Random(seed).sample(names, len(names) // one_in))


def expected() -> dict[str, Any]:
    """The committed list: class -> a word for all shapes, or a word for each."""
    found: dict[str, Any] = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    return found


def judge(name: str, shapes: Mapping[str, str] | None = None) -> tuple[str, dict[str, str]]:
    """The name of a class or of one of ROWS, and by shape "equal", a reason, or what went wrong; "seconds" of all."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    verdicts = _verdicts(name, shapes or ROWS.get(name, SHAPES))
    return name, verdicts | {"seconds": f"{time.perf_counter() - began:.1f}"}


def short(verdict: str) -> str:
    """A verdict without its sentence."""
    return verdict.partition(": ")[0]


def entry(verdicts: Mapping[str, str]) -> str | dict[str, str]:
    """What the list says of a class."""
    each = {shape: short(verdict) for shape, verdict in verdicts.items() if shape != "seconds"}
    return next(iter(each.values())) if len(set(each.values())) == 1 else each


def _verdicts(name: str, shapes: Mapping[str, str]) -> dict[str, str]:
    try:
        model = base_of(build_model(name, torch.float64)) if name in ROWS else tiny_model(name, class_names()[name])
    except Exception as error:
        return dict.fromkeys(shapes, _reason(f"no tiny model ({type(error).__name__}: {error})"))
    try:
        with doubled():
            by_numbers = CausalLM(model, StageOptions(token_sharding=True)).facts
            with mock.patch.object(meta_copy, "FEW_PARAMETERS", 0):  # as large models are looked at
                source = CausalLM(model, StageOptions(token_sharding=True))
    except Exception as error:
        return dict.fromkeys(shapes, _told(error))
    # Numbers choose experts, by rounding alone where they tie, so layers may run unlike each other that are alike; then
    # more of them are examined.
    told, expected = (replace(one, flow=replace(one.flow, ran=())) for one in (by_numbers, source.facts))
    if told != expected:
        return dict.fromkeys(shapes, f"{DIFFERS}: runs with numbers tell something else than those without")
    data = tried_data(96, [(6, 33, 2), (12,)], special=special_tokens(model), left_out=source.uncounted)
    try:
        right = Plain(model, source.flow.draws, source.layers_path).outcome(data)
        if not finite(right):
            raise ValueError("its loss is not finite")
    except Exception as error:
        return dict.fromkeys(shapes, _reason(f"no tiny model ({type(error).__name__}: {error})"))
    return {name: _run(source, right, data, shape) for name, shape in shapes.items()}


def _run(source: CausalLM, right: Outcome, data: Data, shape: str) -> str:
    try:
        pipeline = place_pipeline(PipelineShape.parse(shape), 0, source.plan.num_layers)
        source.plan.check(Strategy((pipeline,)))
        outcome = run_pipeline(source, pipeline, data)
    except Exception as error:
        return _told(error)
    found = compare(right, outcome)
    return EQUAL if found.what is None else f"{DIFFERS}: {found.what}"


def _told(error: Exception) -> str:
    if isinstance(error, ConfigError | PlanError):
        return _reason(str(error))
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{CRASHES}: {type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"


def _reason(text: str) -> str:
    for pattern, reason in REASONS:
        if re.search(pattern, text):
            return f"{reason}: {text}"
    return f"{CRASHES}: a refusal without a reason of the list: {text}"
