"""The state of each message in Redis: its number of deliveries, and its outcome until that is published.

    (none) ── claim ──► counted ── record ──► recorded ── published ──► published

An outcome is recorded before it is published. A process that is killed between the two leaves it to the next one, which
looks for it in the topic and publishes it if it is not there. So a message that arrives again, because it was
redelivered or sent twice, is answered once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from causeway_server.router.errors import JobStoreUnavailable, RecordUnreadable

from ..storage.encryption import NO_CIPHER, ContentCipher
from ..storage.record import RunBill, encode_bill
from ..storage.redis_client import RedisClient, as_bytes, as_int, as_list, as_text
from ..storage.stores import SCRIPTS, load_with_shared

_NAMES: Final = ("stream_hold", "stream_claim", "stream_count", "stream_record", "stream_published")
STREAM_SCRIPTS: Final = {
    **{name: load_with_shared(f"{__package__}.lua", name, "stream") for name in _NAMES},
    **{name: SCRIPTS[name] for name in ("usage_take", "usage_done")},
}
REPLICATED: Final = frozenset({"stream_record"})
"""Scripts whose effect must be on enough replicas of Redis before an outcome is published."""
EffectState = Literal["", "recorded", "published"]


class LeaseLost(Exception):
    """The lease is lost, and another process now receives for this pipeline."""


class KnownEffect(msgspec.Struct, frozen=True):
    """The known state of a message."""

    attempts: int  # number of attempts, including this delivery
    state: EffectState
    outcome: bytes  # outcome of a recorded message
    position: str  # position in the topic of outcomes, before the outcome


class EffectStore:
    """The effects of one pipeline. Methods raise JobStoreUnavailable. `owner`: this process, if it needs the lease."""

    def __init__(
        self, database: RedisClient, name: str, owner: str, *, ttl_s: float, cipher: ContentCipher = NO_CIPHER
    ) -> None:
        self._database = database
        self._name = name
        self._owner = owner
        self._ttl_ms = int(ttl_s * 1000)
        self._cipher = cipher

    async def hold(self, lease_s: float) -> bool:
        """Take or renew the lease; with 0, return it. Return False if another process has it."""
        arguments = (self._name, self._owner, int(lease_s * 1000))
        return as_int(await self._database.run("stream_hold", *arguments)) > 0

    async def claim(self, effects: Sequence[str]) -> list[KnownEffect]:
        """Count a delivery of each message. Raises LeaseLost."""
        rows = as_list(await self._database.run("stream_claim", self._name, self._owner, self._ttl_ms, *effects))
        if len(rows) != len(effects):
            raise LeaseLost
        known = []
        for effect, row in zip(effects, rows, strict=True):
            attempts, state, stored, position = as_list(row)
            try:
                outcome = self._cipher.open(as_bytes(stored), "outcome", "", self._name, effect)
            except RecordUnreadable as error:  # running the message again might answer it twice
                raise JobStoreUnavailable(
                    f"The stored outcome of message {effect} cannot be read: {error.message}"
                ) from error
            effect_state = msgspec.convert(as_text(state), EffectState)
            known.append(KnownEffect(as_int(attempts), effect_state, outcome, as_text(position)))
        return known

    async def count(self, effect: str, change: int, bill: RunBill | None = None) -> None:
        """Change a message's attempts: a run failed (1), or was abandoned (-1)."""
        await self._database.run("stream_count", self._name, effect, change, encode_bill(bill))

    async def record(self, effect: str, run: str, outcome: bytes, position: str, bill: RunBill | None = None) -> bool:
        """Store an outcome until its publication; False if another `run` has. Repeatable. Raises LeaseLost."""
        outcome = self._cipher.seal(outcome, "outcome", "", self._name, effect)
        arguments = (self._name, self._owner, self._ttl_ms, effect, run, outcome, position, encode_bill(bill))
        reply = as_int(await self._database.run("stream_record", *arguments))
        if reply < 0:
            raise LeaseLost
        return reply > 0

    async def published(self, effects: Sequence[str]) -> None:
        """Record that the outcomes are in their topics."""
        await self._database.run("stream_published", self._name, self._ttl_ms, *effects)
