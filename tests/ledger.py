"""The ledger: how many lines the core and each capability may have, and how many mechanisms of a kind there may be.

The core is what dense Transformers need to train heterogeneously; a capability is what else there is, by the files that
hold it. Lines are those of formatted Python, tables that code reads among them. A number may fall at any time. Who
raises one says in the same commit what users get for it. `python -m tests.ledger` prints what there is beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ("zero_hetero", "pipe", "ds_hydra")
TOOLS = ("tools", "benchmarks")


class Lines(NamedTuple):
    """Lines of Python that something may have in the library, in tests, and in tools and benchmarks."""

    library: int
    tests: int = 0
    tools: int = 0


class Capability(NamedTuple):
    """What there is besides the core: its files, as globs from the root on, and the lines that it may have."""

    files: str
    most: Lines
    apart: bool = False  # the core imports none of it, so that it can be taken away
    needs: str = ""  # another one that it builds on, and is taken away with


CAPABILITIES: Mapping[str, Capability] = {
    "elastic": Capability(
        "ds_hydra/elastic/*.py tests/pure/test_membership.py "
        "tests/pure/test_elastic_*.py tests/pure/test_freeing.py "
        "tests/gloo/test_going_on.py tests/gloo/test_agents.py "
        "tests/gloo/test_freed.py tests/gloo/test_aborted.py tests/gloo/test_elastic_*.py tests/support/elastic_*.py "
        "tests/support/simulated_members.py tests/support/drawn_members.py "
        "tools/demo_elastic.py",
        Lines(3020, 3090, 230),
        apart=True,
    ),
    "post-training": Capability(
        "ds_hydra/losses/*.py ds_hydra/hugging_face/scores.py ds_hydra/hugging_face/reward.py "
        "ds_hydra/hugging_face/sft.py tests/gloo/test_post_training.py",
        Lines(840, 560, 0),
        apart=True,
    ),
    # Image-text models train on pixels: tower, projector and text. Plans count what the tower takes.
    "images": Capability(
        "ds_hydra/images/*.py tests/test_image_seam.py tests/pure/test_image_loads.py "
        "tests/gloo/test_image*.py tests/support/image_*.py "
        "tools/image_classes.py tools/bench_images.py ds_hydra/commands/lengths.py",
        Lines(3420, 2060, 390),
        apart=True,
    ),
    # What a script reads of a batch before its step, and trains on what it makes of it; drawn loops beside DeepSpeed.
    "losses read early": Capability(
        "ds_hydra/engine/rounds.py tests/gloo/test_early_losses.py tests/support/drawn_loops.py tools/bench_reads.py",
        Lines(450, 690, 110),
    ),
    "layers beyond attention": Capability(
        "pipe/models/boxes.py pipe/models/find_boxes.py pipe/models/recurrent_heads.py "
        "pipe/models/experts.py pipe/expert_parallel.py tests/test_states.py tests/test_experts.py "
        "tests/support/own_models.py",
        Lines(2370, 1200, 0),
    ),
    # Sequences of a million tokens on one node: MLPs in tiles of rows, attention kept, what layers keep on the host.
    "long contexts": Capability(
        "pipe/recomputed.py pipe/on_host.py tests/test_long_contexts.py tests/support/long_cases.py",
        Lines(380, 160, 0),
    ),
    # FP32 masters and optimizer states in the host's memory, updated on the device run by run.
    "states on the host": Capability("ds_hydra/step/host_states.py tests/gloo/test_host_states.py", Lines(200, 250, 0)),
    "mixed devices": Capability(
        "ds_hydra/mixed/*.py tests/pure/test_mixed_devices.py tools/bench_hetero.py",
        Lines(430, 200, 630),
        apart=True,
    ),
    "optimizers of whole parameters": Capability(
        "ds_hydra/matrices/*.py tests/test_matrices.py "
        "tests/gloo/test_whole_parameters.py tests/support/matrix_cases.py tools/bench_muon.py",
        Lines(1800, 960, 160),
        apart=True,
    ),
    "Ray": Capability(
        "ds_hydra/ray/*.py tests/pure/test_ray.py tests/hosts/test_ray.py tests/support/ray_job.py",
        Lines(620, 370, 0),
        apart=True,
    ),
    "verl": Capability(
        "ds_hydra/hosts/*.py tests/hosts/test_verl*.py tests/support/verl_*.py", Lines(350, 580, 0), apart=True
    ),
    "emulated cluster": Capability(
        "ds_hydra/emulate/*.py ds_hydra/commands/emulate.py ds_hydra/commands/demo_cluster.py "
        "tests/gloo/test_emulation.py tests/support/emulated_job.py tools/systems/emulated.py",
        Lines(1240, 550, 50),
        apart=True,
        needs="comparison, previews and pages",
    ),
    # Its cells are run as they stand, without Jupyter.
    "notebook": Capability("tests/test_notebook.py", Lines(0, 160, 0)),
    "comparison, previews and pages": Capability(
        "ds_hydra/rivals/*.py ds_hydra/commands/pages.py ds_hydra/commands/preview.py "
        "ds_hydra/commands/init.py ds_hydra/commands/init_job.py "
        "ds_hydra/commands/demo.py tests/pure/test_rivals.py "
        "tests/pure/test_systems.py tests/pure/test_init.py tools/systems/*.py tools/bench_systems.py "
        "tools/check_gains.py benchmarks/rivals/*.py "
        "ds_hydra/report/plots.py ds_hydra/commands/report.py "
        "ds_hydra/commands/simulate.py",
        Lines(3840, 1340, 2460),
        apart=True,
    ),
}
CORE = Lines(66320, 45000, 7380)
# Of each kind: the files that hold one. Another of a kind needs a reason; one less is welcome.
MECHANISMS: Mapping[str, str] = {
    "nets on what a script does to its model": (
        "ds_hydra/host/kept_model.py ds_hydra/host/own_updates.py ds_hydra/host/released.py "
        "ds_hydra/self_check/small_copy.py ds_hydra/engine/real_sequences.py ds_hydra/engine/own_loss.py "
        "pipe/models/state.py"
    ),
    "accounts of a rank's memory": (
        "ds_hydra/costs/memory.py ds_hydra/simulate/pipeline.py ds_hydra/profiling/stage_memory.py "
        "ds_hydra/planner/composing.py"
    ),
    "walks of a step in time": (
        "pipe/schedules/simulate.py pipe/schedules/list_walk.py ds_hydra/simulate/pipeline.py "
        "ds_hydra/simulate/step.py ds_hydra/emulate/clock.py"
    ),
    "ways to run ranks in a test": (
        "ds_hydra/ranks/forked.py pipe/in_process.py tests/support/strict.py tests/support/simulated_members.py "
        "ds_hydra/emulate/cluster.py"
    ),
    "runs of one process to compare with": ("ds_hydra/testing/one_process.py ds_hydra/self_check/plain.py"),
}


def python_files(tops: tuple[str, ...]) -> Iterator[Path]:
    """All modules below these folders, each once: folders that are links to others are passed over."""
    for top in tops:
        for path in (ROOT / top).rglob("*.py"):
            if not any(folder.is_symlink() for folder in path.parents if ROOT in folder.parents):
                yield path


def found() -> dict[str, Lines]:
    """The lines that there are: of each capability, and of the core, which is the rest."""
    left = {where: {path: len(path.read_text().splitlines()) for path in python_files(tops)}
            for where, tops in (("library", LIBRARY), ("tests", ("tests",)), ("tools", TOOLS))}  # fmt: skip
    lines = dict[str, Lines]()
    for name, capability in CAPABILITIES.items():
        own = {path for pattern in capability.files.split() for path in ROOT.glob(pattern)}
        lines[name] = Lines(
            **{where: sum(files.pop(path) for path in own & set(files)) for where, files in left.items()}
        )
    return lines | {"core": Lines(**{where: sum(files.values()) for where, files in left.items()})}


def most() -> dict[str, Lines]:
    """The lines that there may be."""
    return {name: capability.most for name, capability in CAPABILITIES.items()} | {"core": CORE}


def main() -> int:
    """Print the ledger; 1 if something is over it."""
    allowed, over = most(), 0
    for name, lines in found().items():
        print(
            f"{name:24}" + "".join(f"{one:8,} of {limit:6,}" for one, limit in zip(lines, allowed[name], strict=True))
        )
        over += any(one > limit for one, limit in zip(lines, allowed[name], strict=True))
    for kind, places in MECHANISMS.items():
        print(f"{len(places.split()):3} {kind}")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
