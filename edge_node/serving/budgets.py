"""Rates of tokens and daily budgets of clients (`limits`).

Nothing is reserved: a request begins while something is left, and an answer may put its client into debt, which delays
the next one. What a client was answered from the cache, or from another request's generation, costs it nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Final

from causeway_server.router.errors import RateLimited
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.trackers import MAX_CLIENTS

from ..clock import Clock
from ..config.schema import LimitsConfig
from ..storage.background_sqlite import Value, Write
from ..storage.spend import LOAD_TIMEOUT_S, SpendStore

log = logging.getLogger(__name__)

_DAY_S: Final = 86_400
_PUT: Final = "INSERT INTO clients VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET usd = excluded.usd"
_GET: Final = "SELECT client, day, usd FROM clients ORDER BY rowid"
_ROW_BYTES: Final = 64  # approximate


class ClientBudgets:
    """Use that clients have made of their limits. `store`: the file of their costs, by day and keyed digest
    of the client; `keys`: those of the state folder.
    """

    def __init__(self, config: LimitsConfig, store: SpendStore, clock: Clock, keys: StateKeys | None) -> None:
        self._config = config
        self._store = store
        self._clock = clock
        self._keys = keys
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()  # left of a minute's, and when (monotonic)
        self._usd: OrderedDict[tuple[Value, int], float] = OrderedDict()

    async def load(self) -> None:
        """Load the costs of earlier runs, if they can be read."""
        if self._store.database is None:
            return
        try:
            rows = await self._store.database.read(_GET, timeout_s=LOAD_TIMEOUT_S)
        except TimeoutError:
            log.warning("The clients' spending in earlier runs cannot be read, so it starts at 0.")
            return
        self._usd.update(((client, day), usd) for client, day, usd in rows)  # type: ignore[misc]

    def check(self, client: str, now: float) -> None:
        """Check that a client may begin a request. `now`: monotonic seconds. Raises RateLimited."""
        holder, limits = self._config.of(client)
        if limits.usd_per_day and self._usd.get(self._row(holder), 0.0) >= limits.usd_per_day:
            left_s = _DAY_S - self._clock.unix() % _DAY_S
            raise RateLimited(f"Your budget of {limits.usd_per_day:g} USD a day is spent.", retry_after_s=left_s)
        if (rate := limits.tokens_per_minute) and (left := self._left(holder, rate, now)) < 1.0:
            raise RateLimited(f"Your limit is {rate} tokens a minute.", retry_after_s=(1.0 - left) * 60.0 / rate)

    def charge(self, client: str, tokens: int, usd: float, now: float) -> None:
        """Count what a client's request has used. `now`: monotonic seconds."""
        holder, limits = self._config.of(client)
        if rate := limits.tokens_per_minute:
            self._tokens[holder] = self._left(holder, rate, now) - tokens, now
            self._tokens.move_to_end(holder)
            if len(self._tokens) > MAX_CLIENTS:
                self._tokens.popitem(last=False)
        if usd and limits.usd_per_day:
            key = self._row(holder)
            self._usd[key] = spent = round(self._usd.get(key, 0.0) + usd, 12)
            if len(self._usd) > MAX_CLIENTS:
                self._usd.popitem(last=False)
            self._store.write(Write(_PUT, (*key, spent), _ROW_BYTES))

    def _left(self, holder: str, rate: int, now: float) -> float:
        left, at = self._tokens.get(holder, (float(rate), now))
        return min(float(rate), left + max(0.0, now - at) * rate / 60.0)

    def _row(self, holder: str) -> tuple[Value, int]:
        name = holder.encode("utf-8", "replace")
        return name if self._keys is None else self._keys.keyed(name), int(self._clock.unix() // _DAY_S)
