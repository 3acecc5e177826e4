"""From the store's rollouts to the published plans, and from those to the boxes."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from anyio import to_thread

from router.bundle.rollout import encode_plan

from ..repository.fleet_file import FLEET_FILE, CohortDoc, FleetDoc, read_fleet
from ..repository.rollout_keys import RolloutDoc, maintenance_windows
from ..rollout.life import RolloutState
from ..rollout.membership import plan_of
from ..store.database import Store
from ..store.generations import CohortPace, advance, read_generations, set_pace
from ..store.rollouts import RolloutRecord, pins_and_holds
from .publisher import Publisher
from .step import has_begun

REVERTING = (RolloutState.ABORTED, RolloutState.REVERTING)


class Plans:
    """Publishes each cohort's plan and tells its boxes. Everything is compared first: calling it again does nothing.

    Args:
        folder: The fleet's, with `fleet.yaml`.
        published: Called after boxes were told of something new; wakes those that wait in this process.
    """

    def __init__(
        self, store: Store, folder: Path, publisher: Publisher, published: Callable[[], Awaitable[None]] | None
    ) -> None:
        self._store = store
        self._folder = folder
        self._publisher = publisher
        self._published = published
        self._fleet: FleetDoc | None = None

    async def publish(self, newest: Sequence[RolloutRecord], now: float) -> tuple[str, ...]:
        """Publish the plans of these rollouts, renew what expires, and tell the boxes.

        Args:
            newest: The newest rollout of each cohort that has begun one.
            now: Unix seconds.

        Returns:
            What could not be published.

        Raises:
            StoreUnavailable: The database is away.
            CausewayError: Keys or signatures are missing.
            OSError: A file cannot be read or written.
        """
        async with self._store.read() as connection:
            decided = await pins_and_holds(connection)
        plans = {}
        for record in newest:
            pins, holds = decided.get(record.rollout.cohort, ({}, frozenset()))
            plans[record.rollout.cohort] = plan_of(record.rollout, pins, holds)
        if not plans and not await to_thread.run_sync(self._publisher.published):
            return ()  # nothing was ever rolled out
        # Boxes have seen newer metadata than a restored folder has: after an operator's decision, be newer than that.
        least = int(now) if any(record.acknowledged for record in newest) else 0
        done = await to_thread.run_sync(self._publisher.publish, plans, now, least)
        await self._tell({record.rollout.cohort: record.rollout.state in REVERTING for record in newest})
        return done.problems

    async def _tell(self, reverting: Mapping[str, bool]) -> None:
        """Wake the boxes of cohorts whose published plan is another one than they were told of."""
        published = await to_thread.run_sync(self._publisher.published)
        async with self._store.read() as connection:
            generations = await read_generations(connection)
        told_any = False
        for cohort, plan in published.items():
            doc = self.rollout_doc(cohort)
            digest = hashlib.sha256(encode_plan(plan)).hexdigest()
            pace = CohortPace(maintenance_windows(doc), doc.per_site, reverting.get(cohort, False), digest)
            before = generations[cohort].pace if cohort in generations else None
            if before == pace:
                continue
            async with self._store.write() as connection:
                if before is not None and before.plan == digest:
                    await set_pace(connection, cohort, pace)
                else:
                    await advance(connection, cohort, pace)
            told_any = True
        if told_any and self._published is not None:
            await self._published()

    def rollout_doc(self, cohort: str) -> RolloutDoc:
        """Return the cohort's keys as `fleet.yaml` has them now; while it has errors, as it had them before."""
        try:
            text = (self._folder / FLEET_FILE).read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        self._fleet = read_fleet(text, FLEET_FILE)[0] or self._fleet
        cohorts: Mapping[str, CohortDoc] = {} if self._fleet is None else self._fleet.cohorts
        return cohorts[cohort].rollout if cohort in cohorts else RolloutDoc()


def newest_begun(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """Return the newest of each cohort that has begun: its plan is the cohort's. `records` are newest first."""
    found: dict[str, RolloutRecord] = {}
    for record in records:
        if has_begun(record.rollout):
            found.setdefault(record.rollout.cohort, record)
    return list(found.values())
