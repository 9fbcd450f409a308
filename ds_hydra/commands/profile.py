"""Measure a cost table on this machine: time and memory of every parallel scheme of a model.

  python -m tools.profile_schemes --model examples/llama_tiny.json --deepspeed_config examples/ds_hydra.json \
      --out cost_table.json [--gpus N] [--links links.json] [--merge] [--quick]
  deepspeed tools/profile_schemes.py ...                       on the ranks of a launcher

Without enough ranks for a scheme one rank's share of its stages is run, and its collectives are added from link
figures, measured or given. On a CPU the tool starts as many ranks as there are cores, one thread each. Ctrl-C keeps
the schemes that are done; the same command goes on with the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ds_hydra.commands.figures import figures_parser, finish, print_table
from ds_hydra.config.hydra_block import parse_config, read_config
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.memory import Activations, JobMemory
from ds_hydra.costs.table_file import (
    JobFingerprint,
    TableFile,
    activations_from_record,
    activations_record,
    read_table_file,
    write_atomically,
)
from ds_hydra.engine.fingerprint import describe_job
from ds_hydra.engine.fits import rank_memory
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme, parse_strategy
from ds_hydra.plan.schemes import feasible_schemes
from ds_hydra.profiling.fit import Point
from ds_hydra.profiling.hollow import hollow_source
from ds_hydra.profiling.ladder import Rung, make_ladder
from ds_hydra.profiling.link_timer import time_links
from ds_hydra.profiling.links import Links, links_from_record, read_links
from ds_hydra.profiling.stage_memory import measure_activations
from ds_hydra.profiling.survey import RepeatBudget, SchemeEntry, Survey, entry_from_record, step_costs
from ds_hydra.ranks.forked import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

MEDIAN_AIM, P90_AIM = 0.05, 0.12  # held-out error


@dataclass(frozen=True)
class Request:
    """What is to be measured, the same on every rank."""

    source: CausalLM
    schemes: tuple[ParallelScheme, ...]
    num_gpus: int
    node_size: int
    rungs: tuple[Rung, ...]
    most_tokens: int | None  # of a micro-batch, if the job says how many a step has
    budget: RepeatBudget
    clock: Literal["wall", "cpu"]
    dtype: torch.dtype
    device: torch.device
    job: JobFingerprint


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line; the launcher adds --local_rank."""
    parser = figures_parser(__doc__)
    parser.add_argument("--model", required=True, help="config JSON, or checkpoint folder")
    parser.add_argument("--deepspeed_config", help="the job's config: dtype, checkpointing, context length")
    parser.add_argument("--out", type=Path, default=Path("cost_table.json"))
    parser.add_argument(
        "--gpus", type=int, help="ranks of the job (default: of the config's strategies, or those here)"
    )
    parser.add_argument("--schemes", nargs="+", metavar="SCHEME", help="only these, e.g. tp2 tp4pp2")
    parser.add_argument("--node_size", type=int, help="ranks of a node: TP and SP stay inside (default: --gpus)")
    parser.add_argument("--links", type=Path, help="link figures (JSON) instead of measuring them")
    parser.add_argument("--longest", type=int, help="longest sequence to measure, in tokens")
    parser.add_argument("--rungs", type=int, help="lengths on the ladder (default 7, with --quick 5)")
    parser.add_argument("--seconds", type=float, help="time for the repeats of one micro-batch")
    clock_help = "cpu: CPU time and local shapes, for a machine that others use too; auto: cpu there"
    parser.add_argument("--clock", choices=("auto", "wall", "cpu"), default="auto", help=clock_help)
    parser.add_argument("--ranks", type=int, help="ranks to start here (CPU; default: the cores, 8 at most)")
    parser.add_argument("--device_memory", type=float, metavar="GIB", help="of one rank (default: what is there)")
    parser.add_argument("--merge", action="store_true", help="extend --out, keeping its other schemes")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def make_request(args: argparse.Namespace) -> Request:
    """Model, schemes and lengths from the command line and the job's config. ConfigError for what cannot be."""
    parsed = parse_config(read_config(config=args.deepspeed_config)) if args.deepspeed_config else None
    hydra = parsed.hydra if parsed else None
    settings = parsed.deepspeed if parsed else {}
    checkpointing = bool(hydra and hydra.activation_checkpointing)
    source = hollow_source(args.model, activation_checkpointing=checkpointing)
    wanted = args.gpus or (sum(s.num_ranks for s in hydra.schemes[0]) if hydra and hydra.schemes else None)
    num_gpus = wanted or _world_size()
    node_size = args.node_size or (hydra.node_size if hydra and hydra.node_size else num_gpus)
    if args.schemes:
        schemes = tuple(dict.fromkeys(s for text in args.schemes for s in parse_strategy(text)))
        allowed = feasible_schemes(source.plan, max(s.num_ranks for s in schemes), max(s.num_ranks for s in schemes))
        wrong = [str(scheme) for scheme in schemes if scheme not in allowed]
        if wrong:
            raise ConfigError(
                f"the model cannot be cut by {', '.join(wrong)}; it can by {', '.join(map(str, allowed))}"
            )
    else:
        schemes = feasible_schemes(source.plan, num_gpus, node_size)
    if not schemes:
        raise ConfigError("the model cannot be cut by any scheme: no TP, SP or PP degree fits it")
    limit = getattr(source.text_config, "max_position_embeddings", None) or 4096
    longest = args.longest or min(limit, (hydra.context_length if hydra else None) or limit)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", args.local_rank)))
        torch.cuda.set_device(device)
    dtype = _dtype(settings)
    shortest = max(16, min(128 if device.type == "cuda" else 32, longest // 8))
    rungs = make_ladder(shortest, longest, args.rungs or (5 if args.quick else 7))
    seconds = args.seconds or (0.1 if args.quick else 0.35)
    return Request(
        source, schemes, num_gpus, node_size, rungs, hydra.tokens_per_step if hydra else None,
        RepeatBudget(seconds, 3, 5 if args.quick else 15), _clock(args, device), dtype, device,
        describe_job(source, device, dtype, num_gpus),
    )  # fmt: skip


def _dtype(settings: dict[str, Any]) -> torch.dtype:
    if settings.get("bf16", {}).get("enabled"):
        return torch.bfloat16
    return torch.float16 if settings.get("fp16", {}).get("enabled") else torch.float32


def _clock(args: argparse.Namespace, device: torch.device) -> Literal["wall", "cpu"]:
    """CPU time where other work runs on the same cores: wall time would measure that too."""
    if args.clock != "auto":
        return "cpu" if args.clock == "cpu" else "wall"
    return "cpu" if device.type == "cpu" and _busy_cores() > 0.5 else "wall"


def _busy_cores(seconds: float = 1.0) -> float:
    """Cores that others use now; the load average would remember what has ended."""

    def ticks() -> tuple[int, int]:
        numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # idle, and waiting for a disk

    try:
        before = ticks()
        time.sleep(seconds)
        total, idle = (b - a for a, b in zip(before, ticks(), strict=True))
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]
    return (1.0 - idle / max(1, total)) * (os.cpu_count() or 1)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "0")) or max(1, torch.cuda.device_count())


class Session:
    """Measures scheme by scheme and keeps what is done beside the table that it will become."""

    def __init__(self, request: Request, args: argparse.Namespace) -> None:
        self.request, self.args = request, args
        self.partial = args.out.with_name(args.out.name + ".partial")
        self.done: dict[str, dict[str, Any]] = {}
        self.links: Links | None = read_links(args.links) if args.links else None
        self.step: dict[str, float] = {}
        self.activations: dict[tuple[int, int], Activations] = {}
        self._load_partial()

    def _header(self) -> dict[str, Any]:
        job = self.request.job
        given = json.loads(self.args.links.read_text()) if self.args.links else None
        rungs = [[list(rung.lengths), rung.held_out] for rung in self.request.rungs]
        return {"model": job.model, "device": job.device, "dtype": job.dtype, "checkpointing":
                job.activation_checkpointing, "rungs": rungs, "most_tokens": self.request.most_tokens,
                "clock": self.request.clock, "links": given}  # fmt: skip

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
            self.activations = activations_from_record(record["activations"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.partial} cannot be read ({error}); remove it to start anew") from error
        print(f"going on after {len(self.done)} schemes of an interrupted run")

    def save_partial(self) -> None:
        """What is measured so far."""
        record = {
            "header": self._header(),
            "done": self.done,
            "links": self.links.to_record() if self.links else None,
            "step": self.step,
            "activations": activations_record(self.activations),
        }
        write_atomically(self.partial, json.dumps(record))

    def survey(self) -> Survey:
        """On the ranks at hand."""
        assert self.links is not None, "links come first"
        r = self.request
        control = _control(r.device)
        return Survey(r.source, r.device, r.dtype, self.links, r.rungs, budget=r.budget, clock=r.clock,
                      most_tokens=r.most_tokens, node_size=r.node_size, control=control)  # fmt: skip

    def measure_links(self) -> tuple[Links, dict[str, float]]:
        """Figures of the ranks at hand, and what a step costs besides its pipelines."""
        needed = any(scheme.num_ranks > 1 for scheme in self.request.schemes)
        links = self.links or Links(tuple(_measure_links(self.request.device)) if needed else (), "measured here")
        return links, step_costs(self.request.device, self.request.dtype, links)

    def table(self, device_bytes: float) -> TableFile:
        """The table of all measured schemes that fit; ConfigError when none does."""
        r = self.request
        memory = JobMemory(
            r.source.plan, r.num_gpus, self.activations, r.dtype.itemsize, device_bytes=device_bytes,
            vocab=r.source.vocab_size or 1,
        )  # fmt: skip
        costs, measured = [], {}
        for name, entry in self.done.items():
            (scheme,) = parse_strategy(name)
            limit = memory.max_length(scheme)
            if limit < 1:
                needs = memory.fullest(scheme, 1)
                print(f"{name}: left out, its model states need {needs.states / 2**30:.2f} GiB of a rank's "
                      f"{memory.capacity / 2**30:.2f} GiB")  # fmt: skip
                continue
            cost, record = _cost(scheme, entry, limit)
            costs.append(cost)
            measured[name] = record | {"memory": _memory_record(memory, scheme)}
        if not costs:
            raise ConfigError(
                f"no scheme fits: not even one token beside the model states in {device_bytes / 2**30:.2f} GiB a rank; "
                "use more ranks (--gpus), a larger TP or PP (--schemes), or devices with more memory"
            )
        source = f"measured by tools/profile_schemes on {r.job.device}, {r.num_gpus} ranks"
        return TableFile(CostTable(tuple(costs), source), r.job, measured,
                         self.links.to_record() if self.links else None, self.step,
                         self.activations)  # fmt: skip


def _cost(scheme: ParallelScheme, entry: dict[str, Any], limit: int) -> tuple[Any, dict[str, Any]]:
    read = entry_from_record(scheme, entry)
    return read.cost(limit), entry


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


def _measure_links(device: torch.device) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise ConfigError("link figures need two ranks to be measured: give --links, or start with --ranks 2")
    figures = []
    world = dist.get_world_size()
    size = 2
    while size <= world:
        groups = [dist.new_group(list(range(start, start + size))) for start in range(0, world - size + 1, size)]
        if dist.get_rank() < size:
            figures += time_links(list(range(size)), groups[0], device)
        dist.barrier()
        size *= 2
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, figures)
    return gathered[0]


def _control(device: torch.device) -> dist.ProcessGroup | None:
    if not dist.is_initialized() or device.type == "cpu":
        return None
    return dist.new_group(backend="gloo")


def run_here(session: Session, survey_ranks: int) -> None:
    """Measure what is missing: on ranks started here (CPU), or in this process (GPU, or ranks of a launcher)."""
    request = session.request
    launched = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    forked = request.device.type == "cpu" and not launched
    if launched:
        dist.init_process_group("nccl" if request.device.type == "cuda" else "gloo")
    lead = not dist.is_initialized() or dist.get_rank() == 0

    def call(function: Any, *args: Any) -> Any:
        if not forked:
            return function(0, *args)
        return run_ranks(function, survey_ranks, *args, timeout=1200)[0]

    if not session.step:
        session.links, session.step = call(lambda rank: session.measure_links())
        session.save_partial() if lead else None
    bar = _bar(len(request.schemes), lead)
    shapes = dict.fromkeys((s.tp, s.sp) for s in request.schemes)
    for tp, sp in shapes:
        if (tp, sp) not in session.activations:
            tokens = min(512, max(rung.lengths[0] for rung in request.rungs))
            session.activations[tp, sp] = call(
                lambda rank, tp=tp, sp=sp, tokens=tokens: measure_activations(
                    request.source, tp, sp, request.device, request.dtype, tokens
                )
            )
    for scheme in request.schemes:
        if str(scheme) not in session.done:
            entry: SchemeEntry = call(lambda rank, scheme=scheme: session.survey().measure(scheme))
            session.done[str(scheme)] = entry.record()
            session.save_partial() if lead else None
        if bar is not None:
            bar.update()
    if bar is not None:
        bar.close()


def _bar(total: int, lead: bool) -> Any:
    if not lead or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    return tqdm(total=total, unit="scheme")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the held-out error misses the aims, 2 for input that cannot be, 130 for Ctrl-C."""
    args = parse_args(arguments)
    began = time.perf_counter()
    torch.set_num_threads(1)
    try:
        request = make_request(args)
        old = read_table_file(args.out) if args.merge and args.out.exists() else None
        session = Session(request, args)
        try:
            run_here(session, args.ranks or min(8, os.cpu_count() or 1))
        except KeyboardInterrupt:
            print(f"\ninterrupted: {len(session.done)} of {len(request.schemes)} schemes are in {session.partial}; "
                  "the same command goes on with the rest")  # fmt: skip
            return 130
        if dist.is_initialized() and dist.get_rank() != 0:
            return 0
        here = rank_memory(request.device, os.cpu_count() or 1)  # of a CPU: a rank for each core
        device_bytes = args.device_memory * 2**30 if args.device_memory else here
        made = session.table(device_bytes)
        (old.merged(made) if old else made).save(args.out)
        session.partial.unlink(missing_ok=True)
    except (ConfigError, PlanError) as error:
        print(f"profile_schemes: {error}", file=sys.stderr)
        return 2
    return show(made, args, time.perf_counter() - began)


def show(made: TableFile, args: argparse.Namespace, seconds: float) -> int:
    """Print the entries and how well they predict lengths that they were not fitted on."""
    rows, errors = [], []
    for cost in made.table.costs:
        entry = (made.measured or {})[str(cost.scheme)]
        stage = entry["stages"][[s["index"] for s in entry["stages"]].index(entry["slowest_stage"])]
        fit = entry_from_record(cost.scheme, entry).slowest.fit
        for point in stage["points"]:
            if point["held_out"]:
                errors.append(abs(fit.error(Point(**{**point, "lengths": tuple(point["lengths"])}))))
        spread = sorted(point["spread"] for point in stage["points"])[len(stage["points"]) // 2]
        how = entry["how"] + (", scaled links" if entry["scaled_links"] else "")
        known = ((fit.a, fit.standard_errors[0]), (fit.b, fit.standard_errors[1]), (fit.c, fit.standard_errors[2]))
        within = " ".join(f"{error / k:.0%}" if k else "-" for k, error in known)
        rows.append((str(cost.scheme), f"{cost.a:.3e}", f"{cost.b:.4e}", f"{cost.c:.3f}", within,
                     " ".join(entry["unidentified"]) or "-", cost.max_length, cost.util_length,
                     f"{entry['held_out_median']:.1%}", f"{entry['held_out_p90']:.1%}", f"{spread:.1%}",
                     how))  # fmt: skip
    print_table(("scheme", "a ms/tok^2", "b ms/tok", "c ms", "std. errors", "not fixed", "MaxLen", "UtilLen",
                 "held-out med", "p90", "spread", "how"), rows)  # fmt: skip
    errors.sort()
    median, p90 = errors[len(errors) // 2], errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    missed = []
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
    return finish("profile_schemes", summary, figures, missed, args.json)


if __name__ == "__main__":
    sys.exit(main())
