"""Methods of published systems, as published, that ours is compared with: for tools and tests, in no wheel.

Hydraulis (arXiv 2412.07894): `proposal` of strategies by Eq. 4, `dispatch` by its Algorithm 1 on Eq. 3, packing by its
Eq. 1, and `hydraulis` with all of them in each step. `interval_program`, `algorithm_1` and `eq_1` are kernels;
`kernels` compiles them with the planner's. What `ds-hydra preview` shows is in `ds_hydra/rivals`. Pure: no torch.
"""
