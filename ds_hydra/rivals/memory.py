"""The memory model of Hydraulis, appendix C.1: a scheme in, MaxLen out. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ds_hydra.pipe.shape import ParallelScheme


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Memory of one device by appendix C.1 of Hydraulis, solved for the tokens of a micro-batch.

    `activation_bytes` is A (bytes per token, hidden unit and layer), `state_bytes` is B (bytes per layer and
    hidden^2), `sharded_share` is alpha, the part of the model states that is sharded over all ranks.
    """

    hidden: int
    layers: int
    vocab: int
    device_bytes: float  # capacity less a safety margin
    num_ranks: int
    activation_bytes: float = 40.0
    state_bytes: float = 201.0
    sharded_share: float = 0.75

    def max_length(self, scheme: ParallelScheme, activation_bytes: float | None = None) -> int:
        """MaxLen in tokens; 0 or less when not even the model states fit.

        A stage keeps PP micro-batches' activations of layers/PP layers. The first stage holds one embedding
        table, the only stage of PP = 1 the output table too; both are sharded over all ranks.
        """
        share, split = self.sharded_share, 1.0 - self.sharded_share
        layer_states = self.layers * self.hidden**2 * self.state_bytes
        states = layer_states * (share / self.num_ranks + split / (scheme.tp * scheme.pp))
        table = 16.0 * self.hidden * self.vocab
        states += table * (2 * share / self.num_ranks + (2 if scheme.pp == 1 else 1) * split / scheme.tp)
        per_token = self.layers * self.hidden * (activation_bytes or self.activation_bytes)
        return int((self.device_bytes - states) * scheme.tp * scheme.sp // per_token)
