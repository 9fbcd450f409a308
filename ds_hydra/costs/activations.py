"""What one rank keeps of a micro-batch from its forward to its backward, for each token. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_hydra.costs.shares import CONTEXT, RECOMPUTED, UNTIL_WEIGHT, Shares, Terms

EXPERT_IMBALANCE = 1.5
"""Rows of the busiest rank over even ones, where experts are spread and nothing is said. A guess: with a router's load
balancing loss it is nearer to 1, and `expert_imbalance` of a step's record tells what it was."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes per token of a whole micro-batch on one rank, for one TP and SP degree.

    `layer`, `first` and `last` are kept from forward to backward, by each layer, by the embeddings and by what
    follows the layers (logits apart); `transient` is needed while a layer computes its backward. Of what is kept the
    share `until_weight` stays from the input's gradient to the weights' where the backward is split, and a token of a
    slice that others follow keeps the share `context` more [Note: shares of a micro-batch]. A token of a layer that is
    computed again keeps the share `recomputed`. `state`: bytes of a layer, not per token, that a slice which others
    follow keeps of states that are carried on, and of their gradients. `experts`: what whole experts keep of `layer`,
    which counts as many tokens for each rank's; 0 where none are spread over ranks, or nothing is known of them.
    """

    layer: float
    first: float
    last: float
    transient: float = 0.0
    until_weight: float = UNTIL_WEIGHT
    context: float = CONTEXT
    recomputed: float = RECOMPUTED
    state: float = 0.0
    experts: float = 0.0

    def shares(self, forward: Terms, weight: Terms) -> Shares:
        """Of a cost table's row, with these shares of its time."""
        state = self.state / self.layer if self.state else 0.0
        return Shares(forward, weight, self.until_weight, self.context, self.recomputed, state)

    def routed(self, imbalance: float) -> Activations:
        """Those of a rank whose experts are chosen `imbalance` times as often as even routing has it."""
        if not self.experts:
            return self
        # What a layer needs while it computes its backward is mostly gradients of what it keeps.
        grown = 1.0 + (imbalance - 1.0) * self.experts / self.layer
        return replace(self, layer=grown * self.layer, transient=grown * self.transient)
