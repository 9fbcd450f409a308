"""Trains a tiny model of every causal language model class of transformers under four shapes, or sees it refused.

For each class a step and an evaluation are run in one process under TP 3, PP 3, SP 3 and a pipeline of a TP 3 and an
SP 3 stage (6 ranks), and compared with the plain model, one sequence at a time, in FP64. A committed list says what
each class is to come to: equal, or refused for one of a few reasons. A class that differs from the plain model, that
crashes or that comes to something else than the list says, is missed.

  python -m tools.check_families [--quick] [--only WORDS] [--json FILE] [--write]

`--quick` takes a tenth of the classes, drawn by a fixed seed, and the models of the table of unusual ones. `--write`
writes the list anew. Exits non-zero if a class is missed.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.placement import Pipeline, Strategy
from ds_hydra.self_check.compare import compare, finite
from ds_hydra.self_check.runs import Outcome, evaluate_plain, run_pipeline, train_plain, uneven_data
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.cases import UNUSUAL
from tests.support.equivalence import custom_strategy
from tests.support.families import build_model
from tests.support.tiny_families import class_names, tiny_model
from tools._figures import figures_parser, finish, print_table

EXPECTED = Path(__file__).resolve().parents[1] / "tests" / "support" / "families_expected.json"
# (tp, sp, layers) of each stage
SHAPES = {
    "tp3": ((3, 1, 4),),
    "pp3": ((1, 1, 1), (1, 1, 2), (1, 1, 1)),
    "sp3": ((1, 3, 4),),
    "mixed": ((3, 1, 2), (1, 3, 2)),
}
FOR_FOUR_HEADS = {"tp2": ((2, 1, 4),), "mixed": ((1, 2, 1), (2, 1, 2), (1, 1, 1))}  # of the unusual models
EQUAL, DIFFERS, CRASHES = "equal", "differs", "crashes"
# What a refusal's sentence must hold -> the reason that the list gives.
REASONS = (
    ("recurrent state", "it carries a state from token to token"),
    ("attention interface", "its attention cannot be replaced"),
    (r"has layers of type|the attention feature|is not causal", "its attention has a feature that packs lack"),
    (r"draws random numbers|frequencies of type 'dynamic'", "plain training of it depends on chance or order"),
    (r"with tp1 for this model|tp=3", "tensor parallel ranks cannot share it"),
    (r"with pp1 for this model", "its layers cannot be cut apart"),
    (r"no tiny model", "a tiny config of it is at odds with itself"),
    (r"encoder-decoder|no language modelling head|cannot run one packed|module list|numbers the tokens|router's aux"
     r"|computes its logits in", "it is no language model of one stack of layers over tokens"),
)  # fmt: skip
QUICK_SHARE, SEED = 10, 7
AIM_EQUAL = 80


def main(arguments: Sequence[str] | None = None) -> int:
    parser = figures_parser(__doc__)
    parser.add_argument("--only", metavar="WORDS", help="classes whose name holds one of these words")
    parser.add_argument("--write", action="store_true", help="write the list anew from what is found")
    parser.add_argument("--processes", type=int, default=2, help="classes at once")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    names = list(class_names())
    if options.quick:
        names = sorted(random.Random(SEED).sample(names, len(names) // QUICK_SHARE)) + list(UNUSUAL)
    if options.only:
        names = [name for name in names if any(word in name for word in options.only.split())]
    found = dict(_judged(names, options.processes))
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    missed = [line for name, verdicts in found.items() for line in _missed(name, verdicts, expected)]
    rows = [[name, *_columns(verdicts)] for name, verdicts in found.items()]
    print_table(["class", "tp", "pp", "sp", "mixed", "s"], rows)
    if options.write:
        summary = {name: _entry(verdicts) for name, verdicts in found.items() if name not in UNUSUAL}
        EXPECTED.write_text(
            json.dumps({**(expected if options.only else {}), **summary}, indent=1, sort_keys=True) + "\n"
        )
    equal = sum(_entry(verdicts) == EQUAL for verdicts in found.values())
    if not options.quick and not options.only and equal < AIM_EQUAL:
        missed.append(f"{equal} classes are equal under all shapes, fewer than {AIM_EQUAL}")
    counts = Counter(str(entry) if isinstance(entry, str) else "mixed" for entry in map(_entry, found.values()))
    print("\n".join(f"{count:4d} {reason}" for reason, count in counts.most_common()))
    text = f"{equal} of {len(found)} equal under all shapes, {time.perf_counter() - began:.0f} s"
    return finish("check_families", text, {"families": found}, missed, options.json)


def _judged(names: Sequence[str], processes: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Verdicts by class, as they come; each class in a process that nothing before has changed."""
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=20) as pool:
        yield from pool.imap(judge, names)


def judge(name: str) -> tuple[str, dict[str, str]]:
    """A class's name, and by shape "equal", a reason, or what went wrong in words; "seconds" in all."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    verdicts = _verdicts(name)
    return name, verdicts | {"seconds": f"{time.perf_counter() - began:.1f}"}


def _verdicts(name: str) -> dict[str, str]:
    shapes = FOR_FOUR_HEADS if name in UNUSUAL else SHAPES
    try:
        model = build_model(name, torch.float64) if name in UNUSUAL else tiny_model(name, class_names()[name])
    except Exception as error:
        return dict.fromkeys(shapes, _reason(f"no tiny model ({type(error).__name__}: {error})"))
    try:
        source = CausalLM(model)
    except Exception as error:
        return dict.fromkeys(shapes, _told(error))
    try:
        data = uneven_data(96, [(5, 33, 2), (12,)])
        loss, gradients = train_plain(model, data)
        right = Outcome(loss, evaluate_plain(model, data), gradients)
        if not finite(right):
            raise ValueError("its loss is not finite")
    except Exception as error:
        return dict.fromkeys(shapes, _reason(f"no tiny model ({type(error).__name__}: {error})"))
    return {shape: _run(source, right, data, stages) for shape, stages in shapes.items()}


def _run(source: CausalLM, right: Outcome, data: Any, stages: tuple[tuple[int, int, int], ...]) -> str:
    try:
        pipeline: Pipeline = custom_strategy([stages]).pipelines[0]
        source.plan.check(Strategy((pipeline,)))
        outcome = run_pipeline(source, pipeline, data, eval_source=source)
    except Exception as error:
        return _told(error)
    found = compare(right, outcome)
    return EQUAL if found.what is None else f"{DIFFERS}: {found.what}"


def _told(error: Exception) -> str:
    if isinstance(error, ConfigError | PlanError):
        return _reason(str(error))
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{CRASHES}: {type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"


def _reason(text: str) -> str:
    for pattern, reason in REASONS:
        if re.search(pattern, text):
            return f"{reason}: {text}"
    return f"{CRASHES}: a refusal without a reason of the list: {text}"


def _short(verdict: str) -> str:
    return verdict.partition(": ")[0]


def _entry(verdicts: dict[str, str]) -> str | dict[str, str]:
    """What the list says of a class: one word for all shapes, or one for each."""
    each = {shape: _short(verdict) for shape, verdict in verdicts.items() if shape != "seconds"}
    return next(iter(each.values())) if len(set(each.values())) == 1 else each


def _missed(name: str, verdicts: dict[str, str], expected: dict[str, Any]) -> Iterator[str]:
    entry = _entry(verdicts)
    wanted = EQUAL if name in UNUSUAL else expected.get(name)
    for shape, verdict in verdicts.items():
        if _short(verdict) in (DIFFERS, CRASHES):
            yield f"{name} under {shape} {verdict}"
    if entry != wanted:
        yield f"{name}: {entry}, but the list says {wanted}"


def _columns(verdicts: dict[str, str]) -> list[object]:
    shapes = [_short(verdict)[:44] for shape, verdict in verdicts.items() if shape != "seconds"]
    return [*shapes, *[""] * (4 - len(shapes)), float(verdicts["seconds"])]


if __name__ == "__main__":
    sys.exit(main())
