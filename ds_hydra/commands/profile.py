"""Measure a cost table on this machine: time and memory of every parallel scheme of a model.

  ds-hydra profile --model my_model/ --deepspeed-config ds.json --out cost_table.json
      [--gpus N] [--links links.json] [--merge] [--quick]
  deepspeed --module ds_hydra.commands.profile ...             on the ranks of a launcher

Without enough ranks for a scheme one rank's share of its stages is run, and its collectives are added from link
figures, measured or given. On a CPU the command starts as many ranks as there are cores, one thread each. Ctrl-C
keeps the schemes that are done; the same command goes on with the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from ds_hydra.commands.figures import figures_parser, finish, guarded, new_file, print_table
from ds_hydra.commands.job_config import read_job
from ds_hydra.config.hydra_block import FLASH_3, HydraConfig
from ds_hydra.costs.cost_table import (
    CostTable,
    Peak,
    TableFile,
    activations_from_record,
    activations_record,
    read_table_file,
    told,
    write_atomically,
)
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.costs.memory import Activations, JobMemory
from ds_hydra.costs.shape_costs import stage_schemes
from ds_hydra.engine.costs import describe_job, rank_memory
from ds_hydra.engine.plugs import plugged
from ds_hydra.host.devices import device_index
from ds_hydra.pipe.attention.backends import use_flash_3
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.layouts import feasible_schemes
from ds_hydra.profiling.fit import Point, Rung, SchemeEntry, entry_from_record, make_ladder, with_shared_squares
from ds_hydra.profiling.links import Links, links_from_record, read_links
from ds_hydra.profiling.stage_memory import measure_activations
from ds_hydra.profiling.stage_timer import MakeOptimizer, step_costs, within_memory
from ds_hydra.profiling.survey import RepeatBudget, Survey, message_sizes, time_links
from ds_hydra.ranks.forked import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """All that decides what is measured; the same on every rank."""

    source: CausalLM
    schemes: tuple[ParallelScheme, ...]
    num_gpus: int
    node_size: int
    rungs: tuple[Rung, ...]
    most_tokens: int | None  # of a micro-batch, if the job says how many a step has
    budget: RepeatBudget
    clock: Literal["wall", "cpu"]
    dtype: torch.dtype
    grad_dtype: torch.dtype | None  # where gradients add up; None: FP32 or wider
    wire_dtype: torch.dtype | None  # of gradients on their way; None: as computed in
    device: torch.device
    job: JobFingerprint
    make_optimizer: MakeOptimizer
    images: bool = False  # whether the job trains images

    @property
    def shard_elements(self) -> int:
        """Trained elements that a rank of the job owns."""
        return sum(bucket.numel for bucket in self.source.plan.buckets if bucket.trainable) // self.num_gpus

    @property
    def largest_message(self) -> int:
        """Bytes of the job's largest message.

        That is the hidden states of the largest micro-batch, or a rank's part of the largest bucket on its way to a
        rank that holds all of it.
        """
        plan = self.source.plan
        hidden = max(sum(rung.lengths) for rung in self.rungs) * self.source.width(min(1, plan.num_layers - 1))
        part = max(bucket.numel for bucket in plan.buckets) // self.num_gpus
        return max(hidden, part) * self.dtype.itemsize


def make_request(args: argparse.Namespace) -> Request:
    """The request of a command line and the job's config. ConfigError if they ask for something impossible."""
    job = read_job(args.deepspeed_config, torch.float32)
    named = [StrategyShape.parse(text) for text in args.schemes or ()] or (job.hydra.shapes if job.hydra else ())
    # Where layers may be recomputed they are kept if they fit, by costs of layers that are.
    again, asked = job.hydra is not None and job.hydra.recomputes_all, job.stage_options
    options = replace(asked, activation_checkpointing=again, host_activations=again and asked.host_activations)
    source = job.source(args.model, options, named)
    num_gpus = args.gpus or _ranks_of(job.hydra) or _world_size()
    node_size = args.gpus_per_node or (job.hydra and job.hydra.node_size) or num_gpus
    schemes = _schemes(source, args.schemes, num_gpus, node_size)
    device = _device(args.local_rank)
    if device.type == "cuda" and (job.hydra is None or FLASH_3 in job.hydra.fast_paths):
        use_flash_3(device)
    return Request(
        source=source,
        schemes=schemes,
        num_gpus=num_gpus,
        node_size=node_size,
        rungs=_rungs(source, args, job.hydra.context_length if job.hydra else None, device),
        most_tokens=(job.hydra and job.hydra.tokens_per_step) or None,
        budget=RepeatBudget(args.seconds or (0.1 if args.quick else 0.35), 3, 5 if args.quick else 15),
        clock=_clock(args.clock, device),
        dtype=job.dtype,
        grad_dtype=job.grad_dtype,
        wire_dtype=job.wire_dtype,
        device=device,
        job=describe_job(source, device, job.dtype, num_gpus),
        make_optimizer=job.make_optimizer,
        images=job.hydra is not None and job.hydra.images,
    )


def _ranks_of(hydra: HydraConfig | None) -> int | None:
    return hydra.shapes[0].num_ranks if hydra and hydra.shapes else None


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "0")) or max(1, torch.cuda.device_count())


def _schemes(source: CausalLM, named: list[str] | None, num_gpus: int, node_size: int) -> tuple[ParallelScheme, ...]:
    """The schemes named on the command line, or all that the model and the ranks allow."""
    if not named:
        schemes = feasible_schemes(source.plan, num_gpus, node_size)
        if not schemes:
            raise ConfigError("the model cannot be cut by any scheme: no TP, SP or PP degree fits it")
        return schemes
    schemes = tuple(
        dict.fromkeys(s for text in named for p in StrategyShape.parse(text).pipelines for s in stage_schemes(p))
    )
    largest = max(scheme.num_ranks for scheme in schemes)
    allowed = feasible_schemes(source.plan, largest, largest)
    wrong = [str(scheme) for scheme in schemes if scheme not in allowed]
    if wrong:
        raise ConfigError(f"the model cannot be cut by {', '.join(wrong)}; it can by {', '.join(map(str, allowed))}")
    return schemes


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = device_index(int(os.environ.get("LOCAL_RANK", local_rank)), torch.cuda.device_count())
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _rungs(source: CausalLM, args: argparse.Namespace, context: int | None, device: torch.device) -> tuple[Rung, ...]:
    """Lengths to measure: up to the longest that model and job allow, from an eighth of it or less."""
    limit = getattr(source.text_config, "max_position_embeddings", None) or 4096
    longest = args.longest or min(limit, context or limit)
    shortest = max(16, min(128 if device.type == "cuda" else 32, longest // 8))
    return make_ladder(shortest, longest, args.rungs or (5 if args.quick else 7))


def _clock(wanted: Literal["auto", "wall", "cpu"], device: torch.device) -> Literal["wall", "cpu"]:
    """CPU time where other work runs on the same cores: wall time would measure that too."""
    if wanted == "cpu" and device.type != "cpu":
        raise ConfigError("--clock cpu is the time of the host's cores, and a GPU computes beside them: leave it out")
    if wanted != "auto":
        return wanted
    return "cpu" if device.type == "cpu" and _busy_cores() > 0.5 else "wall"


def _busy_cores() -> float:
    """Cores that other processes use now."""
    # The load average looks back over a minute: after a build it would still speak of work that has ended.

    def ticks() -> tuple[int, int]:
        numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # idle, and waiting for a disk

    try:
        before = ticks()
        time.sleep(1.0)
        total, idle = (b - a for a, b in zip(before, ticks(), strict=True))
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]
    return (1.0 - idle / max(1, total)) * (os.cpu_count() or 1)


T = TypeVar("T")
_NO_ROOM: dict[str, Any] = {"how": "no room"}  # in place of the entry of a scheme for which a device has no memory


class Session:
    """Measures scheme by scheme and keeps finished ones in a file beside the table that they will become."""

    def __init__(self, request: Request, out: Path, links_file: Path | None) -> None:
        self.request = request
        self.partial = out.with_name(out.name + ".partial")
        self.done: dict[str, dict[str, Any]] = {}
        self.links: Links | None = read_links(links_file) if links_file else None
        self.given_links = json.loads(links_file.read_text()) if links_file else None
        self.step: dict[str, float] = {}
        self.activations: dict[tuple[int, int], Activations] = {}
        self.images: dict[str, float] | None = None  # of an encoder, if the job has one
        self._load_partial()

    def _header(self) -> dict[str, Any]:
        """All that measured figures depend on: those of another header must not be mixed with new ones."""
        job = self.request.job
        rungs = [[list(rung.lengths), rung.held_out] for rung in self.request.rungs]
        return {"model": job.model, "device": job.device, "dtype": job.dtype, "stages": asdict(job.stages),
                "rungs": rungs,
                "most_tokens": self.request.most_tokens, "clock": self.request.clock, "links": self.given_links,
                "shard_elements": self.request.shard_elements,
                "largest_message": self.request.largest_message}  # fmt: skip

    def _load_partial(self) -> None:
        if not self.partial.exists():
            return
        try:
            record = json.loads(self.partial.read_text())
            if record["header"] != self._header():
                print(f"{self.partial}: begun for something else; starting anew")
                return
            self.done, self.step = dict(record["done"]), dict(record["step"])
            if record["links"]:
                self.links = links_from_record(record["links"], str(self.partial))
            self.activations, self.images = activations_from_record(record["activations"]), record.get("images")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.partial} cannot be read ({error}); remove it to start anew") from error
        print(f"going on after {len(self.done)} schemes of an interrupted run")

    def save_partial(self) -> None:
        """Write all measurements so far, so that the same command can continue from them."""
        record = {
            "header": self._header(),
            "done": self.done,
            "links": self.links.to_record() if self.links else None,
            "step": self.step,
            "activations": activations_record(self.activations),
            "images": self.images,
        }
        write_atomically(self.partial, json.dumps(record))

    def measure_scheme(self, scheme: ParallelScheme) -> SchemeEntry | None:
        """One scheme, by a survey of its own: on forked ranks the process groups of a survey end with the ranks."""
        assert self.links is not None, "links come first"
        r = self.request
        control = _control(r.device)
        survey = Survey(r.source, r.device, r.dtype, self.links, r.rungs, budget=r.budget, clock=r.clock,
                      most_tokens=r.most_tokens, node_size=r.node_size, control=control)  # fmt: skip
        return survey.measure(scheme)

    def measure_links(self) -> tuple[Links, dict[str, float]]:
        """Link figures of the ranks that are there, and the coefficients of a step's overhead."""
        needed = any(scheme.num_ranks > 1 for scheme in self.request.schemes)
        r = self.request
        figures = _measure_links(r.device, r.largest_message) if needed and self.links is None else []
        links = self.links or Links(tuple(figures), "measured here")
        costs = step_costs(r.device, links, elements=r.shard_elements, make_optimizer=r.make_optimizer)
        return links, costs

    def table(self, device_bytes: float) -> TableFile:
        """The table of all measured schemes that fit; ConfigError when none does."""
        r = self.request
        memory = JobMemory(
            r.source.plan, r.num_gpus, self.activations, r.dtype.itemsize, device_bytes=device_bytes,
            vocab=r.source.vocab_size or 1, outputs=1 if r.source.valued else None,
            grad_bytes=r.grad_dtype.itemsize if r.grad_dtype else None,
            wire_bytes=r.wire_dtype.itemsize if r.wire_dtype else None, node_size=r.node_size,
        )  # fmt: skip
        costs, measured, entries = [], {}, []
        for name, entry in self.done.items():
            if entry == _NO_ROOM:
                print(f"{name}: left out, a rank ran out of memory before two lengths were measured")
            else:
                entries.append(entry_from_record(ParallelScheme.parse(name), entry))
        for whole in with_shared_squares(entries):
            scheme, entry = whole.scheme, whole.record()
            name = str(scheme)
            limit = memory.max_length(scheme)
            if limit < 1:
                needs = memory.fullest(scheme, 1)
                print(f"{name}: left out, its model states need {needs.states / 2**30:.2f} GiB of a rank's "
                      f"{memory.capacity / 2**30:.2f} GiB")  # fmt: skip
                continue
            kept = self.activations[scheme.tp, scheme.sp]
            costs.append(whole.cost(limit, kept))
            measured[name] = entry | {"memory": _memory_record(memory, scheme)}
        if not costs:
            raise ConfigError(
                f"no scheme fits: not even one token beside the model states in {device_bytes / 2**30:.2f} GiB a rank; "
                "use more ranks (--gpus), a larger TP or PP (--schemes), or devices with more memory"
            )
        software = ", ".join(f"{library} {version}" for library, version in r.job.versions)
        source = (
            f"measured by ds-hydra profile on {r.job.device}, {r.num_gpus} ranks, attention by {r.job.attention}, "
            f"{software}, {date.today()}"
        )
        return TableFile(CostTable(tuple(costs), source), r.job, measured,
                         self.links.to_record() if self.links else None, self.step,
                         self.activations, _peak(r), self.images)  # fmt: skip

    def measure_images(self) -> dict[str, float]:
        """What its encoder takes for an image."""
        r = self.request
        price = plugged("images", "hydra.images").measured(r.source, r.device, r.dtype)
        return dict(price._asdict())


def _peak(request: Request) -> Peak | None:
    """Of models whose layers attend to all tokens before, on devices whose peak is known."""
    plan, config = request.source.plan, request.source.text_config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    queries = [p for p in plan.buckets[len(plan.buckets) // 2].params if p.name.endswith("q_proj.weight")]
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None) or len(queries) != 1:
        return None
    return Peak.of(queries[0].shape[0], plan.num_layers, request.job.device)


def _memory_record(memory: JobMemory, scheme: ParallelScheme) -> dict[str, Any]:
    needs = memory.fullest(scheme, 1024)
    return {
        "stage": needs.stage,
        "state_bytes": needs.states,
        "bytes_per_token": needs.per_token,
        "transient_per_token": needs.transient,
        "device_bytes": memory.device_bytes,
        "margin": memory.margin,
    }


def _measure_links(device: torch.device, largest_message: int) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise ConfigError("link figures need two ranks to be measured: give --links, or start with --ranks 2")
    figures = []
    world = dist.get_world_size()
    size = 2
    while size <= world:
        groups = [dist.new_group(list(range(start, start + size))) for start in range(0, world - size + 1, size)]
        if dist.get_rank() < size:
            figures += time_links(list(range(size)), groups[0], device, sizes=message_sizes(largest_message))
        dist.barrier()
        size *= 2
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, figures)
    return gathered[0]


def _control(device: torch.device) -> dist.ProcessGroup | None:
    if not dist.is_initialized() or device.type == "cpu":
        return None
    return dist.new_group(backend="gloo")


def measure(session: Session, num_ranks: int) -> None:
    """Measure what is missing: on ranks started here (CPU), or in this process (GPU, or ranks of a launcher)."""
    request = session.request
    launched = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    forked = request.device.type == "cpu" and not launched
    if launched:
        on_cuda = request.device.type == "cuda"
        # With its device a rank makes communicators where groups are made, and its barriers are on no other's device.
        dist.init_process_group("nccl" if on_cuda else "gloo", device_id=request.device if on_cuda else None)
    lead = not dist.is_initialized() or dist.get_rank() == 0

    def call(function: Callable[[], T]) -> T:
        if not forked:
            return function()
        return run_ranks(lambda rank: function(), num_ranks, timeout=1200)[0]

    def keep() -> None:
        if lead:
            session.save_partial()

    if not session.step:
        session.links, session.step = call(session.measure_links)
        keep()
    if request.images and session.images is None:
        session.images = call(session.measure_images)
        keep()
    tokens = min(512, max(rung.lengths[0] for rung in request.rungs))
    for tp, sp in dict.fromkeys((scheme.tp, scheme.sp) for scheme in request.schemes):
        if (tp, sp) not in session.activations:
            count = partial(measure_activations, request.source, tp, sp, request.device, request.dtype, tokens)
            found = call(partial(_within_memory, count, request.device))
            if found is not None:
                session.activations[tp, sp] = found
                continue
            without = [scheme for scheme in request.schemes if (scheme.tp, scheme.sp) == (tp, sp)]
            session.done.update({str(scheme): _NO_ROOM for scheme in without})
    hidden = not lead or not sys.stderr.isatty()
    with tqdm(total=len(request.schemes), unit="scheme", disable=hidden) as bar:
        for scheme in request.schemes:
            if str(scheme) not in session.done:
                entry = call(partial(session.measure_scheme, scheme))
                session.done[str(scheme)] = _NO_ROOM if entry is None else entry.record()
                keep()
            bar.update()


def _within_memory(work: Callable[[], T], device: torch.device) -> T | None:
    """`within_memory` with a group for it, made where it is called: on forked ranks groups end with the ranks."""
    return within_memory(work, _control(device))


MEDIAN_AIM, P90_AIM = 0.05, 0.12  # held-out error


def parse_args(arguments: Sequence[str] | None, name: str) -> argparse.Namespace:
    """Command line; the launcher adds --local_rank."""
    parser = figures_parser(__doc__, name)
    parser.add_argument("--model", required=True, help="config JSON, or checkpoint folder")
    parser.add_argument("--deepspeed-config", help="the job's config: dtype, checkpointing, context length")
    parser.add_argument("--out", type=new_file, default=Path("cost_table.json"))
    parser.add_argument(
        "--gpus", type=int, help="ranks of the job (default: of the config's strategies, or those here)"
    )
    parser.add_argument("--schemes", nargs="+", metavar="SCHEME", help="only these, e.g. tp2 tp4pp2")
    parser.add_argument("--gpus-per-node", type=int, help="TP and SP stay inside a node (default: --gpus)")
    parser.add_argument("--links", type=Path, help="link figures (JSON) instead of measuring them")
    parser.add_argument("--longest", type=int, help="longest sequence to measure, in tokens")
    parser.add_argument("--rungs", type=int, help="lengths on the ladder (default 7, with --quick 5)")
    parser.add_argument("--seconds", type=float, help="time for the repeats of one micro-batch")
    clock_help = "cpu: CPU time and local shapes, for a machine that others use too; auto: cpu there"
    parser.add_argument("--clock", choices=("auto", "wall", "cpu"), default="auto", help=clock_help)
    parser.add_argument("--ranks", type=int, help="ranks to start here (CPU; default: the cores, 8 at most)")
    parser.add_argument("--device-memory", type=float, metavar="GIB", help="of one rank (default: what is there)")
    parser.add_argument("--merge", action="store_true", help="extend --out, keeping its other schemes")
    parser.add_argument("--local-rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra profile") -> int:
    """Measure, print, write; return 1 if the held-out error misses the aims, 2 for refused input, 130 for Ctrl-C."""
    args = parse_args(arguments, name)
    return guarded(name, lambda: run(args, name))


def run(args: argparse.Namespace, name: str) -> int:
    """Run the command with its parsed options. ConfigError or PlanError if the input is refused."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    request = make_request(args)
    old = told(read_table_file(args.out)) if args.merge and args.out.exists() else None
    session = Session(request, args.out, args.links)
    try:
        measure(session, args.ranks or min(8, os.cpu_count() or 1))
    except KeyboardInterrupt:
        print(f"\ninterrupted: {len(session.done)} of {len(request.schemes)} schemes are in {session.partial}; "
              "the same command goes on with the rest")  # fmt: skip
        return 130
    if dist.is_initialized() and dist.get_rank() != 0:
        return 0
    here = rank_memory(request.device, os.cpu_count() or 1)  # of a CPU: a rank for each core
    made = session.table(args.device_memory * 2**30 if args.device_memory else here)
    (old.merged(made) if old else made).save(args.out)
    session.partial.unlink(missing_ok=True)
    return show(made, args, name, time.perf_counter() - began)


def show(made: TableFile, args: argparse.Namespace, name: str, seconds: float) -> int:
    """Print the entries, and how well they predict lengths that they were not fitted to."""
    rows, errors = [], []
    for scheme in made.table.schemes:
        cost, entry = made.table[scheme], (made.measured or {})[str(scheme)]
        stage = entry["stages"][[s["index"] for s in entry["stages"]].index(entry["slowest_stage"])]
        fit = entry_from_record(scheme, entry).slowest.fit
        for point in stage["points"]:
            if point["held_out"]:
                errors.append(abs(fit.error(Point(**{**point, "lengths": tuple(point["lengths"])}))))
        spread = sorted(point["spread"] for point in stage["points"])[len(stage["points"]) // 2]
        how = entry["how"] + (", scaled links" if entry["scaled_links"] else "")
        no_room = [s["no_room_tokens"] for s in entry["stages"] if s.get("no_room_tokens")]
        how += f", out of memory at {min(no_room):,} tokens" if no_room else ""
        known = ((fit.a, fit.standard_errors[0]), (fit.b, fit.standard_errors[1]), (fit.c, fit.standard_errors[2]))
        within = " ".join(f"{error / k:.0%}" if k and error is not None else "-" for k, error in known)
        floor = f"{cost.floor:.3f}" if cost.floor else "-"
        rows.append((str(cost.scheme), f"{cost.a:.3e}", f"{cost.b:.4e}", f"{cost.c:.3f}", floor, within,
                     " ".join(entry["unidentified"]) or "-", cost.max_length, cost.util_length,
                     *("-" if entry[key] is None else f"{entry[key]:.1%}" for key in
                       ("held_out_median", "held_out_p90")), f"{spread:.1%}",
                     how))  # fmt: skip
    print_table(("scheme", "a ms/tok^2", "b ms/tok", "c ms", "floor ms", "std. errors", "not fixed", "MaxLen",
                 "UtilLen", "held-out med", "p90", "spread", "how"), rows)  # fmt: skip
    show_split(made)
    if made.images:
        a, b, keep = made.images.values()
        print(
            f"an image of p patches, forward and backward: {a:.3e} ms * p^2 + {b:.3e} ms * p, {keep:,.0f} bytes a patch"
        )
    errors.sort()
    missed = [] if errors else ["no scheme had memory for a length to test the fit on"]
    errors = errors or [0.0]
    median, p90 = errors[len(errors) // 2], errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    if median > MEDIAN_AIM:
        missed.append(f"held-out median error {median:.1%} is above {MEDIAN_AIM:.0%}")
    if p90 > P90_AIM:
        missed.append(f"held-out p90 error {p90:.1%} is above {P90_AIM:.0%}")
    clock = next(iter((made.measured or {}).values()))["clock"]
    summary = (
        f"{len(rows)} schemes in {seconds:.0f} s ({clock} time, {platform.machine()}), held-out error median "
        f"{median:.1%}, p90 {p90:.1%}; table in {args.out}"
    )
    figures = {"seconds": seconds, "held_out_median": median, "held_out_p90": p90, "record": made.to_record()}
    return finish(name, summary, figures, missed, args.json)


def show_split(made: TableFile) -> None:
    """Print the shares of forward and weights' gradients, and how well they predict what they were not fitted to."""
    rows = []
    for scheme in made.table.schemes:
        cost = made.table[scheme]
        fit = (entry := entry_from_record(scheme, (made.measured or {})[str(scheme)]).slowest).fit
        if cost.shares is None or entry.split is None:
            continue
        small = [fit.error(point) for point in entry.points if sum(point.lengths) < cost.util_length]
        forward, weight = (
            " ".join(f"{share:.2f}" for share in part) for part in (cost.shares.forward, cost.shares.weight)
        )
        errors = (sum(small) / len(small) if small else None, entry.split.held_out, entry.split.slices,
                  entry.split.slice_parts)  # fmt: skip
        kept = (f"{cost.shares.until_weight:.2f}", f"{cost.shares.context:.2f}")
        shown = ("-" if error is None else f"{error:.1%}" for error in errors)
        rows.append((str(cost.scheme), forward, weight, *kept, *shown))
    if rows:
        print(
            "shares of a, b and c in the forward and the weights' gradients, and of memory; errors: mean of lengths "
            "below UtilLen, of the parts of held-out lengths, of whole slices with context, and of their parts"
        )
        headers = ("scheme", "F: a b c", "W: a b c", "until W", "context", "small", "parts", "slices", "their parts")
        print_table(headers, rows)


if __name__ == "__main__":
    sys.exit(main())
