"""What tests of models, losses and engines need: ranks on one machine, and a run on them beside one process.

`compare` trains a model both ways. Its parts stand beside it: `run_ranks` calls a function on forked gloo ranks,
`note_training` notes an engine's steps, `OneProcess` computes the same in plain torch, `difference` compares the two.
"""

from ds_hydra.host.environment import free_port
from ds_hydra.ranks.forked import RankError, rank_environment, run_ranks
from ds_hydra.testing.comparison import Aims, Difference, RankRun, compare, difference, note_training, whole_gradients
from ds_hydra.testing.one_process import OneProcess, Sample, Step, float64_throughout, token_losses, token_weights

__all__ = [
    "Aims", "Difference", "OneProcess", "RankError", "RankRun", "Sample", "Step", "compare", "difference",
    "float64_throughout", "free_port", "note_training", "rank_environment", "run_ranks", "token_losses",
    "token_weights", "whole_gradients",
]  # fmt: skip
