"""What other systems take for a job's steps: their costs, and how they deal sequences out. Pure: no torch.

`costs` has the schemes that each may use and what they hold, `waits` what their messages leave exposed. `systems` has
fixed layouts and InfiniPipe, `dynamic_cp` dynamic context parallelism as Megatron-Core schedules it. All of them take a
`setting`.
"""
