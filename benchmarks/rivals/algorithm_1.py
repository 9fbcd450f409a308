"""Kernel of Algorithm 1 of Hydraulis, as printed. Plain Python that numba can compile."""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.planner.kernels.problem import Floats, Ints


def greedy_trials(
    times: Floats, tokens: Ints, max_length: Ints, pp: Floats, trials: int, seed: int, owner: Ints
) -> float:
    """Algorithm 1 (appendix E.2): best of random greedy dispatches under Eq. 3; fills owner, returns its ms.

    times (pipelines, n) is T(l_i, P_j) with c; tokens (n,); max_length and pp (pipelines,), in the paper's
    order, largest MaxLen first. Ties go to the first pipeline, as printed. Infinite when a sequence fits nowhere.
    """
    pipelines, n = times.shape
    order = np.arange(n)
    # C_j, the work of pipeline j; E_j = (PP-1) * T(l_max, P_j), its bubble; j is done after both.
    done = np.empty(pipelines, dtype=np.float64)  # C_j + E_j
    spent = np.empty(pipelines, dtype=np.float64)  # C_j
    widest = np.empty(pipelines, dtype=np.float64)  # T(l_max, P_j)
    trial = np.empty(n, dtype=np.int64)
    best = math.inf
    state = seed + 1
    for _ in range(trials):
        for i in range(n - 1, 0, -1):  # a random permutation (Fisher and Yates)
            state = (state * 6364136223846793005 + 1442695040888963407) % 4611686018427387904
            j = (state >> 20) % (i + 1)  # the lowest bits of such a generator repeat soon
            order[i], order[j] = order[j], order[i]
        done[:] = 0.0
        spent[:] = 0.0
        widest[:] = 0.0
        for at in range(n):
            i = order[at]
            # The step's time with i on pipeline j is j's new time or the latest of the others. The two latest of all
            # pipelines tell the latest of the others for every j, without a loop in the loop.
            first, second = -1, -1
            for j in range(pipelines):
                if first < 0 or done[j] > done[first]:
                    first, second = j, first
                elif second < 0 or done[j] > done[second]:
                    second = j
            least, chosen = math.inf, -1
            for j in range(pipelines):
                if tokens[i] > max_length[j]:
                    break  # those after it hold no more
                other = second if j == first else first
                others = done[other] if other >= 0 else 0.0
                own = spent[j] + times[j, i] + max(widest[j], times[j, i]) * (pp[j] - 1)
                if max(own, others) < least:
                    least, chosen = max(own, others), j
            if chosen < 0:
                return math.inf
            trial[i] = chosen
            spent[chosen] += times[chosen, i]
            widest[chosen] = max(widest[chosen], times[chosen, i])
            done[chosen] = spent[chosen] + widest[chosen] * (pp[chosen] - 1)
        if done.max() < best:
            best = done.max()
            owner[:] = trial
    return best
