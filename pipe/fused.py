"""Gates, norms and rotary embeddings as functions that keep less for the backward, by one kernel where there is one.

An MLP down(act(gate) * up) keeps gate, act(gate), up and their product, each as wide as the MLP. Gate and up are
enough: one more activation and one more multiplication make the others again.

Written out in torch's operators, a norm of 16 bit rows keeps an FP32 copy of them and the normalised rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """Triton's kernels, where these tensors are on a GPU for which they compile, in types that they compute in."""
    if not all(one.is_cuda and one.dtype in _DTYPES for one in tensors):
        return None
    try:
        from ds_hydra.pipe import kernels
    except ImportError:  # a build of torch without Triton
        return None
    return kernels if kernels.work(tensors[0].device) else None


Activation = Callable[[Tensor], Tensor]
_SILU, _GELU = F.silu, F.gelu
_WIDEST = 16384  # row that a program has whole


class Gated:
    """act(gate) * up, which nothing has computed yet: a linear layer that is handed it does so, and so does its
    backward."""

    def __init__(self, gate: Tensor, up: Tensor, act: Activation):
        self.gate, self.up, self.act = gate, up, act

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        """`torch.nn.functional.linear` of it; nothing else is defined."""
        if func is not F.linear:
            return NotImplemented
        return args[0].linear(*args[1:], **(kwargs or {}))  # type: ignore[no-any-return]

    def computed(self) -> Tensor:
        """It, of which the backward finds the gate and what it lets through, and no more."""
        return _GatedProduct.apply(self.gate, self.up, self.act)  # type: ignore[no-any-return]

    def linear(
        self, weight: Tensor, bias: Tensor | None = None, add: Callable[[Tensor, Tensor], None] | None = None
    ) -> Tensor:
        """It through a linear layer, whose weight's gradient `add` takes: of rows (T, n), and their own (T, out); None:
        autograd has it."""
        return _GatedLinear.apply(self.gate, self.up, weight, bias, self.act, add)  # type: ignore[no-any-return]

    @property
    def requires_grad(self) -> bool:
        """False: a queue of weights' gradients would keep what is not to be kept."""
        return False


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, act: Activation,
        add: Callable[[Tensor, Tensor], None] | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(gate, up, weight)
        ctx.act, ctx.add = act, add
        return F.linear(_product(gate, up, act), weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        gate, up, weight = ctx.saved_tensors
        rows, trained = dy.flatten(0, -2), ctx.needs_input_grad[2]
        dgate, dup, product = _gradients(gate, up, ctx.act, dy @ weight, trained)
        dweight = None if product is None or ctx.add else rows.t() @ product.flatten(0, -2)
        if product is not None and ctx.add:
            ctx.add(product.flatten(0, -2), rows)
        dbias = rows.sum(0) if ctx.needs_input_grad[3] else None
        return dgate, dup, dweight, dbias, None, None


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return _product(gate, up, act)

    @staticmethod
    def backward(ctx: Any, dproduct: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        dgate, dup, _ = _gradients(gate, up, ctx.act, dproduct.contiguous(), again=False)
        return dgate, dup, None


def _product(gate: Tensor, up: Tensor, act: Activation) -> Tensor:
    if (found := _gate_kernels(gate, up, act)) is None:
        return act(gate) * up
    kernels, tanh = found
    return kernels.gated(gate, up, tanh=tanh)  # type: ignore[no-any-return]


def _gradients(
    gate: Tensor, up: Tensor, act: Activation, given: Tensor, again: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients by gate and up, `given` that by their product, contiguous; and the product, if it is asked for `again`,
    which may stand where `given` did."""
    dgate, dup = _beside(gate, up)
    if (found := _gate_kernels(gate, up, act)) is not None:
        kernels, tanh = found
        kernels.gate_gradients(gate, up, given, dgate, dup, tanh=tanh, product=again)
        return dgate, dup, given if again else None
    with torch.enable_grad():
        entered = gate.detach().requires_grad_()
        active = act(entered)
    torch.mul(given, active.detach(), out=dup)
    dgate.copy_(torch.autograd.grad(active, entered, given * up)[0])
    return dgate, dup, active.detach() * up if again else None


def _beside(one: Tensor, other: Tensor) -> list[Tensor]:
    """Memory for the gradients (..., n) of two tensors: side by side in one row, as they are in a packed product, whose
    gradient is then there without a copy [Note: packed weights]."""
    both = one.new_empty((*one.shape[:-1], one.shape[-1] + other.shape[-1]))
    if other.data_ptr() < one.data_ptr():
        return [*reversed(both.split((other.shape[-1], one.shape[-1]), -1))]
    return [*both.split((one.shape[-1], other.shape[-1]), -1)]


def parts_of(out: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Parts of a packed product (..., sum of the sizes), which nobody else reads; each may be changed in place."""
    return _Parts.apply(out, sizes)  # type: ignore[no-any-return]


class _Parts(torch.autograd.Function):
    """Parts of a packed product. What a backward has written side by side is their gradient without a copy."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        # Not by `split`: torch lets no view of several be changed in place, as models may do with what a layer made.
        return torch.unsafe_split_with_sizes(out, sizes, -1)

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        first, width = parts[0], sum(part.shape[-1] for part in parts)
        whole = first.as_strided((*first.shape[:-1], width), first.stride()) if _in_one_row(parts, width) else None
        return torch.cat(parts, -1) if whole is None else whole, None


def _in_one_row(parts: Sequence[Tensor], width: int) -> bool:
    """Whether tensors (..., n) follow each other in the last dimension of one (..., width)."""
    starts = accumulate((part.shape[-1] for part in parts), initial=parts[0].storage_offset())
    return all(
        part.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
        and part.dtype == parts[0].dtype
        and part.storage_offset() == start
        and part.stride() == parts[0].stride()
        and part.stride(-1) == 1
        and part.stride(-2) == width
        for part, start in zip(parts, starts, strict=False)
    )


def _gate_kernels(gate: Tensor, up: Tensor, act: Activation) -> tuple[ModuleType, bool] | None:
    """Those for this gate, and whether it is GELU by its tanh and not SiLU; None: its features do not lie side by side,
    or it is neither."""
    if not gate.is_cuda or not gate.stride(-1) == up.stride(-1) == 1:
        return None
    replaced = F.silu is not _SILU or F.gelu is not _GELU
    tanh = False if act is _SILU else _is_by_tanh(act) if isinstance(act, nn.Module) else None
    kernels = None if replaced or tanh is None else kernels_for(gate, up)
    return None if kernels is None or tanh is None else (kernels, tanh)


_BY_TANH: WeakKeyDictionary[nn.Module, bool | None] = WeakKeyDictionary()


def _is_by_tanh(act: nn.Module) -> bool | None:
    """Whether a module computes GELU by its tanh, to the bit, or SiLU; None: neither. Models have classes of their own
    for both."""
    if act not in _BY_TANH:
        x = torch.linspace(-30.0, 30.0, 121)
        with torch.no_grad():
            of = {False: F.silu(x), True: F.gelu(x, approximate="tanh")}
            found = None if act.state_dict() else act(x)
        _BY_TANH[act] = next((tanh for tanh, one in of.items() if found is not None and torch.equal(found, one)), None)
    return _BY_TANH[act]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0) -> Tensor:
    """x (..., n) over the root of the mean of its squares and `eps`, times (weight (n,) + offset), in x's type.

    (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.) All is computed in FP32, or wider.
    """
    if x.is_cuda and not offset:
        return F.rms_norm(x, x.shape[-1:], weight, eps)  # one kernel forward, and it keeps as little
    return _RmsNorm.apply(x, weight, eps, offset)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
        ctx.offset, rows, wide = offset, x, weight
        if weight is not None and (kernels := _norm_kernels(x, weight)) is not None:
            out, root = kernels.normed(x.contiguous(), weight, eps, offset)
            ctx.save_for_backward(x, root, weight)
            return out  # type: ignore[no-any-return]
        if weight is not None and offset:  # 1 + 0.001 is 1 in 16 bit
            rows, wide = x.to(_wide(x)), weight.to(_wide(x)) + offset
        # What `F.rms_norm` calls; it returns the inverse root (..., 1) of each row, too, in FP32 or wider.
        out, root = torch._fused_rms_norm(rows, x.shape[-1:], wide, eps)
        ctx.save_for_backward(x, root, weight)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # type: ignore[override]
        # With y = w u, u = x r and r = (mean of x² + eps)^-1/2, and g = dy w:
        #   dw = sum over rows of dy u          dx = r (g - u mean(g u))
        x, root, weight = ctx.saved_tensors
        if weight is not None and (kernels := _norm_kernels(x, weight)) is not None:
            dx, dw = kernels.norm_gradients(x.contiguous(), weight, dy.contiguous(), root, ctx.offset)
            return dx, dw if ctx.needs_input_grad[1] else None, None, None
        r, size, wide = root.view(*x.shape[:-1], 1), x.shape[-1], root.dtype
        u = x * r
        dyu, dw = dy * u, None
        if weight is None:
            g, mean = dy.to(wide, copy=True), dyu.sum(-1, keepdim=True)
        else:
            w = weight.to(wide) + ctx.offset if ctx.offset else weight.to(wide)
            g, mean = dy * w, (dyu @ w).unsqueeze(-1)
            dw = dyu.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        g.addcmul_(u, mean, value=-1 / size)
        return torch.mul(g, r, out=torch.empty_like(x)), dw, None, None


def _norm_kernels(x: Tensor, weight: Tensor) -> ModuleType | None:
    """Those for rows (..., n) and a weight (n,) of the same type, where a row fits a program."""
    fits = x.is_cuda and x.dtype == weight.dtype and x.shape[-1] <= _WIDEST
    return kernels_for(x, weight) if fits else None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., d) turned: of its halves a and b, a cos - b sin and b cos + a sin, by tables that broadcast with x; in
    x's type, computed in that of the tables, which may be wider.

    (Su et al. 2021, "RoFormer", eq. 34, with the features of a pair half the size apart, as Hugging Face has them.)
    """
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        if (kernels := _rotary_kernels(x, cos, sin)) is not None:
            return kernels.turned(x, cos, sin, back=False)  # type: ignore[no-any-return]
        wide = x.to(torch.promote_types(x.dtype, cos.dtype))
        (a, b), (sin_a, sin_b) = wide.chunk(2, -1), sin.chunk(2, -1)
        out = wide * cos
        turned_a, turned_b = out.chunk(2, -1)
        turned_a.addcmul_(b, sin_a, value=-1)
        turned_b.addcmul_(a, sin_b)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        if (kernels := _rotary_kernels(dy, cos, sin)) is not None:
            return kernels.turned(dy, cos, sin, back=True), None, None
        wide = dy.to(torch.promote_types(dy.dtype, cos.dtype))
        (dy_a, dy_b), (sin_a, sin_b) = wide.chunk(2, -1), sin.chunk(2, -1)
        dx = wide * cos
        dx_a, dx_b = dx.chunk(2, -1)
        dx_a.addcmul_(dy_b, sin_b)
        dx_b.addcmul_(dy_a, sin_a, value=-1)
        return dx.to(dy.dtype), None, None


def _rotary_kernels(x: Tensor, cos: Tensor, sin: Tensor) -> ModuleType | None:
    """Those for heads (B, heads, T, d) and tables (1 or B, 1, T, d) with whole rows of features."""
    if not x.is_cuda:
        return None
    tables = {(batch, 1, x.shape[-2], x.shape[-1]) for batch in (1, len(x))} if x.dim() == 4 else set()
    plain = cos.shape in tables and sin.shape in tables and all(one.stride(-1) == 1 for one in (x, cos, sin))
    return kernels_for(x, cos, sin) if plain else None
