"""Ranks that share queries, of which some compute none of a slice: gradients of its keys are those of one process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_hydra.pipe.attention.backends import varlen_attention
from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.rows import Chunk, Pack
from ds_hydra.testing import run_ranks

HEADS = 2
ROWS = (((4, 40), 0, 4), ((6,), 4, 10))  # lengths, and which tokens of a sequence of ten the first of them are


def gradients(rank: int, sp: int) -> list[torch.Tensor]:
    """Of the queries, keys and values of this rank's tokens, row by row."""
    if sp > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    contexts, leaves, losses = Contexts(10), list[torch.Tensor](), list[torch.Tensor]()
    generator = torch.Generator().manual_seed(0)
    for lengths, start, stop in ROWS:
        pack = Pack(lengths, sp_rank=rank, sp=sp, chunk=Chunk(start, stop, contexts))
        whole = [torch.randn(sum(lengths), HEADS, 4, dtype=torch.float64, generator=generator) for _ in range(4)]
        q, k, v, wanted = (x[slice(*pack.local)].clone() for x in whole)
        leaves += [x.requires_grad_() for x in (q, k, v)]
        losses.append((varlen_attention(q, k, v, pack, context=contexts.of("layer")) * wanted).sum())
    for loss in reversed(losses):
        loss.backward()  # type: ignore[no-untyped-call]
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_a_slice_whose_queries_others_compute() -> None:
    """Of the first row the last ranks compute queries of the sequence beside the slice alone."""
    (alone,) = run_ranks(gradients, 1, 1)
    shared = [torch.cat(parts) for parts in zip(*run_ranks(gradients, 3, 3), strict=True)]
    assert len(alone) == len(shared) == 6
    for one, other in zip(alone, shared, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-13)
