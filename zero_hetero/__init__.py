"""Tensors on ranks: layouts, mutual slices, the LNK operator, FP32 master shards, the sharded optimizer.

Imports torch only; `intervals`, `layout` and `transfer_plan` not even that.
"""

if __name__ != "ds_hydra.zero_hetero":
    raise ImportError(f"import this package as 'ds_hydra.zero_hetero', not as {__name__!r}")
