"""Losses for `engine.forward_backward`: of policies, of preferences, of a teacher's top words, and of values.

Each is called as loss(log_probs, entropy, fields) [Note: losses of log-probabilities], a critic's as loss(values,
fields), and names in its docstring the columns that the items must have. `normaliser` says what its sum is divided by
where the call gives no number, and `mixes_tokens` that it needs other tokens than the one that it is of.
"""

from ds_hydra.losses.distillation import Distillation
from ds_hydra.losses.policy import GSPO, PolicyLoss, dapo, dr_grpo, group_advantages, grpo, ppo
from ds_hydra.losses.preference import DPO
from ds_hydra.losses.values import ValueLoss

__all__ = [
    "DPO", "GSPO", "Distillation", "PolicyLoss", "ValueLoss", "dapo", "dr_grpo", "group_advantages", "grpo", "ppo",
]  # fmt: skip
