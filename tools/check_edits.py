"""What users do to their model, data and loss: trained as one process of plain torch does it, or refused.

  python -m tools.check_edits [--quick] [--json FILE] [--only WORDS] [--seed N]

Each trial takes an edit, made before `initialize` or between two steps, and trains the edited job by the whole engine
on two ranks, under strategies in turn, whole or in slices. Losses and parameters after three steps must be those of one
process that runs the same script with plain transformers, one sequence at a time, or the engine must have refused on
all ranks. An edit is also tried against the job without it: one without an effect would prove nothing. Last, on the
example's job, what looks at model, data and loss beside the self-check may add a quarter to its CPU time, and 0.5 % to
a step's.

Exits non-zero for any trial that trains otherwise without a word, ends in an error of the engine's own, stands still,
or ends differently on two ranks.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict

from ds_hydra.commands.figures import figures_parser, finish, guarded, print_table
from tools import aims
from tools.edits.added import added
from tools.edits.kind import KINDS, SAME
from tools.edits.trial import ROUNDING, draw_trials, effects, try_edit

TRIALS, QUICK_TRIALS = 180, 4
STEPS, QUICK_STEPS = 8, 2
GOOD = ("equal", "refused")


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 if a trial ended otherwise than it may."""
    parser = figures_parser(__doc__, "python -m tools.check_edits")
    parser.add_argument("--only", default="", metavar="WORDS", help="edits whose name holds these words, each once")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (default 1)")
    options = parser.parse_args(arguments)
    drawn = list(draw_trials(QUICK_TRIALS if options.quick else TRIALS, options.seed))
    if options.only:
        drawn = [trial for trial in draw_trials(3 * len(KINDS), options.seed) if options.only in trial.edit]
    moved = effects(sorted({trial.edit for trial in drawn} - SAME))
    missed = [f"the edit {name!r} has no effect" for name, apart in moved.items() if apart <= ROUNDING]
    verdicts = []
    for trial in drawn:
        verdict = try_edit(trial)
        verdicts.append(verdict)
        print(f"{verdict.state:9} {verdict.apart:8.1e}  {trial}  {verdict.words[:160]}", flush=True)
    missed += [f"{one.state}: {one.trial} ({one.apart:.1e}) {one.words}" for one in verdicts if one.state not in GOOD]
    counts = Counter((one.trial.late, one.state) for one in verdicts)
    states = sorted({state for _, state in counts})
    print_table(
        ("made", "trials", *states),
        [
            (name, sum(counts[late, state] for state in states), *(counts[late, state] for state in states))
            for name, late in (("before initialize", False), ("between steps", True))
        ],
    )
    cost = added(QUICK_STEPS if options.quick else STEPS)
    of_start, of_step = cost.shares
    if of_start > aims.EDITS_AT_START:
        missed.append(f"looking at model and data adds {of_start:.1%} to the self-check, not {aims.EDITS_AT_START:.0%}")
    if of_step > aims.EDITS_IN_STEP:
        missed.append(f"looking at the model adds {of_step:.2%} to a step, not {aims.EDITS_IN_STEP:.1%}")
    print(f"on the example's job: {of_start:.1%} of the self-check's {cost.self_check:.1f} s of CPU time, and "
          f"{of_step:.2%} of a step's {cost.whole_step:.2f} s")  # fmt: skip
    total = ", ".join(f"{number} {state}" for state, number in Counter(one.state for one in verdicts).items())
    figures = {"effects": moved, "trials": [asdict(verdict) for verdict in verdicts],
               "cost": cost._asdict()}  # fmt: skip
    return finish("check_edits", f"{len(verdicts)} edits: {total}", figures, missed, options.json)


if __name__ == "__main__":
    sys.exit(guarded("check_edits", main))
