"""Post-training: losses of log-probabilities, steps in parts and fields, against one process of plain torch.

  python -m tools.check_post_training [--quick] [--json FILE] [--only PART ...] [--without PART ...]

  equality   every loss that is shipped, those of values and of a user's own among them, under strategies with slices,
             a V, shared tokens, recomputed layers, several phases and adapters: loss and all gradients, in FP64
  scores     what `log_probs` gives, its entropies, and `values`, under the same
  routes     choices of experts that are given to routers, and those that they make by themselves, under the same
  splits     steps of one call against steps of three with other ranks' sequences, and evaluations between them
  replay     30 updates of recorded rollouts by a loop of GRPO, padded, in parts, two epochs: parameters
  strict     some of these under a transport that lets go on nothing before its order
  memory     bytes at once for log-probabilities and entropy of a large vocabulary, beside gathered logits; CPU time
  trl        GRPO, RLOO, DPO, rewards by TRL's trainers on two ranks, against TRL's in one process: losses, parameters
  live       GRPO by TRL's trainer on two ranks with a real reward, the model generates: its rewards from three seeds
  rollouts   updates of 7B and 32B on 64 simulated GPUs, by lengths of reasoning models: ours beside hosts' ways
  refusals   fields and losses that cannot be trained on: refused on all ranks alike, and nothing has changed

The quick form computes on one thread a process: ranks that share a few cores wait for each other's threads by spinning.
Exits non-zero where an aim is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import product

import torch

from ds_hydra.commands.figures import chosen_parts, finish, print_table
from ds_hydra.pipe.model_plan import LOGITS_AT_ONCE
from tests.support.strict import Rules
from tools import aims, machine
from tools.post_training import equality, live, long_tail, memory, refusals, replay, routes, trl_trainers
from tools.post_training.plain import ALL_LOSSES, LOSSES, VALUE_LOSSES

Found = tuple[dict[str, object], list[str]]
"""Figures of a part, and what it misses."""

LARGE = memory.Shape(150_000, 4096, 4)
TIMED, QUICK_TIMED = memory.Shape(150_000, 1024, 4), memory.Shape(50_000, 128, 4)


def check_equality(*, quick: bool) -> Found:
    layouts = equality.QUICK if quick else equality.LAYOUTS
    cases = list(product(layouts, LOSSES))
    if quick:  # every loss, under one of the five layouts in turn
        cases = cases[::5]
    rows, slices = equality.compare("llama", cases)
    rows += equality.compare("lora", [(layouts[4], "DPO")] if quick else cases)[0]
    for family in () if quick else ("llama_tied", "gemma2", "qwen3"):
        rows += equality.compare(family, list(product(layouts, ("PPO", "GSPO", "distillation"))))[0]
    of_values = list(product(layouts, VALUE_LOSSES))
    rows += equality.compare("llama, values", of_values[::8] if quick else of_values)[0]
    for family in () if quick else ("qwen3_moe, values", "gpt2, values"):
        rows += equality.compare(family, of_values)[0]
    missed = [] if slices else ["no sequence ran in slices"]
    for row in rows:
        worst = max(row.of_loss, row.of_gradients)
        if not worst <= aims.POST_TRAINING:
            missed.append(f"{row.loss} of {row.family} under {row.layout}: {worst:.1e}, not <= {aims.POST_TRAINING}")
    print_table(
        ("model", "layout", "losses", "loss apart", "gradients apart"),
        [
            (family, layout, len(of), max(row.of_loss for row in of), max(row.of_gradients for row in of))
            for (family, layout) in dict.fromkeys((row.family, row.layout) for row in rows)
            for of in ([row for row in rows if (row.family, row.layout) == (family, layout)],)
        ],
    )
    return {"equality": [row._asdict() for row in rows]}, missed


def check_scores(*, quick: bool) -> Found:
    layouts = equality.QUICK[2:6] if quick else equality.LAYOUTS
    rows, values = equality.scores(layouts), equality.scores(layouts[-1:] if quick else layouts, "llama, values")
    print_table(("layout", "log-probabilities apart", "entropies apart"), rows)
    print_table(("layout", "values apart"), [row[:2] for row in values])
    return {"scores": rows, "values": values}, _beyond(rows + values)


def check_routes(*, quick: bool) -> Found:
    if quick:
        rows = routes.compare("mixtral", routes.QUICK, ["GSPO"])
    else:
        rows = [row for family in ("mixtral", "qwen3_moe") for row in routes.compare(family, equality.LAYOUTS)]
        rows += routes.compare("mixtral", routes.SPREAD)
    print_table(("model", "layout", "loss", "loss apart", "gradients apart", "log-probabilities", "choices off"), rows)
    missed = _beyond([(row.family, row.layout, row.loss, *row[3:6]) for row in rows])
    missed += [f"{row.family}, {row.layout}: {row.choices_off} choices came back otherwise" for row in rows
               if row.choices_off]  # fmt: skip
    return {"routes": [row._asdict() for row in rows]}, missed


def check_splits(*, quick: bool) -> Found:
    rows = equality.splits([equality.LAYOUTS[6]], ["DPO"]) if quick else equality.splits(equality.LAYOUTS)
    print_table(("layout", "loss", "three calls to one", "to one process"), rows)
    return {"splits": rows}, _beyond(rows)


def check_replay(*, quick: bool) -> Found:
    updates = 2 if quick else 30
    apart = replay.replayed(updates)
    print(f"{updates} updates of recorded rollouts, parameters {apart:.1e} from those of plain torch")
    missed = [] if apart <= aims.POST_TRAINING else [f"parameters after {updates} updates: {apart:.1e} apart"]
    return {"replay": [updates, apart]}, missed


def check_strict(*, quick: bool) -> Found:
    rules = [Rules(blocking=True), Rules(connect=True)]
    found = []
    for rule, which in zip(rules, (1, 3), strict=True) if not quick else ((rules[0], 1),):
        layouts = [equality.LAYOUTS[which]] if quick else list(equality.LAYOUTS)
        found += equality.compare(
            "llama", list(product(layouts, ("GRPO",) if quick else ("GRPO", "DPO"))), strict=rule
        )[0]
    rows = [(row.layout, row.loss, row.of_loss, row.of_gradients) for row in found]
    print_table(("layout, strict transport", "loss", "loss apart", "gradients apart"), rows)
    return {"strict": rows}, _beyond(rows)


def _beyond(rows: Sequence[tuple[object, ...]]) -> list[str]:
    found = []
    for row in rows:
        worst = max(cell for cell in row if isinstance(cell, float))
        if not worst <= aims.POST_TRAINING:
            name = ", ".join(str(cell) for cell in row if isinstance(cell, str))
            found.append(f"{name}: {worst:.1e}, not <= {aims.POST_TRAINING}")
    return found


def check_memory(*, quick: bool) -> Found:
    ours, gathered = memory.most_bytes(LARGE)
    _, in_block = memory.most_bytes(LARGE._replace(tokens=max(1, LOGITS_AT_ONCE // LARGE.vocabulary)))
    shape = QUICK_TIMED if quick else TIMED
    timed = memory.timed(shape)
    shares = ours / in_block, timed.ours / timed.gathered
    print_table(
        ("vocabulary", "tokens", "TP", "what", "ours", "gathered", "ours over it"),
        [
            (LARGE.vocabulary, LARGE.tokens, LARGE.tp, "MiB, at once", ours / 2**20, gathered / 2**20, ours / gathered),
            (LARGE.vocabulary, LARGE.tokens, LARGE.tp, "MiB, in blocks", ours / 2**20, in_block / 2**20, shares[0]),
            (shape.vocabulary, shape.tokens, shape.tp, "CPU s", timed.ours, timed.gathered, shares[1]),
        ],
    )
    missed = [
        f"log-probabilities and entropy take {share:.2f} of the {what} of gathering, not <= {aim}"
        for what, share, aim in zip(("memory", "time"), shares, (aims.SCORES_MEMORY, aims.SCORES_TIME), strict=True)
        if not share <= aim
    ]
    if not timed.apart <= aims.POST_TRAINING:
        missed.append(f"gradients of both ways are {timed.apart:.1e} apart")
    return {"memory": [ours, gathered, in_block, *timed]}, missed


def check_trl(*, quick: bool) -> Found:
    rows = trl_trainers.compare(trl_trainers.QUICK if quick else list(trl_trainers.CASES))
    print_table(("TRL's trainer", "loss apart", "parameters apart", "they moved by"), rows)
    missed = [
        f"{row.case}: losses {row.of_loss:.1e} and parameters {row.of_parameters:.1e} apart, not <= {aims.TRL_TRAINERS}"
        for row in rows
        if not max(row.of_loss, row.of_parameters) <= aims.TRL_TRAINERS
    ]
    return {"trl": [row._asdict() for row in rows]}, missed


def check_live(*, quick: bool) -> Found:
    rows = [live.learnt(seed) for seed in range(1 if quick else 3)]
    print_table(("seed", "reward at first", "in the end"), rows)
    missed = [
        f"seed {row.seed}: the reward rises from {row.first:.2f} to {row.last:.2f}, not to {aims.LIVE_REWARD}"
        for row in rows if not row.last >= aims.LIVE_REWARD
    ]  # fmt: skip
    return {"live": [row._asdict() for row in rows]}, missed


def check_refusals(*, quick: bool) -> Found:
    found = refusals.refused()
    print_table(
        ("refused", "alike", "unchanged", "what all ranks are told"),
        [(one.name, len(set(one.texts)) == 1, one.unchanged, one.texts[0][:110]) for one in found],
    )
    missed = [
        f"{one.name}: {one.texts}, unchanged {one.unchanged}, lacks {one.missing}" for one in found if not one.right
    ]
    return {"refusals": [one._asdict() for one in found]}, missed


def check_rollouts(*, quick: bool) -> Found:
    rows = [long_tail.updates(model, 2 if quick else 12, systems=not quick) for model in ("7b", "32b")[: 2 - quick]]
    print_table(
        ("model", "sequences", "ours, ms", "of it planning", *("over ours: " + name for name in
          ("equal counts", "equal tokens", "bound of dynamic CP", "dynamic CP"))), rows,
    )  # fmt: skip
    most = machine.limit(aims.ROLLOUTS_PLANNING, waits=True)
    missed = [
        f"{row.model}: equal counts take {row.counts:.2f} times as long, not >= {aims.ROLLOUTS_OVER_COUNTS}"
        for row in rows if not row.counts >= aims.ROLLOUTS_OVER_COUNTS
    ] + [
        f"{row.model}: planning is {row.exposed:.4f} of an update, not <= {most}"
        for row in rows if not row.exposed <= most.here
    ] + [
        f"{row.model}: dynamic context parallelism takes {row.dynamic:.3f} times as long, not >= "
        f"{aims.ROLLOUTS_OVER_DYNAMIC}"
        for row in rows if row.dynamic is not None and not row.dynamic >= aims.ROLLOUTS_OVER_DYNAMIC
    ]  # fmt: skip
    return {"rollouts": [row._asdict() for row in rows]}, missed


PARTS: dict[str, Callable[..., Found]] = {
    "equality": check_equality,
    "scores": check_scores,
    "routes": check_routes,
    "splits": check_splits,
    "replay": check_replay,
    "strict": check_strict,
    "memory": check_memory,
    "trl": check_trl,
    "live": check_live,
    "refusals": check_refusals,
    "rollouts": check_rollouts,
}


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 if an aim is missed."""
    options, chosen = chosen_parts("check_post_training", __doc__, PARTS, arguments)
    if options.quick:
        torch.set_num_threads(1)  # which ranks inherit when they are forked
    figures: dict[str, object] = {}
    missed: list[str] = []
    for name in chosen:
        print(f"\n{name}", flush=True)
        found, lacking = PARTS[name](quick=options.quick)
        figures |= found
        missed += lacking
    summary = f"{len(chosen)} parts, {len(ALL_LOSSES)} losses"
    return finish("check_post_training", summary, figures, missed, options.json)


if __name__ == "__main__":
    sys.exit(main())
