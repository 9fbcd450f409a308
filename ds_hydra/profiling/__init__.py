"""Cost tables from the user's own machine: what is measured, and how coefficients are fitted to it.

[Note: how an entry is made]
"local shapes": one rank computes its true share of a stage, with collectives that move nothing; their bytes are
counted, and of their time by link figures is added what is not hidden by what the stage computes between a start and
its wait. "ranks": the tensor and sequence parallel ranks of a stage really ran together. Pipeline neighbours are never
run: a message's time comes from link figures.

`fit` and `links` are pure; `stage_timer`, `stage_memory` and `survey` need torch.
"""

from ds_hydra.zero_hetero.deepspeed_names import handed_on

__getattr__ = handed_on(__name__)
