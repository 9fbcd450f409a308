"""Whole experts spread over the ranks of a stage, and the loss that has routers use all experts alike.

[Note: whole experts]
Stacked experts are parameters of the shape (experts, ...). Tensor parallelism cuts the width of each, so 768 columns of
an expert become 96 on eight ranks, which products are slow with. Where a stage has an `ep`, each of so many ranks holds
experts / ep of them as they are: an interval of the stack's first dimension, and of its flat order. A router is whole
on every rank, as it is without. Every rank is handed all tokens of the group and where they are routed, and computes
with its own experts the tokens that chose them; the results are parts of the sum, as those of cut experts are, and are
added as these are. Six tokens, two experts for each of them, four experts on two ranks:

  token           0     1     2     3     4     5
  chosen          0 2   1 3   0 1   2 3   3 1   2 0
  rank 0 has 0, 1 0     1     0 1   -       1     0     6 rows of its products
  rank 1 has 2, 3   2     3   -     2 3   3     2       6 rows

No token is dropped, no count is exchanged, and all that ranks send has sizes that they know before. A gather of T
tokens of H features brings each of n ranks T * (n - 1) / n rows, the exchange of each token with the ranks of its k
experts k * T / n * (n - 1) / n: the gather moves as much or less where k >= n, as with eight experts for a token on
eight ranks; with fewer it moves n / k times as much. What ranks compute is as uneven as the routing: one that is chosen
by all tokens has at most T * min(k, experts / ep) rows, and in the mean T * k / ep.

The gradient of an expert is on the ranks that hold it and nowhere else. Of the gradients of hidden states and of the
router's weights each rank has a part, which add up: under tensor parallelism by what stands around these wrappers, over
sequence parallel ranks by the gather here, whose backward is a scatter of sums.

[Note: the routers' loss]
Of one router and one sequence of n tokens: let c_e be how many tokens have expert e among their k most probable ones,
and p_te the softmax of token t's logits. With E experts the sequence's loss is

    E * sum over e of (c_e / n) * (sum over t of p_te / n)

For two tokens with the probabilities (.9 .1) and (.6 .4), and k = 1: c = (2, 0), so 2 * (2/2 * 1.5/2) = 1.5; it is k, 1
here, where all experts are used alike. That is the load balancing loss of the Switch Transformer (arXiv 2101.03961,
eq. 4 to 6) as transformers has it, but for each sequence by itself (as arXiv 2412.19437, eq. 17 to 20): a product of
two means over all tokens of a batch would depend on which sequences make a micro-batch, and so on the plan.

In the step's loss a sequence's router loss counts as much as the losses of its tokens do together: a sequence with 10
of 50 targets counts 1/5 of its router loss, times the model's coefficient. Several routers count by their mean. So a
step of one sequence has the loss that transformers gives a batch of it, but for this: transformers adds up counts and
probabilities of all layers before it multiplies them, as if expert 3 of one layer were expert 3 of another.

Counts have no gradient. That of p_te is E * c_e / n^2 times what the sequence counts, so it is known without any
message as soon as the counts of the whole sequence are: they are added over the ranks that share its tokens, and over
its slices, whose forwards have all run when the first backward comes. The gradient joins that of what the router hands
on, as in Megatron-LM's MoEAuxLossAutoScaler; the stages send nothing more than before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hydra.pipe.collectives import all_of_row, own_of_sum
from ds_hydra.pipe.rows import Pack
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.pipe.wrappers import wrap


class Routed(NamedTuple):
    """Which sequences the rows of a router's logits are of, and what their router losses count."""

    sequence: Tensor  # (rows,) its number in the pack
    weights: Tensor  # (sequences,) what multiplies the sum over e of c_e * (sum over t of p_te)
    counts: Callable[[], Tensor]  # (sequences, E) c_e of whole sequences; asked for in the backward


def probabilities_of(logits: Tensor) -> Tensor:
    """Softmax of logits (rows, E), in FP32 at least."""
    return torch.softmax(logits.detach().to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def totals_of(logits: Tensor, sequence: Tensor, num_sequences: int, top_k: int) -> Tensor:
    """c_e and the sum over t of p_te for the rows at hand: (sequences, 2 * E)."""
    probabilities = probabilities_of(logits)
    used = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    totals = probabilities.new_zeros(num_sequences, 2 * logits.shape[-1])
    return totals.index_add_(0, sequence, torch.cat((used, probabilities), dim=-1))


def balanced(routed: Routed | None, logits: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`outputs` of a router as they are; in the backward its logits (rows, E) get the gradient of its loss as well.

    None stands for what is not known where a layer is computed again; nothing goes backward through that.
    """
    found: tuple[Tensor, ...] = _Balanced.apply(routed, logits, *outputs)
    return found


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, routed: Routed | None, logits: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.routed = routed
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits)
        return tuple(out.clone() for out in outputs)  # views could not be written to in place by what follows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        sequence, weights, counts = ctx.routed
        probabilities = probabilities_of(logits)
        of_rows = (weights.unsqueeze(-1) * counts()).to(probabilities.dtype)[sequence]
        mean = (probabilities * of_rows).sum(dim=-1, keepdim=True)
        return None, (probabilities * (of_rows - mean)).to(logits.dtype), *gradients


class RowsComputed:
    """How many rows the experts of a module have computed on this rank, of all rows of the ranks that share them."""

    def __init__(self, ranks: int):
        """So many `ranks` share the experts."""
        self._ranks = ranks
        self._own = self._all = 0

    def add(self, own: int, every: int) -> None:
        """Count rows of a forward, also of one that computes a layer again."""
        self._own += own
        self._all += every

    def take(self) -> float:
        """The rank's rows over those that it has where routing is even, since it was taken last; 0: none were routed.

        Of 4 ranks one that computes 30 of 80 rows has 1.5 times as many as it would have.
        """
        found = self._own * self._ranks / self._all if self._all else 0.0
        self._own = self._all = 0
        return found


def spread_experts(
    model: nn.Module, modules: Collection[str], place: StagePlace, pack: Callable[[], Pack]
) -> dict[str, RowsComputed]:
    """Let the experts' modules at these paths compute with this rank's experts alone; `pack` gives the one that runs.

    To be called before what adds their results up over tensor parallel ranks. Returns what each will have computed, by
    its path.
    """
    stage = place.stage
    found = {path: RowsComputed(stage.ep) for path in modules}
    for path, routed in found.items():
        module = model.get_submodule(path)
        every = num_experts(module)
        count = every // stage.ep
        around = [model.get_submodule(path[: path.index(".base_layer")])] if ".base_layer" in path else []
        for owner in (module, *(each for outer in around for each in outer.modules())):
            for name, value in list(vars(owner).items()):
                if "experts" in name and type(value) is int and value == every:
                    setattr(owner, name, count)  # by which models count, and bound what they index
        first = place.holder % stage.ep * count
        own = partial(_own_experts, module.forward, first, count, routed=routed)
        wrap(module, own, "tensor parallel", "own experts")
        if stage.ep > stage.tp:
            over_all = partial(_over_sequence_ranks, module.forward, pack)
            wrap(module, over_all, "tensor parallel", "experts of all sequence parallel ranks")
    return found


def num_experts(module: nn.Module) -> int:
    """Experts of a module of stacks."""
    return int(next(p for p in module._parameters.values() if p is not None).shape[0])


def _own_experts(
    forward: Callable[..., Tensor], first: int, count: int, hidden: Tensor, chosen: Tensor, weights: Tensor, *rest: Any,
    routed: RowsComputed | None = None,
) -> Tensor:  # fmt: skip
    """What experts first, first + 1, ..., first + count - 1 add to the output of all tokens.

    `hidden` (T, H); `chosen`, the experts of each token, and their `weights` (T, k); out (T, H). `routed` is told of
    the rows.
    """
    own = (chosen >= first) & (chosen < first + count)
    token, place = own.nonzero(as_tuple=True)  # which waits for their number anyway
    if routed is not None:
        routed.add(len(token), chosen.numel())
    if not len(token):  # one that counts for nothing, so that all parameters have a gradient on every rank
        token = place = token.new_zeros(1)
    index = (chosen[token, place] - first).clamp(0, count - 1)
    weight = weights[token, place] * own[token, place]
    out = forward(hidden[token], index[:, None], weight[:, None], *rest)
    # Not `index_add`, which adds up in any order on a GPU.
    return out.new_zeros((len(hidden), out.shape[-1])).index_put((token,), out, accumulate=True)


def _over_sequence_ranks(
    forward: Callable[..., Tensor], pack: Callable[[], Pack], hidden: Tensor, chosen: Tensor, weights: Tensor,
    *rest: Any,
) -> Tensor:  # fmt: skip
    """The own tokens' part of the sum that all sequence parallel ranks make of all of their tokens."""
    now = pack()
    with torch.no_grad():
        every = all_of_row(chosen, 0, now)
    out = forward(all_of_row(hidden, 0, now), every, all_of_row(weights, 0, now), *rest)
    return own_of_sum(out, now)
