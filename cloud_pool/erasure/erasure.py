"""Erase all of a subject's data, kind by kind, until nothing is found any more.

What was erased is counted in Redis, beside the jobs. So a run that was killed is continued by the next one, whose
receipt has the counts of both. A kill may leave a few uncounted (32 at most), and counts none that is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from router.errors import CausewayError

from ..storage.errors import JobStoreRefused
from ..storage.redis_client import RedisClient, as_fields, as_int, redis_time
from .kinds import ErasedKind
from .receipt import Receipt, Remainder
from .subject import ErasureSubject

_PASSES: Final = 3
_AT_ONCE: Final = 32
_PROGRESS_TTL_MS: Final = 30 * 86_400_000
_STARTED = "started"


class StillAtWork(CausewayError):
    """New data of the subject comes in while it is erased."""

    code = "erasure_incomplete"


class Erasure:
    """Erases. `kinds` are erased in this order; `database` keeps the progress."""

    def __init__(self, database: RedisClient, kinds: Sequence[ErasedKind]) -> None:
        self._db = database
        self._kinds = kinds

    async def count(self, subject: ErasureSubject) -> dict[str, int]:
        """Return how many of each kind there are, and change nothing."""
        return {kind.name: len({name async for name in kind.find(subject)}) for kind in self._kinds}

    async def erase(self, subject: ErasureSubject, left: Sequence[Remainder]) -> Receipt:
        """Erase everything and return the receipt, whose counts are kept until `forget`.

        Args:
            left: what is not erased here

        Raises:
            StillAtWork: it still gets new data; what was there is erased
            JobStoreUnavailable: a store does not answer; a later call continues
        """
        progress = self._db.key("erasure", subject.digest)
        is_new = as_int(await self._db.command("HSETNX", progress, _STARTED, await self._now_ms()))
        await self._db.command("PEXPIRE", progress, _PROGRESS_TTL_MS)
        for _ in range(_PASSES):
            if not await self._pass(subject, progress):
                break
        else:
            raise StillAtWork(f"{subject.name} still gets new data: revoke its tokens, then erase again")
        await self._db.replicate()
        counts = {name: int(value) for name, value in as_fields(await self._db.command("HGETALL", progress)).items()}
        return Receipt(
            subject=subject,
            started=_time(counts.pop(_STARTED)),
            finished=_time(await self._now_ms()),
            resumed=not is_new,
            erased=counts,
            left=[*left, await self._rewrite()],
        )

    async def forget(self, subject: ErasureSubject) -> None:
        """Forget the progress of an erasure whose receipt is kept."""
        await self._db.command("UNLINK", self._db.key("erasure", subject.digest))

    async def _pass(self, subject: ErasureSubject, progress: str) -> int:
        """Erase what is found, and return how much it was."""
        total = 0
        for kind in self._kinds:
            names, erased = [], 0
            async for name in kind.find(subject):
                names.append(name)
                if len(names) == _AT_ONCE:
                    erased += await self._erase(kind, names, progress)
                    names.clear()
            erased += await self._erase(kind, names, progress)
            total += erased
        return total

    async def _erase(self, kind: ErasedKind, names: Sequence[str], progress: str) -> int:
        """Erase these at once, so that Redis flushes them together."""

        async def erase_one(name: str) -> bool:
            erased = await kind.erase(name)
            if erased:
                await self._db.command("HINCRBY", progress, kind.name, 1)
            return erased

        results = await asyncio.gather(*map(erase_one, names), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results.count(True)

    async def _rewrite(self) -> Remainder:
        """Have Redis write its files anew, without what was erased."""
        what = "append-only files and snapshots of Redis"
        try:
            await self._db.command("BGREWRITEAOF")
        except JobStoreRefused:
            return Remainder(what, "until Redis rewrites them: run BGREWRITEAOF, which this user may not")
        return Remainder(what, "until the rewrite that has begun is over; copies of them are yours to delete")

    async def _now_ms(self) -> int:
        return await self._db.now_ms(redis_time)


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000.0, UTC).isoformat(timespec="milliseconds")
