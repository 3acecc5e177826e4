"""The device's connection to its control plane, in the daemon: token, wakes, status and telemetry.

    tokens      renewed automatically, see `tokens.py`
    wakes       a long poll of uniform(150, 300) s; after a lost connection the next one begins uniform(0, 60) s later
    status      after each change of the agent's state, and with each wake
    telemetry   each minute
    erasures    when a status reply has an order

This module does not choose the bundle. Without its control plane the device continues with its present bundle.
`link.json` records the state of the connection for `causeway-edge fleet status`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import anyio
import msgspec
from anyio import to_thread

from causeway_server.router.bundle.protocol import DeviceState, SignedOrder, StatusReply, StatusReport
from causeway_server.router.errors import CausewayError
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.serving.logs import redacted

from ... import daemon_version
from ...clock import Clock
from ...observability.logs import Fault
from ...observability.metrics import Traffic
from ..source import SourceWithImport
from .certificate import CERTIFICATE, DeviceCertificate
from .control_plane import ControlPlane, FleetError, FleetRefused, FleetUnreachable
from .identity import DeviceKey, Identity, write_identity, write_synced
from .orders import Erase, OrderRefused, carry_out
from .records import RecordSample
from .telemetry import TelemetryLog
from .tokens import RETRY_S, Sleep, TokenKeeper, Uniform

log = logging.getLogger(__name__)

LINK_FILE = "link.json"
POLL_S = (150.0, 300.0)
TELEMETRY_S = 60.0
_MIN_POLL_S = 1.0  # minimum time between two polls, whatever the control plane answers
_ANSWERED_EARLY_S = 30.0  # minimum duration of a poll that ran to its end
_FLUSH_S = 5.0
_SURELY_AWAY = 2  # consecutive failures before a report: a single lost poll is normal
_REVOKED = ("device_revoked", "device_unknown")


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's part of a `StatusReport`, which documents the attributes."""

    state: DeviceState = DeviceState.IDLE
    running: str | None = None
    wanted: str | None = None
    rollout: str = ""
    code: str = ""
    reason: str = ""
    quarantined: tuple[str, ...] = ()
    unproven: bool = False
    since: float = 0.0


class LinkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `link.json`, for `causeway-edge fleet status`. Times are Unix seconds; 0 means never."""

    boot: str
    last_seen: float = 0.0
    problems: tuple[str, ...] = ()
    cloned: bool = False
    report: AgentReport = AgentReport()


def read_record(folder: Path) -> LinkRecord | None:
    """Return the record that the daemon wrote last; None if it is missing or unreadable."""
    try:
        return msgspec.json.decode((folder / LINK_FILE).read_bytes(), type=LinkRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


@dataclass(eq=False, repr=False)
class FleetConnection:
    """The connection of one device. `follow` an agent before `run`, and call `changed` after each change of its state.
    Raises ConfigError if the control plane's URL or CA file cannot be used.
    """

    folder: Path  # STATE_DIR/fleet
    identity: Identity
    key: DeviceKey
    _: KW_ONLY
    clock: Clock
    read_traffic: Callable[[], Traffic]
    uniform: Uniform = field(default_factory=lambda: random.Random().uniform)
    sleep: Sleep = anyio.sleep
    telemetry_interval_s: float = TELEMETRY_S  # mean time between two telemetry messages
    records_per_hour: float = 0.0  # the owner's limit of decision records, see `RecordSample`
    keys: StateKeys | None = None  # the keys of the state folder

    def __post_init__(self) -> None:
        self.boot = secrets.token_hex(8)
        self.plane = ControlPlane(self.identity.url, self.identity.ca_file, self.key.sign)
        self.tokens = TokenKeeper(
            self.identity,
            self.plane,
            boot=self.boot,
            clock=self.clock,
            uniform=self.uniform,
            sleep=self.sleep,
            changed=self._keep_record,
            certificate=DeviceCertificate(self.folder / CERTIFICATE, self.clock.unix),
        )
        self.source = SourceWithImport(self.plane, self.folder, self.clock.monotonic)
        self._seen_import = self.source.stamp
        self._seq = 0
        self.records = RecordSample(self.records_per_hour, self.clock.monotonic)
        device, kept = (self.identity.device, self.boot), (self.records, self.keys)
        self.telemetry = TelemetryLog(*device, self.read_traffic, self.clock, self.folder, *kept)
        self._dirty = asyncio.Event()
        self._reporting = asyncio.Lock()
        self._failures = 0
        # time of the control plane's last response, Unix seconds; 0.0: none since the daemon started
        self.last_seen = 0.0
        self._written: LinkRecord | None = None
        self._away = Fault(log, logging.WARNING, self.clock.monotonic)
        self._clone = Fault(log, logging.ERROR, self.clock.monotonic)
        self._agent_report: Callable[[], AgentReport] = AgentReport  # a device without an agent runs the factory files
        self._wake_agent: Callable[[], None] = lambda: None
        self.erase: Erase | None = None  # None: this process erases nothing
        self.read_condition: Callable[[], tuple[float | None, float | None]] = lambda: (None, None)
        self._order: SignedOrder | None = None
        self._ordered = asyncio.Event()

    def follow(self, report: Callable[[], AgentReport], wake: Callable[[], None]) -> None:
        """Report this agent's state, and wake it when an update may be available."""
        self._agent_report, self._wake_agent = report, wake

    @property
    def reachable(self) -> bool:
        """Whether the last request to the control plane succeeded."""
        return self._failures == 0 and self.last_seen > 0.0

    @property
    def problems(self) -> tuple[str, ...]:
        lasting = tuple(fault.problem for fault in (self._away, self._clone) if fault.problem)
        return (*self.tokens.problems, *lasting)

    def changed(self) -> None:
        """Report the changed state of the agent."""
        running = self._agent_report().running
        self.telemetry.cut(running)
        self._dirty.set()

    async def may_change(self, wanted: str) -> float:
        """Return 0.0 if the device may change to `wanted` now, else the seconds until the next request. An imported
        bundle needs no permission of the control plane: the operator chose the time of the import.
        """
        try:
            reply = await self._report(msgspec.structs.replace(self._agent_report(), wanted=wanted))
        except FleetError:
            return 0.0 if wanted == self.source.wanted else max(1.0, self.uniform(*RETRY_S))
        return 0.0 if reply.may_change else max(1.0, reply.retry_after_s)

    async def run(self) -> None:
        """Communicate with the control plane until cancelled."""
        self.telemetry.cut(self._agent_report().running)
        async with anyio.create_task_group() as tasks:
            for work in (self.tokens.run, self._wakes, self._statuses, self._telemetries, self._erasures):
                tasks.start_soon(self._repeated, work)

    async def close(self) -> None:
        """Send the waiting telemetry for at most five seconds, store the rest, and close the connections."""
        self.telemetry.cut(self._agent_report().running)
        if self.tokens.token:
            with anyio.move_on_after(_FLUSH_S):
                await self.telemetry.send(self.plane.telemetry, self._note_revoked)
        self.telemetry.keep()
        await self.plane.close()

    # --- loops -------------------------------------------------------------------------------------------------------

    async def _repeated(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:
                log.error("The connection to the fleet failed unexpectedly: %s", redacted(error))
            await self.sleep(self.uniform(*RETRY_S))

    async def _wakes(self) -> None:
        """Poll until the connection is lost."""
        etag, polled = "", False
        while True:
            token = await self.tokens.wait()
            began = self.clock.monotonic()
            try:
                woken = await self.plane.wake(etag, self.uniform(*POLL_S) if polled else 0.0, token)
            except FleetRefused as error:
                if self._note_revoked(error) or await self.tokens.renew(token):
                    continue
                self._lost(error)
                return
            except FleetUnreachable as error:
                self._lost(error)
                return
            self._found()
            if woken.changed or not polled:
                self._wake_agent()
            etag, early = woken.etag, self.clock.monotonic() - began < _ANSWERED_EARLY_S
            self._dirty.set()
            if polled and early and not woken.changed:
                await self.sleep(self.uniform(*RETRY_S))
            elif early:
                await self.sleep(_MIN_POLL_S)
            polled = True

    async def _statuses(self) -> None:
        """Send reports until the connection is lost; changes during a report are reported afterwards."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._report(self._agent_report())
            except FleetUnreachable:
                self._dirty.set()
                return
            except FleetRefused:
                continue

    async def _telemetries(self) -> None:
        while True:
            await self.sleep(self.uniform(self.telemetry_interval_s * 5 / 6, self.telemetry_interval_s * 7 / 6))
            self.telemetry.cut(self._agent_report().running)
            await self.telemetry.send(self.plane.telemetry, self._note_revoked)
            await self.check_import()
            self._keep_record()

    async def _erasures(self) -> None:
        """Carry out orders of the fleet; the next status report brings one again that failed."""
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            if self._order is None or self.erase is None:
                continue
            try:
                done = await carry_out(self.folder, self._order, self.identity.device, self.erase)
                if done is not None:
                    await self.plane.erased(done)
            except (OrderRefused, FleetError, OSError, CausewayError) as error:
                log.error("An erasure order of the fleet was not carried out: %s", error)

    async def check_import(self) -> None:
        """Wake the agent for a new import, and delete one that is already installed."""
        if (stamp := self.source.stamp) != self._seen_import:
            self._seen_import = stamp
            self._wake_agent()
            return
        report = self._agent_report()
        if (
            stamp
            and report.state is DeviceState.IDLE
            and report.wanted is None
            and report.running == self.source.wanted
        ):
            await to_thread.run_sync(self.source.remove)
            self._seen_import = 0

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _report(self, report: AgentReport) -> StatusReply:
        async with self._reporting:
            try:
                reply = await self.plane.status(self._status(report))
            except FleetRefused as error:
                if not self._note_revoked(error):
                    log.warning("The control plane refuses the status report: %s", error)
                raise
        if reply.cloned:
            self._clone.begin(
                f"Two devices report as {self.identity.device} to the fleet {self.identity.fleet}: one is "
                "a clone. On the clone, run `causeway-edge fleet leave` and `fleet join`."
            )
        else:
            self._clone.end(f"Only one device reports as {self.identity.device} now")
        if reply.erasure is not None:
            self._order = reply.erasure
            self._ordered.set()
        self.records.per_hour = reply.records_per_hour
        self._follow(reply.cohort)
        self._found()
        return reply

    def _note_revoked(self, error: FleetRefused) -> bool:
        """Record a refusal that means that this device is not in the fleet; return whether it was one."""
        if error.code not in _REVOKED:
            return False
        self.tokens.refused(error)
        return True

    def _follow(self, cohort: str) -> None:
        if cohort == self.identity.cohort:
            return
        log.info("This device now belongs to the cohort %s, previously to %s.", cohort, self.identity.cohort)
        self.identity = msgspec.structs.replace(self.identity, cohort=cohort)
        try:
            write_identity(self.folder, self.identity)
        except OSError as error:
            log.warning("The new cohort cannot be written to %s: %s", self.folder, error.strerror)
        self._wake_agent()

    def _found(self) -> None:
        self._failures = 0
        self.last_seen = self.clock.unix()
        self._away.end(f"{self.plane.name} answers again")
        self._keep_record()

    def _lost(self, error: FleetError) -> None:
        self._failures += 1
        if self._failures >= _SURELY_AWAY:
            self._away.begin(f"The device keeps its bundle: {error}")
        self._keep_record()

    def _status(self, report: AgentReport) -> StatusReport:
        now = self.clock.unix()
        local = time.localtime(now)
        temperature_c, drift = self.read_condition()
        self._seq += 1
        return StatusReport(
            device=self.identity.device,
            boot=self.boot,
            seq=self._seq,
            sent=now,
            daemon=daemon_version(),
            local_weekday=local.tm_wday + 1,
            local_minute=local.tm_hour * 60 + local.tm_min,
            temperature_c=temperature_c,
            drift=drift,
            **msgspec.structs.asdict(report),
        )

    def _keep_record(self) -> None:
        """Write `link.json`, unless only `last_seen` differs, which does not justify a write to flash."""
        written, path = self._written, self.folder / LINK_FILE
        problems, cloned = self.problems, bool(self._clone.problem)
        record = LinkRecord(
            boot=self.boot, last_seen=self.last_seen, problems=problems, cloned=cloned, report=self._agent_report()
        )
        if written is not None and msgspec.structs.replace(record, last_seen=written.last_seen) == written:
            return
        try:
            write_synced(path, msgspec.json.encode(record))
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error.strerror)
            return
        self._written = record
