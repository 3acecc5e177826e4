"""Authenticated messages of devices: status reports, telemetry and token requests. Many messages share a transaction.

For each message, in the order of arrival:

1. The device is enrolled, and not revoked.
2. The signature verifies with its key, or the MAC of a report or of telemetry with its report key.
3. The message is not a replay: a report's `seq` grows within a boot; a token request's `sent` grows and is near now.
   Repeated telemetry is accepted, but not counted again.
4. The message changes the device's row, which is written once for all its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from causeway_server.router.bundle.protocol import (
    ErasureDone,
    SampledRecord,
    StatusReply,
    StatusReport,
    Telemetry,
    TelemetrySample,
    TokenRequest,
    signed_bytes,
)
from causeway_server.router.errors import CausewayError

from ..store.devices import CHANGING, Device, changing_at, forget_device, lock_devices, write_reports
from ..store.generations import CohortPace
from ..store.history import DeviceEvent
from ..store.records import add_labels, add_records
from ..store.telemetry import add_samples
from .enrolment import verified
from .refusals import DeviceRevoked, DeviceUnknown, RequestStale, SignatureInvalid, StatusReplayed, TokenRequestReplayed
from .tokens import ReportKeys

_BOOTS = 16
_ARRIVALS = 8
FRESH_S = 300.0
"""The maximum deviation of a token request's `sent`, in seconds."""
_RETRY_S = 60.0
Message = StatusReport | Telemetry | TokenRequest | ErasureDone


class BootHistory(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last boots of a device. They reveal replays, repeated telemetry and clones."""

    arrivals: tuple[str, ...] = ()  # the last 8 boot ids of its reports in order of arrival, without repetitions
    reports: dict[str, int] = {}  # the newest `seq` of status reports, for each of the last 16 boots
    telemetry: dict[str, int] = {}  # the newest `seq` of telemetry, for each of the last 16 boots

    @property
    def cloned(self) -> bool:
        """Whether two machines report with this identity: an earlier boot id has returned, which no restart does."""
        return len(set(self.arrivals)) < len(self.arrivals)

    def with_report(self, boot: str, seq: int) -> BootHistory | None:
        """Return the history after a status report; None if the report is a replay."""
        if seq <= self.reports.get(boot, -1):
            return None
        arrivals = self.arrivals
        if not arrivals or arrivals[-1] != boot:
            arrivals = (*arrivals, boot)[-_ARRIVALS:]
        return msgspec.structs.replace(self, arrivals=arrivals, reports=_noted(self.reports, boot, seq))

    def with_telemetry(self, boot: str, seq: int) -> BootHistory | None:
        """Return the history after telemetry; None if it was counted before."""
        if seq <= self.telemetry.get(boot, -1):
            return None
        return msgspec.structs.replace(self, telemetry=_noted(self.telemetry, boot, seq))


def _noted(seqs: dict[str, int], boot: str, seq: int) -> dict[str, int]:
    """Return the numbers with `seq` for this boot, which is last; the oldest boot is dropped."""
    kept = {name: value for name, value in seqs.items() if name != boot}
    return dict([*kept.items(), (boot, seq)][-_BOOTS:])


class SignedMessage(msgspec.Struct, frozen=True):
    """A message and its signature or MAC."""

    message: Message
    path: str  # the path that it was posted to
    body: bytes  # the exact bytes
    signature: str  # the Ed25519 signature by the device key, base64url; "" if there is a MAC
    mac: str = ""  # the header `MAC_HEADER`; "" without one


class Answer(msgspec.Struct, frozen=True):
    """The device after the message, and the reply to a status report."""

    device: Device
    reply: StatusReply | None = None


class Messages(msgspec.Struct, frozen=True):
    """The handler of messages. `handle` is the `work` of a `fleet.store.database.GroupCommit`.

    `pace` returns the pace of a cohort; `clock`: Unix seconds.
    """

    pace: Callable[[str], CohortPace]
    clock: Callable[[], float]
    keys: ReportKeys

    async def handle(
        self, connection: AsyncConnection, messages: Sequence[SignedMessage]
    ) -> list[Answer | CausewayError]:
        """Handle messages in one transaction."""
        now = self.clock()
        group = _Group(await lock_devices(connection, {signed.message.device for signed in messages}), now, self.keys)
        answers: list[Answer | CausewayError] = []
        asking = []
        for signed in messages:
            try:
                device = group.accept(signed)
            except CausewayError as error:
                answers.append(error)
                continue
            if isinstance(signed.message, StatusReport):
                asking.append(len(answers))
            answers.append(Answer(device))
        if asking:
            await self._grant(connection, group, answers, asking)
        await write_reports(connection, group.changed, group.events)
        await add_samples(connection, group.samples, now)
        wanted = {device.id for device in group.changed if self.pace(device.cohort).records_per_hour}
        await add_labels(connection, (pair for pair in group.samples if pair[0] in wanted), now)
        await add_records(connection, (pair for pair in group.records if pair[0] in wanted), now)
        for name in group.erased:
            await forget_device(connection, name)
        return answers

    async def _grant(
        self, connection: AsyncConnection, group: _Group, answers: list[Answer | CausewayError], asking: list[int]
    ) -> None:
        """Decide for each reporting device whether it may change."""
        reports = [
            (index, group.devices[answer.device.id]) for index in asking if isinstance(answer := answers[index], Answer)
        ]
        limited = {
            device.site for _, device in reports if device.site and _wants(device) and self.pace(device.cohort).per_site
        }
        busy = dict(await changing_at(connection, limited, group.now)) if limited else {}
        for device in group.devices.values():  # in their state after this group's reports
            if device.site in limited and device.state in CHANGING:
                busy[device.id] = device.site
        for index, device in reports:
            allowed = _may_change(device, self.pace(device.cohort), busy)
            if allowed and _wants(device):
                busy[device.id] = device.site
                group.change(msgspec.structs.replace(device, granted=group.now))
            reply = StatusReply(
                may_change=allowed,
                now=group.now,
                cohort=device.cohort,
                retry_after_s=_RETRY_S,
                cloned=device.cloned,
                erasure=None if (one := device.erasure) is None or one.finished else one.signed,
                records_per_hour=self.pace(device.cohort).records_per_hour,
            )
            answers[index] = Answer(device, reply)


class _Group:
    """The devices of a transaction, changed message by message."""

    def __init__(self, devices: dict[str, Device], now: float, keys: ReportKeys) -> None:
        self._keys = keys
        self.devices = devices
        self.now = now
        self.events: list[tuple[str, DeviceEvent]] = []
        self.samples: list[tuple[str, TelemetrySample]] = []
        self.records: list[tuple[str, SampledRecord]] = []
        self.erased: list[str] = []  # devices that have erased everything
        self._changed: dict[str, None] = {}

    @property
    def changed(self) -> list[Device]:
        return [self.devices[name] for name in self._changed]

    def change(self, device: Device) -> None:
        self.devices[device.id] = device
        self._changed[device.id] = None

    def accept(self, signed: SignedMessage) -> Device:
        """Check a message, apply its changes, and return the changed device. Raises CausewayError."""
        message = signed.message
        device = self._sender(signed)
        if isinstance(message, StatusReport):
            after = self._report(device, message)
        elif isinstance(message, Telemetry):
            after = self._telemetry(device, message)
        elif isinstance(message, ErasureDone):
            after = self._erased(device, message)
        else:
            after = self._token(device, message)
        if after is not device:
            self.change(after)
        return after

    def _sender(self, signed: SignedMessage) -> Device:
        """Return the authenticated sender of a message (1) (2)."""
        device = self.devices.get(signed.message.device)
        if device is None:
            raise DeviceUnknown(f"The device {signed.message.device!r} is not enrolled in this fleet.")
        if device.revoked is not None:
            raise DeviceRevoked(f"{device.id} was revoked. Enrol with a new key and a new join token.")
        if signed.mac and not isinstance(signed.message, TokenRequest):
            self._keys.check(device.id, signed.mac, signed.path, signed.body, self.now)
        elif not verified(device.public_key, signed.signature, signed_bytes(signed.path, signed.body)):
            raise SignatureInvalid(f"The message is not signed by the key of {device.id!r}.")
        return device

    def _report(self, device: Device, report: StatusReport) -> Device:
        """Return the device after a status report (3, 4)."""
        history = msgspec.json.decode(device.boots_json, type=BootHistory).with_report(report.boot, report.seq)
        if history is None:
            raise StatusReplayed(f"A report of boot {report.boot} with seq {report.seq} or later has already arrived.")
        now = self.now
        after = msgspec.structs.replace(
            device,
            last_seen=now,
            boots_json=msgspec.json.encode(history).decode(),
            cloned=history.cloned,
            daemon=report.daemon,
            state=report.state.value,
            state_since=device.state_since if device.state == report.state.value and device.last_seen else now,
            running=report.running,
            running_since=device.running_since if device.running == report.running and device.last_seen else now,
            wanted=report.wanted,
            rollout=report.rollout,
            code=report.code,
            reason=report.reason,
            quarantined_json=msgspec.json.encode(report.quarantined).decode(),
            unproven=report.unproven,
            weekday=report.local_weekday,
            minute=report.local_minute,
            granted=0.0 if report.state in CHANGING else device.granted,
            temperature_c=report.temperature_c,
            drift=report.drift,
        )
        if _shown(after) != _shown(device) or not device.last_seen:
            event = DeviceEvent(now, after.state, after.running, after.wanted, after.rollout, after.code, after.reason)
            self.events.append((device.id, event))
        return after

    def _telemetry(self, device: Device, telemetry: Telemetry) -> Device:
        """Return the device after telemetry (3, 4)."""
        history = msgspec.json.decode(device.boots_json, type=BootHistory).with_telemetry(telemetry.boot, telemetry.seq)
        if history is None:
            return device
        self.samples += [(device.id, sample) for sample in telemetry.samples]
        self.records += [(device.id, record) for record in telemetry.records]
        return msgspec.structs.replace(device, last_seen=self.now, boots_json=msgspec.json.encode(history).decode())

    def _erased(self, device: Device, done: ErasureDone) -> Device:
        """Return the device after the receipt of an erasure; a repeated one changes nothing (4)."""
        erasure = device.erasure
        if erasure is None or erasure.finished or erasure.id != done.order:
            return device
        if not erasure.client:
            self.erased.append(device.id)
        erasure = msgspec.structs.replace(erasure, finished=self.now, receipt=done.receipt)
        return msgspec.structs.replace(
            device, last_seen=self.now, reason="", erasure_json=msgspec.json.encode(erasure).decode()
        )

    def _token(self, device: Device, request: TokenRequest) -> Device:
        """Return the device after a token request (3, 4)."""
        if not abs(request.sent - self.now) <= FRESH_S:
            raise RequestStale(
                "`sent` differs from the control plane's time by more than five minutes. Take the time from the "
                "header `Date` of the answer, and send the request again."
            )
        if request.sent <= device.token_sent:
            raise TokenRequestReplayed("A token request with the same or a later `sent` was already answered.")
        return msgspec.structs.replace(device, last_seen=self.now, token_sent=request.sent)


def _shown(device: Device) -> tuple[object, ...]:
    return device.state, device.running, device.wanted, device.rollout, device.code


def _wants(device: Device) -> bool:
    """Return whether the device waits for the permission to change."""
    return device.wanted is not None and device.wanted != device.running and device.state not in CHANGING


def _may_change(device: Device, pace: CohortPace, busy: Mapping[str, str]) -> bool:
    """Return the permission of a device that is already changing, or that needs no change."""
    if device.state in CHANGING or not _wants(device):
        return True
    others = sum(site == device.site for name, site in busy.items() if name != device.id)
    return pace.may_change(device.weekday, device.minute, others if device.site else 0)
