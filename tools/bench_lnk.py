"""Pull and push beside gloo's own collectives, in milliseconds for the same bytes.

Every case is one strategy on forked gloo ranks, with the buckets of a small Llama. `pull` and `push` start all
buckets and wait for all, casts between FP32 master shards and the wire dtype included. Beside them, in turns and in
the same processes, gloo's all_gather_into_tensor and reduce_scatter_tensor of as many bytes, cast likewise. Note that
gloo's reduce-scatter is slow (slower than its own all-reduce), so a push far below 1.0 is gloo's doing in part.

  python -m tools.bench_lnk [--quick] [--json FILE] [--ranks N] [--rounds N] [--strategies TEXT ...]

A second table plans for clusters of nodes of 8 ranks, without running: bytes of a pull that enter one node, directly
and with twins, as multiples of the model, and planning times of one bucket (a layer of a 32B model).

A case that misses its aim in time is measured again with three times the turns, which then count.
Exits non-zero if a ratio of times is above 1.0, twins gather an element into a node twice, or a bucket takes too long
to plan. That no more bytes and messages move than have to, tests of plans judge.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from ds_hydra.commands.figures import figures_parser, finish, print_table
from ds_hydra.pipe.model_plan import ModelPlan, twins_of
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.layout import ALIGNMENT, BucketSpec, Layout, even_layout
from ds_hydra.zero_hetero.link import Link
from ds_hydra.zero_hetero.masters import MasterShards
from ds_hydra.zero_hetero.pushes import Pulls, PushBucket, Pushes
from ds_hydra.zero_hetero.transfer_plan import TransferPlan, plan_transfer
from ds_hydra.zero_hetero.transport import TorchTransport
from ds_hydra.zero_hetero.twin_plan import plan_twin_pull
from tests.support.planner_cases import fused_llama_plan
from tools import aims, machine

NODE_SIZE = 8


CLUSTERS = ((64, "64*tp1"), (64, "2*tp16 + 4*tp4 + 8*tp2"), (1024, "1024*tp1"), (1024, "32*tp16 + 64*tp4 + 128*tp2"))


@dataclass(frozen=True)
class NodeRow:
    """One line of the table of clusters; volumes in multiples of the bucket, for one node."""

    num_ranks: int
    strategy: str
    direct: float
    entered: float  # to where twins have their parts
    gathered: float
    needed: float  # what the node's ranks hold, less what they own, and what each part is rounded up by
    plan_ms: float
    twins_ms: float


def plan_cluster(num_ranks: int, text: str) -> NodeRow:
    """Plan the pull of one layer of a 32B model and count what enters a node on average."""
    model = fused_llama_plan(num_layers=1, hidden=5120)
    bucket = next(bucket for bucket in model.buckets if bucket.name == "layer.0")
    strategy = place_strategy(StrategyShape.parse(text), num_ranks, model.num_layers)
    layout = model.pull_layout(bucket, strategy)
    masters = even_layout(bucket.numel, num_ranks)
    times: list[tuple[float, float]] = []
    for _ in range(3):
        began = time.process_time()
        plan = plan_transfer(masters, layout)
        between = time.process_time()
        shared = plan_twin_pull(masters, layout, twins_of(strategy, NODE_SIZE))
        times.append(((between - began) * 1e3, (time.process_time() - between) * 1e3))
    needed = 0
    for first in range(0, num_ranks, NODE_SIZE):
        wanted = _union(layout, range(first, first + NODE_SIZE))
        owned = masters.pieces[first][0].start, masters.pieces[first + NODE_SIZE - 1][0].stop
        needed += sum(stop - start - max(0, min(stop, owned[1]) - max(start, owned[0])) for start, stop in wanted)
    whole = bucket.numel * (num_ranks // NODE_SIZE)
    plan_ms, twins_ms = (min(column) for column in zip(*times, strict=True))
    enter, *gathers = shared.hops
    direct, entered = (_between_nodes(one) / whole for one in (plan, enter))
    gathered = sum(map(_between_nodes, gathers)) / whole
    # Parts begin on whole 128 bytes, so that one may be longer than an equal share, in each node.
    needed += ALIGNMENT * num_ranks * (num_ranks // NODE_SIZE)
    return NodeRow(num_ranks, text, direct, entered, gathered, needed / whole, plan_ms, twins_ms)


def _between_nodes(plan: TransferPlan) -> int:
    """Elements that a plan moves from one node to another."""
    slices = plan.slices
    return int(slices.length[slices.src // NODE_SIZE != slices.dst // NODE_SIZE].sum())


def _union(layout: Layout, ranks: range) -> list[tuple[int, int]]:
    """What some ranks hold together, as disjoint intervals."""
    union: list[tuple[int, int]] = []
    for start, stop in sorted((piece.start, piece.stop) for rank in ranks for piece in layout.pieces[rank]):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        else:
            union.append((start, stop))
    return union


def missed_node_aims(row: NodeRow) -> list[str]:
    """What a row of the table of clusters misses."""
    where = f"{row.num_ranks} ranks, {row.strategy}"
    missed = []
    if row.entered + row.gathered > row.needed * aims.MODELS_ENTERED:
        missed.append(f"{where}: {row.gathered} + {row.entered} models enter a node, {row.needed} needed")
    if max(row.plan_ms, row.twins_ms) > machine.limit(aims.TRANSFER_PLAN_S).here * 1e3:
        missed.append(f"{where}: planned in {row.plan_ms:.0f} ms, with twins in {row.twins_ms:.0f} ms")
    return missed


STRATEGIES = {4: ("4*tp1", "2*tp2", "tp2 + 2*tp1", "tp2pp2"), 8: ("8*tp1", "tp4 + 2*tp1pp2")}
PUSH_TAG = 1 << 10


@dataclass(frozen=True)
class Case:
    """One strategy on some ranks in one wire dtype."""

    num_ranks: int
    dtype: torch.dtype
    text: str
    strategy: Strategy
    plan: ModelPlan


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    num_ranks: int
    dtype: str
    strategy: str
    direction: str
    mib: float  # of all ranks
    mib_zero_1: float  # what ZeRO-1 would move
    ms: float
    gloo_ms: float
    ratio: float  # median of the ratios of one turn: what else the machine does comes and goes with the turns


class Lnk:
    """Pull and push of one strategy on this rank."""

    def __init__(self, case: Case, rank: int, plans: list[tuple[TransferPlan, Layout, TransferPlan]]):
        specs = [BucketSpec(b.name, tuple((p.name, p.numel) for p in b.params)) for b in case.plan.buckets]
        masters = MasterShards(specs, rank, case.num_ranks, "cpu")
        masters.put_grads(None)
        transport = TorchTransport(max_open_receives=2)
        buffers = [torch.zeros(held.sizes[rank], dtype=case.dtype) for _, held, _ in plans]
        pulls = [Link(pull, rank, transport) for pull, _, _ in plans]
        self.pulls = Pulls(pulls, masters.shards, buffers)
        self.pushes = Pushes(
            [
                PushBucket(Link(push, rank, transport), (), torch.zeros(held.sizes[rank]), masters.grads[b], case.dtype)
                for b, (_, held, push) in enumerate(plans)
            ],
            first_tag=PUSH_TAG,
        )

    def pull(self) -> None:
        self.pulls.start()
        self.pulls.finish()

    def push(self) -> None:
        self.pushes.finish()


class Gloo:
    """The collectives of ZeRO-1 over buckets of such sizes that as many elements move as in `moved`."""

    def __init__(self, case: Case, rank: int, moved: int, zero_1: int):
        sizes = [max(1, bucket.numel * moved // zero_1 // case.num_ranks) for bucket in case.plan.buckets]
        self.dtype = case.dtype
        self.shards = [torch.zeros(size) for size in sizes]
        self.wires = [torch.zeros(size, dtype=case.dtype) for size in sizes]
        self.wholes = [torch.zeros(size * case.num_ranks, dtype=case.dtype) for size in sizes]
        self.grads = [torch.zeros(size * case.num_ranks) for size in sizes]

    def pull(self) -> None:
        works = []
        for shard, wire, whole in zip(self.shards, self.wires, self.wholes, strict=True):
            source = shard if shard.dtype == self.dtype else wire.copy_(shard)
            works.append(dist.all_gather_into_tensor(whole, source, async_op=True))
        for work in works:
            work.wait()

    def push(self) -> None:
        works = []
        for shard, wire, whole, grad in zip(self.shards, self.wires, self.wholes, self.grads, strict=True):
            same = grad.dtype == self.dtype
            source, target = (grad, shard) if same else (whole.copy_(grad), wire)
            works.append(dist.reduce_scatter_tensor(target, source, async_op=True))
        for work, shard, wire in zip(works, self.shards, self.wires, strict=True):
            work.wait()
            if shard.dtype != self.dtype:
                shard.copy_(wire)


def slowest_ms(run: Callable[[], None]) -> float:
    """Time of the slowest rank, all starting together."""
    dist.barrier()
    began = time.perf_counter()
    run()
    elapsed = torch.tensor((time.perf_counter() - began) * 1e3, dtype=torch.float64)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item()


def measure(rank: int, case: Case, plans: list, moved: tuple[int, int], zero_1: int, rounds: int) -> list[float]:
    """Medians of ours and gloo's in ms and of their ratio, for pull and then push; taken in turns."""
    warnings.simplefilter("ignore")
    lnk = Lnk(case, rank, plans)
    runs: list[Callable[[], None]] = [
        lnk.pull,
        Gloo(case, rank, moved[0], zero_1).pull,
        lnk.push,
        Gloo(case, rank, moved[1], zero_1).push,
    ]
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for index, run in enumerate(runs):
            elapsed = slowest_ms(run)
            if turn > 0:  # the first turn connects, allocates and touches pages
                times[index].append(elapsed)
    result = []
    for ours, theirs in (times[:2], times[2:]):
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        result += [statistics.median(values) for values in (ours, theirs, ratios)]
    return result


def run_case(case: Case, rounds: int) -> list[Row]:
    plan, strategy = case.plan, case.strategy
    specs = [BucketSpec(b.name, tuple((p.name, p.numel) for p in b.params)) for b in plan.buckets]
    masters = MasterShards(specs, 0, case.num_ranks, "meta").layouts
    held = [plan.pull_layout(bucket, strategy) for bucket in plan.buckets]
    contributed = [plan.push_layout(bucket, strategy) for bucket in plan.buckets]
    plans = [
        (plan_transfer(m, h), h, plan_transfer(m, c).transposed())
        for m, h, c in zip(masters, held, contributed, strict=True)
    ]
    pulled = sum(sum(pull.received_numels()) for pull, _, _ in plans)
    pushed = sum(sum(push.sent_numels()) for _, _, push in plans)
    zero_1 = sum(master.numel for master in masters) * (case.num_ranks - 1)

    def body(rank: int) -> list[float]:
        return measure(rank, case, plans, (pulled, pushed), zero_1, rounds)

    ms = run_ranks(body, case.num_ranks, timeout=600)[0]
    mib = case.dtype.itemsize / 2**20
    name = str(case.dtype).removeprefix("torch.")
    return [
        Row(case.num_ranks, name, case.text, direction, moved * mib, zero_1 * mib, *times)
        for direction, moved, times in (("pull", pulled, ms[:3]), ("push", pushed, ms[3:]))
    ]


def main() -> int:
    parser = figures_parser(__doc__)
    parser.add_argument("--ranks", type=int, action="append", help="number of ranks (default: 4 and 8)")
    parser.add_argument("--rounds", type=int, help="timings of each operation (default: 11; quick: 5)")
    parser.add_argument("--strategies", nargs="+", help="strategies instead of the default ones")
    args = parser.parse_args()
    plan = fused_llama_plan(num_layers=2 if args.quick else 8)
    rounds = args.rounds or (5 if args.quick else 11)
    rows: list[Row] = []
    for num_ranks in args.ranks or (4, 8):
        for text in args.strategies or STRATEGIES.get(num_ranks, (f"{num_ranks}*tp1",)):
            strategy = place_strategy(StrategyShape.parse(text), num_ranks, plan.num_layers)
            for dtype in (torch.float32, torch.bfloat16):
                case = Case(num_ranks, dtype, text, strategy, plan)
                found = run_case(case, rounds)
                if max(row.ratio for row in found) > 1.0:  # too few turns, or is it so?
                    found = run_case(case, 3 * rounds)
                rows += found
    print_table(
        ["ranks", "wire", "strategy", "", "MiB", "ZeRO-1", "ms", "gloo ms", "ratio"],
        [tuple(asdict(row).values()) for row in rows],
    )
    print("gloo: all_gather_into_tensor for pull, reduce_scatter_tensor for push (which is slow on gloo), equal bytes")
    clusters = [plan_cluster(num_ranks, text) for num_ranks, text in CLUSTERS]
    print()
    print_table(
        ["ranks", "strategy", "into a node", "to twins", "gathered", "needed", "plan ms", "twins ms"],
        [tuple(asdict(cluster).values()) for cluster in clusters],
    )
    most = aims.QUICK_MOVED if args.quick else aims.MOVED
    missed = [f"{row.num_ranks} ranks, {row.dtype}, {row.strategy}, {row.direction}: {row.ratio:.2f} times gloo's time"
              for row in rows if row.ratio > most]  # fmt: skip
    missed += [aim for cluster in clusters for aim in missed_node_aims(cluster)]
    worst = max(rows, key=lambda row: row.ratio)
    figures = {"rows": [asdict(row) for row in rows], "clusters": [asdict(cluster) for cluster in clusters]}
    summary = f"{len(rows)} rows, time against gloo at worst {worst.ratio:.2f} ({worst.strategy} {worst.direction})"
    return finish("bench_lnk", summary, figures, missed, args.json)


if __name__ == "__main__":
    sys.exit(main())
