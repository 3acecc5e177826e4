"""The audit log's chain shows every change but a cut at the end, which a noted hash shows."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.fleet.store.history import FIRST, AuditRow, first_fault, next_row


def chain(count: int) -> list[AuditRow]:
    rows: list[AuditRow] = []
    for number in range(count):
        rows.append(
            next_row(rows[-1] if rows else None, 5.0 + number, "anna", "rollout.pause", {"id": "r1", "n": number})
        )
    return rows


def test_an_untouched_chain_has_no_fault() -> None:
    rows = chain(5)
    assert rows[0].previous == FIRST
    assert first_fault(rows) == first_fault([]) == first_fault(rows[2:], after=rows[1]) == ""


@given(st.integers(0, 4), st.sampled_from(["at", "actor", "action", "what", "previous", "hash"]))
def test_a_changed_row_is_found(index: int, field: str) -> None:
    rows = chain(5)
    values = {"at": 7.5, "what": msgspec.Raw(b"{}")}
    rows[index] = msgspec.structs.replace(rows[index], **{field: values.get(field, "0" * 63 + "1")})
    fault = first_fault(rows)
    assert f"row {index + 1} " in fault or f"row {index + 2} " in fault


@pytest.mark.parametrize("index", range(4))
def test_a_removed_row_is_found(index: int) -> None:
    rows = chain(5)
    del rows[index]
    assert first_fault(rows) == f"row {index + 1} is missing: row {index + 2} follows"


def test_a_rewritten_row_breaks_the_row_after_it() -> None:
    """After one recomputed hash all later ones must be recomputed too."""
    rows = chain(3)
    rows[1] = next_row(rows[0], 6.0, "mallory", "rollout.pause", {})
    assert first_fault(rows) == "row 3 does not follow the row before it: one of them was replaced"
