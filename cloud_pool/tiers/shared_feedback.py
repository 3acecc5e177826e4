"""Scores of answers that another gateway made: each is offered to all gateways of one Redis, and its owner counts it.

    causeway:feedback            stream: scores on offer, about the newest 1,000
    causeway:feedback:<id>       string: the owner's reply, for a minute

Answers themselves are not shared, so that they cost Redis nothing.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, cast

import anyio
import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from causeway_server.router.variants.feedback import Feedback

_KEY: Final = "causeway:feedback"
_KEPT_S, _REPLY_S = 3600, 60
_LOOK_EVERY_S, _LOOKS, _PATIENCE_S = 0.25, 12, 2.0
_Entries = Sequence[tuple[bytes, Mapping[bytes, bytes]]]
_FAULTS = (RedisError, OSError, TimeoutError, msgspec.DecodeError)
log = logging.getLogger(__name__)


class CountScore(Protocol):
    def __call__(self, tenant: str, client: str, feedback: Feedback, /) -> bool | None:
        """Count a score of an own answer; return None for any other answer."""
        ...


class _Offer(msgspec.Struct, frozen=True):
    reply: str
    tenant: str
    client: str
    feedback: Feedback


class SharedFeedback:
    """The exchange of one process's scores. `count`: counts those of its own answers."""

    def __init__(self, client: redis.asyncio.Redis, count: CountScore) -> None:
        self._redis = client
        self._count = count
        self._last = b""  # id of the last offer that was read

    async def offer(self, tenant: str, client: str, feedback: Feedback) -> bool | None:
        """Return what the gateway that made the answer says of the score; None if no gateway claims it in time."""
        reply = f"{_KEY}:{secrets.token_hex(8)}"
        data = msgspec.json.encode(_Offer(reply, tenant, client, feedback))
        try:
            with anyio.fail_after(_PATIENCE_S):
                await self._redis.xadd(_KEY, {"offer": data}, maxlen=1000)
                await self._redis.expire(_KEY, _KEPT_S)
                for _ in range(_LOOKS):
                    await anyio.sleep(_LOOK_EVERY_S / 2)
                    if (counted := await self._redis.get(reply)) is not None:
                        return int(counted) > 0
        except _FAULTS as error:
            log.debug("A client's score cannot be passed to the other gateways: %s", type(error).__name__)
        return None

    async def watch(self) -> None:
        """Count offered scores of own answers until cancelled."""
        while True:
            try:
                with anyio.fail_after(_PATIENCE_S):
                    await self._look()
            except _FAULTS as error:
                log.debug("Scores of other gateways cannot be read: %s", type(error).__name__)
            await anyio.sleep(_LOOK_EVERY_S)

    async def _look(self) -> None:
        """Count the offers since the last look, each once, whatever fails; the first look counts none."""
        if not self._last:
            newest = cast("_Entries", await self._redis.xrevrange(_KEY, count=1))
            self._last = newest[0][0] if newest else b"0"
            return
        for name, fields in cast("_Entries", await self._redis.xrange(_KEY, min=b"(" + self._last, count=100)):
            self._last = name
            offer = msgspec.json.decode(fields.get(b"offer", b""), type=_Offer)
            counted = self._count(offer.tenant, offer.client, offer.feedback)
            if counted is not None:
                await self._redis.set(offer.reply, int(counted), ex=_REPLY_S)
