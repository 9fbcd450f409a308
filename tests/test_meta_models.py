"""Models built on the meta device: buffers and drawn parameters are those that the constructor makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ds_hydra.pipe.models.unset import drawn_parameter, set_buffers, unset_buffers
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError
from tests.support.families import FAMILIES
from tests.support.small_job import small_engine, small_model


def hollow(make: Any = small_model) -> Any:
    with torch.device("meta"):
        return make()


def of_family(name: str) -> Any:
    model_type, settings = FAMILIES[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))


@pytest.mark.drawn
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_is_drawn_is_what_the_constructor_makes(name: str) -> None:
    """Buffers and constants to the bit; random parameters with its mean and deviation."""
    model, real = hollow(lambda: of_family(name)), of_family(name)
    set_buffers(model, {})
    assert not unset_buffers(model)
    for path, buffer in real.named_buffers():
        assert torch.equal(model.get_buffer(path), buffer), path
    for path, made in real.named_parameters():
        drawn = drawn_parameter(model, path, seed=3)
        assert drawn.shape == made.shape
        assert torch.equal(drawn, drawn_parameter(model, path, seed=3))
        if made.std() == 0:
            assert torch.equal(drawn, made), path
        else:
            if made.numel() > 64:
                error = 6 * made.std().item() / made.numel() ** 0.5
                assert abs(drawn.mean() - made.mean()).item() < error, path
                assert abs(drawn.std() - made.std()).item() < error, path
            assert not torch.equal(drawn, drawn_parameter(model, path, seed=4)), path
    assert all(parameter.is_meta for parameter in model.parameters())  # it still takes no memory


def test_what_nothing_sets_is_refused_by_name() -> None:
    model = hollow()
    model.model.layers[1].mlp.gate = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ConfigError, match=r"does not set all of the parameter model\.layers\.1\.mlp\.gate"):
        drawn_parameter(model, "model.layers.1.mlp.gate", seed=0)
    with torch.device("meta"), pytest.raises(ConfigError, match="Linear has no _init_weights to draw weight by"):
        drawn_parameter(nn.Linear(2, 2), "weight", seed=0)
    model.model.layers[2].register_buffer("scale", torch.empty(3, device="meta"))
    with pytest.raises(ConfigError, match=r"buffer model\.layers\.2\.scale of the model is on the meta device"):
        set_buffers(model, {})
    set_buffers(model, {"model.layers.2.scale": torch.full((3,), 2.0)})
    assert model.model.layers[2].scale.tolist() == [2.0] * 3


def trained(rank: int, **hydra: Any) -> dict[str, Tensor]:
    engine = small_engine(rank, hollow(), **hydra)
    engine.train_batch()
    return engine.fp32_state_dict()


def first_values(rank: int, **hydra: Any) -> dict[str, Tensor]:
    return small_engine(rank, hollow(), **hydra).fp32_state_dict()


@pytest.mark.drawn
def test_random_weights_do_not_depend_on_the_number_of_ranks() -> None:
    one, other = (run_ranks(lambda rank: first_values(rank, initial_weights="random"), n)[0] for n in (1, 4))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["model.layers.0.mlp.up_proj.weight"].std() > 0.01


@pytest.mark.drawn
def test_a_folder_s_weights_train_as_the_model_that_it_was_saved_from(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)

    def whole(rank: int) -> dict[str, Tensor]:
        engine = small_engine(rank)
        engine.train_batch()
        return engine.fp32_state_dict()

    one, other = run_ranks(whole, 2)[0], run_ranks(lambda r: trained(r, initial_weights=str(tmp_path)), 2)[0]
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_buffers_come_with_the_folder(tmp_path: Path) -> None:
    """A buffer that is saved, as routers' corrections are, belongs to the weights."""

    def with_scale(value: float) -> Any:
        model = small_model()
        model.model.layers[1].register_buffer("scale", torch.full((2,), value))
        return model

    with_scale(3.0).save_pretrained(tmp_path)

    def job(rank: int) -> list[float]:
        model = hollow(lambda: with_scale(1.0))
        small_engine(rank, model, initial_weights=str(tmp_path))
        with pytest.raises(CheckpointError, match=r"other values of the buffer 'model\.layers\.1\.scale'"):
            small_engine(rank, with_scale(1.0)).load_16bit_model(tmp_path)
        return list(model.model.layers[1].scale.tolist())

    assert run_ranks(job, 2)[1] == [3.0, 3.0]


def test_wrong_ways_to_start_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def refused(rank: int) -> None:
        with pytest.raises(ConfigError, match=r"no rank has a value for .* hydra\.initial_weights"):
            small_engine(rank, hollow())
        with pytest.raises(ConfigError, match='is "random" but the model has a value'):
            small_engine(rank, initial_weights="random")
        with pytest.raises(CheckpointError, match="holds neither"):
            small_engine(rank, hollow(), initial_weights=str(tmp_path))

    run_ranks(refused, 2)
