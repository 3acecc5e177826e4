"""The counts of variants' trials, shared by all gateways and workers of one Redis.

    causeway:variants:{<digest>}:counts   hash: <metric>|<arm>|<events or answers>|<group> → sum; state, reason

The digest is of the tier, both models and the share: another share is another trial. Each process adds what it has
counted and reads the sums about once a second, so that all judge the same counts; the first verdict is everybody's.
A batch keeps its id until Redis has confirmed it. While Redis is unavailable each process judges what it knows.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

import anyio
import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from causeway_server.router.variants.trials import Counts, Trial, Trials

from ..redis.connect import client_fault
from ..redis.keys import load_script

EVERY_S: Final = 1.0
_KEPT_S: Final = 3600  # after the last process that has the variant
_TIMEOUT_S: Final = 1.0
log = logging.getLogger(__name__)


class SharedTrials:
    """The exchange of one process's counts."""

    def __init__(self, trials: Trials, client: redis.asyncio.Redis) -> None:
        self._trials = trials
        self._redis = client
        self._script = client.register_script(load_script(__package__, "exchange"))
        self._sent: dict[str, tuple[str, Counts]] = {}  # batches that Redis has not confirmed, by the trial's key
        self._known: set[str] = set()
        self.fault = ""

    async def watch(self) -> None:
        """Exchange counts until cancelled."""
        while True:
            await self.exchange()
            await anyio.sleep(EVERY_S)

    async def exchange(self) -> None:
        """Add the new counts of every trial, and take over the sums; forget those of trials that were removed."""
        trials = {_key(trial): trial for trial in self._trials}
        for key, trial in trials.items():
            try:
                with anyio.fail_after(_TIMEOUT_S):
                    await self._exchange(key, trial)
                self.fault = ""
            except (RedisError, OSError, TimeoutError) as error:
                if not self.fault:
                    log.warning(
                        "Trials of variants use only the counts of this process: %s", client_fault(error, self._redis)
                    )
                self.fault = "Variants are judged by each process alone, because their Redis is unavailable."
                return
        await self._forget(self._known - trials.keys())
        self._known = set(trials)

    async def _forget(self, keys: Iterable[str]) -> None:
        """Delete the counts of removed trials, so that a variant that comes back begins again."""
        for key in keys:
            self._sent.pop(key, None)
            with suppress(RedisError, OSError, TimeoutError), anyio.move_on_after(_TIMEOUT_S):
                await self._redis.delete(f"{key}:counts")

    async def _exchange(self, key: str, trial: Trial) -> None:
        if key not in self._sent:
            self._sent[key] = secrets.token_hex(8), trial.take_new()
        batch, counts = self._sent[key]
        arguments = [part for field, amount in counts.items() for part in (field, amount)]
        keys = [f"{key}:counts", f"{key}:batch:{batch}"]
        reply = await self._script(keys, [_KEPT_S, trial.state, trial.reason, *arguments])
        del self._sent[key]
        self._trials.share(trial, _texts(reply))


def _key(trial: Trial) -> str:
    identity = msgspec.json.encode((trial.place, trial.model, trial.variant))
    return f"causeway:variants:{{{hashlib.sha256(identity).hexdigest()[:32]}}}"


def _texts(reply: Sequence[bytes | str]) -> dict[str, str]:
    texts = [one.decode() if isinstance(one, bytes) else one for one in reply]
    return dict(zip(texts[::2], texts[1::2], strict=True))
