"""Losses for `engine.forward_backward`: of policies, of preferences, of a teacher's top words, and of values.

Each is called as loss(log_probs, entropy, fields) [Note: losses of log-probabilities], a critic's as loss(values,
fields), and names in its docstring the columns that the items must have. `normaliser` says what its sum is divided by
where the call gives no number, and `mixes_tokens` that it needs other tokens than the one that it is of.
"""

from ds_hydra.losses.scores import (
    DPO,
    GSPO,
    Distillation,
    PolicyLoss,
    ValueLoss,
    dapo,
    dr_grpo,
    group_advantages,
    grpo,
    ppo,
)

__all__ = [
    "DPO", "GSPO", "Distillation", "PolicyLoss", "ValueLoss", "dapo", "dr_grpo", "group_advantages", "grpo", "ppo",
]  # fmt: skip
