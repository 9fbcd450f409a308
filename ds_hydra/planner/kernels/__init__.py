"""The inner loops of the planner, as plain Python and compiled by numba; `load` says how. Pure: no torch.

`Kernels` lists what is called from outside. `bound`: no plan is sooner done, proofs of that, and few sequences solved
exactly. `dispatch`: sequences to pipelines, and repairs. `packing`: micro-batches, also of pipelines that may cut
sequences, and layers to compute again. `cut_search`: what such micro-batches take, and better ones.

The same letters mean the same things throughout:

    n       sequences                           tau     a time in ms that is tried
    i, j    a sequence, longest first           v, V    micro-batches of a pipeline
    p, q    a pipeline                          c       ms that each micro-batch costs besides its sequences
    k       a scheme, by its row of the cost table

And one example runs through them: three sequences of 6, 5 and 4 ms on two equal pipelines with PP = 1 and c = 0. The
best plan is {6} and {5, 4}: 9 ms.
"""

from ds_hydra.planner.kernels.load import Kernels, compiled, pure, select, timing

__all__ = ["Kernels", "compiled", "pure", "select", "timing"]
