"""Reads a page of an owner's jobs or batches: two round trips, and three more where records have expired."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from router.errors import RecordUnreadable

from .redis_client import Argument, RedisClient, Reply, as_list, as_text

_log = logging.getLogger("causeway.cloud.jobs")
T = TypeVar("T")


async def list_newest(
    db: RedisClient,
    listed: str,
    start: int,
    limit: int,
    command: Callable[[str], tuple[Argument, ...]],
    parse: Callable[[str, Reply], T | None],
) -> list[T]:
    """Return at most `limit` records of the sorted set `listed`, newest first, from rank `start` on.

    Ids whose record has expired are removed from the set on the way. Unreadable records are left out.

    Args:
        command: id -> the command that reads its record
        parse: id and reply -> the record; None if it has expired; raises RecordUnreadable
    """
    records: list[T] = []
    while len(records) < limit:
        names = [as_text(name) for name in as_list(await db.command("ZREVRANGE", listed, start, start + limit - 1))]
        expired = []
        for name, row in zip(names, await db.commands([command(name) for name in names]), strict=True):
            try:
                record = parse(name, row)
            except RecordUnreadable as error:
                _log.warning("%s is not listed: %s", name, error.message)
                continue
            if record is None:
                expired.append(name)
            else:
                records.append(record)
        if expired:
            await db.command("ZREM", listed, *expired)
        start += len(names) - len(expired)
        if len(names) < limit:
            break
    return records[:limit]
