"""The table of training cases: each is trained on ranks and in one process of plain Hugging Face, sequence by sequence.

A run draws some, shortened; the long rows are five steps each, and more seeds of cases that are drawn at random.
"""

from __future__ import annotations

from pathlib import Path

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.testing import RankRun, run_ranks
from ds_hydra.testing.comparison import relative
from tests.support.case import FLOAT32, Case
from tests.support.cases import CASES, UNDER_STRICT
from tests.support.drawn_tests import commit, number
from tests.support.equivalence import compare, difference, num_ranks, plan_of, samples_of, traced_once, train
from tests.support.random_cases import random_case

QUICK = [case for case in CASES if case.quick and case.name not in UNDER_STRICT]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case.shortened(), marks=pytest.mark.drawn, id=case.name) for case in QUICK]
    + [pytest.param(case, marks=pytest.mark.long, id=f"whole {case.name}") for case in CASES],
)
def test_same_as_one_process(case: Case) -> None:
    missed = compare(case, timeout=300).missed(case.aims, case.name)
    assert not missed, missed


@pytest.mark.long
def test_half_of_the_rows_with_tensor_parallel_ranks_share_tokens() -> None:
    with_tp = [case for case in CASES if case.has_tp]
    assert 2 * sum(plan_of(case, spread=False).token_sharding for case in with_tp) >= len(with_tp)


DRAWN = 1 + number(commit(Path(__file__).parents[2])) % 16


@pytest.mark.parametrize("seed", [DRAWN, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 51))])
def test_a_case_drawn_by_the_commit(seed: int) -> None:
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


def test_what_is_rounding_of_the_largest_is_compared_with_that() -> None:
    noise, other = torch.tensor([2e-16, -1e-16]), torch.tensor([-3e-16, 1e-16])
    assert relative(other, noise) > 1
    assert relative(other, noise, of_all=0.1) < 1e-14
    wrong = torch.tensor([1e-4, 0.0])
    assert relative(wrong, noise, of_all=0.1) > 1e-4, "a gradient where there is none"
    small = torch.tensor([1e-9, 0.0])
    assert relative(2 * small, small, of_all=0.1) == 1, "a small one that is twice as large"
