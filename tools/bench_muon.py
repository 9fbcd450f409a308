"""What updates of whole parameters take beside AdamW's on many devices: `python -m tools.bench_muon`, simulated.

Directions go to the owners of whole matrices and come back over links with ports, as pulls and pushes do
(`ds_hydra.simulate.links`); owners iterate in the order of the buckets, each when its matrices have come. The step
beside it is the least that there can be: the published table's costs of its most efficient scheme, shared evenly by all
devices, so that shares are rather too large. Rates are assumed: of the iteration's products, and of memory, which is
all that AdamW needs. LAMB and Adafactor read their elements once more for each round of sums, which a ring adds up.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from ds_hydra.commands.figures import figures_parser, finish, print_table, shipped
from ds_hydra.costs.cost_table import read_table_file
from ds_hydra.data.lengths import WEB_PAGES, read_lengths
from ds_hydra.matrices.lamb_adafactor import Lamb, TorchAdafactor
from ds_hydra.matrices.owners import (
    Kind,
    MatrixParam,
    Owned,
    deal,
    iteration_flops,
    loads,
    master_parts,
    matrix_params,
    whole_layout,
)
from ds_hydra.pipe.model_plan import Bucket
from ds_hydra.simulate.job import SHIPPED, llama_plan
from ds_hydra.simulate.links import LinkModel, Parcels, Wires
from ds_hydra.zero_hetero.layout import even_layout
from ds_hydra.zero_hetero.transfer_plan import TransferPlan, plan_transfer
from tools import aims

PRODUCTS = 200e12  # FLOP/s of the iteration, of 312e12 of the data sheet
MEMORY = 1.5e12  # bytes/s
ADAM_BYTES = 28  # read and written of each element: value, gradient, two moments, in FP32
MATRIX_BYTES = 36  # the same of a matrix's: value, gradient twice, momentum thrice, what leaves and what comes
SUMS_BYTES = {"LAMB": 16 + ADAM_BYTES, "Adafactor": 12 + 8 + 20}  # rounds of sums, and the update
NODE, CONTEXT = 8, 32768


class Update(NamedTuple):
    """Seconds of an update, and what its busiest rank has to do."""

    seconds: float
    computing: float  # of the busiest rank, if nothing had to travel
    flops: float
    ratio: float  # of the busiest rank's work to an even share
    sent: float  # bytes that leave the busiest rank, both ways
    messages: int  # that it sends and receives


def transfers(
    buckets: tuple[Bucket, ...], params: tuple[MatrixParam, ...], owned: tuple[Owned, ...], ranks: int
) -> list[tuple[int, TransferPlan, TransferPlan]]:
    """By bucket, there and back."""
    made = []
    for number in sorted({param.bucket for param in params}):
        numel = buckets[number].numel
        whole = whole_layout(numel, params, owned, number, ranks)
        back = plan_transfer(whole, master_parts(even_layout(numel, ranks), params, number, 0))
        made.append((number, plan_transfer(even_layout(numel, ranks), whole), back))
    return made


def simulated(model: str, ranks: int, kind: Kind, there_bytes: int) -> Update:
    """An update on so many devices, eight to a node."""
    buckets = llama_plan(SHIPPED[model].shape).buckets
    vocab = SHIPPED[model].shape.vocab
    matrices = [p.name for b in buckets for p in b.params if len(p.shape) == 2 and p.shape[0] != vocab]
    params = matrix_params(buckets, dict.fromkeys(matrices, 1))
    costs = [(1, iteration_flops(*param.batch[1:], kind), param.apart) for param in params]
    owned = deal(costs, ranks)
    work = loads(costs, owned, ranks)
    links = LinkModel(NODE)
    wires = Wires.pair(ranks, links)[0]
    ways = transfers(buckets, params, owned, ranks)
    formed = np.zeros(ranks)
    came = [wires.exchange(Parcels.of_plan(there, links, there_bytes), formed).came for _, there, _ in ways]
    clock, done = np.zeros(ranks), np.zeros(ranks)
    for (number, _, back), arrived in zip(ways, came, strict=True):
        clock = np.maximum(clock, arrived)
        for one in owned:
            if params[one.param].bucket == number:
                clock[one.rank] += costs[one.param][1] / PRODUCTS
        exchanged = wires.exchange(Parcels.of_plan(back, links, 2), clock)
        done = np.maximum(done, np.maximum(exchanged.came, exchanged.left))
    sent = sum(
        there_bytes * np.array(there.sent_numels()) + 2 * np.array(back.sent_numels()) for _, there, back in ways
    )
    messages = np.zeros(ranks, dtype=int)
    for _, *both in ways:
        for plan in both:
            for pair in plan.pairs:
                messages[list(pair)] += 1
    elements = MATRIX_BYTES * sum(param.numel for param in params) / ranks / MEMORY
    busiest = max(work)
    return Update(float(max(done.max(), clock.max())) + elements, busiest / PRODUCTS + elements, busiest,
                  busiest * ranks / sum(work), float(sent.max()), int(messages.max()))  # fmt: skip


def by_sums(model: str, ranks: int, kind: str) -> tuple[float, float]:
    """Bytes of the tables of an update by sums over whole parameters, and its seconds."""
    buckets = llama_plan(SHIPPED[model].shape).buckets
    params = matrix_params(buckets, {param.name: 1 for bucket in buckets for param in bucket.params})
    sizes = Lamb.sizes if kind == "LAMB" else TorchAdafactor.sizes
    rounds = [8 * sum(own) for own in zip(*(sizes(None, param) for param in params), strict=True)]  # type: ignore[arg-type]
    links = LinkModel(NODE)
    adding = sum(links.collective_s("all_reduce", range(ranks), numel) for numel in rounds)
    return sum(rounds), adding + SUMS_BYTES[kind] * SHIPPED[model].shape.params / ranks / MEMORY


def even_step_s(model: str, ranks: int, tokens: int) -> float:
    """The least that a step of so many tokens of web pages could take."""
    costs = read_table_file(shipped(model)).table.costs
    lengths = [int(n) for n in read_lengths(WEB_PAGES, CONTEXT, 20000, 0).lengths]
    least = min(sum(c.a * n * n + c.b * n for n in lengths) * c.scheme.num_ranks for c in costs)
    ms = least * tokens / sum(lengths)
    return ms / ranks / 1e3


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    args = figures_parser(__doc__, "python -m tools.bench_muon").parse_args(arguments)
    rows, missed, summed = [], [], []
    for model in ("a800-7b", "a800-32b"):
        steps = [even_step_s(model, 1, tokens) for tokens in (200_000, 1_000_000)]
        for ranks in (64,) if args.quick else (64, 1024):
            adam = ADAM_BYTES * SHIPPED[model].shape.params / ranks / MEMORY
            for name in SUMS_BYTES:
                table, seconds = by_sums(model, ranks, name)
                shares = [f"{seconds / (step / ranks + seconds):.1%}" for step in steps]
                summed.append(
                    (model, ranks, name, f"{table / 1e6:.2f}", f"{1e3 * seconds:.1f}", f"{1e3 * adam:.1f}", *shares)
                )
            for kind, wide in (("standard", 2), ("gram", 4)):
                made = simulated(model, ranks, kind, wide)  # type: ignore[arg-type]
                exposed = made.seconds - made.computing
                whole = [step / ranks + made.seconds for step in steps]
                told = [f"{made.seconds / one:.1%}, {exposed / one:.1%}" for one in whole]
                rows.append((model, ranks, kind, f"{made.ratio:.2f}", f"{made.sent / 1e9:.2f}", made.messages,
                             f"{1e3 * made.seconds:.0f}", f"{1e3 * adam:.1f}", *told))  # fmt: skip
                if ranks == 64 and (made.ratio > aims.MATRIX_EVEN or exposed > aims.MATRIX_EXPOSED * whole[1]):
                    missed.append(f"{model} {kind}: {made.ratio:.2f} of even, {exposed / whole[1]:.1%} exposed")
    print_table(
        ("model", "ranks", "iteration", "over even", "sent, GB", "messages", "update, ms", "AdamW, ms",
         "of 200K: all, exposed", "of 1M: all, exposed"), rows
    )  # fmt: skip
    print_table(("model", "ranks", "optimizer", "sums, MB", "update, ms", "AdamW, ms", "of 200K", "of 1M"), summed)
    return finish("bench_muon", f"{len(rows)} updates", {"rows": rows, "sums": summed}, missed, args.json)


if __name__ == "__main__":
    sys.exit(main())
