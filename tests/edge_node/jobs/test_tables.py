"""The outbox without a daemon around it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from causeway_server.edge_node.backends.cloud.backend import Clouds
from causeway_server.edge_node.clock import Clock, system_clock
from causeway_server.edge_node.config.schema import OutboxConfig
from causeway_server.edge_node.jobs import schema
from causeway_server.edge_node.jobs.acceptance import OutboxAcceptance
from causeway_server.edge_node.jobs.record import EdgeJob
from causeway_server.edge_node.jobs.rows import OutboxRows
from causeway_server.edge_node.jobs.runner import OutboxRunner
from causeway_server.edge_node.jobs.schema import SCHEMA
from causeway_server.edge_node.jobs.store import READ_BYTES, JobOutbox
from causeway_server.edge_node.serving.generation import Generation
from causeway_server.edge_node.serving.requests import RequestContext
from causeway_server.edge_node.serving.service import Service
from causeway_server.edge_node.storage.sealed import register
from causeway_server.router.errors import CloudFailed, NotFound
from causeway_server.router.jobs.job import JobEvent
from causeway_server.router.serving.at_rest.state_keys import StateKeys

from .killed_outbox import new_job
from .support import opened

RARE = {schema.COUNTS, schema.COUNTS_BY_OWNER, schema.RUNNING}
"""They read every job, when the file is opened."""
QUERIES = sorted(
    text
    for name, text in vars(schema).items()
    if name.isupper() and str(text).startswith(("SELECT", "UPDATE")) and not name.startswith("_") and text not in RARE
)


@pytest.mark.parametrize("query", QUERIES)
def test_no_query_reads_the_whole_table(tmp_path: Path, query: str) -> None:
    """A scan makes acceptance slower with each job that waits."""
    with sqlite3.connect(":memory:") as database:
        register(database, StateKeys(tmp_path))
        database.executescript(SCHEMA)
        plan = database.execute(
            f"EXPLAIN QUERY PLAN {query}", [0] * len({*re.findall(r"\?\d+", query)} or query.split("?")[1:])
        ).fetchall()
    steps = [str(row[3]) for row in plan]
    fine = ("SEARCH", "SCAN json_each", "LIST SUBQUERY", "CORRELATED")  # the second is of an argument
    assert not [step for step in steps if not step.startswith(fine)], steps


@pytest.mark.slow
async def test_requests_with_images_are_not_read_into_memory_all_at_once(tmp_path: Path) -> None:
    """One that is larger than the bound comes alone."""
    store = await opened(tmp_path, OutboxConfig())
    for number, size in enumerate((READ_BYTES // 2, READ_BYTES // 2, READ_BYTES + 1, 1)):
        await store.accept(new_job(store, str(number)), bytes(size))
    found = [len(claimed.body) for claimed in await store.claim("edge", 10)]
    assert found == [READ_BYTES // 2] * 2
    assert [len(claimed.body) for claimed in await store.claim("edge", 10)] == [READ_BYTES + 1]
    assert [len(claimed.body) for claimed in await store.claim("edge", 10)] == [1]
    store.close()


def test_a_run_of_a_file_that_was_lost_ends_no_job_of_the_new_file(tmp_path: Path) -> None:
    """A corrupt file is replaced while its jobs run: their answers are nobody else's."""
    store = JobOutbox(tmp_path, OutboxConfig(), system_clock())
    rows = OutboxRows(store.time)
    acceptance = OutboxAcceptance(OutboxConfig(), rows)

    def accept_in_a_new_file(text: str) -> tuple[sqlite3.Connection, EdgeJob]:
        database = sqlite3.connect(":memory:", isolation_level=None)
        register(database, StateKeys(tmp_path))
        database.executescript(SCHEMA)
        rows.load(database)
        return database, acceptance.accept(database, new_job(store, text), text.encode()).job

    _, lost = accept_in_a_new_file("lost")
    database, job = accept_in_a_new_file("new")
    assert rows.stored(database, lost.seq) is None
    assert rows.stored(database, job.seq) == job


async def test_a_job_stays_where_the_policy_placed_it_when_its_run_is_given_back(tmp_path: Path) -> None:
    """Else it is sent to the cloud from the device's lane, which nothing paces."""
    store = await opened(tmp_path, OutboxConfig(), system_clock())
    accepted = await store.accept(new_job(store, "moved"), b"{}")
    await store.place([(accepted.job, "cloud")])
    (claimed,) = await store.claim("cloud", 1)
    await store.postpone(claimed.job, store.time.now(), CloudFailed("again"), decision="d")
    assert await store.claim("edge", 1) == []
    assert len(await store.claim("cloud", 1)) == 1
    store.close()


@pytest.mark.parametrize(("result_ttl_s", "dead_letter_ttl_s"), [(10.0, 1000.0), (1000.0, 10.0)])
async def test_dead_letters_and_results_are_kept_for_the_time_of_each(
    tmp_path: Path, result_ttl_s: float, dead_letter_ttl_s: float
) -> None:
    now = 0.0
    config = OutboxConfig(result_ttl_s=result_ttl_s, dead_letter_ttl_s=dead_letter_ttl_s)
    store = await opened(tmp_path, config, Clock(lambda: now, lambda: now, "one"))
    for text in ("result", "dead letter"):
        await store.accept(new_job(store, text), b"{}")
    for claimed in await store.claim("edge", 2):
        event = JobEvent.EXHAUST if claimed.job.key == "dead letter" else JobEvent.FAIL
        await store.fail(claimed.job, event, CloudFailed("no"))
    now = 20.0
    assert await store.expire() == 1
    (kept,) = await store.list_owned("me", "", 10)
    assert kept.key == ("dead letter" if result_ttl_s < dead_letter_ttl_s else "result")
    now = 1020.0
    assert await store.expire() == 1
    store.close()


async def test_jobs_that_ended_without_a_result_do_not_fill_the_disk(tmp_path: Path) -> None:
    """A client submits and cancels without end: the newest `max_jobs` are kept."""
    store = await opened(tmp_path, OutboxConfig(max_jobs=3), system_clock())
    ids = []
    for number in range(5):
        accepted = await store.accept(new_job(store, str(number)), b"{}")
        ids.append(accepted.job.id)
        await store.cancel(accepted.job.id, "me")
    assert await store.expire() == 2
    assert [job.id for job in await store.list_owned("me", "", 10)] == ids[:1:-1]
    with pytest.raises(NotFound):
        await store.get(ids[0], "me")
    assert await store.expire() == 0
    store.close()


class _FailingService:
    """A service whose answers fail."""

    draining = False
    revision = "r"

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    async def preview(self, request: object) -> object:
        return SimpleNamespace(attempts=())

    async def answer(self, context: RequestContext) -> None:
        context.generation = cast("Generation", SimpleNamespace(sequence=None))
        raise self._errors.pop(0)


async def test_a_job_that_meets_a_bug_stops_no_other(tmp_path: Path) -> None:
    """Else the daemon ends with it, starts again, and meets the bug again: in a run, or where its end is stored."""
    config, clock = OutboxConfig(max_attempts=1), system_clock()
    store = await opened(tmp_path, config, clock)
    service = cast("Service", _FailingService(RuntimeError("a bug"), CloudFailed("no"), CloudFailed("no")))
    ids = iter(("one", "\udcff no text", "three"))
    runner = OutboxRunner(store, service, Clouds(), config, clock, lambda: next(ids), random.Random(7))
    body = json.dumps({"model": "auto", "messages": [{"role": "user", "content": "hello"}]}).encode()
    jobs = [(await store.accept(new_job(store, str(number)), body)).job.id for number in range(3)]
    running = asyncio.create_task(runner.run())
    async with asyncio.timeout(60.0):
        while sum(job.has_ended for job in await store.list_owned("me", "", 3)) < 2:
            assert not running.done()
            await asyncio.sleep(0.01)
    found = [(await store.get(job, "me"))[0] for job in jobs]
    assert [job.state.value for job in found] == ["dead", "running", "dead"]
    assert json.loads(found[0].error)["code"] == "internal_error"
    running.cancel()
    await asyncio.wait([running])
    store.close()
