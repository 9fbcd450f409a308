"""What a group is for in; the options of its NCCL communicator out: how much of the device it may take, and when."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# A message keeps its multiprocessors, of which a GPU has about a hundred, until the slowest peer has done its part. Two
# to four of them fill a link of 25 to 50 GB/s between nodes; eight leave room for links inside a node.
MOST_CTAS = 8


def nccl_options(*, background: bool = False, urgent: bool = False) -> Any:
    """Options for `new_group`; None, which takes torch's own, where this torch has no NCCL.

    `background`: what computing goes on beside takes few multiprocessors. `urgent`: what computing waits for comes
    before other work that stands in the device's queues.
    """
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        return None
    options = nccl.Options(is_high_priority_stream=urgent)
    if background:
        options.config.max_ctas = MOST_CTAS
    return options
