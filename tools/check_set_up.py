"""What set-up asks of a machine, and of a reader who follows it.

  python -m tools.check_set_up [--quick] [--json FILE]

The first table is the CPU time in which a Llama of many layers is examined: by the rank that looks at it, and by one
that is told what was found. The second counts what runs on one rank from `initialize` to the first step, self-check on:
files of the project that are entered, and pairs of files of which one calls the other, whatever lies between.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import types
from pathlib import Path

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from tools import aims, machine

ROOT = Path(__file__).resolve().parents[1]
LAYERS, QUICK_LAYERS = (16, 64), (64,)


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 if an aim is missed."""
    options = figures_parser(__doc__, "python -m tools.check_set_up").parse_args(arguments)
    examined = [(layers, *examine(layers)) for layers in (QUICK_LAYERS if options.quick else LAYERS)]
    print_table(("layers", "looks (CPU s)", "is told (CPU s)"), examined)
    files, edges = entered()
    print_table(("set-up", "number"), [("files", files), ("calls", edges)])
    looks, most = examined[-1][1], machine.limit(aims.EXAMINED_S)
    missed = []
    if looks > most.here:
        missed.append(f"{LAYERS[-1]} layers take {looks:.1f} s of CPU to examine, more than {most}")
    figures = {"examined": examined, "files": files, "calls": edges}
    summary = f"{LAYERS[-1]} layers in {looks:.1f} s of CPU (aim {most}), {files} files, {edges} calls between files"
    return finish("check_set_up", summary, figures, missed, options.json)


def examine(layers: int) -> tuple[float, float]:
    """CPU seconds to find what a job of default settings asks of a model, and with that given."""
    import torch
    from transformers import LlamaForCausalLM

    from ds_hydra.pipe.models.causal_lm import CausalLM
    from tests.support.small_job import USUAL, small_model

    torch.set_num_threads(1)
    CausalLM(small_model(), USUAL)  # what is imported and registered once
    config = small_model().config
    config.num_hidden_layers = layers
    model = LlamaForCausalLM(config)
    began = time.process_time()
    found = CausalLM(model, USUAL)
    between = time.process_time()
    CausalLM(model, USUAL, facts=found.facts)
    return between - began, time.process_time() - between


def entered() -> tuple[int, int]:
    """Files that set-up enters, and calls between them, on a rank of its own."""
    from ds_hydra.testing import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # without what an earlier job has kept
        ((files, edges),) = run_ranks(_set_up, 1)
    return files, edges


def _set_up(rank: int) -> tuple[int, int]:
    from tests.support.small_job import small_engine, small_model

    homes: dict[types.CodeType, str] = {}
    files: set[str] = set()
    edges: set[tuple[str, str]] = set()

    def home(code: types.CodeType) -> str:
        if code not in homes:
            path = Path(os.path.realpath(code.co_filename))
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in (
                "ds_hydra",
                "pipe",
                "zero_hetero",
            )
            homes[code] = str(path) if inside else ""
        return homes[code]

    def see(frame: types.FrameType, event: str, _: object) -> None:
        if event != "call" or not (own := home(frame.f_code)):
            return
        files.add(own)
        before = frame.f_back
        while before is not None and not home(before.f_code):
            before = before.f_back
        if before is not None and home(before.f_code) != own:
            edges.add((home(before.f_code), own))

    model = small_model()
    sys.setprofile(see)
    try:
        engine = small_engine(rank, model, self_check="on")
    finally:
        sys.setprofile(None)
    engine.destroy()
    return len(files), len(edges)


if __name__ == "__main__":
    sys.exit(guarded("check_set_up", main))
