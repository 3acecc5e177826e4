"""The controller's loop: read, step, write, publish. If the process is killed at any point, its successor continues.

1. A published plan of a rollout that the store does not know, because it was restored from a backup, is adopted.
2. A revocation that the store has lost is repeated (see `keep_revocations`).
3. Each active rollout makes at most one step, in one transaction with its look and its audit row.
4. The plans of the store are published, unless devices are ahead of the store; expiring metadata is renewed.
5. Devices are woken for a plan that is new to them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec
from anyio import to_thread

from causeway_server.router.bundle.manifest import RolloutPlan
from causeway_server.router.errors import CausewayError
from causeway_server.router.serving.folders import write_atomically

from ..repository.fleet_file import maintenance_windows, rollout_settings
from ..rollout.rollout import Rollout
from ..rollout.settings import RolloutState
from ..store.audit import append_audit
from ..store.database import Still, Store, StoreUnavailable
from ..store.devices import CohortCount, cohort_devices, count_devices
from ..store.generations import KEPT_S, read_revocations, revoke_owner
from ..store.rollouts import (
    RolloutChanged,
    RolloutRecord,
    add_look,
    change_rollout,
    insert_rollout,
    known_rollouts,
    reported_plans,
    working_rollouts,
)
from ..store.telemetry import forget_mark, mark, since_mark
from ..trust.published import PUBLISHED
from .checks import Check, lint_bundle, prove_bundle, replay_bundle
from .forecast import read_evidence
from .publisher import Plans, Publisher, newest_begun
from .step import CHECKED, RolloutObservations, Step, adopted, ahead_count, checked, needs_devices, paused_behind, step

S = RolloutState
ACTOR = "controller"
REVOCATIONS_FILE = "revocations.json"
_RECENT_S = 3600.0  # devices report at least every few minutes
_RETRY_S = 5.0
SURVEY_S = 10.0
log = logging.getLogger(__name__)


async def keep_revocations(store: Store, folder: Path, now: float) -> None:
    """Restore revocations that a restored backup lacks, from a copy beside the published files.

    `published/revocations.json` maps tenant/device to the Unix time of the revocation. The store's revocations are
    added to it, and those only in it are repeated in the store, even for unknown devices: from `now` (Unix, s) on, so
    that tokens issued after the loss are refused too. Raises StoreUnavailable, or OSError for the copy.
    """
    path = folder / PUBLISHED / REVOCATIONS_FILE
    kept = await to_thread.run_sync(_read_revocations, path)
    async with store.read() as connection:
        found = (await read_revocations(connection)).devices
    lost = sorted(owner for owner, at in (kept or {}).items() if owner not in found and at >= now - KEPT_S)
    if lost:
        async with store.write() as connection:
            for owner in lost:
                await revoke_owner(connection, owner, now)
                what = {"device": owner.partition("/")[2], "reason": "the restored database did not know it"}
                await append_audit(connection, now, ACTOR, "device.revoked_again", what)
            found = (await read_revocations(connection)).devices
        log.error(
            "The store had lost %d revocations, probably because it was restored from a backup. "
            "They are in force again.",
            len(lost),
        )
    if found != kept:
        await to_thread.run_sync(write_atomically, path, msgspec.json.encode(found, order="sorted"))


def _read_revocations(path: Path) -> dict[str, float] | None:
    """Return the copy; None if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.error("%s is damaged and is written again from the database: %s.", path, error)
        return None


class Controller:
    """The driver of a fleet's rollouts. Call `run` in every process: one drives them, the others wait for its lock.

    Args:
        published: Wakes devices whose polls wait in this process, after a publication.
        clock: Unix time, in seconds.
        interval_s: Time between ticks; `notify` starts one at once.
        survey_s: Time between surveys of the plans that devices follow, of reverts, pins and holds.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        publisher: Publisher,
        clock: Callable[[], float],
        *,
        published: Callable[[], Awaitable[None]] | None = None,
        interval_s: float = 1.0,
        survey_s: float = SURVEY_S,
    ) -> None:
        self._store = store
        self._folder = folder
        self._publisher = publisher
        self._plans = Plans(store, folder, publisher, published)
        self._clock = clock
        self._interval_s = interval_s
        self._survey_s = survey_s
        self._news = anyio.Event()
        self._surveyed_at = float("-inf")
        self._settled: object = None
        self._unreadable: tuple[str, ...] = ()  # why some rollouts are left out
        self.leads = False  # whether this process holds the lock and drives the rollouts
        self.problems: tuple[str, ...] = ()  # why plans are not published, for operators
        self.counts: Sequence[CohortCount] = ()  # devices by running bundle, at the last survey
        self.rollouts: Sequence[Rollout] = ()  # each cohort's active or newest one, at the last survey
        self.ahead: Mapping[str, int] = {}  # devices ahead of the store: nothing is published until an operator decides

    def notify(self) -> None:
        """Begin a tick at once, after a decision of an operator."""
        self._surveyed_at = float("-inf")
        self._news.set()

    async def run(self) -> None:
        """Drive the rollouts, or wait for the lock, until cancelled. A lost database pauses it."""
        while True:
            try:
                async with self._store.leadership() as still:
                    if still is None:  # another process leads, so earlier problems of this one are over
                        self._report(())
                    else:
                        await self._work(still)
            except StoreUnavailable as error:
                self._report((f"the controller pauses: {error.message}",))
            finally:
                self.leads = False
            await anyio.sleep(min(_RETRY_S, 5 * self._interval_s))

    async def _work(self, still: Still) -> None:
        self.leads = True
        self._settled = None
        self._surveyed_at = float("-inf")
        while True:
            await still()
            news, self._news = self._news, anyio.Event()
            del news
            if await self.tick():
                continue
            with anyio.move_on_after(self._interval_s):
                await self._news.wait()

    async def tick(self) -> bool:
        """Make every due step; return whether anything changed, so that another may be due. Raises StoreUnavailable."""
        now = self._clock()
        surveys = now >= self._surveyed_at + self._survey_s or now < self._surveyed_at
        try:
            published = await to_thread.run_sync(self._publisher.published)
            async with self._store.read() as connection:
                records, self._unreadable = await working_rollouts(connection)
            if await self._take_over(records, published, now):
                return True
            if surveys:
                await keep_revocations(self._store, self._folder, now)
                await self._survey(records, now)
                self._surveyed_at = now
            changed = False
            for record in records:
                changed |= await self._advance(record, published.get(record.rollout.cohort), now, surveys)
            if changed:
                return True
            await self._publish(records, now, surveys)
        except StoreUnavailable:
            raise
        except (CausewayError, OSError) as error:
            self._report((getattr(error, "message", str(error)),))
        except Exception as error:  # a fault of ours must not stop the service for devices
            log.exception("A round of the controller failed. The next round tries again.")
            self._report((f"the controller failed and tries again: {type(error).__name__}",))
        return False

    # --- (1) ---------------------------------------------------------------------------------------------------------

    async def _take_over(
        self, records: Sequence[RolloutRecord], published: Mapping[str, RolloutPlan], now: float
    ) -> bool:
        have = {record.rollout.id for record in records}
        lost = {plan.rollout: plan for plan in published.values() if plan.rollout not in have}
        if lost:
            async with self._store.read() as connection:
                known = await known_rollouts(connection, lost)
            lost = {rollout: plan for rollout, plan in lost.items() if rollout not in known}
        if not lost:
            return False
        async with self._store.write() as connection:
            for plan in lost.values():
                rollout = adopted(plan, rollout_settings(self._plans.cohort_doc(plan.cohort).rollout), now)
                await insert_rollout(connection, RolloutRecord(rollout, 1, ACTOR, now, now))
                await append_audit(connection, now, ACTOR, "rollout.recovered", _summary(rollout))
                log.error(
                    "%s: the store had lost the published rollout %s, probably because it was restored from a backup.",
                    plan.cohort,
                    rollout.id,
                )
        return True

    async def _survey(self, records: Sequence[RolloutRecord], now: float) -> None:
        """Count the devices, find those that are ahead of the store, and pause their rollout."""
        self.rollouts = list({record.rollout.cohort: record.rollout for record in reversed(records)}.values())
        async with self._store.read() as connection:
            self.counts = await count_devices(connection, now - _RECENT_S)
            reports = await reported_plans(connection, now - _RECENT_S)
            known = await known_rollouts(connection, {report.rollout for report in reports})
        ahead = {}
        for record in newest_begun(records):
            cohort = record.rollout.cohort
            count = ahead_count((one for one in reports if one.cohort == cohort), known | record.acknowledged)
            if not count:
                continue
            ahead[cohort] = count
            following = paused_behind(record.rollout, count, now)
            if following is not record.rollout:
                await self._write(record, Step(following), now)
        self.ahead = ahead

    # --- (3) ---------------------------------------------------------------------------------------------------------

    async def _advance(self, record: RolloutRecord, published: RolloutPlan | None, now: float, surveys: bool) -> bool:
        """Make one step of a rollout. Returns whether one was due."""
        rollout = record.rollout
        if rollout.state in CHECKED:
            check = await self._check(record)
            done = Step(checked(rollout, check, await self._situation(rollout), now))
        elif rollout.state is S.REVERTING and rollout.has_begun and not surveys:
            return False
        else:
            situation = await self._situation(rollout) if needs_devices(rollout, now) else RolloutObservations()
            done = await to_thread.run_sync(step, rollout, situation, published, now)
        if done.rollout == rollout:
            return False
        await self._write(record, done, now)
        return True

    async def _check(self, record: RolloutRecord) -> Check:
        rollout = record.rollout
        if rollout.state is S.LINT:
            found = await to_thread.run_sync(lint_bundle, self._publisher, rollout.cohort, rollout.to_bundle)
            return Check(tuple(found))
        proof = await to_thread.run_sync(
            partial(prove_bundle, self._publisher, rollout, may_leave=record.allow_leaving)
        )
        if proof.problems:
            return proof
        async with self._store.read() as connection:
            evidence = await read_evidence(connection, rollout.cohort)
        least = self._plans.cohort_doc(rollout.cohort).replay.records
        check = await to_thread.run_sync(replay_bundle, self._publisher, self._folder, rollout, evidence, least)
        problems = () if record.allow_leaving else check.problems
        unreplayed = "" if record.without_replay or record.allow_leaving else check.unproven
        unproven = "; ".join(filter(None, (proof.unproven, unreplayed)))
        return Check(problems, unproven, (*proof.notes, *check.notes), check.predictions)

    async def _situation(self, rollout: Rollout) -> RolloutObservations:
        async with self._store.read() as connection:
            devices = await cohort_devices(connection, rollout.cohort)
            counts = await since_mark(connection, rollout.id, rollout.cohort)
        return RolloutObservations(
            tuple(devices), counts, maintenance_windows(self._plans.cohort_doc(rollout.cohort).rollout)
        )

    async def _write(self, record: RolloutRecord, done: Step, now: float) -> None:
        before, after = record.rollout, done.rollout
        try:
            async with self._store.write() as connection:
                await change_rollout(connection, msgspec.structs.replace(record, rollout=after, updated=now))
                if done.verdict is not None:
                    await add_look(connection, after.id, now, before.stage, done.verdict)
                if after.looked != before.looked:
                    await mark(connection, after.id, after.cohort)
                if after.state in (S.DONE, S.REVERTED):
                    await forget_mark(connection, after.id)
                if (before.state, before.stage, before.share) != (after.state, after.stage, after.share):
                    await append_audit(connection, now, ACTOR, f"rollout.{after.state.value}", _summary(after))
                    why = f": {after.reason}" if after.reason else ""
                    log.info("Cohort %s: rollout %s is in state %s%s.", after.cohort, after.id, after.state.value, why)
        except RolloutChanged:  # an operator changed it meanwhile: the next tick starts from that decision
            log.info("Rollout %s was changed by an operator in the meantime.", after.id)

    # --- (4) and (5) -------------------------------------------------------------------------------------------------

    async def _publish(self, records: Sequence[RolloutRecord], now: float, surveys: bool) -> None:
        settled = (*((record.rollout.id, record.version) for record in records), self._unreadable)
        if settled == self._settled and not surveys:
            return
        if self.ahead:
            devices = ", ".join(f"{count} of {cohort}" for cohort, count in sorted(self.ahead.items()))
            advice = "nothing is published until an operator resumes, accepts, aborts or applies a rollout"
            self._report((f"devices are ahead of the control plane ({devices}), as after a restored backup: {advice}",))
            return
        sizes: Counter[str] = Counter()
        for count in self.counts:
            sizes[count.cohort] += count.devices
        self._report(await self._plans.publish(newest_begun(records), now, sizes))
        self._settled = settled

    def _report(self, problems: tuple[str, ...]) -> None:
        problems = (*problems, *self._unreadable)
        if problems != self.problems:
            for problem in problems:
                log.error("%s", problem)
        self.problems = problems


def _summary(rollout: Rollout) -> dict[str, object]:
    return {
        "rollout": rollout.id,
        "cohort": rollout.cohort,
        "stage": rollout.stage,
        "share": rollout.share,
        "reason": rollout.reason,
    }
