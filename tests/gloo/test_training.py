"""Rows of the table of training cases, of which a run draws some; `tools.check_equivalence` runs all of them."""

from __future__ import annotations

from pathlib import Path

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.testing import RankRun, run_ranks
from tests.support.case import FLOAT32, Case
from tests.support.cases import CASES, UNDER_STRICT
from tests.support.drawn_tests import commit, number
from tests.support.equivalence import compare, difference, num_ranks, samples_of, traced_once, train
from tests.support.random_cases import random_case

QUICK = [case for case in CASES if case.quick and case.name not in UNDER_STRICT]


@pytest.mark.drawn
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_same_as_one_process(case: Case) -> None:
    case = case.shortened()
    missed = compare(case).missed(case.aims, case.name)
    assert not missed, missed


@pytest.mark.parametrize("seed", [1 + number(commit(Path(__file__).parents[2])) % 16])
def test_a_case_drawn_by_the_commit(seed: int) -> None:
    """One of sixteen; `python -m tools.check_equivalence --random N --seed SEED` trains others."""
    case = random_case(seed)
    missed = compare(case, timeout=240).missed(case.aims, str(case))
    assert not missed, missed


@pytest.mark.drawn
def test_same_plan_twice_is_bit_identical() -> None:
    """Two steps with slices, in a V and under the list order; beside the latter a pipeline has whole sequences."""
    case = Case("twice", "mixtral", ("tp2pp2/v", "sp2 + pp2/list"), FLOAT32, steps=2, slices=True).shortened()
    data = samples_of(case)
    with traced_once(case):
        one, other = (run_ranks(train, num_ranks(case), case, data, timeout=240)[0] for _ in range(2))
    for name, value in one.parameters.items():
        assert torch.equal(_bits(value), _bits(other.parameters[name])), name
    for key, moments in one.moments.items():
        assert all(torch.equal(_bits(moments[name]), _bits(other.moments[key][name])) for name in moments)
    assert [step.result.loss for step in one.steps] == [step.result.loss for step in other.steps]


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.int32)


def test_comparison_sees_small_errors() -> None:
    """The proof itself is checked: errors just above the aims, in any of what is compared, are reported."""
    case = Case(
        "sees", "llama_tied", ("tp1",), FLOAT32, optimizer="SGD", steps=2, lengths=(9, 5, 12), tokens_per_step=9
    )
    data = samples_of(case)
    run: RankRun = run_ranks(train, 1, case, data, timeout=120)[0]
    assert not difference(case, data, run).missed(case.aims, case.name)
    step = run.steps[-1]
    name = "model.layers.1.self_attn.o_proj.weight"
    for tensors, what in ((step.result.gradients, "gradient"), (run.parameters, "parameter"), (step.before, None)):
        saved = tensors[name]
        tensors[name] = saved.clone()
        tensors[name][3, 5] += 3e-5 * saved.abs().max() if what else 0.5
        missed = difference(case, data, run).missed(case.aims, case.name)
        tensors[name] = saved
        if what is not None:
            assert any(f"{what} differs" in line and name in line for line in missed), missed
        else:
            assert missed, "other parameters have other gradients"
    assert not difference(case, data, run).missed(case.aims, case.name)
    dropped = step.result.gradients.pop(name)
    with pytest.raises(AssertionError, match="on one side only"):
        difference(case, data, run)
    step.result.gradients[name] = dropped * float("nan")
    assert difference(case, data, run).missed(case.aims, case.name)
