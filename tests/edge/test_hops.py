"""How many files one request passes, counted while it does."""

from __future__ import annotations

import pytest

from tests.bench.hops import MAX_DAEMON_FILES, PAGE, ROOT, listed_files, measure, table

pytestmark = pytest.mark.engine


def test_a_streamed_device_answer_passes_few_files_and_the_page_lists_them() -> None:
    hops = measure()
    assert len(hops.daemon) <= MAX_DAEMON_FILES, f"collapse a relay:\n{table(hops)}"
    listed = listed_files(PAGE)
    assert hops.child, "the engine child's own threads decide which of its files run meanwhile"
    assert [file for file in hops.daemon if file not in listed] == [], "run `python -m tests.bench.hops --write`"
    assert [file for file in listed if not (ROOT / file).is_file()] == []
