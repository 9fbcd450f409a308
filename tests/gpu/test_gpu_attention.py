"""Attention backends on a GPU against per-sequence SDPA in FP32."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from ds_hydra.pipe.attention.backends import BACKENDS, Segments, _torch_varlen, varlen_attention
from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.rows import Chunk, Pack
from tools import aims

pytestmark = pytest.mark.gpu

LENGTHS = (7, 513, 64, 1, 130)


def attend(backend: str, inputs: list[Tensor], window: int | None, softcap: float | None) -> list[Tensor]:
    """Output and input gradients, in FP32 on the CPU."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
    out = BACKENDS[backend](q, k, v, Segments.whole(LENGTHS), q.shape[-1] ** -0.5, window, softcap)
    out.float().sin().sum().backward()
    grads = [x.grad for x in (q, k, v)]
    return [x.detach().float().cpu() for x in (out, *grads) if x is not None]


@pytest.mark.parametrize("backend", ["torch", "flash", "sdpa"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (33, None), (None, 20.0)])
def test_backend_matches_fp32_sdpa(backend: str, kv_heads: int, window: int | None, softcap: float | None) -> None:
    if backend == "torch" and (softcap is not None or _torch_varlen() is None):
        pytest.skip("torch's varlen_attn has no softcap, or is not in this torch")
    if backend == "flash" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("the package flash-attn is not installed")
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    wide = [torch.randn(tokens, heads, 64, generator=generator).cuda() for heads in (8, kv_heads, kv_heads)]
    expected = attend("sdpa", wide, window, softcap)
    got = attend(backend, [x.bfloat16() for x in wide], window, softcap)
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() <= aims.GPU_ATTENTION * other.abs().max()


@pytest.mark.parametrize("backend", ["torch", "flash", "sdpa"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("window", [None, 33, 700])
def test_slices_see_the_keys_before_them(backend: str, kv_heads: int, window: int | None) -> None:
    """The last query of a slice sees its last key: the causal triangle stands at the bottom right."""
    if backend == "torch" and _torch_varlen() is None:
        pytest.skip("torch's varlen_attn is not in this torch")
    if backend == "flash" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("the package flash-attn is not installed")
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(900, heads, 64, generator=generator).cuda() for heads in (8, kv_heads, kv_heads)]
    expected = sliced("sdpa", wide, window, (900,))
    got = sliced(backend, [x.bfloat16() for x in wide], window, (130, 1, 512, 257))
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() <= aims.GPU_ATTENTION * other.abs().max()


def sliced(backend: str, inputs: list[Tensor], window: int | None, sizes: tuple[int, ...]) -> list[Tensor]:
    """Output and input gradients of one sequence in slices of these sizes, in FP32 on the CPU."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
    contexts, outs, start = Contexts(sum(sizes)), [], 0
    for size in sizes:
        rows = slice(start, start + size)
        pack = Pack((size,), chunk=Chunk(start, start + size, contexts))
        outs.append(
            varlen_attention(
                q[rows], k[rows], v[rows], pack, window=window, backend=backend, context=contexts.of("layer")
            )
        )
        start += size
    for out in reversed(outs):
        out.float().sin().sum().backward()
    grads = [x.grad for x in (q, k, v)]
    return [x.detach().float().cpu() for x in (torch.cat(outs), *grads) if x is not None]


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("window", [None, 33])
def test_sinks_by_the_kernel_match_probabilities_in_fp32(kv_heads: int, window: int | None) -> None:
    """Packs and, with them, a sequence of one token: output and all gradients, those of the sinks too."""
    if _torch_varlen() is None:
        pytest.skip("torch's varlen_attn is not in this torch")
    generator = torch.Generator().manual_seed(0)
    shapes = *((sum(LENGTHS), heads, 64) for heads in (8, kv_heads, kv_heads)), (8,)
    wide = [torch.randn(shape, generator=generator).cuda() for shape in shapes]

    def run(inputs: list[Tensor]) -> list[Tensor]:
        q, k, v, sinks = leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = varlen_attention(q, k, v, Pack(LENGTHS), window=window, sinks=sinks)
        out.float().sin().sum().backward()
        return [x.detach().float().cpu() for x in (out, *(leaf.grad for leaf in leaves)) if x is not None]

    got, expected = run([x.bfloat16() for x in wide]), run(wide)
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() <= aims.GPU_ATTENTION * other.abs().max()
