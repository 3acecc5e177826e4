"""How many files one request passes, counted while it does."""

from __future__ import annotations

import shutil

import pytest

from tests.bench.hops import (
    MAX_CHAT_FILES,
    MAX_DAEMON_FILES,
    MAX_JOB_FILES,
    MAX_WORKER_DEPTH,
    PAGE,
    ROOT,
    listed_files,
    measure,
    measure_chat,
    measure_job,
    named_files,
    table,
)

pytestmark = pytest.mark.engine


def test_a_streamed_device_answer_passes_few_files_and_the_page_lists_them() -> None:
    hops = measure()
    assert len(hops.daemon.files) <= MAX_DAEMON_FILES, f"collapse a relay:\n{table(hops)}"
    listed = listed_files(PAGE)
    assert hops.child.files, "the engine child's own threads decide which of its files run meanwhile"
    assert [file for file in hops.daemon.files if file not in listed] == [], "run `python -m tests.bench hops --write`"
    assert [file for file in listed if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("way", ["chat", "job"])
def test_the_files_that_the_page_names_on_a_way_exist(way: str) -> None:
    named = named_files(PAGE, way)
    assert named
    assert [file for file in named if not (ROOT / file).is_file()] == []


@pytest.mark.slow
def test_a_forwarded_chat_passes_few_files_and_takes_the_way_of_the_page() -> None:
    hops = measure_chat()
    for process, trace in hops._asdict().items():
        assert len(trace.files) <= MAX_CHAT_FILES[process], trace.files
    assert set(named_files(PAGE, "chat")) <= {file for trace in hops for file in trace.files}


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server on PATH")
def test_a_job_passes_few_files_and_takes_the_way_of_the_page() -> None:
    hops = measure_job()
    files = {file for trace in hops for file in trace.files}
    assert len(files) <= MAX_JOB_FILES, {process: trace.files for process, trace in hops._asdict().items()}
    assert hops.worker.depth <= MAX_WORKER_DEPTH
    assert set(named_files(PAGE, "job")) <= files
