"""What a Trainer's own code would divide by otherwise than a planned step is refused, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_hydra.host.pending import Collected, PendingLoss, Term
from ds_hydra.hugging_face.counted import Counted
from ds_hydra.zero_hetero.errors import ConfigError

LABELS = torch.tensor([[5, 6, 7, -100], [8, 9, -100, -100]])  # three targets
OF_ALL = torch.tensor(10)


def checked(
    given: Any = OF_ALL, handed_on: Any = OF_ALL, labels: torch.Tensor = LABELS, norm: str = "token", batches: int = 2
) -> None:
    counted = Counted()
    counted.count([{"labels": LABELS}], OF_ALL)
    entry = Collected({"input_ids": labels, "labels": labels}, print, num_items=handed_on)
    loss = PendingLoss([Term(entry, 1.0)])
    counted.check(loss, given, owner="Own", norm=norm, batches=batches, last=True)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"given": torch.tensor(10.0), "handed_on": 10},
        {"given": None, "norm": "batch"},
        {"given": None, "batches": 1},
        {"handed_on": None, "batches": 1},
        {"handed_on": None, "norm": "batch"},
    ],
)
def test_what_divides_by_the_targets_is_trained(case: dict[str, Any]) -> None:
    checked(**case)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"given": None}, 'set "loss_norm": "batch"'),
        ({"given": 20}, "leave get_batch_samples as it is"),
        ({"handed_on": None}, "num_items_in_batch=num_items_in_batch"),
        ({"handed_on": 5}, "hand that on"),
        ({"labels": LABELS.masked_fill(LABELS == 6, -100)}, "have 2 targets on this rank in an update"),
    ],
)
def test_what_divides_otherwise_is_refused(case: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        checked(**case)
    assert words in str(error.value)
    assert "Own" in str(error.value)
