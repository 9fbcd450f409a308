"""A request in, measured schemes out, for `ds-hydra profile`; finished schemes survive an interruption."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from ds_hydra.commands.profile_request import Request
from ds_hydra.costs.cost_table import (
    CostTable,
    Peak,
    TableFile,
    activations_from_record,
    activations_record,
    write_atomically,
)
from ds_hydra.costs.memory import Activations, JobMemory
from ds_hydra.engine.plugs import plugged
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.profiling.fit import SchemeEntry, entry_from_record, with_shared_squares
from ds_hydra.profiling.link_timer import message_sizes, time_links
from ds_hydra.profiling.links import Links, links_from_record, read_links
from ds_hydra.profiling.local_group import within_memory
from ds_hydra.profiling.stage_memory import measure_activations
from ds_hydra.profiling.stage_timer import step_costs
from ds_hydra.profiling.survey import Survey
from ds_hydra.ranks.forked import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError

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

    def survey(self) -> Survey:
        """A survey on the ranks that are there."""
        assert self.links is not None, "links come first"
        r = self.request
        control = _control(r.device)
        return Survey(r.source, r.device, r.dtype, self.links, r.rungs, budget=r.budget, clock=r.clock,
                      most_tokens=r.most_tokens, node_size=r.node_size, control=control)  # fmt: skip

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
    with _bar(len(request.schemes), lead) as bar:
        for scheme in request.schemes:
            if str(scheme) not in session.done:
                entry = call(partial(_measure_scheme, session, scheme))
                session.done[str(scheme)] = _NO_ROOM if entry is None else entry.record()
                keep()
            bar.update()


def _within_memory(work: Callable[[], T], device: torch.device) -> T | None:
    """`within_memory` with a group for it, made where it is called: on forked ranks groups end with the ranks."""
    return within_memory(work, _control(device))


def _measure_scheme(session: Session, scheme: ParallelScheme) -> SchemeEntry | None:
    """One scheme, by a survey of its own: on forked ranks the process groups of a survey end with the ranks."""
    return session.survey().measure(scheme)


def _bar(total: int, lead: bool) -> tqdm:
    return tqdm(total=total, unit="scheme", disable=not lead or not sys.stderr.isatty())
