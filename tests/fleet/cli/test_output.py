"""How the commands print: tables, and the state of a rollout."""

from __future__ import annotations

import pytest

from causeway_server.fleet.cli.rollout_output import bundle_name, counted, state_text, table
from causeway_server.fleet.operators.answers import RolloutStatus


def test_a_table_has_columns_as_wide_as_their_longest_cell() -> None:
    assert list(table(("device", "site", "why"), [("device-1", "", "late"), ("b", "store-12", "")])) == [
        "DEVICE    SITE      WHY",
        "device-1            late",
        "b         store-12",
    ]
    assert list(table(("device",), [])) == []


def test_numbers_have_their_noun() -> None:
    assert [counted(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert (bundle_name(None), bundle_name("ab" * 32)) == ("factory's files", "abababababab")


@pytest.mark.parametrize(
    ("state", "stage", "text"),
    [
        ("lint", 0, "lint"),
        ("stage", 0, "stage 1 of 2"),
        ("paused", 1, "stage 2 of 2 paused"),
        ("soak", 2, "soak"),
        ("paused", 2, "soak paused"),
        ("done", 2, "done"),
    ],
)
def test_a_state_names_the_stage(state: str, stage: int, text: str) -> None:
    rollout = RolloutStatus(
        "r-1", "kiosk", state, stage, (50_000, 100_000), 100_000, began=1.0, entered=1.0, reason="",
        to_bundle="a" * 64, from_bundle=None, author="anna", created=0.0,
    )  # fmt: skip
    assert state_text(rollout) == text
