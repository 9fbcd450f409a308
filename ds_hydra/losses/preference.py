"""Losses of pairs of answers, one of which is preferred."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hydra.losses.policy import answers
from ds_hydra.zero_hetero.errors import ConfigError


@dataclass(frozen=True)
class DPO:
    """DPO of pairs (arXiv 2305.18290, eq. 7), in the mean over pairs, with h = the sum over an answer's tokens of
    log_probs - reference_log_probs, of the preferred one less that of the other:

        "sigmoid"   -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), where e is `label_smoothing`
        "ipo"       (h - 1 / (2 beta))^2 (IPO, arXiv 2310.12036, eq. 17)

    Columns: `pair`, a whole number of a sequence, equal for the two of a pair, which are of one rank. `chosen`, 1 for
    the preferred sequence and 0 for the other. `reference_log_probs`, a number of a token, as `engine.log_probs` of the
    reference model gives them.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    kind: Literal["sigmoid", "ipo"] = "sigmoid"

    @property
    def mixes_tokens(self) -> bool:
        """It needs all tokens of two sequences."""
        return True

    def __call__(self, log_probs: Tensor, entropy: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """The loss of each pair, (pairs,)."""
        apart = log_probs - fields["reference_log_probs"]
        of, first = answers(fields), _first(answers(fields))
        sums = torch.zeros(len(first), dtype=apart.dtype, device=apart.device).index_add(0, of, apart)
        pair, chosen = fields["pair"][first], fields["chosen"][first] > 0
        names, of_pair, counts = torch.unique(pair, return_inverse=True, return_counts=True)
        preferred = torch.bincount(of_pair[chosen], minlength=len(names))
        if bool((counts != 2).any()) or bool((preferred != 1).any()):
            at = int(((counts != 2) | (preferred != 1)).nonzero()[0])
            raise ConfigError(
                f"the pair {int(names[at])} has {int(counts[at])} sequences with a target on this rank, of which "
                f"{int(preferred[at])} are chosen: give both of each pair to one rank, one with chosen 1 and one with 0"
            )
        signs = torch.where(chosen, 1.0, -1.0).to(sums)
        margin = torch.zeros(len(names), dtype=sums.dtype, device=sums.device).index_add(0, of_pair, signs * sums)
        if self.kind == "ipo":
            return (margin - 1 / (2 * self.beta)).square()
        return -(1 - self.label_smoothing) * F.logsigmoid(self.beta * margin) - self.label_smoothing * F.logsigmoid(
            -self.beta * margin
        )


def _first(of: Tensor) -> Tensor:
    """The first place of each of 0, 1, 2, ... in (T,)."""
    places = torch.full((int(of.max()) + 1,), len(of), device=of.device)
    return places.scatter_reduce(0, of, torch.arange(len(of), device=of.device), "amin")
