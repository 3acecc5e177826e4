"""The outbox is shared: no client takes all of it, and bulk jobs give way as before."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from causeway_server.edge_node.config.schema import OutboxConfig
from causeway_server.edge_node.jobs.record import EdgeJob, JobAnswer, OutboxFull
from causeway_server.edge_node.jobs.store import JobOutbox

from .killed_outbox import new_job
from .support import opened

ME, OTHER, THIRD = "me", "other", "third"


def of(store: JobOutbox, owner: str, text: str) -> EdgeJob:
    return msgspec.structs.replace(new_job(store, text), owner=owner)


async def fill(store: JobOutbox, owner: str, kind: str = "job") -> int:
    """Submit jobs of one client until one is refused; return how many were accepted."""
    for number in range(1000):
        try:
            await store.accept(of(store, owner, f"{kind} {number}"), b"{}")
        except OutboxFull:
            return number
    raise AssertionError("the outbox has no bound")


async def unfinished(store: JobOutbox, owner: str) -> int:
    return sum(not job.has_ended for job in await store.list_owned(owner, "", 1000))


async def test_one_client_leaves_room_for_others(tmp_path: Path) -> None:
    """Alone it has seven eighths; what it holds counts until it ends, also after a restart."""
    config = OutboxConfig(max_jobs=64)
    store = await opened(tmp_path, config)
    assert await fill(store, ME) == 56
    assert await fill(store, OTHER) == 8
    store.close()
    store = await opened(tmp_path, config)
    with pytest.raises(OutboxFull, match="56 jobs and 112 bytes of this client"):
        await store.accept(of(store, ME, "more"), b"{}")
    for job in await store.list_owned(ME, "", 40):
        await store.cancel(job.id, ME)
    assert await fill(store, OTHER, "later") == 32 - 8
    assert await unfinished(store, ME) == 16
    store.close()


async def test_bytes_of_one_client_leave_room_for_others(tmp_path: Path) -> None:
    """Results count as requests do, until they are purged."""
    store = await opened(tmp_path, OutboxConfig(max_bytes=8000))
    await store.accept(of(store, OTHER, "small"), bytes(10))
    accepted = await store.accept(of(store, ME, "large"), bytes(4000))
    with pytest.raises(OutboxFull):
        await store.accept(of(store, ME, "one byte more"), bytes(1))
    for claimed in await store.claim("edge", 2):
        if claimed.job.owner == ME:
            await store.succeed(claimed.job, JobAnswer(bytes(3000), "miss", "edge", "d"))
    with pytest.raises(OutboxFull):
        await store.accept(of(store, ME, "beside a result"), bytes(1001))
    await store.purge(accepted.job.id, ME)
    await store.accept(of(store, ME, "without it"), bytes(4000))
    store.close()


async def test_a_flood_of_bulk_jobs_drops_its_own(tmp_path: Path) -> None:
    """Neither the bulk jobs of others nor jobs of another class are touched."""
    store = await opened(tmp_path, OutboxConfig(max_jobs=64, bulk_share=0.5))
    for number in range(4):
        await store.accept(of(store, OTHER, f"bulk {number}"), b"{}")
    await store.accept(of(store, THIRD, "standard"), b"{}")
    for number in range(100):
        await store.accept(of(store, ME, f"bulk {number}"), b"{}")
    assert [await unfinished(store, one) for one in (ME, OTHER, THIRD)] == [16, 4, 1]
    assert store.stats.dropped == 84
    store.close()


async def test_a_client_that_comes_new_takes_the_place_of_a_floods_bulk_jobs(tmp_path: Path) -> None:
    """A bulk flood that is alone has all that bulk jobs may have, and gives way to each other client, bulk or not."""
    store = await opened(tmp_path, OutboxConfig(max_jobs=16, bulk_share=0.5))
    for number in range(20):
        await store.accept(of(store, ME, f"bulk {number}"), b"{}")
    assert await unfinished(store, ME) == 8
    await store.accept(of(store, OTHER, "bulk"), b"{}")
    assert [await unfinished(store, one) for one in (ME, OTHER)] == [7, 1]
    assert await fill(store, OTHER) == 8  # the last one in the place of its own bulk job
    assert [await unfinished(store, one) for one in (ME, OTHER)] == [7, 8]
    assert await fill(store, THIRD) == 8
    assert [await unfinished(store, one) for one in (ME, OTHER, THIRD)] == [0, 8, 8]
    store.close()


async def test_a_client_beyond_its_share_drops_its_own_bulk_jobs_alone(tmp_path: Path) -> None:
    store = await opened(tmp_path, OutboxConfig(max_jobs=16, bulk_share=1.0))
    await store.accept(of(store, OTHER, "bulk"), b"{}")
    await store.accept(of(store, ME, "bulk"), b"{}")
    assert await fill(store, ME) == 8
    assert [await unfinished(store, one) for one in (ME, OTHER)] == [8, 1]
    store.close()
