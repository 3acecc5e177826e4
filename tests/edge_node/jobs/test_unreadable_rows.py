"""Rows of the outbox that this version cannot read: damaged ones, and those of a newer version after a downgrade.

They stop no other job and no daemon, and are kept: a version that can read them runs them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.config.schema import OutboxConfig
from causeway_server.edge_node.jobs import FILE
from causeway_server.edge_node.jobs.record import ReplyTo
from causeway_server.edge_node.jobs.store import JobOutbox
from causeway_server.router.errors import CloudFailed, NotFound, RecordUnreadable
from causeway_server.router.jobs.job import JobEvent

from ..device import running
from ..storage.encrypted import database_of
from .killed_outbox import WEBHOOK, new_job
from .support import PROMPT, accepted, away, ended, opened, request, submit, view

Edit = Callable[[dict[str, Any]], object]


def edit_record(folder: Path, seq: int, edit: Edit | None) -> None:
    """Change the record of a job in the file of a daemon that is down; None: bit rot."""
    with database_of(folder / FILE) as database:
        if edit is None:
            (record,) = database.execute("SELECT record FROM jobs WHERE seq = ?", (seq,)).fetchone()
            database.execute("UPDATE jobs SET record = ? WHERE seq = ?", (record[:-1] + b"\xc1", seq))
            return
        (record,) = database.execute("SELECT opened(record, 'jobs', seq) FROM jobs WHERE seq = ?", (seq,)).fetchone()
        fields = msgspec.msgpack.decode(record)
        edit(fields)
        values = (msgspec.msgpack.encode(fields), seq)
        database.execute("UPDATE jobs SET record = seal(?1, 'jobs', ?2) WHERE seq = ?2", values)


def endpoint(name: str) -> Edit:
    return lambda fields: fields.update(endpoint=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        None,
        endpoint("/v1/of-a-newer-version"),
        lambda fields: fields.update(state="paused"),
        lambda fields: fields.update(due="soon"),
        lambda fields: fields.pop("owner"),
    ],
    ids=["bit rot", "newer endpoint", "newer state", "another type", "a field is missing"],
)
@pytest.mark.parametrize("state", ["queued", "running"])
async def test_a_job_that_cannot_be_read_stops_neither_the_daemon_nor_other_jobs(
    tmp_path: Path, state: str, edit: Edit | None
) -> None:
    cloud = away()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT) as device:
        poison, other = await accepted(device, "poison", tags="cloud"), await accepted(device, "other", tags="cloud")
    folder = tmp_path / "state"
    edit_record(folder, 1, edit)
    with sqlite3.connect(folder / FILE) as database:
        database.execute("UPDATE jobs SET state = ? WHERE seq = 1", (state,))
    database.close()
    await cloud.come_back()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        assert (await ended(device, other))["status"] == "succeeded"
        assert (await device.ask()).status == 200
        found = await request(device, "GET", f"/v1/jobs/{poison}")
        assert (found.status, found.code) == (500, "record_unreadable")
        assert "1 jobs of the outbox cannot be read" in str((await device.get("/readyz")).json["problems"])
        assert "causeway_edge_jobs_unreadable 1.0" in (await device.get("/metrics")).body.decode()
        listed = (await request(device, "GET", "/v1/jobs")).json["data"]
        assert [job["id"] for job in listed] == [other]
        assert not device.app.restarting
    assert cloud.effects == {"other": 1}


async def test_a_downgrade_loses_no_job_and_the_upgrade_runs_it(tmp_path: Path) -> None:
    """The key of a job that cannot be read stays taken, so that it is not done twice."""
    cloud = away()
    folder = tmp_path / "state"
    async with running(tmp_path, cloud=cloud, jobs=PROMPT) as device:
        job = await accepted(device, "newer", tags="cloud", key="k")
    edit_record(folder, 1, endpoint("/v1/of-a-newer-version"))
    async with running(tmp_path, cloud=cloud, jobs=PROMPT) as device:
        again = await submit(device, "newer", tags="cloud", key="k")
        assert (again.status, again.code) == (500, "record_unreadable")
        assert (await request(device, "DELETE", f"/v1/jobs/{job}")).code == "record_unreadable"
    edit_record(folder, 1, endpoint("/v1/chat/completions"))
    await cloud.come_back()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        assert (await ended(device, job))["status"] == "succeeded"
        assert (await view(device, job))["error"] is None
        assert (await device.get("/readyz")).json["problems"] == []
    assert cloud.effects == {"newer": 1}


async def test_rows_of_an_older_and_of_a_newer_version_are_read_where_only_fields_differ(tmp_path: Path) -> None:
    cloud = away()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT) as device:
        jobs = [await accepted(device, text, tags="cloud") for text in ("older", "newer")]
    optional = ("webhook", "webhook_status", "lost", "revived")
    edit_record(tmp_path / "state", 1, lambda fields: [fields.pop(name) for name in optional])
    edit_record(tmp_path / "state", 2, lambda fields: fields.update(of_a_newer_version={"any": 1}))
    await cloud.come_back()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        assert [(await ended(device, job))["status"] for job in jobs] == ["succeeded"] * 2
    assert cloud.effects == {"older": 1, "newer": 1}


def damage(store_folder: Path, statement: str) -> None:
    with sqlite3.connect(store_folder / FILE) as database:
        assert database.execute(statement).rowcount
    database.close()


async def test_each_owner_alone_purges_a_job_that_cannot_be_read(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    job = (await store.accept(new_job(store, "private"), b"{}")).job
    store.close()
    edit_record(tmp_path, 1, None)
    store = await opened(tmp_path)
    assert await store.claim("edge", 1) == []
    for ask in (store.get, store.purge):
        with pytest.raises(NotFound):
            await ask(job.id, "somebody else")
    with pytest.raises(RecordUnreadable):
        await store.get(job.id, "me")
    await store.purge(job.id, "me")
    with pytest.raises(NotFound):
        await store.get(job.id, "me")
    assert (store.stats.unreadable, store.stats.unfinished, store.stats.bytes, store.problems) == (0, 0, 0, ())
    store.close()


async def test_a_job_that_cannot_be_read_is_kept_as_long_as_a_dead_letter(tmp_path: Path) -> None:
    now = 0.0
    clock = Clock(lambda: now, lambda: now, "one")
    config = OutboxConfig(dead_letter_ttl_s=100.0)
    store = await opened(tmp_path, config, clock)
    await store.accept(new_job(store, "1"), b"{}")
    store.close()
    edit_record(tmp_path, 1, None)
    store = await opened(tmp_path, config, clock)
    await store.expire()
    assert await store.claim("edge", 1) == []
    now = 99.0
    await store.expire()
    assert store.stats.unreadable == 1
    now = 101.0
    await store.expire()
    assert (store.stats.unreadable, store.stats.bytes) == (0, 0)
    store.close()


@pytest.mark.parametrize("ask", ["expire", "recover", "due_replies", "due_webhooks", "list", "accept"])
async def test_every_query_passes_over_a_row_that_cannot_be_read(tmp_path: Path, ask: str) -> None:
    """Whichever query meets it first."""
    store = await opened(tmp_path, OutboxConfig(max_jobs=4, bulk_share=0.5))
    for number in range(2):
        job = msgspec.structs.replace(new_job(store, f"bulk-{number}"), webhook=WEBHOOK)
        await store.accept(job, b"{}", ReplyTo(b"address"))
    if ask in ("due_replies", "due_webhooks"):
        for claimed in await store.claim("edge", 2):
            await store.fail(claimed.job, JobEvent.FAIL, CloudFailed("no"))
    store.close()
    edit_record(tmp_path, 1, None)
    if ask == "expire":
        damage(tmp_path, "UPDATE jobs SET deadline = -1.0")
    if ask == "recover":
        damage(tmp_path, "UPDATE jobs SET state = 'running' WHERE seq = 1")
    store = await opened(tmp_path, OutboxConfig(max_jobs=4, bulk_share=0.5))
    count = await _asked(store, ask)
    assert (count, store.stats.unreadable) == ({"accept": 0}.get(ask, 1), 1)
    store.close()


async def _asked(store: JobOutbox, ask: str) -> int:
    """Return how many of two jobs were found."""
    match ask:
        case "expire":
            return await store.expire()
        case "recover":
            await store.recover()
            return len(await store.claim("edge", 2))
        case "due_replies":
            return len(await store.run(store.replies.due, 2))
        case "due_webhooks":
            return len(await store.run(store.webhooks.due, 2, (), ()))
        case "list":
            return len(await store.list_owned("me", "", 2))
        case _:  # none need give way any more
            assert not (await store.accept(new_job(store, "bulk-new"), b"{}")).known
            return store.stats.dropped


async def test_a_webhook_and_a_clock_that_cannot_be_read_stop_nothing(tmp_path: Path) -> None:
    """The webhook counts as failed; the time goes on from the newest end of a job."""
    now = 5000.0
    clock = Clock(lambda: now, lambda: now, "one")
    store = await opened(tmp_path, clock=clock)
    now = 9000.0
    for number in range(2):
        await store.accept(msgspec.structs.replace(new_job(store, str(number)), webhook=WEBHOOK), b"{}")
    for claimed in await store.claim("edge", 2):
        await store.fail(claimed.job, JobEvent.FAIL, CloudFailed("no"))
    ended_at = store.time.now()
    store.close()
    damage(tmp_path, "UPDATE webhooks SET notice = X'C1' WHERE seq = 1")
    damage(tmp_path, "UPDATE box SET mark = X'C1'")
    store = await opened(tmp_path, clock=Clock(lambda: 3.0, lambda: 3.0, "two"))
    assert store.time.now() == pytest.approx(ended_at + 3.0)  # since the boot
    (due,) = await store.run(store.webhooks.due, 2, (), ())
    assert [job.webhook_status for job in await store.list_owned("me", "", 2)] == ["pending", "failed"]
    assert await store.run(store.webhooks.finish, due.number, "delivered")
    store.close()
