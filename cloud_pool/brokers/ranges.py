"""Ranges of a topic, written FROM..TO: by time, by JetStream's sequence, or by partition and offset of Kafka."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

import msgspec

from router.errors import ConfigError

from .address import BrokerKind

_PLACES: Final = {"nats": re.compile(r"()(\d{1,18})"), "kafka": re.compile(r"(\d{1,9})-(\d{1,18})")}
_EXAMPLES: Final = {"nats": "100..200", "kafka": "0-100..0-200"}


class MessageRange(msgspec.Struct, frozen=True, kw_only=True):
    """Which messages of a topic; both ends belong to it. By time or by number, never both."""

    since: float | None = None  # unix s, by the broker's clock
    until: float = float("inf")
    lane: str | None = None  # None: of every lane
    first: int = 0  # sequence or offset
    last: int | None = None

    def holds(self, lane: str, number: int, published_at: float) -> bool:
        """Return whether a message belongs to it."""
        if self.lane is not None and lane != self.lane:
            return False
        in_numbers = self.first <= number and (self.last is None or number <= self.last)
        return in_numbers and (self.since or 0.0) <= published_at <= self.until


def parse_range(text: str, kind: BrokerKind) -> MessageRange:
    """Parse FROM..TO; one end may be left out.

    Raises:
        ConfigError: says what to write for this kind of broker.
    """
    first, dots, last = text.partition("..")
    if not dots or not (first or last):
        raise _refused(kind)
    ends = [_PLACES[kind].fullmatch(end) for end in (first, last) if end]
    if not all(ends):
        if any(ends):
            raise _refused(kind)
        since, until = _time(first, kind), _time(last, kind)
        return MessageRange(since=since or 0.0, until=float("inf") if until is None else until)
    lanes = {found[1] for found in ends if found}
    if len(lanes) > 1:
        raise ConfigError("both ends name the same partition: replay one after the other", where="--replay")
    numbers = [int(found[2]) for found in ends if found]
    return MessageRange(
        lane=lanes.pop() if kind == "kafka" else None,
        first=numbers[0] if first else 0,
        last=numbers[-1] if last else None,
    )


def _time(text: str, kind: BrokerKind) -> float | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise _refused(kind) from None
    if found.tzinfo is None:
        raise ConfigError(f"{text}: say the time zone, as in 2026-11-23T06:00:00Z", where="--replay")
    return found.timestamp()


def _refused(kind: BrokerKind) -> ConfigError:
    example = "2026-11-23T06:00:00Z..2026-11-23T07:00:00Z"
    return ConfigError(f"write FROM..TO, as in {_EXAMPLES[kind]} or {example}", where="--replay")
