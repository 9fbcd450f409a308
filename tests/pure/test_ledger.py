"""The ledger holds: no part has more lines than it may have, and what it names is there."""

from __future__ import annotations

import pytest

from tests import ledger


@pytest.mark.parametrize("name", [*ledger.CAPABILITIES, "core"])
def test_no_part_has_more_lines_than_the_ledger_gives_it(name: str) -> None:
    lines, most = ledger.found()[name], ledger.most()[name]
    over = [f"{where}: {one} lines, {limit} in tests/ledger.py" for where, one, limit in
            zip(lines._fields, lines, most, strict=True) if one > limit]  # fmt: skip
    assert not over, f"{name}: {'; '.join(over)}: make it smaller, or say in the commit what users get for more"


@pytest.mark.parametrize("name", ledger.CAPABILITIES)
def test_each_file_of_the_ledger_is_there(name: str) -> None:
    missing = [pattern for pattern in ledger.CAPABILITIES[name].files.split() if not any(ledger.ROOT.glob(pattern))]
    assert not missing, missing


@pytest.mark.parametrize("kind", ledger.MECHANISMS)
def test_each_mechanism_of_the_ledger_is_there(kind: str) -> None:
    missing = [place for place in ledger.MECHANISMS[kind].split() if not (ledger.ROOT / place).is_file()]
    assert not missing, missing
