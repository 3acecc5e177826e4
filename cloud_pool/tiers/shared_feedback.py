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
_Entries = Sequence[tuple[bytes | str, Mapping[bytes | str, bytes | str]]]
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
            log.debug("A score cannot be offered: %s", type(error).__name__)
        return None

    async def watch(self) -> None:
        """Count offered scores of own answers until cancelled."""
        last = ""
        while True:
            try:
                with anyio.fail_after(_PATIENCE_S):
                    last = await self._look(last)
            except _FAULTS as error:
                log.debug("Scores of other gateways cannot be read: %s", type(error).__name__)
            await anyio.sleep(_LOOK_EVERY_S)

    async def _look(self, last: str) -> str:
        """Count the offers after `last`, "" for those from now on. Return the last one's id."""
        if not last:
            newest = cast("_Entries", await self._redis.xrevrange(_KEY, count=1))
            return _text(newest[0][0]) if newest else "0"
        for name, fields in cast("_Entries", await self._redis.xrange(_KEY, min=f"({last}", count=100)):
            last = _text(name)
            offer = msgspec.json.decode({_text(key): value for key, value in fields.items()}["offer"], type=_Offer)
            counted = self._count(offer.tenant, offer.client, offer.feedback)
            if counted is not None:
                await self._redis.set(offer.reply, int(counted), ex=_REPLY_S)
        return last


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
