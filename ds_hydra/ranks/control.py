"""Small messages between all ranks that steer a job: no tensors of the model, no decisions."""

from __future__ import annotations

import torch
import torch.distributed as dist

_INLINE_BYTES = 1 << 15  # of a text that travel with its length; longer texts take a second message


def broadcast_text(text: str | None, control: dist.ProcessGroup | None) -> str:
    """Rank 0's text, on every rank; the others give None. `control` takes CPU tensors."""
    if dist.get_world_size() == 1:
        assert text is not None, "the only rank is rank 0"
        return text
    head = torch.zeros(8 + _INLINE_BYTES, dtype=torch.uint8)
    payload = torch.empty(0, dtype=torch.uint8)
    if text:
        payload = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        head[:8] = torch.tensor([len(payload)], dtype=torch.int64).view(torch.uint8)
        inline = payload[:_INLINE_BYTES]
        head[8 : 8 + len(inline)] = inline
    dist.broadcast(head, 0, group=control)
    size = int(head[:8].view(torch.int64))
    rest = payload[_INLINE_BYTES:] if text else torch.empty(max(0, size - _INLINE_BYTES), dtype=torch.uint8)
    if len(rest):
        dist.broadcast(rest, 0, group=control)
    return bytes(torch.cat((head[8 : 8 + min(size, _INLINE_BYTES)], rest)).numpy()).decode()
