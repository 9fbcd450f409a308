"""One batch in, the best assignment over the candidate strategies and a certified bound out. Pure: no torch.

[Note: search]
Every strategy gets a cheap bound first, and strategies are tried in the order of their bounds. Three strategies with
bounds of 90, 96 and 120 ms: the first is searched and gives a plan of 95 ms. The second is then left out, for no plan
of it takes less than 96, and the third with it. Were the first plan 100 ms, the second would be searched too. The
least bound over all strategies, searched or not, certifies the plan: 95 against 90 is within 5.6 % of the optimum.

What "searched" means depends on the mode; each of them is one method of `Search`. Where others than the best plan are
asked for too, strategies are searched until their bounds are clearly above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ds_hydra.planner.kernels.arrays import Floats, Prospect, Schemes
from ds_hydra.planner.kernels.problem import Assignment, Batch, PipelineKinds
from ds_hydra.planner.one_strategy import StrategySearch
from ds_hydra.planner.options import PlannerOptions

_TINY_SEQUENCES = 8  # up to here 3^n subsets are cheaper than any search
_LEAN_TRIES = 3  # strategies tried by plain Python kernels
_MORE_RESTARTS = 12
_CLOSE = 0.01  # of the best plan's time: what other plans that are asked for may take more
_PROOF_TARGETS = (0.001, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08)  # gaps tried, best first


@dataclass
class _Candidates:
    """The strategies of one search by their index: what is known of each, and the best plan of each so far."""

    tolerance: float  # share of the best plan's time that is not worth another search; below 0: worse plans are too
    prices: dict[int, Floats]
    bounds: dict[int, float]  # of a step, with what each strategy's messages add
    found: dict[int, Assignment] = field(default_factory=dict)

    @property
    def best_ms(self) -> float:
        """Of a step by the best plan so far; infinite without one."""
        return min((one.step_ms for one in self.found.values()), default=math.inf)

    def winners(self, count: int) -> list[Assignment]:
        """The best plan, and up to so many others of other strategies that are close to it, best first; none where no
        strategy gave one."""
        ranked = sorted(self.found.values(), key=lambda one: one.step_ms)
        return [one for one in ranked[:count] if one.step_ms <= (1.0 + _CLOSE) * ranked[0].step_ms]

    @property
    def least_bound(self) -> float:
        """No plan under any of the strategies is sooner done (ms)."""
        return min(self.bounds.values())

    def by_bound(self) -> list[int]:
        return sorted(self.bounds, key=lambda index: (self.bounds[index], index))

    def can_win(self, index: int) -> bool:
        return self.bounds[index] * (1.0 + self.tolerance) < self.best_ms

    def worth_trying(self) -> Iterator[int]:
        """Strategies in the order of their bounds, until one cannot win; then none of those after it can."""
        for index in self.by_bound():
            if not self.can_win(index):
                return
            yield index

    def offer(self, index: int, found: Assignment | None) -> None:
        if found is not None and (index not in self.found or found.step_ms < self.found[index].step_ms):
            self.found[index] = found


class Search:
    """One step's search over candidate strategies [Note: search]."""

    def __init__(self, kinds: Sequence[PipelineKinds], schemes: Schemes, options: PlannerOptions, batch: Batch) -> None:
        self._kinds = kinds
        self._options = options
        self._num_sequences = batch.size
        self._one = StrategySearch(schemes, options, batch)

    def best_of(self, candidates: Sequence[int], count: int = 1) -> tuple[list[Assignment], float]:
        """The best assignment over these strategies, none where no strategy holds every sequence, and a lower bound on
        the step of any (ms).

        With a larger `count` up to so many, each of another strategy and little worse than the best, which is first.
        """
        prices = {index: self._kinds[index].num_ranks.copy() for index in candidates}
        bounds = {index: self._bound(index, prices[index], 4, 8) for index in candidates}
        known = _Candidates(self._options.tolerance if count == 1 else -_CLOSE, prices, bounds)
        if self._num_sequences <= _TINY_SEQUENCES:
            self._by_subsets(known)
        elif self._one.is_compiled:
            self._fully(known)
        else:
            self._leanly(known)
        return known.winners(count), known.least_bound

    def _bound(self, index: int, price: Floats, outer: int, inner: int) -> float:
        kinds = self._kinds[index]
        return self._one.bound(kinds, price, outer, inner) + kinds.exposed_ms

    def _prospect(self, index: int, known: _Candidates) -> Prospect:
        """Of the strategy's pipelines, whose times do not count what messages add."""
        exposed_ms, ceiling = self._kinds[index].exposed_ms, known.best_ms * (1.0 - min(0.0, known.tolerance))
        return Prospect(known.bounds[index] - exposed_ms, known.prices[index], ceiling - exposed_ms)

    def _fully(self, known: _Candidates) -> None:
        """The usual mode: compiled kernels search every strategy whose bound, made tighter first, can win."""
        for index in known.worth_trying():
            if len(known.bounds) > 1:
                self._tighten(index, known)
                if not known.can_win(index):
                    continue
            known.offer(index, self._one.assign(self._kinds[index], self._prospect(index, known)))
        if self._options.method == "highs":
            self._exactly(known)
        else:
            self._look_again(known)
        self._raise_bounds(known)

    def _exactly(self, known: _Candidates) -> None:
        if not known.found:
            return
        index, best = min(known.found.items(), key=lambda item: item[1].step_ms)
        known.offer(index, self._one.improve_exactly(best, known.least_bound - best.kinds.exposed_ms))

    def _leanly(self, known: _Candidates) -> None:
        """Without compiled kernels: few strategies are tried, and one placement of each."""
        for index in islice(known.worth_trying(), _LEAN_TRIES):
            known.offer(index, self._one.assign(self._kinds[index], self._prospect(index, known)))
        if self._options.method == "highs":
            self._exactly(known)

    def _by_subsets(self, known: _Candidates) -> None:
        """Few sequences: the optimum of every strategy that can win, which is its bound too."""
        for index in known.worth_trying():
            found = self._one.solve_tiny(self._kinds[index])
            if found is not None:
                known.bounds[index] = found.step_ms
            known.offer(index, found)

    def _tighten(self, index: int, known: _Candidates) -> None:
        """Improve a strategy's bound from the prices of the first one, which may save the search, which costs more."""
        again = self._bound(index, known.prices[index], 10, 12)
        known.bounds[index] = max(known.bounds[index], again)

    def _look_again(self, known: _Candidates) -> None:
        """More restarts, with prices perturbed by another seed, for every strategy whose bound is below the plan."""
        # Fewer for larger batches: each restart costs more there, and the many short sequences leave less to gain.
        restarts = _MORE_RESTARTS * self._options.effort * 100 // max(200, self._num_sequences)
        effort = self._one.effort._replace(restarts=restarts)
        for index in known.by_bound() if restarts else ():
            if known.can_win(index):
                known.offer(index, self._one.assign(self._kinds[index], self._prospect(index, known), effort))

    def _raise_bounds(self, known: _Candidates) -> None:
        """Prove better bounds for the strategies that could still beat the plan [Note: branching on the longest].

        A target within 0.1 % of the plan is tried first, then 0.5 %, ...: the first one that is refuted for all
        strategies with a bound below it becomes their bound.
        """
        best_ms, proven = known.best_ms, known.least_bound
        if not known.found or not self._one.can_refute:
            return
        for share in _PROOF_TARGETS:
            target = best_ms / (1.0 + share)
            if target <= proven:
                return
            open_ones = [index for index in known.bounds if known.bounds[index] < target]
            if all(self._refuted(index, target, known) for index in open_ones):
                for index in known.bounds:
                    known.bounds[index] = max(known.bounds[index], target)
                return

    def _refuted(self, index: int, target: float, known: _Candidates) -> bool:
        kinds = self._kinds[index]
        return self._one.refute(kinds, target - kinds.exposed_ms, known.prices[index])
