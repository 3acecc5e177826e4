"""Wakes parked polls.

Every process reads the generations from the database twice a second, so a change that one process commits wakes the
boxes of all of them, and a revocation ends the polls of its box.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import anyio
from sqlalchemy.ext.asyncio import AsyncConnection

from ..store.database import Store, StoreUnavailable
from ..store.generations import REVOCATIONS, CohortPace, Generation, read_generations, revoked_devices
from .boxes.refusals import DeviceRevoked
from .connections import Connections
from .polls import Polls

CHECK_EVERY_S = 0.5
_NOTHING = Generation()
_log = logging.getLogger("causeway.fleet.wakes")


class Wakes:
    """Each cohort's generation and the polls parked until its next.

    Attributes:
        polls: The parked polls.
        closing: The server stops.

    Args:
        store: The database.
        clock: Unix time, s.
        connections: Those of this process.
    """

    def __init__(self, store: Store, clock: Callable[[], float], connections: Connections) -> None:
        self._store = store
        self._clock = clock
        self._known: Mapping[str, Generation] = {}
        self._turn = anyio.Lock()
        self._away = False
        self.polls = Polls(connections)
        self.closing = False

    def current(self, cohort: str) -> Generation:
        """Return the generation of a cohort as last read."""
        return self._known.get(cohort, _NOTHING)

    @property
    def revocations(self) -> Generation:
        """The generation of the revocations as last read."""
        return self.current(REVOCATIONS)

    def pace(self, cohort: str) -> CohortPace:
        return self.current(cohort).pace

    async def refresh(self) -> None:
        """Read the generations now and wake the polls of those that changed: call it after a commit of `advance`.

        Raises:
            StoreUnavailable: The database is away.
        """
        async with self._turn:  # an older reading must not replace a newer one
            async with self._store.read() as connection:
                known = await read_generations(connection)
                revoked = await self._newly_revoked(connection, known)
            before, self._known = self._known, known
        for name, generation in known.items():
            if generation.etag != before.get(name, _NOTHING).etag:
                self.polls.wake(name, generation, self._clock())
        if revoked:
            self.polls.refuse(revoked, DeviceRevoked("this device was revoked: enrol anew, with a new join token"))

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
            self.polls.end_old(self._known, asyncio.get_running_loop().time())
            await anyio.sleep(CHECK_EVERY_S)

    def close(self) -> None:
        """Answer every parked poll: the server stops."""
        self.closing = True
        self.polls.close(self._known)

    async def _newly_revoked(self, connection: AsyncConnection, known: Mapping[str, Generation]) -> frozenset[str]:
        """Return every revoked device if the list has changed, else none."""
        if known.get(REVOCATIONS, _NOTHING).etag == self.revocations.etag:
            return frozenset()
        return await revoked_devices(connection)
