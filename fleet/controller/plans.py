"""From the store's rollouts to the published plans, and from those to the boxes."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from anyio import to_thread

from router.bundle.rollout import encode_plan

from ..repository.fleet_file import FLEET_FILE, CohortDoc, FleetDoc, RolloutDoc, maintenance_windows, read_fleet
from ..rollout.rollout import RolloutState, plan_of
from ..store.database import Store
from ..store.generations import CohortPace, advance, read_generations, set_pace
from ..store.rollouts import RolloutRecord, pins_and_holds
from .publisher import Publisher

REVERTING = (RolloutState.ABORTED, RolloutState.REVERTING)


class Plans:
    """Publishes each cohort's plan and tells its boxes. Idempotent: only differences are written.

    Args:
        folder: The fleet's folder, with `fleet.yaml`.
        published: Called after a plan was published; wakes the boxes whose polls wait in this process.
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
            The reasons for which a plan was not published.

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
            return ()  # no cohort has begun a rollout
        # After a restored backup boxes have seen newer metadata: once an operator has decided, publish a newer version.
        least = int(now) if any(record.acknowledged for record in newest) else 0
        done = await to_thread.run_sync(self._publisher.publish, plans, now, least)
        await self._tell({record.rollout.cohort: record.rollout.state in REVERTING for record in newest})
        return done.problems

    async def _tell(self, reverting: Mapping[str, bool]) -> None:
        """Wake the boxes of each cohort whose published plan differs from the one of their last wake."""
        published = await to_thread.run_sync(self._publisher.published)
        async with self._store.read() as connection:
            generations = await read_generations(connection)
        is_any_new = False
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
            is_any_new = True
        if is_any_new and self._published is not None:
            await self._published()

    def rollout_doc(self, cohort: str) -> RolloutDoc:
        """Return the cohort's keys from `fleet.yaml`; while the file has errors, the last valid ones."""
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
        if record.rollout.has_begun:
            found.setdefault(record.rollout.cohort, record)
    return list(found.values())
