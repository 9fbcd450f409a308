"""What counts as a difference of two runs."""

import torch

from ds_hydra.testing.comparison import relative


def test_what_is_rounding_of_the_largest_is_compared_with_that() -> None:
    noise, other = torch.tensor([2e-16, -1e-16]), torch.tensor([-3e-16, 1e-16])
    assert relative(other, noise) > 1
    assert relative(other, noise, of_all=0.1) < 1e-14
    wrong = torch.tensor([1e-4, 0.0])
    assert relative(wrong, noise, of_all=0.1) > 1e-4, "a gradient where there is none"
    small = torch.tensor([1e-9, 0.0])
    assert relative(2 * small, small, of_all=0.1) == 1, "a small one that is twice as large"
