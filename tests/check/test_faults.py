"""Each test that the table of faults names exists."""

from __future__ import annotations

import re

import pytest

from .sources import ROOT

TABLE = ROOT / "tests/attacks/FAULTS.md"
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?")


def rows() -> list[str]:
    return [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]


def missing(row: str) -> list[str]:
    """Tests of one row that do not exist; the row itself if it names none."""
    named = _NAMED.findall(row.rpartition(" | ")[2])
    if not named:
        return [row]
    return [f"{path}::{test}" for path, test in named if not _exists(path, test)]


def _exists(path: str, test: str) -> bool:
    file = ROOT / path
    return file.exists() and (not test or f"def {test}(" in file.read_text(encoding="utf-8"))


def test_every_fault_names_tests_that_exist() -> None:
    assert [name for row in rows() for name in missing(row)] == []


@pytest.mark.parametrize(
    "row",
    [
        "| a fault | edge | none |",
        "| a fault | edge | `tests/check/test_nowhere.py::test_a` |",
        "| a fault | edge | `tests/check/test_faults.py::test_of_another_name` |",
    ],
)
def test_a_row_without_a_test_is_found(row: str) -> None:
    assert missing(row) != []
