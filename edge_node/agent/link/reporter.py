"""The box's reports to its control plane: its state after each change, and sums of its requests each minute.

Telemetry waits while the control plane is away, for at most a day; then the oldest is dropped, and counted. A message
is repeated unchanged until it is answered, also by the next run of the daemon, so that it is counted once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from router.bundle.protocol import BoxState, StatusReport, Telemetry, TelemetrySample

from ...version import daemon_version
from .identity import write_synced

log = logging.getLogger(__name__)

TELEMETRY_FILE = "telemetry.json"
MAX_WAITING = 1440
"""Samples that wait: a day of minutes."""
MAX_SAMPLES = 128
"""Samples of one message, which must stay below `protocol.MAX_MESSAGE_BYTES`."""


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's part of a `StatusReport`, whose attributes are explained there."""

    state: BoxState = BoxState.IDLE
    running: str | None = None
    wanted: str | None = None
    rollout: str = ""
    code: str = ""
    reason: str = ""
    quarantined: tuple[str, ...] = ()
    unproven: bool = False
    since: float = 0.0


class TrafficSums(Protocol):
    """Requests since the daemon's start; `latency` by bucket of `protocol.LATENCY_BOUNDS_S`."""

    @property
    def requests(self) -> int: ...
    @property
    def errors(self) -> int: ...
    @property
    def degraded(self) -> int: ...
    @property
    def latency(self) -> tuple[int, ...]: ...


class TelemetryLog:
    """Cuts the daemon's sums into samples by bundle and minute, and keeps them until they were accepted.

    Samples are sealed into messages, whose number and content stay. `lost` counts samples that were dropped because too
    many waited.

    Args:
        device: The box's id.
        boot: The id of this run of the daemon.
        read: Returns the current sums.
        unix: Returns the time, unix seconds.
        earlier: Messages that earlier runs of the daemon could not send.
    """

    def __init__(
        self,
        device: str,
        boot: str,
        read: Callable[[], TrafficSums],
        unix: Callable[[], float],
        earlier: Iterable[Telemetry] = (),
    ) -> None:
        self._device = device
        self._boot = boot
        self._read = read
        self._unix = unix
        self._last, self._began = read(), unix()
        self._bundle: str | None = None
        self._waiting: deque[TelemetrySample] = deque()
        self._sealed = deque(earlier)
        self._seq = 0
        self.lost = 0

    def __len__(self) -> int:
        """Samples that wait, those of the message in transit included."""
        return len(self._waiting) + sum(len(message.samples) for message in self._sealed)

    def cut(self, bundle: str | None) -> None:
        """End the present sample; `bundle` serves from now on (None: the factory's files)."""
        sums, now, last = self._read(), self._unix(), self._last
        requests = sums.requests - last.requests
        if requests > 0:
            self._waiting.append(
                TelemetrySample(
                    bundle=self._bundle,
                    began=min(self._began, now),
                    ended=now,
                    requests=requests,
                    errors=sums.errors - last.errors,
                    degraded=sums.degraded - last.degraded,
                    latency=tuple(late - early for late, early in zip(sums.latency, last.latency, strict=True)),
                )
            )
        self._last, self._began, self._bundle = sums, now, bundle
        while len(self) > MAX_WAITING:
            dropped = 1
            if self._sealed:
                dropped = len(self._sealed.popleft().samples)
            else:
                self._waiting.popleft()
            if not self.lost:
                log.warning(
                    "telemetry of more than a day waits for the control plane: the oldest is dropped from now on"
                )
            self.lost += dropped

    def next(self) -> Telemetry | None:
        """Return the message to send, the same until it was `accepted`; None if there is none."""
        if not self._sealed:
            self._seal()
        return self._sealed[0] if self._sealed else None

    def accepted(self, message: Telemetry) -> None:
        """Drop the message: the control plane has counted it, or will never take it."""
        if self._sealed and self._sealed[0] is message:  # else it was dropped meanwhile
            self._sealed.popleft()

    def seal(self) -> tuple[Telemetry, ...]:
        """Seal every sample that waits, and return all messages."""
        while self._waiting:
            self._seal()
        return tuple(self._sealed)

    def _seal(self) -> None:
        samples = tuple(self._waiting.popleft() for _ in range(min(MAX_SAMPLES, len(self._waiting))))
        if samples:
            self._seq += 1
            self._sealed.append(Telemetry(device=self._device, boot=self._boot, seq=self._seq, samples=samples))


class TelemetryFile:
    """`telemetry.json`: messages that the control plane did not answer, for the next run of the daemon.

    Args:
        folder: STATE_DIR/fleet.
        device: The box's id; messages of another identity are ignored.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self._path = folder / TELEMETRY_FILE
        self._device = device
        self._there = True

    def read(self) -> tuple[Telemetry, ...]:
        """Return the messages; none from a file that is damaged."""
        try:
            messages = msgspec.json.decode(self._path.read_bytes(), type=tuple[Telemetry, ...])
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be read, its telemetry is lost: %s", self._path, error)
            return ()
        return tuple(message for message in messages if message.device == self._device)

    def write(self, messages: Sequence[Telemetry]) -> None:
        """Replace the file; without messages there is none. A disk that fails costs telemetry, nothing else."""
        try:
            if messages:
                self._there = True
                write_synced(self._path, msgspec.json.encode(messages))
            elif self._there:
                self._path.unlink(missing_ok=True)
                self._there = False
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror)


class StatusWriter:
    """Makes reports, each with a higher number."""

    def __init__(self, device: str, boot: str, unix: Callable[[], float]) -> None:
        self._device = device
        self._boot = boot
        self._unix = unix
        self._seq = 0
        self._daemon = daemon_version()

    def report(self, agent: AgentReport) -> StatusReport:
        now = self._unix()
        local = time.localtime(now)
        self._seq += 1
        return StatusReport(
            device=self._device,
            boot=self._boot,
            seq=self._seq,
            sent=now,
            daemon=self._daemon,
            local_weekday=local.tm_wday + 1,
            local_minute=local.tm_hour * 60 + local.tm_min,
            **msgspec.structs.asdict(agent),
        )
