"""Which optimizers of whole parameters are taken, and what small parameters show of them."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor as OfTransformers

from ds_hydra.host.optimizers import optimizer_recipe
from ds_hydra.matrices import lamb_adafactor
from ds_hydra.matrices.lamb_adafactor import Adafactor, Box, Lamb, TorchAdafactor
from ds_hydra.matrices.owners import MatrixParam
from ds_hydra.matrices.sums import OfSums, Sums, Values, prove_sums
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.layout import BucketSpec
from ds_hydra.zero_hetero.masters import MasterShards

SETTINGS: list[tuple[type[OfSums], dict[str, Any]]] = [
    (Lamb, {"weight_decay": 0.1}),
    (Lamb, {"eps_inside_sqrt": True, "bias_correction": False, "max_coeff": 0.5}),
    (Adafactor, {}),
    (Adafactor, {"lr": 0.1, "relative_step": False, "scale_parameter": False, "beta1": 0.9, "weight_decay": 0.1}),
    (TorchAdafactor, {"weight_decay": 0.1}),
    (TorchAdafactor, {"eps": (0.5, 1e-3), "maximize": True}),
]


def proven(kind: Any, settings: dict[str, Any]) -> None:
    (group,) = kind([nn.Parameter(torch.zeros(1))], **settings).param_groups
    prove_sums(kind, group, kind.in_one_process)


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_small_parameters_show_that_it_is_what_one_process_makes(kind: Any, settings: dict[str, Any]) -> None:
    proven(kind, settings)


GIVE, AROUND, HELD, OF, RATIO = Sums.give, Box.around, Values.held, Box.of.__func__, lamb_adafactor.ratio  # type: ignore[attr-defined]


def of_an_interval(self: Sums, totals: Any) -> None:
    """Each rank takes what it has added up itself for the whole."""
    (optimizer,) = (held for held in [self.own])  # type: ignore[attr-defined]
    own: list[Tensor] = []
    for _ in totals:
        own.append(self.partial(optimizer, own))
    GIVE(self, own)


def noting(self: Sums, optimizer: Any, totals: Any) -> Tensor:
    self.own = optimizer  # type: ignore[attr-defined]
    return PARTIAL(self, optimizer, totals)


PARTIAL = Sums.partial


def of_a_part(self: Box, part: Any, values: Tensor) -> Any:
    """Rows that this rank has in part are left out of the means."""
    box, of = AROUND(self, part, values)
    box[0] = 0
    return box, of


def as_it_lies(cls: Any, param: Any) -> Box:
    """Rows and columns of a matrix that lies turned are taken for one another's numbers."""
    box: Box = OF(cls, param)
    return box._replace(outer=box.inner, inner=box.outer) if param.dim == len(param.shape) - 1 else box


def of_other_elements(self: Values, key: str) -> Tensor:
    return HELD(self, key).roll(1)


MUTANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "norm of an interval": (Lamb, {"give": (Sums, of_an_interval), "partial": (Sums, noting)}),
    "means of an interval": (TorchAdafactor, {"give": (Sums, of_an_interval), "partial": (Sums, noting)}),
    "row means of a part": (Adafactor, {"around": (Box, of_a_part)}),
    "a matrix transposed": (Adafactor, {"of": (Box, classmethod(as_it_lies))}),
    "moments of the wrong interval": (Lamb, {"held": (Values, of_other_elements)}),
    "squares of the wrong interval": (TorchAdafactor, {"held": (Values, of_other_elements)}),
    "one ratio twice": (Lamb, {"ratio": (lamb_adafactor, lambda norms, group: RATIO(norms, group) ** 2)}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_small_parameters_show_what_is_not(name: str) -> None:
    kind, mutants = MUTANTS[name]
    with contextlib.ExitStack() as mutated:
        for attribute, (where, mutant) in mutants.items():
            mutated.enter_context(mock.patch.object(where, attribute, mutant))
        with pytest.raises((ConfigError, RuntimeError), match=r"apart|shape"):
            proven(kind, {"weight_decay": 0.1})


def test_a_sum_that_does_not_go_around_shows_before_step_0() -> None:
    masters = MasterShards([BucketSpec("a", (("w", 6),))], 1, 3, "cpu")
    with pytest.raises(AssertionError, match="each rank's sums count once"):
        Sums(masters, [MatrixParam(0, "w", 0, (6,), None)], lambda param: (1,), None).connect()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "Lamb", "params": {"max_grad_norm": 1.0}}, "max_grad_norm: clip by the config's gradient_clipping"),
        ({"name": "Lamb", "params": {"amsgrad": True}}, "amsgrad"),
        ({"name": "Lamb", "params": {"betas": [2.0, 0.9]}}, "betas are"),
        ({"name": "Lamb", "params": {"max_coeff": 0.001}}, "max_coeff is 0.001, below min_coeff 0.01"),
        ({"name": "Lamb", "params": {"momentum": 0.9}}, "momentum.*DeepSpeed's FusedLamb"),
        (
            {"name": "Adafactor", "params": {"scale_parameter": False}},
            "scale_parameter.*a config's Adafactor is torch's",
        ),
        ({"name": "Adafactor", "params": {"d": 0.5}}, "threshold d should be >= 1"),
        ({"name": "LARS"}, "neither torch nor DeepSpeed nor transformers has one"),
        ({"client": lambda groups: type("Lamb", (torch.optim.SGD,), {})(groups, lr=1)}, 'instead.*type "Lamb"'),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        optimizer_recipe(Model(), **arguments).build([[nn.Parameter(torch.zeros(3))]])


def test_an_optimizer_that_is_given_keeps_its_identity_settings_and_scheduler() -> None:
    model = Model()
    client = OfTransformers(model.parameters(), lr=0.4, relative_step=False, scale_parameter=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 0.5**step)
    made = optimizer_recipe(model, client=client).build([[nn.Parameter(torch.zeros(7))]])
    assert made is client
    assert isinstance(client, Adafactor)
    scheduler.step()
    assert (client.param_groups[0]["lr"], client.param_groups[0]["scale_parameter"]) == (0.2, False)
    by_callable = optimizer_recipe(model, client=torch.optim.Adafactor).build([[nn.Parameter(torch.zeros(7))]])
    assert isinstance(by_callable, TorchAdafactor)


def test_a_part_of_a_parameter_is_never_updated_by_its_own_sums() -> None:
    part = nn.Parameter(torch.ones(5))
    part.grad = torch.ones(5)
    optimizer = Lamb([part])
    optimizer.exchange = mock.Mock()
    with pytest.raises(AssertionError, match="run_exchange"):
        optimizer.step()
