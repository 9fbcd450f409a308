"""Another amount of memory for pushes than the one of the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from ds_hydra.costs import rank_bytes


@contextmanager
def room_for_pushes(room: int) -> Iterator[None]:
    """Within it pushes have so many bytes; what was counted with others is counted anew, before and after."""
    with mock.patch.object(rank_bytes, "room_for_pushes", return_value=room):
        rank_bytes._ranks.cache_clear()
        try:
            yield
        finally:
            rank_bytes._ranks.cache_clear()
