"""Part "costs": a cost table of one device by local shapes, as `ds-hydra profile` makes it, and its held-out error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds_hydra.commands import profile
from ds_hydra.profiling.links import LinkFigure, Links
from tools.gpu.bench import Bench, Findings, Table
from tools.gpu.job import engine_config, llama, save_config

TABLE = "cost_table.json"  # in the run's folder, for other parts
SCHEMES = ("tp1", "tp8", "pp2", "sp2")
_SPREAD = 1.8  # a measurement takes so much longer than its repeats
_BATCHES = 33  # measured of a stage, in parts and slices too

# One device cannot measure links. These stand for a node with NVLink: what they add to a time is the same straight line
# in the tokens for every rung, so they have no part in the error; a job of several devices measures its own.
ASSUMED = Links(
    tuple(LinkFigure(operation, 2, 25.0, 2e11) for operation in ("all_reduce", "all_gather", "all_to_all", "p2p")),
    "assumed: 200 GB/s and 25 microseconds",
)


def measure_costs(bench: Bench) -> Findings:
    """Measure the table, leave it in the run's folder, and compare it with lengths that it was not fitted to."""
    schemes = bench.pick(SCHEMES, ("tp1", "tp2"))
    figures = make_table(bench, schemes, bench.left)
    measured = figures["record"]["measured"]
    costs = {row["scheme"]: row for row in figures["record"]["schemes"]}
    rows = tuple(
        (name, f"{costs[name]['a']:.2e}", f"{costs[name]['b']:.2e}", f"{costs[name]['c']:.2f}",
         f"{costs[name].get('floor', 0.0):.2f}",
         costs[name]["max_length"], *(_share(entry[key]) for key in ("held_out_median", "held_out_p90")))
        for name, entry in measured.items()
    )  # fmt: skip
    headers = ("scheme", "a ms/tok^2", "b ms/tok", "c ms", "floor ms", "MaxLen of 8 ranks", "held-out median", "p90")
    median, p90 = figures["held_out_median"], figures["held_out_p90"]
    return Findings(
        f"{len(rows)} schemes in {figures['seconds']:.0f} s, held-out error median {median:.1%}, p90 {p90:.1%}",
        (Table(f"Cost table by local shapes; links {ASSUMED.source}", headers, rows),),
        figures | {"links": ASSUMED.to_record()},
        tuple(figures["missed"]) if bench.full else (),
    )


def make_table(bench: Bench, schemes: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Figures of `ds-hydra profile` for these schemes in about so many seconds; TABLE is what it wrote."""
    folder = bench.folder
    config = folder / "ds.json"
    longest = bench.pick(8192, 128)
    config.write_text(json.dumps(engine_config(bench.pick(65536, 400), context_length=longest)))
    links, figures = folder / "links.json", folder / "profile.json"
    links.write_text(json.dumps(ASSUMED.to_record()))
    # A scheme with pipelines has two stages to measure, the others have one.
    stages = sum(1 + ("pp" in scheme) for scheme in schemes)
    repeats = bench.pick(max(0.05, seconds / _SPREAD / stages / _BATCHES), 0.005)
    options = ["--model", save_config(llama(bench), folder), "--deepspeed_config", config, "--out", folder / TABLE,
               "--gpus", 8, "--links", links, "--longest", longest, "--clock", "wall", "--ranks", 1, "--json", figures,
               "--seconds", repeats, "--schemes", *schemes]  # fmt: skip
    if not bench.full:
        options += ["--quick", "--rungs", 3]
    code = profile.main([str(option) for option in options], name="profile")
    if code > 1:
        raise RuntimeError(f"ds-hydra profile ended with {code}; its own message says why")
    return json.loads(figures.read_text())


def table_of(bench: Bench) -> Path:
    """The table that an earlier part has left, or one of tp1 alone, measured now."""
    path = bench.folder / TABLE
    if not path.exists():
        make_table(bench, ("tp1",), bench.left / 3)
    return path


def _share(error: float | None) -> str:
    """An error for a table; a dash where there was no room for held-out lengths."""
    return "-" if error is None else f"{error:.1%}"
