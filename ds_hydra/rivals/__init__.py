"""What other systems take for a job's steps: their costs, and how they deal sequences out. Pure: no torch.

`costs` has the schemes that each may use, `waits` what their messages leave exposed, `memory` what they hold. `static`
are fixed layouts, `as_made` dynamic context parallelism by the rules of `dynamic_cp`; `hindsight` finds the set-up that
suits given batches best. All of them take a `setting`.
"""
