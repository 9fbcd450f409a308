"""Kernels of flash-linear-attention and causal-conv1d, by functions of their signatures: what they are called with, and
that one which mixes sequences, or loses a state, is found out before step 0."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

from tests.support.checks import check
from tests.support.families import build_model

DELTA_RULE = modeling.torch_chunk_gated_delta_rule.__wrapped__
CONVOLUTION = modeling.causal_conv1d_fn.__wrapped__


class Kernels:
    """The two functions, as the packages have them, which note each call's batch, tokens, bounds and states."""

    def __init__(self, fault: str = ""):
        self.fault = fault
        self.rules: list[tuple[int, int, bool, bool]] = []
        self.convolutions: list[tuple[int, int]] = []
        self.bounds: list[Any] = []
        self._last: Tensor | None = None

    def chunk_gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        self.bounds.append(cu_seqlens)
        self.rules.append((*q.shape[:2], initial_state is not None, output_final_state))
        state = initial_state
        if self.fault == "goes on from the call before" and state is None and self._last is not None:
            state = self._last if self._last.shape[0] == q.shape[0] else None
        if self.fault == "forgets the state":
            state = None
        given: tuple[Tensor, ...] = (q, k, v, g, beta)
        count = q.shape[0]
        if self.fault == "takes rows for one sequence" and state is None and not output_final_state:
            given = tuple(x.flatten(0, 1)[None] for x in given)
        out, final = DELTA_RULE(
            *given, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
        )
        self._last = final.detach()
        final = final.detach() if self.fault == "has no gradient of the state" else final
        return out.view(count, -1, *out.shape[2:]), final if output_final_state else None

    def causal_conv1d_fn(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
        initial_states: Tensor | None = None, return_final_states: bool = False,
        final_states_out: Tensor | None = None, activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        self.bounds += [seq_idx, initial_states]
        self.convolutions.append((x.shape[0], x.shape[2]))
        if self.fault == "convolves rows as one sequence":
            rows: Tensor = CONVOLUTION(x.transpose(0, 1).flatten(1)[None], weight, bias, activation)
            return rows[0].unflatten(1, (x.shape[0], -1)).transpose(0, 1)
        found: Tensor = CONVOLUTION(x, weight, bias, activation)
        return found


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Both packages, as transformers finds them when it is imported."""
    found = Kernels(getattr(request, "param", ""))
    fla, convolutions = ModuleType("fla"), ModuleType("causal_conv1d")
    vars(fla)["chunk_gated_delta_rule"] = found.chunk_gated_delta_rule
    vars(fla)["ops"] = SimpleNamespace(gated_delta_rule=found, chunk_gated_delta_rule=found.chunk_gated_delta_rule)
    vars(convolutions)["causal_conv1d_fn"] = found.causal_conv1d_fn
    monkeypatch.setitem(sys.modules, "fla", fla)
    monkeypatch.setitem(sys.modules, "causal_conv1d", convolutions)
    for name, kernel, package, plain in (
        ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "fla", DELTA_RULE),
        ("causal_conv1d_fn", "causal_conv1d_fn", "causal_conv1d", CONVOLUTION),
    ):
        monkeypatch.setattr(modeling, name, use_kernel_func_from_hub_with_fallback(kernel, package)(plain))
    return found


def tried() -> Any:
    return check(build_model("qwen3_next", torch.float32), "tp2", "pp2", keep=False)


@pytest.mark.drawn
def test_kernels_are_called_for_whole_sequences_and_slices_and_never_for_a_pack(kernels: Kernels) -> None:
    result = tried()
    assert (result.objections(), result.no_slices) == ([], "")
    assert kernels.bounds
    assert {each is None for each in kernels.bounds} == {True}, "no bounds: a row is of one sequence"
    assert {(begins, ends) for *_, begins, ends in kernels.rules} >= {(False, False), (False, True), (True, True)}
    assert kernels.convolutions


@pytest.mark.drawn
@pytest.mark.parametrize("kernels", ["takes rows for one sequence", "convolves rows as one sequence"], indirect=True)
def test_a_kernel_that_ignores_where_rows_end_gets_one_sequence_at_a_time(kernels: Kernels) -> None:
    result = tried()
    assert result.objections() == []


@pytest.mark.parametrize("kernels", ["goes on from the call before"], indirect=True)
def test_a_kernel_that_mixes_sequences_is_refused(kernels: Kernels) -> None:
    assert tried().objections()


@pytest.mark.drawn
@pytest.mark.parametrize("kernels", ["forgets the state", "has no gradient of the state"], indirect=True)
def test_a_kernel_that_loses_a_state_takes_whole_sequences(kernels: Kernels) -> None:
    result = tried()
    assert result.objections() == []
    assert "is off by" in result.no_slices
