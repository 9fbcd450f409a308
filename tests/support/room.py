"""Another amount of memory for pushes than the one of the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from ds_hydra.costs import memory


@contextmanager
def room_for_pushes(room: int) -> Iterator[None]:
    """Within it pushes have so many bytes; what was counted with others is counted anew, before and after."""
    with mock.patch.object(memory, "room_for_pushes", return_value=room):
        memory._ranks.cache_clear()
        try:
            yield
        finally:
            memory._ranks.cache_clear()
