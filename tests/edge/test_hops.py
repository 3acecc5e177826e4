"""How many files one request passes, counted while it does."""

from __future__ import annotations

import pytest

from tests.bench.hops import MAX_DAEMON_FILES, PAGE, measure, table

pytestmark = pytest.mark.engine


def test_a_streamed_device_answer_passes_few_files_and_the_page_lists_them() -> None:
    hops = measure()
    assert len(hops.daemon) <= MAX_DAEMON_FILES, f"collapse a relay:\n{table(hops)}"
    page = PAGE.read_text()
    missing = [file for file in (*hops.daemon, *hops.child) if f"`{file}`" not in page]
    assert not missing, "run `python -m tests.bench.hops --write`"
