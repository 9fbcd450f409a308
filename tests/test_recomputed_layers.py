"""Layers that the backward computes again: as many as the share says, the first ones, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_hydra.pipe.models.recompute import Recomputing
from ds_hydra.pipe.placement import whole_layers


@given(st.integers(1, 200), st.data())
def test_a_share_of_whole_layers_is_that_many(layers: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, layers))
    assert whole_layers(number / layers, layers) == number
    assert whole_layers((number + 0.1) / (layers + 1), layers) <= layers


def test_other_shares_are_rounded_up() -> None:
    assert [whole_layers(share, 7) for share in (0.0, 0.01, 0.5, 0.99, 1.0)] == [0, 1, 4, 7, 7]


@pytest.mark.parametrize(("share", "twice"), [(0.0, 0), (0.3, 2), (0.5, 2), (1.0, 4)])
def test_the_first_layers_run_once_more_in_the_backward(share: float, twice: int) -> None:
    layers: Any = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)).double()
    calls, of_hooks = [0] * 4, [0] * 4
    for place, layer in enumerate(layers):
        layer[0].register_forward_hook(lambda *_, place=place: calls.__setitem__(place, calls[place] + 1))
        layer.register_forward_hook(lambda *_, place=place: of_hooks.__setitem__(place, of_hooks[place] + 1))

    def gradients() -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
        out = x
        for layer in layers:
            out = layer(out)
        return list(torch.autograd.grad(out.sum(), [x, *layers.parameters()]))

    kept = gradients()
    recomputing = Recomputing(4)
    recomputing.install(layers)
    assert all(map(torch.equal, kept, gradients())), "none to begin with"
    recomputing.take(share)
    calls[:], of_hooks[:] = [0] * 4, [0] * 4
    assert all(map(torch.equal, kept, gradients()))
    assert calls == [2] * twice + [1] * (4 - twice)
    assert of_hooks == [1] * 4, "hooks of a layer run with its call"
    with torch.no_grad():
        layers[0](torch.zeros(2, 3, dtype=torch.float64))
    assert calls[0] == 2 + (twice > 0), "nothing is computed again where there is no backward"
