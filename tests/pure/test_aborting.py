"""Communicators are aborted all at once, once a fault, and nothing that came meanwhile is believed."""

from __future__ import annotations

import threading

import pytest

from ds_hydra.ranks.groups import Aborting


class Communicator:
    """Its abort returns when that of all has begun, as the kernels of each hold up the others'."""

    def __init__(self, begun: threading.Barrier):
        self.begun, self.aborted = begun, 0

    def abort(self) -> None:
        self.begun.wait(timeout=10)
        self.aborted += 1


def test_all_are_aborted_at_once_and_once() -> None:
    begun = threading.Barrier(3)
    all_of_them = [Communicator(begun) for _ in range(3)]
    aborting = Aborting(lambda: all_of_them)
    aborting.check()
    others = [threading.Thread(target=aborting.abort) for _ in range(2)]
    for other in others:
        other.start()
    aborting.abort()
    assert [one.aborted for one in all_of_them] == [1, 1, 1], "and it returns when that is done, whoever began"
    for other in others:
        other.join()
    with pytest.raises(RuntimeError, match="another rank is gone"):
        aborting.check()
    late = Communicator(threading.Barrier(1))
    all_of_them.append(late)  # made while its rank was being freed
    aborting.abort()
    assert [one.aborted for one in all_of_them] == [1, 1, 1, 1]
    aborting.resume()
    aborting.check()


def test_nothing_that_comes_after_it_has_begun_is_believed() -> None:
    """A kernel may end as soon as the first communicator is told."""
    believed: list[bool] = []

    class First:
        def abort(self) -> None:
            try:
                aborting.check()
            except RuntimeError:
                believed.append(False)
            else:
                believed.append(True)

    first = First()
    aborting = Aborting(lambda: [first])
    aborting.abort()
    assert believed == [False]
