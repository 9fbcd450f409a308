"""Optimizers of whole parameters: which are taken, owners of matrices, the iteration, what small parameters show."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.muon import original_muon
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode
from transformers.optimization import Adafactor as OfTransformers

from ds_hydra.host.optimizers import optimizer_recipe
from ds_hydra.matrices import exchange, lamb_adafactor, muon, proof
from ds_hydra.matrices.exchange import Exchange, Method, orthogonalized
from ds_hydra.matrices.lamb_adafactor import Adafactor, Box, Lamb, TorchAdafactor
from ds_hydra.matrices.muon import Muon
from ds_hydra.matrices.owners import (
    NEAR_EVEN,
    Kind,
    MatrixParam,
    deal,
    interval,
    iteration_flops,
    loads,
    master_parts,
    whole_layout,
)
from ds_hydra.matrices.sums import OfSums, Sums, Values, prove_sums
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.layout import BucketSpec, even_layout
from ds_hydra.zero_hetero.masters import MasterShards
from ds_hydra.zero_hetero.transfer_plan import plan_transfer
from tools.bench_muon import even_step_s, simulated

KINDS: tuple[Kind, ...] = ("gram", "standard", "torch")


def of_llama(hidden: int, wide: int, layers: int, kind: Kind = "standard") -> list[tuple[int, int, bool]]:
    shapes = [(hidden, hidden)] * 4 + [(wide, hidden)] * 2 + [(hidden, wide)]
    return [(1, iteration_flops(*shape, kind), True) for shape in shapes] * layers


@pytest.mark.parametrize(
    ("sizes", "ranks", "ratio"),
    [((4096, 11008, 32), 32, 1.0), ((4096, 11008, 32), 64, 1.02), ((6656, 17920, 60), 32, NEAR_EVEN),
     ((6656, 17920, 60), 64, 1.07)],  # of 6.6 matrices a rank, two sizes: no deal of whole ones is nearer
)  # fmt: skip
def test_the_busiest_rank_is_near_an_even_share(sizes: tuple[int, int, int], ranks: int, ratio: float) -> None:
    costs = of_llama(*sizes)
    load = loads(costs, deal(costs, ranks), ranks)
    assert sum(load) == sum(cost for _, cost, _ in costs)
    assert max(load) * ranks <= ratio * sum(load)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 50), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 9),
)
@settings(max_examples=40, deadline=None)
def test_each_matrix_has_one_owner(costs: list[tuple[int, int, bool]], ranks: int) -> None:
    owned = deal(costs, ranks)
    for param, (count, _, apart) in enumerate(costs):
        mine = [one for one in owned if one.param == param]
        assert [at for one in mine for at in range(one.first, one.last)] == [*range(count)]
        assert apart or len(mine) == 1
    load = loads(costs, owned, ranks)
    longest = max(cost if apart else cost * count for count, cost, apart in costs)
    assert max(load) <= sum(load) / ranks + longest, "nobody gets more while another has less"


@given(st.integers(1, 7), st.integers(0, 3), st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_matrices_go_to_their_owners_and_back(ranks: int, shift: int, before: int) -> None:
    params = [MatrixParam(0, "a", before, (3, 5), 1), MatrixParam(0, "b", before + 17, (4, 2, 3), 0)]
    numel = before + 17 + 24 + 3
    owned = deal([(1, 15, True), (4, 6, True)], ranks)
    even, whole = even_layout(numel, ranks), whole_layout(numel, params, owned, 0, ranks)
    parts = master_parts(even, params, 0, shift)
    matrices = {at for param in params for at in range(param.start, param.start + param.numel)}
    held = [{at for piece in own for at in range(piece.start, piece.stop)} for own in parts.pieces]
    for rank in range(ranks):
        of = {rank, (rank - shift) % ranks}
        mine = {at for r in of for piece in even.pieces[r] for at in range(piece.start, piece.stop)}
        assert held[rank] == mine & matrices
    moved = plan_transfer(even, whole), plan_transfer(whole, parts)
    assert sum(message.numel for message in moved[0].messages) == len(matrices)
    assert sum(message.numel for message in moved[1].messages) == sum(map(len, held))
    for number, first, last, rank in owned:
        start, stop = interval(params[number], first, last)
        assert any(piece.start <= start and stop <= piece.stop for piece in whole.pieces[rank])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_flops_are_those_of_the_products(kind: Kind, shape: tuple[int, int]) -> None:
    for steps in (1, 2, 3, 5, 6):
        with FlopCounterMode(display=False) as counted:
            orthogonalized(torch.randn(shape, dtype=torch.float64), Method(kind, steps), torch.float64)
        assert counted.get_total_flops() == iteration_flops(*shape, kind, steps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (3, 6, 20)])
def test_the_bits_are_deepspeeds_and_torchs(kind: Kind, shape: tuple[int, ...]) -> None:
    """In the types that each of them iterates in here."""
    torch.compiler.set_stance("force_eager")
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    if kind == "torch" and len(shape) == 2:
        expected = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    elif kind == "torch":
        pytest.skip("torch's own takes no stacks")
    elif kind == "gram":
        expected = original_muon.zeropower_via_gram_newtonschulz(matrix, 5)
    else:
        expected = original_muon.zeropower_via_newtonschulz5(matrix, 5)
    made = orthogonalized(matrix, Method(kind), torch.float32)
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.proj = nn.Linear(4, 6)
        self.other = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)


def groups_of(model: nn.Module, given: Any = None, **params: Any) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    recipe = optimizer_recipe(model, name="Muon", params=params, model_parameters=given)
    return [(group.names, group.settings) for group in recipe.groups]


def test_which_parameters_take_muon() -> None:
    model = Model()
    (matrices, own), (others, other) = groups_of(model, lr=1.0, muon_lr=0.5, weight_decay=0.1, betas=[0.5, 0.6])
    assert matrices == ("proj.weight", "other.weight")
    assert others == ("embed.weight", "proj.bias", "other.bias", "norm.weight", "norm.bias")
    assert (own["lr"], own["weight_decay"], own["use_muon"], own["name"]) == (0.5, 0.1, True, "muon-params")
    assert (other["lr"], other["betas"], other["use_muon"]) == (1.0, (0.5, 0.6), False)
    model.other.weight.use_muon = False  # type: ignore[assignment, attr-defined]
    assert groups_of(model)[0][0] == ("proj.weight",), "a script marks its parameters"
    given = [{"params": [model.embed.weight], "use_muon": True, "lr": 3.0}, {"params": [model.proj.bias], "name": "b"}]
    first, second = groups_of(model, given, muon_lr=0.5)
    assert (first[0], first[1]["lr"], first[1]["name"]) == (("embed.weight",), 3.0, "group0-muon-params")
    assert (second[1]["lr"], second[1]["name"]) == (3e-4, "b-adam-params"), "DeepSpeed's own default"
    model.proj.bias.use_muon = True  # type: ignore[assignment, attr-defined]
    with pytest.raises(ConfigError, match=r"'proj.bias' has the shape \(6,\) and is no matrix"):
        groups_of(model)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("muon", {"qk_clip_threshold": 100}, "qk_clip_threshold: clipping of queries and keys .MuonClip"),
    ("muon", {"ns_metod": "gram"}, "'ns_metod'.*mean 'ns_method'"),
    ("muon", {"ns_method": "cubic"}, "ns_method is 'cubic'.*'gram', 'standard'"),
    ("muon", {"adjust_lr_fn": "rms"}, "adjust_lr_fn is 'rms'.*'match_rms_adamw'"),
    ("muon", {"ns_steps": 0}, "ns_steps is 0"),
    ("muon", {"momentum": 1.0}, "momentum is 1.0"),
    ("muon", {"muon_lr": -1.0}, "lr is -1.0"),
    ("muon", {"betas": [2.0, 0.9]}, "beta"),
    ("muon", {"per_head_muon": True}, "per_head_muon: DeepSpeed's rule finds no weight of queries"),
    ("Lamb", {"max_grad_norm": 1.0}, "max_grad_norm: clip by the config's gradient_clipping"),
    ("Lamb", {"amsgrad": True}, "amsgrad"),
    ("Lamb", {"betas": [2.0, 0.9]}, "betas are"),
    ("Lamb", {"max_coeff": 0.001}, "max_coeff is 0.001, below min_coeff 0.01"),
    ("Lamb", {"momentum": 0.9}, "momentum.*DeepSpeed's FusedLamb"),
    ("Adafactor", {"scale_parameter": False}, "scale_parameter.*a config's Adafactor is torch's"),
    ("Adafactor", {"d": 0.5}, "threshold d should be >= 1"),
    ("LARS", {}, "neither torch nor DeepSpeed nor transformers has one"),
]


@pytest.mark.parametrize(("name", "params", "words"), REFUSED)
def test_what_is_refused(name: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        optimizer_recipe(Model(), name=name, params=params)


def test_a_class_that_only_has_the_name_is_refused() -> None:
    def lamb(groups: Any) -> Any:
        return type("Lamb", (torch.optim.SGD,), {})(groups, lr=1)

    with pytest.raises(ConfigError, match=r'instead.*type "Lamb"'):
        optimizer_recipe(Model(), client=lamb).build([[nn.Parameter(torch.zeros(3))]])


GIVEN: list[tuple[Callable[[Any], torch.optim.Optimizer], type, dict[str, Any]]] = [
    # a script's object, what it becomes, and settings that it keeps
    (lambda weights: torch.optim.Muon(weights, lr=0.4, weight_decay=0.3), Muon,
     {"weight_decay": 0.3, "adjust_lr_fn": "original"}),
    (lambda weights: OfTransformers(weights, lr=0.4, relative_step=False, scale_parameter=False), Adafactor,
     {"scale_parameter": False}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "kept"), GIVEN)
def test_an_optimizer_that_is_given_keeps_its_identity_settings_and_scheduler(
    make: Any, kind: type, kept: dict[str, Any]
) -> None:
    model = Model()
    client = make([model.proj.weight, model.other.weight])
    scheduler = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 0.5**step)
    assert optimizer_recipe(model, client=client).build([[nn.Parameter(torch.zeros(7))]]) is client
    assert isinstance(client, kind)
    assert getattr(client, "heads", None) == ({"proj.weight": 1, "other.weight": 1} if kind is Muon else None)
    group = client.param_groups[0]
    assert {"lr": group["lr"], **{key: group[key] for key in kept}} == {"lr": 0.4, **kept}
    scheduler.step()
    assert client.param_groups[0]["lr"] == 0.2


def test_a_callable_makes_torchs_adafactor_the_engines() -> None:
    made = optimizer_recipe(Model(), client=torch.optim.Adafactor).build([[nn.Parameter(torch.zeros(7))]])
    assert isinstance(made, TorchAdafactor)


@pytest.mark.parametrize("kind", [Muon, Lamb])
def test_a_part_of_a_parameter_is_never_updated_by_itself(kind: Any) -> None:
    part = nn.Parameter(torch.ones(5))
    part.grad = torch.ones(5)
    optimizer = kind([{"params": [part], "use_muon": True}])
    optimizer.exchange = mock.Mock()
    with pytest.raises(AssertionError, match="run_exchange"):
        optimizer.step()


def options(**own: Any) -> dict[str, Any]:
    optimizer = Muon([{"params": [nn.Parameter(torch.zeros(1))], "use_muon": True, **own}])
    return optimizer.param_groups[0]


@pytest.mark.parametrize("own", [{}, {"ns_method": "standard"}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}])
def test_small_matrices_show_that_it_is_muon(own: dict[str, Any]) -> None:
    proof.prove(Muon, options(**own, weight_decay=0.1))


@pytest.mark.parametrize("own", [{}, {"ns_method": "standard"}])
def test_of_the_same_gradients_an_update_has_the_same_bits_on_any_number_of_ranks(own: dict[str, Any]) -> None:
    """Strategies sum gradients in other orders, so that theirs differ in the last bits; nothing behind them does."""
    values, grads = proof.drawn(proof.KINDS, 2)
    narrow = [{name: value.float() for name, value in one.items()} for one in (values, *grads)]
    found = []
    for ranks in (1, 2, 5):
        with mock.patch.object(proof, "RANKS", ranks):
            found.append(proof._on_ranks(Muon, options(**own), proof.KINDS, narrow[0], narrow[1:])[0])
    for name, value in found[0].items():
        assert all(torch.equal(value, other[name]) for other in found[1:]), name


def turned_lies_as_it_is(flat: Tensor, shape: tuple[int, ...], dim: int | None, parts: int) -> Tensor:
    """A square matrix is taken as it lies."""
    return flat.view(shape) if len(shape) == 2 and shape[0] == shape[1] else FROM_FLAT(flat, shape, dim, parts)


def half_the_heads(param: MatrixParam) -> tuple[int, int, int]:
    return (param.heads // 2, 2 * BATCH(param)[1], param.shape[1]) if param.heads > 1 else BATCH(param)


def twice(matrix: Tensor, *rest: Any) -> Tensor:
    return ORTHOGONALIZED(ORTHOGONALIZED(matrix, *rest), *rest)


def by_other_momentum(param: Tensor, state: Any, group: Any) -> Tensor:
    return DIRECTION(param, {key: value.roll(1) for key, value in state.items()}, group)


def each_micro_batch(self: Exchange, begun: Any, groups: Any) -> Any:
    """What is sent back is orthogonalized as often as there are micro-batches, here two."""
    plain, counted = exchange.turned, Counter[str]()

    def turned(flat: Tensor, param: MatrixParam, count: int, *rest: Any) -> Tensor:
        counted[param.name] += count
        return plain(plain(flat, param, count, *rest), param, count, *rest)

    with mock.patch.object(exchange, "turned", turned):
        coming = OWNERS_TURN(self, begun, groups)
    self.counts += counted
    return coming


FROM_FLAT, TURNED, ORTHOGONALIZED, DIRECTION = (
    exchange.from_flat, exchange.turned, exchange.orthogonalized, exchange.direction
)  # fmt: skip
BATCH: Callable[[MatrixParam], tuple[int, int, int]] = MatrixParam.batch.fget  # type: ignore[attr-defined]
OWNERS_TURN = Exchange.owners_turn
MUON_MUTANTS: dict[str, tuple[Any, str, Any, str]] = {
    "a matrix transposed": (exchange, "from_flat", turned_lies_as_it_is, "square, turned"),
    "a head split wrongly": (MatrixParam, "batch", property(half_the_heads), "heads"),
    "orthogonalized twice": (exchange, "orthogonalized", twice, "apart"),
    "once per micro-batch": (Exchange, "owners_turn", each_micro_batch, r"\(square, turned\) 4 times, where it is 2"),
    "momentum of the wrong interval": (exchange, "direction", by_other_momentum, "apart"),
}


@pytest.mark.parametrize("name", MUON_MUTANTS)
def test_small_matrices_show_what_is_not_muon(name: str) -> None:
    where, attribute, mutant, words = MUON_MUTANTS[name]
    with mock.patch.object(where, attribute, mutant), pytest.raises(ConfigError, match=words):
        proof.prove(Muon, options())


def test_small_matrices_show_a_transpose_that_only_16_bit_tell_apart() -> None:
    """Of a square matrix there and back, which in FP64 is the same."""

    def transposed(flat: Tensor, param: MatrixParam, *rest: Any) -> Tensor:
        square = param.shape[0] == param.shape[1]
        return TURNED(flat, replace(param, dim=None) if square else param, *rest)

    with mock.patch.object(exchange, "turned", transposed), pytest.raises(ConfigError, match="transpose of a square"):
        proof.prove(Muon, options())


def test_what_a_checkpoint_keeps_of_one_element() -> None:
    optimizer = Muon([{"params": [nn.Parameter(torch.zeros(1))], "use_muon": matrices} for matrices in (True, False)])
    assert list(optimizer.keeps(optimizer.param_groups[0]) or ()) == ["momentum_buffer"]
    assert optimizer.keeps(optimizer.param_groups[1]) is None
    assert muon.takes_muon("model.lm_head.weight", nn.Parameter(torch.zeros(2, 2))) is False


def test_an_update_of_a_large_model_is_a_small_part_of_a_step_as_simulated() -> None:
    made, step = simulated("a800-32b", 64, "standard", 2), even_step_s("a800-32b", 64, 1_000_000)
    assert 1.06 < made.ratio < 1.1
    assert made.computing < made.seconds < 0.05 * step
    assert made.seconds - made.computing < 0.01 * step, "messages hide behind the iterations"


# --- Sums over whole parameters: LAMB and Adafactor.
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


SUM_MUTANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "norm of an interval": (Lamb, {"give": (Sums, of_an_interval), "partial": (Sums, noting)}),
    "means of an interval": (TorchAdafactor, {"give": (Sums, of_an_interval), "partial": (Sums, noting)}),
    "row means of a part": (Adafactor, {"around": (Box, of_a_part)}),
    "a matrix transposed": (Adafactor, {"of": (Box, classmethod(as_it_lies))}),
    "moments of the wrong interval": (Lamb, {"held": (Values, of_other_elements)}),
    "squares of the wrong interval": (TorchAdafactor, {"held": (Values, of_other_elements)}),
    "one ratio twice": (Lamb, {"ratio": (lamb_adafactor, lambda norms, group: RATIO(norms, group) ** 2)}),
}


@pytest.mark.parametrize("name", SUM_MUTANTS)
def test_small_parameters_show_what_is_not_lamb_or_adafactor(name: str) -> None:
    kind, mutants = SUM_MUTANTS[name]
    with contextlib.ExitStack() as mutated:
        for attribute, (where, mutant) in mutants.items():
            mutated.enter_context(mock.patch.object(where, attribute, mutant))
        with pytest.raises((ConfigError, RuntimeError), match=r"apart|shape"):
            proven(kind, {"weight_decay": 0.1})


def test_a_sum_that_does_not_go_around_shows_before_step_0() -> None:
    masters = MasterShards([BucketSpec("a", (("w", 6),))], 1, 3, "cpu")
    with pytest.raises(AssertionError, match="each rank's sums count once"):
        Sums(masters, [MatrixParam(0, "w", 0, (6,), None)], lambda param: (1,), None).connect()
