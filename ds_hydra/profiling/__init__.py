"""Cost tables from the user's own machine: what is measured, and how coefficients are fitted to it.

[Note: how an entry is made]
"local shapes": one rank computes its true share of a stage, with collectives that move nothing; their bytes are
counted and their time added from link figures. "ranks": the tensor and sequence parallel ranks of a stage really
ran together. Pipeline neighbours are never run: a message's time comes from link figures.

`fit`, `ladder` and `links` are pure; `local_group`, `stage_timer`, `stage_memory` and `link_timer` need torch.
"""
