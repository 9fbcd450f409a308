"""What training's parts take of a CPU, and what they keep, each beside the same done otherwise in the same run.

  python -m tools.bench_costs [--quick] [--json FILE] [--only PART ...]

set_up      CPU time in which a Llama of many layers is examined: by the rank that looks at it, and by one that is told
messages    CPU time of a step that hands out memory for messages
heartbeats  what rank 0's watchdog takes of a core: its own thread, with the connections of all ranks that it hears
head        time and peak memory of a head of 128K words and its loss as one function, beside a plain head's
packs       CPU time of a training step on packs over that of plain transformers, one sequence at a time, in FP64, by
            how tokens meet; the share that products and attention alone take, below which no pack comes
heads       a recurrent layer whose heads ranks share over one that each computes whole: CPU time, what is kept; FP32
sinks       attention with sinks by the log-sum-exp of a kernel over probabilities in memory: CPU time, what is kept

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ds_hydra.commands.figures import guarded, run_parts
from ds_hydra.pipe.attention import backends
from ds_hydra.pipe.attention.backends import Segments, per_sequence_sdpa
from ds_hydra.pipe.in_process import InProcessRanks
from ds_hydra.pipe.loss import HeadLoss
from ds_hydra.pipe.models import find_boxes
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.profiling.stage_memory import Allocations, kept_bytes
from ds_hydra.profiling.stage_timer import StageTimer
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.runs import Data, RankOfPipeline, _flat_values, uneven_data
from ds_hydra.self_check.schemes import BASE, uneven_pipeline
from ds_hydra.watchdog.connection import Connection
from ds_hydra.watchdog.meeting import greet
from ds_hydra.watchdog.watchdog import Watchdog
from ds_hydra.zero_hetero.link import Cuts, Scratch
from ds_hydra.zero_hetero.scratch_plan import end_of, in_turn
from tools import aims, machine

Rows = list[dict[str, Any]]
MIB = 2**20


def set_up(quick: bool, missed: list[str]) -> Rows:
    """CPU seconds to find what a job of default settings asks of a model, and with that given."""
    torch.set_num_threads(1)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    rows = []
    for layers in (2, 64) if quick else (2, 16, 64):  # the first imports and registers things once
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, num_hidden_layers=layers))
        began = time.process_time()
        found = CausalLM(model)
        between = time.process_time()
        CausalLM(model, facts=found.facts)
        rows.append({"layers": layers, "looks, s": between - began, "is told, s": time.process_time() - between})
    if rows[-1]["looks, s"] > (most := machine.limit(aims.EXAMINED_S)).here:
        missed.append(f"64 layers take {rows[-1]['looks, s']:.1f} s of CPU to examine, more than {most}")
    return rows[1:]


_BUCKETS, _PEERS = 34, 63  # of a 7B model, under 64*tp1
_NUMEL = 202_391_552 // 64  # of a layer, 1/64
_STEPS = 30


def messages(quick: bool, missed: list[str]) -> Rows:
    """What gradient hooks spend on memory in a step of 64*tp1 on 64 ranks: each bucket is sent to and received from
    all others, 4,284 messages in all. The least of some steps: what else the machine does only adds to it."""
    numels = [_NUMEL] * (2 * _PEERS)
    cuts = [Cuts(numels) for _ in range(_BUCKETS)]
    size = 2 * cuts[0].numel
    windows = in_turn((size,) * _BUCKETS, 2 * size)
    scratch = Scratch("cpu", end_of(windows))  # nobody writes to it, so it takes no pages
    seconds: list[float] = []
    for _ in range(_STEPS):
        began = time.process_time()
        handed = sum(len(cut.of(scratch.at(w, torch.bfloat16))) for cut, w in zip(cuts, windows, strict=True))
        seconds.append(time.process_time() - began)
    least, most = 1e3 * min(seconds), machine.limit(aims.HAND_OUT_MS)
    missed += [f"{least:.1f} ms of CPU to hand out {handed} buffers (aim {most})"] if least > most.here else []
    return [{"buffers": handed, "ms": least}]


NODE_SIZE, HEARTBEAT_S, CONNECTING_S = 8, 1.0, 60.0


@dataclass
class _Alone:
    """The texts of many ranks, all of which say what rank 0 says, but for the host that they are on."""

    num_ranks: int
    rank: int = 0

    def texts(self, text: str) -> list[str]:
        if not text.startswith("{"):  # all but who they are
            return [text] * self.num_ranks
        said = json.loads(text)
        return [json.dumps(said | {"host": f"node{rank // NODE_SIZE}"}) for rank in range(self.num_ranks)]


def heartbeats(quick: bool, missed: list[str]) -> Rows:
    """The share of a core, for jobs of several sizes. The ranks that rank 0 hears are one forked process, which
    connects once for each of them, sends their heartbeats at the times at which they would, and reads the answers. The
    figure is the watchdog's thread's own time; what the kernel does for the sockets is in it."""
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, most_files), most_files))
    rows, most = [], machine.limit(aims.HEARTBEATS)
    for num_ranks in (1024,) if quick else (64, 1024):
        dog, share, connected = _measured(num_ranks, 3.0 if quick else 15.0)
        rows.append({"ranks": num_ranks, "hears": connected, "beats a rank and s": 1 / dog.beat_s, "of a core": share})
        if connected != len(dog.below):
            missed.append(f"only {connected} of {len(dog.below)} ranks have connected")
        if share > most.here:
            missed.append(f"{num_ranks} ranks: {share:.4f} of a core (aim {most})")
    return rows


def _measured(num_ranks: int, seconds: float) -> tuple[Watchdog, float, int]:
    """A watchdog that has run, the share of a core that its thread took, and its connections."""
    dog = Watchdog(_Alone(num_ranks), lambda: (1, "forward"), heartbeat_s=HEARTBEAT_S, end=lambda text: None)
    assert dog.address is not None, "it listens"
    child = os.fork()
    if child == 0:
        try:
            _others(dog)
        finally:
            os._exit(0)
    try:
        deadline = time.monotonic() + CONNECTING_S
        while _connected(dog) < len(dog.below) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert dog._thread is not None, "several ranks are watched"
        assert dog._thread.ident is not None, "it runs"
        clock = time.pthread_getcpuclockid(dog._thread.ident)
        time.sleep(dog.beat_s)  # what connecting has left is over
        began, spent = time.monotonic(), time.clock_gettime(clock)
        time.sleep(seconds)
        share = (time.clock_gettime(clock) - spent) / (time.monotonic() - began)
        return dog, share, _connected(dog)
    finally:
        dog.closing.set()
        assert dog._thread is not None, "it runs"
        dog._thread.join(timeout=10)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _connected(dog: Watchdog) -> int:
    return sum(peer.connection is not None for peer in dog.peers.values())


def _others(dog: Watchdog) -> None:
    """The life of the ranks that rank 0 hears: each sends a beat in its turn, and hears what rank 0 says."""
    selector = selectors.DefaultSelector()
    connections: list[Connection] = []
    assert dog.address is not None, "it listens"
    for rank in dog.below:
        connections.append(greet(dog.address, dog.secret, rank))
        connections[-1].socket.setblocking(False)
        selector.register(connections[-1].socket, selectors.EVENT_READ, connections[-1])
    _beat_for_ever(connections, selector, dog.beat_s)


def _beat_for_ever(connections: Sequence[Connection], selector: selectors.BaseSelector, beat_s: float) -> None:
    begin, turn = time.monotonic(), 0
    while True:
        due = begin + turn * beat_s / len(connections)
        for key, _ in selector.select(max(0.0, due - time.monotonic())):
            key.data.receive()
            for _ in key.data.messages():
                pass
        while time.monotonic() >= begin + turn * beat_s / len(connections):
            connections[turn % len(connections)].send({"beat": [1, "forward"]})
            turn += 1


TOKENS, WIDTH, VOCABULARY = 512, 64, 131072


def head(quick: bool, missed: list[str]) -> Rows:
    """CPU time and peak memory beside a plain head's, all logits at once and torch's cross entropy of them in FP32, by
    turns; quick: a sixteenth of the vocabulary."""
    words, draw = VOCABULARY // 16 if quick else VOCABULARY, torch.Generator().manual_seed(0)
    hidden = torch.randn((1, TOKENS, WIDTH), generator=draw).bfloat16()
    weight = (0.1 * torch.randn((words, WIDTH), generator=draw)).bfloat16()
    labels = torch.randint(0, words, (TOKENS,), generator=draw)
    batch = MicroBatch(Pack((TOKENS,)), torch.zeros(1, TOKENS), None, labels, torch.full((TOKENS,), 1 / TOKENS))

    def run(loss_of: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, int]:
        given = [one.clone().requires_grad_() for one in (hidden, weight)]
        with Allocations(hidden.device) as allocated:
            began = time.process_time()
            loss_of(*given).backward()  # type: ignore[no-untyped-call]
            seconds = time.process_time() - began
        return seconds, allocated.peak

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy((hidden[0] @ weight.t()).float(), labels)

    turns = [(run(plain), run(lambda rows, weight: HeadLoss(0, words, None)(rows, weight, batch))) for _ in range(3)]
    seconds = median(one[0] / other[0] for other, one in turns)
    peak = turns[-1][1][1] / turns[-1][0][1]
    for what, ratio, aim in (("time", seconds, aims.HEAD_TIME), ("peak memory", peak, aims.HEAD_PEAK)):
        missed += [f"head: {ratio:.2f} of a plain head's {what} (aim {aim})"] if ratio > aim else []
    (plain_s, plain_peak), (one_s, one_peak) = turns[-1]
    return [{"words": words, "plain, s": plain_s, "as one, s": one_s, "time over plain": seconds,
             "plain, MiB": plain_peak / MIB, "as one, MiB": one_peak / MIB, "peak over plain": peak}]  # fmt: skip


_VIEWS = frozenset({"view", "t", "transpose", "permute", "slice", "select", "expand", "unsqueeze", "squeeze", "detach",
                    "alias", "as_strided", "_unsafe_view", "split", "split_with_sizes", "unbind", "narrow",
                    "_reshape_alias", "unfold"})  # fmt: skip
_FLOOR = ("mm", "addmm", "addmm_", "bmm", "baddbmm")  # operators whose arithmetic packing can only make wider
_MALLOC = {-1: (1 << 31) - 1, -3: 1 << 25, -8: 1}  # glibc's options: bytes to trim and to map at, arenas
_LAYERS, _SHORT, _PACK_TURNS = 4, 64, 9
# What is measured -> model type and what its config has beside the sizes.
_LAYERS_OF: dict[str, tuple[str, dict[str, Any]]] = {
    "interface": ("llama", {}),
    "boxes": ("stablelm", {}),
    "hybrid": (
        "qwen3_next",
        {"head_dim": 32, "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 32,
         "linear_value_head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
         "shared_expert_intermediate_size": 96, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    ),
}  # fmt: skip


class _Count(TorchDispatchMode):
    """Counts the operators that compute, and the CPU seconds of those that no pack can save."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.floor = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        self.number += name not in _VIEWS
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        if name in _FLOOR or "attention" in name:
            self.floor += time.thread_time() - began
        return result


def packs(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each kind of layers and each pack: CPU seconds of a step over those of plain transformers."""
    torch.set_num_threads(1)
    _hold_memory()
    rows = []
    for sequences, length, width in ((16, _SHORT, 192),) if quick else ((32, _SHORT, 192), (32, 256, 512)):
        for kind in _LAYERS_OF:
            row = _pack_row(kind, sequences, length, width)
            rows.append(row)
            aim = aims.PACKS_OVER_PLAIN[kind] if length == _SHORT else aims.LONGER_PACKS_OVER_PLAIN
            if row["over plain"] > aim:
                missed.append(f"{kind}, {sequences} x {length}: {row['over plain']:.2f} of plain, not <= {aim}")
    return rows


def _hold_memory() -> None:
    """Let this process hold what it frees, in one place, as a GPU's allocator does: what glibc gives back and asks for
    again is touched for the first time again, up to 47,000 pages and 0.1 s of a pack's 0.35 s in the first turns."""
    libc = ctypes.CDLL(None)
    for option, value in _MALLOC.items():
        if libc.mallopt(option, value) != 1:
            raise OSError(f"glibc's allocator refuses {value} as option {option}")


def _pack_row(kind: str, sequences: int, length: int, width: int) -> dict[str, Any]:
    model_type, own = _LAYERS_OF[kind]
    config = AutoConfig.for_model(
        model_type, vocab_size=96, hidden_size=width, intermediate_size=512, num_hidden_layers=_LAYERS,
        num_attention_heads=6 if width % 6 == 0 else 8, num_key_value_heads=3 if width % 6 == 0 else 4,
        max_position_embeddings=4096, **own,
    )  # fmt: skip
    torch.manual_seed(0)
    extra = {"experts_implementation": "eager"} if model_type == "qwen3_next" else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **extra).double()
    data = uneven_data(96, [(length,) * sequences])
    pairs, floor, operators = _pairs(CausalLM(model, by_one_rank=True), Plain(model), data)
    packs, alone = (min(column) for column in zip(*pairs, strict=True))
    each = operators / (sequences * _LAYERS)
    return {"layers": kind, "sequences": sequences, "tokens": length, "width": width, "packs, s": packs,
            "plain, s": alone, "products and attention over plain": floor / alone, "over plain": packs / alone,
            "operators a sequence and layer": each}  # fmt: skip


def _pairs(source: CausalLM, plain: Plain, data: Data) -> tuple[list[tuple[float, float]], float, int]:
    """CPU seconds of training steps as one stage and plainly, those of a stage's products and attention, operators.

    The two take turns, since what else the machine does moves either by a fifth from second to second. The ratio of the
    least of each varies less than the median of their ratios.
    """
    ranks = InProcessRanks(1)
    found: list[tuple[list[tuple[float, float]], float, int]] = []

    def body(rank: int) -> None:
        worker = RankOfPipeline(source, uneven_pipeline(BASE, source.plan.num_layers), rank, ranks)
        worker.install(_flat_values(source), {})
        order = range(len(data.sequences))
        turns = [(_seconds(lambda: worker.train(data)), _seconds(lambda: plain._train(data, order)))
                 for _ in range(1 + _PACK_TURNS)]  # fmt: skip
        with _Count() as count:
            worker.train(data)
        found.append((turns[1:], count.floor, count.number))  # the first is warm-up

    ranks.run(body)
    return found[0]


def _seconds(run: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    began = time.thread_time()
    run()
    return time.thread_time() - began


_SIZES = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}  # fmt: skip
# A layer that is recurrent, and one that is not and does not run.
_RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "delta rule": (
        "qwen3_5_text",
        {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
         "linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "Mamba-2": (
        "nemotron_h",
        {"mamba_num_heads": 16, "mamba_head_dim": 32, "ssm_state_size": 64, "n_groups": 4, "chunk_size": 64,
         "layers_block_type": ["mamba", "attention"]},
    ),
}  # fmt: skip
_SCHEMES = ((2, 1), (1, 2), (1, 4), (2, 2))  # tp, sp
_HEAD_TURNS = 3


def heads(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each kind of layer and degrees: rank 0's forward and backward of one sequence in FP32 on one thread,
    messages left out, by heads over whole."""
    torch.set_num_threads(1)
    tokens, rows = 512 if quick else 1024, []
    for kind in list(_RECURRENT)[: 1 if quick else None]:
        by_heads = _source(kind)
        with mock.patch.object(find_boxes, "with_heads", lambda alone, boxes, calls: boxes):
            whole = _source(kind)
        for tp, sp in _SCHEMES[:2] if quick else _SCHEMES:
            row = _heads_row(by_heads, whole, tp, sp, tokens)
            rows.append({"layer": kind, "scheme": f"tp{tp}sp{sp}", "tokens": tokens} | row)
            for what, aim in (("time", aims.HEADS_TIME[tp * sp]), ("kept", aims.HEADS_KEPT[tp * sp])):
                if row[f"{what} ratio"] > aim:
                    missed.append(f"{kind}, tp{tp}sp{sp}: {what} {row[f'{what} ratio']:.2f} of whole, not <= {aim}")
    return rows


def _source(kind: str) -> CausalLM:
    model_type, own = _RECURRENT[kind]
    torch.manual_seed(0)
    return CausalLM(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_SIZES, **own)))


def _heads_row(by_heads: CausalLM, whole: CausalLM, tp: int, sp: int, tokens: int) -> dict[str, Any]:
    scheme = ParallelScheme(tp, 2, sp)
    timers = [StageTimer(source, scheme, 0, torch.device("cpu"), torch.float32) for source in (by_heads, whole)]
    for timer in timers:
        assert timer.module.place.stage.num_layers == 1, "the recurrent layer"
    kept = [kept_bytes(timer, (tokens,)) for timer in timers]
    batches = [timer.batch((tokens,)) for timer in timers]
    turns = [[_seconds(partial(t.run, b)) for t, b in zip(timers, batches, strict=True)] for _ in range(_HEAD_TURNS)]
    mine, all_of_it = (min(column) for column in zip(*turns, strict=True))
    return {"ms": 1e3 * mine, "whole, ms": 1e3 * all_of_it, "kept KiB a token": kept[0] / tokens / 1024,
            "whole, KiB": kept[1] / tokens / 1024, "time ratio": mine / all_of_it,
            "kept ratio": kept[0] / kept[1]}  # fmt: skip


# A key head of gpt-oss with its queries: eight of width 64; every other layer has a window of 128.
_HEADS, _WIDTH = 8, 64
_WINDOWS = (None, 128)
_SINK_TURNS = 2


def sinks(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for attention to all tokens and in a window: one sequence, FP32, forward and backward on one thread."""
    torch.set_num_threads(1)
    tokens = 2048 if quick else 4096
    rows = [_sinks_row(tokens, window) for window in _WINDOWS]
    for row in rows:
        for name, aim in (("time ratio", aims.SINKS_TIME[row["window"]]), ("kept ratio", aims.SINKS_KEPT)):
            if row[name] > aim:
                missed.append(f"sinks, window {row['window']}: {name} {row[name]:.2f}, not <= {aim}")
    return rows


def _sinks_row(tokens: int, window: int | None) -> dict[str, Any]:
    plain = min(_cost(tokens, window, with_sinks=False) for _ in range(_SINK_TURNS))
    mine = min(_cost(tokens, window) for _ in range(_SINK_TURNS))
    with mock.patch.object(backends, "has_log_sum_exp", return_value=False):
        shown = min(_cost(tokens, window) for _ in range(_SINK_TURNS))
    return {"tokens": tokens, "window": window or "none", "s": mine[0], "by probabilities, s": shown[0],
            "without sinks, s": plain[0], "kept MiB": mine[1], "by probabilities, MiB": shown[1],
            "time ratio": mine[0] / shown[0], "kept ratio": mine[1] / shown[1]}  # fmt: skip


def _cost(tokens: int, window: int | None, *, with_sinks: bool = True) -> tuple[float, float]:
    """CPU seconds of a forward and a backward, and MiB that the backward keeps."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, _HEADS, _WIDTH), (tokens, 1, _WIDTH), (tokens, 1, _WIDTH), (_HEADS,))
    q, k, v, bias = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    began = time.thread_time()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = per_sequence_sdpa(
            q, k, v, Segments.whole((tokens,)), _WIDTH**-0.5, window, None, sinks=bias if with_sinks else None
        )
    out.sum().backward()
    return time.thread_time() - began, sum(kept.values()) / 2**20


PARTS: dict[str, Callable[[bool, list[str]], Rows]] = {
    "set_up": set_up,
    "messages": messages,
    "heartbeats": heartbeats,
    "head": head,
    "packs": packs,
    "heads": heads,
    "sinks": sinks,
}


def main() -> int:
    """The exit code: 0, or 1 if an aim was missed."""
    return run_parts("bench_costs", __doc__, PARTS)


if __name__ == "__main__":
    sys.exit(guarded("bench_costs", main))
