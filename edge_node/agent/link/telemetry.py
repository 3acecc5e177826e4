"""Sums of the device's requests for its control plane, each minute, with records of some of them.

Telemetry waits for at most a day while the control plane is unreachable; then the oldest is dropped and counted. A
message is repeated unchanged until it is accepted, also after a restart of the daemon, so that it is counted once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from pathlib import Path

import msgspec
from anyio import to_thread

from causeway_server.router.bundle.protocol import MAX_MESSAGE_BYTES, MAX_RECORDS, Telemetry, TelemetrySample
from causeway_server.router.serving.at_rest.state_keys import StateKeys

from ...clock import Clock
from ...observability.metrics import Traffic
from .control_plane import FleetRefused, FleetUnreachable
from .identity import write_synced
from .records import MESSAGE_BYTES, RecordSample

log = logging.getLogger(__name__)

TELEMETRY_FILE = "telemetry.json"
MAX_WAITING = 1440
"""Maximum number of waiting samples: a day of minutes."""
MAX_SAMPLES = 96
"""Maximum number of samples in a message; fewer where labels would make it larger than `MAX_MESSAGE_BYTES`."""
_ROOM_BYTES = MAX_MESSAGE_BYTES - 1024  # for the samples, beside the names
_RECORDS_BYTES = MESSAGE_BYTES + 64 * MAX_RECORDS  # with their weights
# interval of saving: a killed daemon loses at most this much telemetry while the control plane is unreachable
_KEEP_S = 600.0


class TelemetryLog:
    """Cuts the daemon's sums into samples by bundle and minute, and keeps them until they are accepted.

    Samples are sealed into messages, whose number and content no longer change, with the records of a sample. `lost`
    counts samples that were dropped because too many waited. Unsent messages are kept in `telemetry.json` for the next
    run, their records only if there are `keys` to seal the file. `boot`: the id of this run of the daemon.
    """

    def __init__(
        self,
        device: str,
        boot: str,
        read: Callable[[], Traffic],
        clock: Clock,
        folder: Path,
        records: RecordSample | None = None,
        keys: StateKeys | None = None,
    ) -> None:
        self._records = records or RecordSample(0.0, clock.monotonic)
        self._keys = keys
        self._private = self._records.private
        self._device = device
        self._boot = boot
        self._read_traffic = read
        self._clock = clock
        self._path = folder / TELEMETRY_FILE
        self._is_kept = True  # the file may exist
        self._writing = asyncio.Lock()
        self._kept_at = float("-inf")
        self._last, self._began = read(), clock.unix()
        self._bundle: str | None = None
        self._waiting: deque[TelemetrySample] = deque()
        self._sealed = deque(self._read())
        self._seq = 0
        self.lost = 0

    def __len__(self) -> int:
        """Return the number of waiting samples, including those of the message that is being sent."""
        return len(self._waiting) + sum(len(message.samples) for message in self._sealed)

    def cut(self, bundle: str | None) -> None:
        """End the present sample. `bundle`: the bundle that serves from now on (None for the factory files)."""
        sums, now = self._read_traffic(), self._clock.unix()
        new = sums - self._last
        private, labels = self._records.private - self._private, self._records.take_labels()
        # a fallback and a shadow's cost are counted in another minute than their request
        if private or labels or msgspec.structs.replace(new, restarts=0) != Traffic():
            counts = new.requests, new.errors, new.degraded, new.latency, new.on_device, new.cached
            usd = max(0, new.micro_usd)
            self._waiting.append(
                TelemetrySample(self._bundle, min(self._began, now), now, *counts, private, usd, labels)
            )
            self._private += private
        self._last, self._began, self._bundle = sums, now, bundle
        while len(self) > MAX_WAITING:
            dropped = 1
            if self._sealed:
                dropped = len(self._sealed.popleft().samples)
            else:
                self._waiting.popleft()
            if not self.lost:
                log.warning(
                    "More than a day of telemetry waits for the control plane, so the oldest telemetry is dropped."
                )
            self.lost += dropped

    def next(self) -> Telemetry | None:
        """Return the message to send, which stays the same until it is `accepted`; None if there is none."""
        if not self._sealed:
            self._seal()
        return self._sealed[0] if self._sealed else None

    def accepted(self, message: Telemetry) -> None:
        """Drop the message, because the control plane has counted it or will never accept it."""
        if self._sealed and self._sealed[0] is message:  # else it has already been dropped
            self._sealed.popleft()

    async def send(
        self, post: Callable[[Telemetry], Awaitable[None]], is_revoked: Callable[[FleetRefused], bool]
    ) -> None:
        """Send the messages until the control plane refuses one (FleetError); if it `is_revoked`, they keep waiting."""
        while (message := self.next()) is not None:
            try:
                await post(message)
            except FleetUnreachable:
                if self._clock.monotonic() >= self._kept_at + _KEEP_S:  # a few times an hour, because flash wears out
                    self._kept_at = self._clock.monotonic()
                    async with self._writing:
                        await to_thread.run_sync(self._write, self._seal_all())
                return
            except FleetRefused as error:
                if is_revoked(error):
                    return
                log.warning("The control plane refuses telemetry: %s", error)
            self.accepted(message)
        self._write(())

    def keep(self) -> None:
        """Write the waiting messages to disk, for the next run of the daemon."""
        self._write(self._seal_all())

    async def forget_records(self) -> int:
        """Drop the records that wait in messages, which name no client; return their number. Raises OSError."""
        async with self._writing:
            dropped = sum(len(message.records) for message in self._sealed)
            self._sealed = deque(msgspec.structs.replace(message, records=()) for message in self._sealed)
            if self._is_kept:
                await to_thread.run_sync(self._rewrite, tuple(self._sealed))
        return dropped

    def _seal_all(self) -> tuple[Telemetry, ...]:
        while self._waiting:
            self._seal()
        return tuple(self._sealed)

    def _seal(self) -> None:
        count = min(MAX_SAMPLES, len(self._waiting))
        while (size := len(msgspec.json.encode(list(islice(self._waiting, count))))) > _ROOM_BYTES:
            count //= 2
        samples = tuple(self._waiting.popleft() for _ in range(count))
        if samples:
            self._seq += 1
            room = MAX_RECORDS - sum(len(message.records) for message in self._sealed)
            records = self._records.take(room) if size + _RECORDS_BYTES <= _ROOM_BYTES else ()
            message = Telemetry(device=self._device, boot=self._boot, seq=self._seq, samples=samples, records=records)
            self._sealed.append(message)

    # --- the file ----------------------------------------------------------------------------------------------------

    def _read(self) -> tuple[Telemetry, ...]:
        """Return the unsent messages of an earlier run; none if the file is damaged or belongs to another identity."""
        try:
            content = self._path.read_bytes()
            if self._keys is not None:
                content = self._keys.open(content, TELEMETRY_FILE) or content  # earlier versions wrote plain JSON
            messages = msgspec.json.decode(content, type=tuple[Telemetry, ...])
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read, and its telemetry is lost: %s", self._path, error)
            return ()
        return tuple(message for message in messages if message.device == self._device)

    def _rewrite(self, messages: Sequence[Telemetry]) -> None:
        """Replace the file, and leave the old one in no case. Raises OSError."""
        self._path.unlink(missing_ok=True)
        self._write(messages)

    def _write(self, messages: Sequence[Telemetry]) -> None:
        """Replace the file, or delete it if there are no messages. A failing disk only loses telemetry."""
        try:
            if messages:
                self._is_kept = True
                if self._keys is None:
                    messages = [msgspec.structs.replace(message, records=()) for message in messages]
                content = msgspec.json.encode(messages)
                write_synced(self._path, content if self._keys is None else self._keys.seal(content, TELEMETRY_FILE))
            elif self._is_kept:
                self._path.unlink(missing_ok=True)
                self._is_kept = False
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror)
