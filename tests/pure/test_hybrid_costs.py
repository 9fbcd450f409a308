"""What is derived of the cost of recurrent layers and experts, where nothing was measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_hydra.costs.analytic import LayerSizes, analytic_cost_table, estimate_activations, layer_sizes, model_shape
from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.head_degrees import BoxSize, HeadDegrees
from ds_hydra.pipe.model_plan import Bucket, ModelPlan, ParamSpec
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.planner.cutting import longest_of

HIDDEN, WORDS = 64, 100
RECURRENT = BoxSize(weights=5 * HIDDEN * HIDDEN, recurrent=True, carried=4096, heads=HeadDegrees((2, 4)))
THREE_OF_FOUR = ((RECURRENT,), (RECURRENT,), (RECURRENT,), ())


def plan(*shapes: tuple[int, ...]) -> ModelPlan:
    """One layer of such parameters, with embeddings and a head."""
    params = tuple(ParamSpec(f"layer.{at}", shape) for at, shape in enumerate(shapes))
    ends = [ParamSpec(name, (WORDS, HIDDEN)) for name in ("embed", "head")]
    return ModelPlan(
        (Bucket("layer", params), Bucket("ends", tuple(ends))), frozenset({"embed"}),
        (frozenset(param.name for param in params),), frozenset({"head"}), num_heads=8, num_kv_heads=2,
    )  # fmt: skip


def test_a_token_is_computed_with_the_experts_that_it_chooses() -> None:
    experts = plan((HIDDEN, HIDDEN), (16, 48, HIDDEN), (16, HIDDEN, 24))
    config = SimpleNamespace(
        num_experts=16, num_experts_per_tok=4, head_dim=16, shared_expert_intermediate_size=10, intermediate_size=999
    )
    assert layer_sizes(experts, HIDDEN, config) == LayerSizes(8 * 16, 4 * 24 + 10, 4 / 16, 16)
    shape = model_shape(experts, HIDDEN, WORDS, config)
    assert shape.params == HIDDEN * HIDDEN + 16 * 72 * HIDDEN + 2 * WORDS * HIDDEN
    assert shape.active == HIDDEN * HIDDEN + 4 * 72 * HIDDEN + WORDS * HIDDEN, "embeddings are looked up"
    (cost,) = analytic_cost_table(shape, [ParallelScheme()], 64, device_flops=1e3).costs
    assert (cost.a, cost.b) == (7 * 128, 6 * shape.active)


@pytest.mark.parametrize(
    ("config", "width"),
    [(None, HIDDEN), (SimpleNamespace(head_dim=None), HIDDEN), (SimpleNamespace(head_dim=32), 256),
     (SimpleNamespace(head_dim=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16), 128)],
)  # fmt: skip
def test_heads_may_be_wider_than_the_hidden_states(config: object, width: int) -> None:
    assert layer_sizes(plan((HIDDEN, HIDDEN)), HIDDEN, config).width == width


def test_recurrent_layers_keep_states_in_place_of_keys_and_values() -> None:
    for sp in (1, 2):
        dense, hybrid = (
            estimate_activations(HIDDEN, 128, 8, 2, 2, 2, sp, boxes=boxes) for boxes in ((), THREE_OF_FOUR)
        )
        assert hybrid.context * hybrid.layer == pytest.approx(dense.context * dense.layer / 4)
        # Five matrices of which a quarter and an eighth of the heads are a rank's.
        assert hybrid.state == 2 * 4096 * 3 / 4 / (2 * sp)
        assert dense.state == 0.0
    whole, halves = (
        estimate_activations(HIDDEN, 128, 8, 2, 2, 2, 2, boxes=((box,),))
        for box in (BoxSize(RECURRENT.weights, recurrent=True), RECURRENT)
    )
    assert whole.layer - halves.layer == pytest.approx(0.75 * 2 * 5 * HIDDEN * 2), "a quarter in place of all"


def test_sequences_of_hybrids_are_cut_longer() -> None:
    """In slices whose layers are computed again: keys and values of one layer in four."""
    usual, found = Shares.usual(), []
    for boxes in ((), THREE_OF_FOUR):
        kept = estimate_activations(HIDDEN, 128, 8, 8, 2, 1, 1, boxes=boxes)
        room = 4 * 2**30 / kept.layer
        cost = SchemeCost(ParallelScheme(pp=4), 1e-6, 0.01, 1.0, int(room / 4))
        found.append(longest_of(cost, kept.shares(usual.forward, usual.weight), layers=64))
    # A token of the one keeps 2 bytes of its input and 2 * (2 + 4) of keys and values, of the other a quarter of these.
    assert found[1] / found[0] == pytest.approx(14 / 5, rel=0.02)
