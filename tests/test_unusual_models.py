"""Models that are not plain decoders, and changed ones: all ranks of a pipeline in one process against the plain model.

The pipeline has stages of unequal depth, tensor and sequence parallel degree. Every third of them is tried here;
`tools.check_families` tries all, and all are trained by ranks of their own in the table of cases.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.runs import Outcome, run_pipeline, uneven_data
from tests.support.adapted_models import ADAPTED, ADAPTED_WITHOUT_TP
from tests.support.case import UNUSUAL
from tests.support.changed_models import CHANGED, CHANGED_LINEARS
from tests.support.families import VOCAB, build_model, reference_model

# Beyond and below the limits of the models with windows and two sets of rotary frequencies.
DATA = uneven_data(VOCAB, [(7, 300, 3), (23, 5)])
MIXED = "(sp2[0:1] > tp2[1:3] > tp1[3:4])"
WITHOUT_TP = "(sp2[0:1] > tp1[1:3] > sp2[3:4])"


def difference(outcome: Outcome, plain: Outcome) -> dict[str, float]:
    """How far loss, eval and each gradient are from the plain model's, relative to their largest entry."""
    gradients = plain.gradients
    least = 1e-6 * max(float(gradient.abs().max()) for gradient in gradients.values())
    found = {"loss": abs(outcome.loss / plain.loss - 1), "eval": abs(outcome.eval_loss / plain.eval_loss - 1)}
    return found | {name: _apart(outcome.gradients[name], gradient, least) for name, gradient in gradients.items()}


def _apart(value: Tensor, reference: Tensor, least: float) -> float:
    return float((value - reference).abs().max()) / max(least, float(reference.abs().max()))


@pytest.mark.drawn
@pytest.mark.parametrize("name", [*UNUSUAL, *CHANGED, *CHANGED_LINEARS, *ADAPTED, *ADAPTED_WITHOUT_TP][::6])
def test_same_as_the_plain_model(name: str) -> None:
    shape = PipelineShape.parse(WITHOUT_TP if name in (*CHANGED_LINEARS, *ADAPTED_WITHOUT_TP) else MIXED)
    source = CausalLM(base_of(build_model(name, torch.float64)))
    plain = Plain(reference_model(name, torch.float64), source.flow.draws, source.layers_path).outcome(DATA)
    apart = difference(run_pipeline(source, place_pipeline(shape, 0, source.plan.num_layers), DATA), plain)
    assert max(apart.values()) < 1e-9, max(apart.items(), key=lambda item: item[1])
