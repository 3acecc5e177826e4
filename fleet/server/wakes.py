"""Parked polls, by cohort. Every process reads the generations from the database twice a second, so a
change that one process commits wakes the boxes of all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import anyio

from ..store.database import Store, StoreUnavailable
from ..store.generations import REVOCATIONS, CohortPace, Generation, read_generations

CHECK_EVERY_S = 0.5
_NOTHING = Generation()
_log = logging.getLogger("causeway.fleet.wakes")


class Wakes:
    """Each cohort's generation and the polls parked until its next. `parked` counts them; `closing`: at the end."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: Mapping[str, Generation] = {}
        self._waiting: dict[str, dict[asyncio.Future[None], float]] = {}  # by cohort: when the poll's time is over
        self._turn = anyio.Lock()
        self.closing = False
        self._away = False
        self.parked = 0

    def current(self, cohort: str) -> Generation:
        """Return the generation of a cohort as last read."""
        return self._known.get(cohort, _NOTHING)

    @property
    def revocations(self) -> Generation:
        """The generation of the revocations as last read."""
        return self.current(REVOCATIONS)

    def pace(self, cohort: str) -> CohortPace:
        return self.current(cohort).pace

    async def wait(self, cohort: str, etag: str, wait_s: float) -> Generation:
        """Return when the cohort's generation differs from `etag`, or after `wait_s`, or when the server stops.

        A parked poll is one future: `watch` ends those whose time is over, twice a second, without a timer for each.
        """
        if self.current(cohort).etag == etag and wait_s > 0 and not self.closing:
            loop = asyncio.get_running_loop()
            news: asyncio.Future[None] = loop.create_future()
            waiting = self._waiting.setdefault(cohort, {})
            waiting[news] = loop.time() + wait_s
            self.parked += 1
            try:
                await news
            finally:
                self.parked -= 1
                waiting.pop(news, None)
        return self.current(cohort)

    async def refresh(self) -> None:
        """Read the generations now and wake the polls of those that changed: call it after a commit of `advance`.

        Raises:
            StoreUnavailable: The database is away.
        """
        async with self._turn:  # an older reading must not replace a newer one
            async with self._store.read() as connection:
                known = await read_generations(connection)
            before, self._known = self._known, known
        for name, generation in known.items():
            if generation.etag != before.get(name, _NOTHING).etag:
                self._wake(name)

    async def watch(self) -> None:
        """Refresh twice a second, until cancelled. While the database is away, polls stay parked."""
        while True:
            try:
                await self.refresh()
                self._away = False
            except StoreUnavailable as error:
                if not self._away:
                    _log.warning("%s", error.message)
                self._away = True
            self._end_old()
            await anyio.sleep(CHECK_EVERY_S)

    def close(self) -> None:
        """Answer every parked poll: the server stops."""
        self.closing = True
        for name in list(self._waiting):
            self._wake(name)

    def _wake(self, name: str) -> None:
        for news in self._waiting.pop(name, {}):
            if not news.done():
                news.set_result(None)

    def _end_old(self) -> None:
        now = asyncio.get_running_loop().time()
        for waiting in self._waiting.values():
            for news in [news for news, ends in waiting.items() if ends <= now and not news.done()]:
                news.set_result(None)
