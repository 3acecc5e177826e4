"""The agent: updates a device from the running bundle to the one that the fleet's plan assigns (states: `journal`).

    agent = Agent(folder=…, booted=boot(…), link=…, host=…, clock=…)
    await agent.run()       # until it is cancelled; `wake` makes it check for updates now

`advance` takes one step and returns how long to wait before the next, so that tests need no time. A failed update never
leaves the device without a bundle: before ACTIVATE nothing has changed, and after it the previous bundle is restored.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import anyio
import msgspec

from causeway_server.router.bundle.manifest import Blob, BundleManifest, BundleModel, RolloutPlan
from causeway_server.router.bundle.protocol import DeviceState
from causeway_server.router.bundle.refusals import DiskFull, RequestsLeave, UpdateRefused, Withdrawn
from causeway_server.router.serving.logs import redacted

from ..clock import Clock
from .inspection import BundleReport, BundleRequest, ChildInspector, Inspector, ModelFile, UpdateCheckRequest
from .interfaces import FleetLink, Host
from .journal import TRANSITIONS, BootState, Event, JournalRow, event_of, first_whole, quarantine, rolled_back
from .source import Download, disk_refusal
from .store import Disk, InstalledBundle
from .trial import ConditionHistory, Trial, TrialProgress

log = logging.getLogger(__name__)

BUILT_AT = 1_735_689_600.0
"""Earliest plausible time, Unix seconds (2025-01-01); an earlier clock is wrong. Raise it with each release."""
_KEPT_BUNDLES = 2  # the running bundle and the previous one
_SPARE_BYTES = 64 * 1024 * 1024  # disk space that must remain free during an update
_REPLAYED_S = 86400.0


@dataclass(eq=False, repr=False)
class Agent:
    """The agent of one daemon. `inspector`: the verifier of published files; by default in a child process."""

    _: KW_ONLY
    folder: Path  # STATE_DIR/fleet
    booted: BootState  # the bundle, store and journal that the daemon started with
    link: FleetLink
    host: Host
    clock: Clock
    disk: Disk = field(default_factory=Disk)
    inspector: Inspector = field(default_factory=ChildInspector)
    rng: Callable[[], float] = random.random  # a random number from 0 to 1, which spreads retries

    def __post_init__(self) -> None:
        self._store = self.booted.store
        self._journal = self.booted.journal
        self._row = self.booted.row
        self._settings = self.link.settings
        self._woken = asyncio.Event()
        self._checked_at = -math.inf
        self.serials: dict[str, int] = {}  # serial by bundle, for bundles whose manifest this daemon has read
        self._wanted: str | None = None  # the bundle that the plan assigned at the last check
        self._manifest: BundleManifest | None = None  # the manifest of `_wanted`, if it is not the running bundle
        self._note(self.booted.bundle)
        self._report: BundleReport | None = None
        self._staged: InstalledBundle | None = None
        self._trial: Trial | None = None
        self._undone = False
        self._refusals = 0
        self._earlier = ConditionHistory()
        self._steps: dict[DeviceState, Callable[[], Awaitable[float]]] = {
            DeviceState.IDLE: self._idle,
            DeviceState.CHECK: self._check,
            DeviceState.FETCH: self._fetch,
            DeviceState.VERIFY: self._verify,
            DeviceState.DRY_RUN: self._dry_run,
            DeviceState.STAGE: self._stage,
            DeviceState.ACTIVATE: self._activate,
            DeviceState.TRIAL: self._try,
            DeviceState.COMMIT: self._commit,
            DeviceState.ROLLBACK: self._roll_back,
            DeviceState.QUARANTINE: self._leave_quarantine,
        }

    # --- state for the daemon -----------------------------------------------------------------------------------------

    @property
    def state(self) -> DeviceState:
        return self._row.state

    @property
    def row(self) -> JournalRow:
        """The newest row of the journal: code and reason of the last refusal, quarantined bundles, and so on."""
        return self._row

    @property
    def running(self) -> str | None:
        """The bundle that serves requests; None for the factory files."""
        return self._row.bundles[0] if self._row.bundles else None

    @property
    def wanted(self) -> str | None:
        """The bundle that the plan assigns; None if it is the running one."""
        return None if self._wanted == self.running else self._wanted

    @property
    def rows(self) -> tuple[JournalRow, ...]:
        """The newest rows of the journal, oldest first."""
        return self._journal.rows

    @property
    def trial(self) -> TrialProgress | None:
        """The progress of the running bundle's trial; None if there is no trial."""
        if self.state is not DeviceState.TRIAL or self._trial is None:
            return None
        return self._trial.progress(self.clock.monotonic(), self.host.condition())

    def wake(self) -> None:
        """Check for updates now."""
        self._woken.set()

    # --- one step after the other ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the plan until cancelled."""
        while True:
            wait_s = await self.advance()
            if wait_s > 0.0:
                with anyio.move_on_after(None if math.isinf(wait_s) else wait_s):
                    await self._woken.wait()
                if self._woken.is_set():
                    self._checked_at = -math.inf
                self._woken.clear()

    async def advance(self) -> float:
        """Take one step; return the seconds until the next, which `wake` shortens."""
        try:
            return await self._steps[self.state]()
        except UpdateRefused as refusal:
            return self._refused(refusal)
        except OSError as error:
            return self._refused(disk_refusal(error, str(error.filename or self.folder)))
        except Exception as error:  # an internal error must not stop the search for better bundles
            log.exception("The agent failed in the state %s.", self.state)
            return self._refused(UpdateRefused(f"{type(error).__name__}: {redacted(error)}"))

    def _refused(self, refusal: UpdateRefused) -> float:
        """Return the event for a refusal in the current state, and take its transition."""
        log.warning("%s: %s: %s", self.state, refusal.code, refusal.message)
        event = event_of(refusal, self.state, pointed=self._pointed())
        if event is None:
            return self._settings.retry_s
        code, reason = refusal.code, refusal.message[:1000]
        if event is Event.REFUSED:
            self._enter(event, bundle=None, written=self.state is not DeviceState.CHECK, code=code, reason=reason)
            return self._retry_s()
        quarantined = self._row.quarantined
        if event is Event.UNFIT:
            assert self._row.bundle is not None
            quarantined = quarantine(quarantined, self._row.bundle, f"{code}: {reason}")
        self._enter(event, code=code, reason=reason, quarantined=quarantined)
        return 0.0

    def _retry_s(self) -> float:
        wait_s = min(self._settings.check_interval_s, self._settings.retry_s * 2.0 ** min(self._refusals, 10))
        self._refusals += 1
        return wait_s * (0.5 + self.rng())

    def _pointed(self) -> bool:
        pointer = self._store.pointer() or ()
        return self.state is DeviceState.TRIAL or (bool(pointer) and pointer[0] == self._row.bundle)

    def _enter(self, event: Event, *, written: bool = True, must: bool = False, **changes: object) -> None:
        """Write the row of the next state, then enter it. If it cannot be written, as on a full disk, a device
        continues in memory; with `must` OSError is raised.
        """
        state = TRANSITIONS[self.state][event]
        row = msgspec.structs.replace(self._row, state=state, at=self.clock.unix(), **changes)
        if written:
            try:
                self._journal.append(row)
            except OSError as error:
                if must:
                    raise
                log.error("The fleet's journal cannot be written: %s", error.strerror or error)
        self._row = row
        log.info("Fleet: %s%s", state, f" {row.bundle[:12]}" if row.bundle else "")
        self.link.on_change()

    # --- before anything changes -------------------------------------------------------------------------------------

    async def _idle(self) -> float:
        self._manifest = self._report = self._staged = self._trial = None
        self._undone = False
        self._earlier.add(self.clock.monotonic(), self.host.condition())
        self._enter(Event.BEGIN, written=False)
        return 0.0

    async def _check(self) -> float:
        plan = await self._read_plan()
        wanted, manifest = self._wanted, self._manifest
        self._refusals = 0
        if plan is None or wanted is None or wanted == self.running or wanted in self._row.quarantined:
            code, _, reason = self._row.quarantined.get(wanted or "", "").partition(": ")
            self._enter(Event.NOTHING, written=False, code=code, reason=reason)
            return self._settings.check_interval_s
        assert manifest is not None
        signed_at = min(float(manifest.created), self._floor() + self._settings.signed_step_s)
        self._enter(
            Event.FOUND,
            must=True,
            bundle=wanted,
            rollout=plan.rollout,
            code="",
            reason="",
            boots=0,
            restarts=False,
            signed_at=max(self._row.signed_at, signed_at),
        )
        return 0.0

    async def _read_plan(self) -> RolloutPlan | None:
        """Read the plan, and the manifest of the wanted bundle unless it is running. Raises UpdateRefused."""
        member, running = self.link.member(), self.running
        self._checked_at = self.clock.monotonic()
        result = await self.inspector.check_updates(
            UpdateCheckRequest(
                folder=str(self.folder / "tuf"),
                root=member.root.encode(),
                device=member.device,
                cohort=member.cohort,
                running=running,
                known=(*self._row.quarantined, *([running] if running else [])),
                daemon_version=self.host.daemon_version,
                not_before=self._floor(),
            ),
            self.link.source,
        )
        self._wanted = result.wanted
        if result.manifest is not None and result.wanted is not None:
            self._manifest = result.manifest
            self.serials[result.wanted] = result.manifest.serial
        return result.plan

    def _is_due(self) -> bool:
        """Return whether a check is due: the last one was `check_interval_s` ago, or `wake` was called."""
        return self.clock.monotonic() - self._checked_at >= self._settings.check_interval_s

    def _note(self, bundle: InstalledBundle | None) -> None:
        """Remember the serial of a bundle that was loaded."""
        if bundle is not None:
            self.serials[bundle.id] = bundle.manifest.serial

    def _floor(self) -> float:
        """Return the earliest time that signed metadata proves, Unix seconds, whatever the clock says."""
        return max(BUILT_AT, self._row.signed_at)

    async def _fetch(self) -> float:
        """Delete unneeded files, and download the missing files of the wanted bundle."""
        manifest, bundle = self._update()
        await asyncio.to_thread(self._store.collect, {*self._row.bundles, bundle}, manifest.blobs)
        missing = await asyncio.to_thread(self._store.missing, manifest.blobs)
        needed = sum(blob.size_bytes for blob in missing) + _SPARE_BYTES
        if missing and self._store.free_bytes() < needed:
            raise DiskFull(
                f"The update needs {needed} bytes of free disk space, but only {self._store.free_bytes()} are free."
            )
        download = Download(self.link.source, self.disk, self._settings.download, self.clock.monotonic)
        for blob in missing:
            await download.fetch(blob, self._store.partial(blob))
        self._enter(Event.DONE, must=True)
        return 0.0

    async def _verify(self) -> float:
        for blob in self._update()[0].blobs:
            if not self._store.blob(blob).exists():
                await asyncio.to_thread(self._store.accept, blob)
        self._enter(Event.DONE, must=True)
        return 0.0

    async def _dry_run(self) -> float:
        manifest, bundle = self._update()
        report = self._report = await self.inspector.examine(
            BundleRequest(
                policy=str(self._store.blob(manifest.policy)),
                cases=tuple(str(self._store.blob(case)) for case in manifest.cases),
                models=tuple(self._model_file(model) for model in manifest.models),
                running_policy=str(self.host.policy_file),
                model_dirs=tuple(map(str, self.host.model_dirs)),
                memory_bytes=self.host.memory_bytes,
                state_dir=str(self.folder.parent),
                since=self.clock.unix() - _REPLAYED_S,
            )
        )
        log.info(
            "The fleet's new policy passes %d cases. Of the last %d decisions %d stay the same and %d are unknown; "
            "%d would leave the device.",
            *(report.cases, report.replayed, report.unchanged, report.unknown, report.leaving),
        )
        note = f"{report.leaving} of the last {report.replayed} decisions would or might leave the device"
        # Returning to the previous bundle is always allowed, even after a failed rollout.
        if report.leaving and manifest.leaving == "refuse" and bundle not in self._row.bundles:
            raise RequestsLeave(f"{note}, such as {report.example}")
        warning = (RequestsLeave.code, note) if report.leaving else ("", "")
        self._enter(Event.DONE, must=True, code=warning[0], reason=warning[1])
        return 0.0

    async def _stage(self) -> float:
        manifest, bundle = self._update()
        if self._staged is None:
            assert self._report is not None
            models = {model.name: model for model in self._report.models}
            await asyncio.to_thread(self._store.stage, bundle, manifest, models)
            self._staged = await asyncio.to_thread(self._store.load, bundle)
        elif self._is_due():
            await self._read_plan()
        self._check_plan()
        wait_s = await self.link.may_change(bundle)
        if wait_s > 0.0:
            return wait_s
        before = self._earlier.before(self.clock.monotonic(), self.host.condition())
        self._enter(Event.DONE, must=True, before=before, restarts=self.host.needs_restart(self._staged), boots=0)
        return 0.0

    def _check_plan(self) -> None:
        """Raise Withdrawn if the plan now assigns another bundle than the one being installed."""
        if self._wanted != self._row.bundle:
            raise Withdrawn(f"The plan now assigns the bundle {self._wanted}.")

    def _update(self) -> tuple[BundleManifest, str]:
        assert self._manifest is not None
        assert self._row.bundle is not None
        return self._manifest, self._row.bundle

    def _model_file(self, model: BundleModel) -> ModelFile:
        def paths(blobs: Iterable[Blob]) -> tuple[str, ...]:
            return tuple(str(self._store.blob(blob)) for blob in blobs)

        adapters = paths(adapter.blob for adapter in model.adapters)
        projector = None if model.projector is None else str(self._store.blob(model.projector.blob))
        signals = paths(signal.blob for signal in model.signals)
        return ModelFile(model, str(self._store.blob(model.blob)), adapters, projector, signals)

    # --- from the change on ------------------------------------------------------------------------------------------

    async def _activate(self) -> float:
        assert self._staged is not None
        bundles = tuple(dict.fromkeys((self._staged.id, *self._row.bundles)))
        self._store.point(bundles)
        if self._row.restarts:
            self.host.restart()
            return math.inf
        await self.host.use(self._staged)
        self._enter(Event.DONE, bundles=bundles)
        return 0.0

    async def _try(self) -> float:
        settings = self._settings.trial
        now, condition = self.clock.monotonic(), self.host.condition()
        if self._trial is None:
            self._trial = Trial(settings, self._row.before, condition.traffic, now)
            await self._ask_golden()
            condition = self.host.condition()
        if self._is_due():
            await self._recheck_plan()
        now = self.clock.monotonic()
        if self._trial.judge(now, condition):
            self._enter(Event.DONE, must=True, unproven=False)
            return 0.0
        if self._trial.is_over(now):
            self._enter(Event.DONE, must=True, unproven=True)
            return 0.0
        return settings.poll_s

    async def _recheck_plan(self) -> None:
        """Withdraw the bundle if the plan no longer assigns it. A failed check does not affect the trial."""
        try:
            await self._read_plan()
        except UpdateRefused as refusal:
            log.warning("%s: %s: %s", self.state, refusal.code, refusal.message)
            return
        self._check_plan()

    async def _ask_golden(self) -> None:
        assert self._row.bundle is not None
        bundle = await asyncio.to_thread(self._store.load, self._row.bundle)
        for model in bundle.manifest.models:
            await self.host.check_model(model)

    async def _commit(self) -> float:
        bundles = self._row.bundles[:_KEPT_BUNDLES]
        self._store.point(bundles)
        self._enter(Event.DONE, must=True, bundle=None, bundles=bundles, before=None, boots=0, code="", reason="")
        await asyncio.to_thread(self._store.collect, bundles)
        return 0.0

    async def _roll_back(self) -> float:
        back = rolled_back(self._row, self.clock.unix())
        bundle, _ = await asyncio.to_thread(first_whole, self._store, back.bundles)
        self._note(bundle)
        restarts = self.host.needs_restart(bundle)
        if not self._undone and not restarts:
            try:
                await self.host.use(bundle, must=True)
            except UpdateRefused as refusal:
                log.error("The previous bundle is damaged (%s): %s", refusal.code, refusal.message)
        if self._trial is not None:
            self._earlier.leave_out(self._trial.progress(self.clock.monotonic(), self.host.condition()).now)
            self._trial = None
        self._undone = True
        bundles = back.bundles[back.bundles.index(bundle.id) :] if bundle else ()
        self._store.point(bundles)
        event = Event.DONE if self._row.bundle in back.quarantined else Event.WITHDRAWN
        self._enter(
            event,
            must=True,
            bundle=None,
            bundles=bundles,
            quarantined=back.quarantined,
            before=None,
            boots=0,
            restarts=False,
        )
        if restarts:
            self.host.restart()
            return math.inf
        return 0.0 if event is Event.DONE else self._retry_s()

    async def _leave_quarantine(self) -> float:
        self._enter(Event.DONE, must=True, bundle=None)
        return 0.0
