"""Functions of few operators in place of a model's chains, and kernels of packages as the models call them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

from ds_hydra.costs.analytic import estimate_activations
from ds_hydra.pipe.fused import Gated, rms_norm, rotate
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.recognise import Gate, Norm, _keeps_type, _turns
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.profiling.stage_memory import kept_bytes
from ds_hydra.profiling.stage_timer import StageTimer
from ds_hydra.self_check.runs import doubled, uneven_data
from tests.support.checks import check
from tests.support.families import VOCAB, build_model

# --- Functions of few operators in place of a model's chains: what is recognised, what is computed, what is
# kept.
DATA = uneven_data(VOCAB, [(7, 61, 3), (23, 5)])
CPU = torch.device("cpu")


def source_of(family: str, functions: str = "auto", dtype: torch.dtype = torch.float64, **options: Any) -> CausalLM:
    return CausalLM(build_model(family, dtype), StageOptions(functions=functions, **options))


def test_a_llama_is_recognised() -> None:
    found = source_of("llama", "recompute").functions
    assert set(found.norms.values()) == {Norm(1e-6)}
    assert len(found.norms) == 9
    assert set(found.rotary.values()) == {"apply_rotary_pos_emb"}
    assert set(found.gates.values()) == {Gate("gate_proj", "up_proj", "down_proj", "act_fn", twice=True)}
    attention = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    assert found.packed[:2] == (attention, ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"))


@pytest.mark.parametrize(
    ("family", "norm"),
    [("gemma2", Norm(1e-6, offset=1.0)), ("cohere", Norm(1e-5, centred=True)), ("olmo2", Norm(1e-5)), ("gpt2", None)],
)
def test_norms_are_told_apart(family: str, norm: Norm | None) -> None:
    found = source_of(family).functions.norms
    assert (norm in found.values()) if norm else not found
    with doubled():  # as the self-check looks at its small model
        assert source_of(family).functions.norms == found


class Doubled(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


class OtherEps(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, 10 * self.variance_epsilon)


class Limited(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.clamp(-1e3, 1e3))


class Held(LlamaRMSNorm):
    """Lets no gradient through the root."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        root = (hidden_states.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt().detach()
        return self.weight * (hidden_states / root)


class Dropping(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.dropout(super().forward(hidden_states), 0.1, self.training)


class Widening(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).float()


class ByDimensions(LlamaRMSNorm):
    """Norms all heads of a token together where it is handed heads."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dim() == 3:
            return super().forward(hidden_states)
        return self.weight * F.rms_norm(hidden_states, hidden_states.shape[-2:], None, self.variance_epsilon)


@pytest.mark.drawn
@pytest.mark.parametrize("kind", [Doubled, OtherEps, Limited, Held, Dropping, Widening, ByDimensions])
def test_what_is_another_norm_stays(kind: type[nn.Module]) -> None:
    model = build_model("llama", torch.float32).eval()
    model.model.layers[1].input_layernorm.__class__ = kind
    found = CausalLM(model, StageOptions(functions="auto")).functions
    assert "model.layers.1.input_layernorm" not in found.norms
    assert len(found.norms) == 8


class Squared(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) ** 2)


class LimitedMLP(LlamaMLP):
    """As gpt-oss has it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x))


class WideMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        product = self.act_fn(self.gate_proj(x).float()) * self.up_proj(x).float()
        return self.down_proj(product.to(x.dtype))


class DroppingMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.dropout(self.act_fn(self.gate_proj(x)), 0.1, self.training) * self.up_proj(x))


@pytest.mark.parametrize("kind", [Squared, LimitedMLP, WideMLP, DroppingMLP])
def test_what_is_another_mlp_stays(kind: type[nn.Module]) -> None:
    model = build_model("llama", torch.float32).eval()
    model.model.layers[2].mlp.__class__ = kind
    found = CausalLM(model, StageOptions(functions="recompute")).functions
    assert "model.layers.2.mlp" not in found.gates
    assert len(found.gates) == 3


def test_what_somebody_else_reads_is_computed() -> None:
    model = build_model("llama", torch.float32)
    model.model.layers[2].mlp.down_proj.register_forward_hook(lambda _, args, out: None)
    assert "model.layers.2.mlp" not in CausalLM(model, StageOptions(functions="recompute")).functions.gates


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    return tuple(x * cos[:, None] + turned(x) * sin[:, None] for x in (q, k))  # type: ignore[return-value]


def scaled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return 0.5 * q, k


def narrow(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = apply_rotary_pos_emb(q.float(), k.float(), cos, sin)
    return q.to(cos.dtype), k.to(cos.dtype)


def held(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q, k.detach() + 0.0 * k


def test_rotary_embeddings_are_told_apart() -> None:
    assert _turns(apply_rotary_pos_emb)
    assert not any(_turns(function) for function in (interleaved, scaled, narrow, held))  # type: ignore[arg-type]


class Listed(LlamaMLP):
    """Has its layers in a list."""

    layers: nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = self.layers
        return down(self.act_fn(gate(x)) * up(x))


def listed(model: Any) -> None:
    mlp = model.model.layers[3].mlp
    mlp.layers = nn.ModuleList([mlp.gate_proj, mlp.up_proj, mlp.down_proj])
    del mlp.gate_proj, mlp.up_proj, mlp.down_proj
    mlp.__class__ = Listed


def test_what_is_packed_is_a_plain_linear_layer() -> None:
    model = build_model("llama", torch.float32)
    first, second, third, _ = model.model.layers
    forward = first.self_attn.k_proj.forward
    first.self_attn.k_proj.forward = lambda input: 2 * forward(input)
    second.mlp.up_proj.weight.register_hook(lambda gradient: gradient)
    second.self_attn.v_proj.weight = third.self_attn.v_proj.weight
    listed(model)
    packed = CausalLM(model, StageOptions(functions="auto")).functions.packed
    names = {path.removeprefix("model.layers.") for group in packed for path in group}
    assert names.isdisjoint({"0.self_attn.k_proj", "1.mlp.up_proj", "1.self_attn.v_proj", "2.self_attn.v_proj"})
    assert not any("layers" in name for name in names)
    assert {"0.self_attn.q_proj", "0.self_attn.v_proj", "0.mlp.gate_proj"} <= names


def written_out(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (weight + offset)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_and_its_gradients(offset: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5, offset=offset), (x, weight))
    assert torch.allclose(rms_norm(x, weight, 1e-5, offset=offset), written_out(x, weight, offset))


def test_rotation_and_its_gradients() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2))
    cos, sin = (torch.randn(1, 5, 8, dtype=torch.float64) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos[:, None], sin[:, None]), (q,))
    assert torch.allclose(rotate(k, cos[:, None], sin[:, None]), apply_rotary_pos_emb(q, k, cos, sin)[1])


def test_rotation_by_wider_tables_is_rounded_once() -> None:
    """As OLMo 2 has it; Llama's function would hand on FP32, and stays."""
    torch.manual_seed(0)
    q = torch.randn(1, 4, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    cos, sin, asked = torch.randn(1, 5, 8), torch.randn(1, 5, 8), torch.randn(1, 4, 5, 8, dtype=torch.bfloat16)
    outs = rotate(q, cos[:, None], sin[:, None]), modeling_olmo2.apply_rotary_pos_emb(q, q, cos, sin)[0]
    assert torch.equal(*outs)
    one, other = (torch.autograd.grad(out, q, asked)[0] for out in outs)  # autograd rounds what it adds up
    assert one.dtype == q.dtype
    torch.testing.assert_close(one, other, rtol=0, atol=4e-2)
    assert (_keeps_type(modeling_olmo2.apply_rotary_pos_emb), _keeps_type(apply_rotary_pos_emb)) == (True, False)


@pytest.mark.parametrize("act", [F.silu, nn.GELU(approximate="tanh")])
def test_gated_product_and_its_gradients(act: Any) -> None:
    torch.manual_seed(0)
    shapes = ((1, 3, 6), (1, 3, 6), (4, 6), (4,))
    gate, up, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    linear: Any = F.linear  # of what torch's stubs do not know that it computes with
    assert torch.autograd.gradcheck(lambda g, u, w, b: linear(Gated(g, u, act), w, b), (gate, up, weight, bias))


def test_weights_that_lie_side_by_side_are_one() -> None:
    timer = StageTimer(source_of("llama", dtype=torch.float32), ParallelScheme(), 0, CPU, torch.float32)
    packed = timer.module.packed
    assert all(each.weight is not None for each in packed)
    names = [name for each in packed for name in each.layers]
    views = {name: timer.module.parameters[name] for name in names}
    assert packed[0].weight is not None
    assert packed[0].weight.data_ptr() == views["model.layers.0.self_attn.q_proj.weight"].data_ptr()
    assert timer.module.leaves.isdisjoint(views.values())
    assert len(source_of("mixtral").functions.packed) == 4  # whose first look, without numbers, ends early
    # Biases stand between the weights of a Qwen2.
    apart = StageTimer(source_of("qwen2", dtype=torch.float32), ParallelScheme(), 0, CPU, torch.float32)
    assert not any("q_proj" in name for each in apart.module.packed for name in each.layers)


def test_layers_keep_less() -> None:
    kept = {}
    for functions in ("off", "auto", "recompute"):
        source = source_of("llama", functions, torch.bfloat16)
        timer = StageTimer(source, ParallelScheme(pp=4), 1, CPU, torch.bfloat16)
        kept[functions] = kept_bytes(timer, (64,)) / 64
    config = source.text_config
    # Of each norm an FP32 copy and the normalised rows; of the MLP the activation, then the product.
    less = 2 * (4 + 2 - 2) * config.hidden_size + 2 * config.intermediate_size
    assert kept["off"] - kept["auto"] == pytest.approx(less, rel=0.1)
    assert kept["auto"] - kept["recompute"] == pytest.approx(2 * config.intermediate_size, rel=0.02)


@pytest.mark.parametrize(("functions", "tensors"), [("off", 4), ("auto", 3), ("recompute", 2)])
def test_tensors_of_gates_are_as_many_as_the_memory_model_is_told(functions: str, tensors: int) -> None:
    """Each is a sixth of a layer at least; the estimate is within a twelfth of what is counted."""
    config = LlamaConfig(hidden_size=64, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=4, vocab_size=128)  # fmt: skip
    source = CausalLM(LlamaForCausalLM(config).bfloat16(), StageOptions(functions=functions))
    counted = kept_bytes(StageTimer(source, ParallelScheme(pp=4), 1, CPU, torch.bfloat16), (256,)) / 256
    found = source.functions
    assert found.of_gates == tensors
    estimated = estimate_activations(64, 512, 4, 4, 2, 1, 1, short_norms=bool(found.norms), of_gates=found.of_gates)
    assert estimated.layer == pytest.approx(counted, rel=1 / 12)


@pytest.mark.parametrize("functions", ["auto", "recompute", "off"])
@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "mixtral", "gpt_oss", "gemma2", "phi3"])
def test_sums_of_products_are_those_of_autograd(family: str, functions: str) -> None:
    """In FP32, with sums in FP64 beside: what is added there and what autograd has is what autograd had alone."""
    scheme, cpu = ParallelScheme(), torch.device("cpu")
    timer = StageTimer(source_of(family, functions, torch.float32), scheme, 0, cpu, torch.float32)
    batch, leaves = timer.batch((40, 23)), sorted(timer.module.leaves, key=id)
    timer.run(batch)
    alone = [leaf.grad.double() for leaf in leaves if leaf.grad is not None]
    sums = {leaf: torch.zeros_like(leaf, dtype=torch.float64) for leaf in leaves}
    for leaf, total in sums.items():
        assert leaf.grad is not None
        leaf.grad.zero_()
        timer.module.add_to(leaf, total)
    timer.run(batch)
    for leaf, before in zip(leaves, alone, strict=True):
        assert leaf.grad is not None
        assert (sums[leaf] + leaf.grad.double() - before).norm() <= 1e-5 * before.norm()
    added = {leaf for leaf, total in sums.items() if total.any()}
    assert added, "some are added"
    assert all(leaf.dim() > 1 for leaf in added), "of weights alone"
    assert all(leaf in added for leaf in leaves if leaf.dim() == 3), "of experts"


# --- Kernels of flash-linear-attention and causal-conv1d, by functions of their signatures: what they are
# called with, and that one which mixes sequences, or loses a state, is found out before step 0.
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
