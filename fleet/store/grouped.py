"""Group commit: while one transaction runs, further items wait, and the next transaction takes all of them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from router.errors import CausewayError

Item = TypeVar("Item")
Result = TypeVar("Result")
Transaction = Callable[[], AbstractAsyncContextManager[AsyncConnection]]
Work = Callable[[AsyncConnection, Sequence[Item]], Awaitable[Sequence[Result | CausewayError]]]

MOST_ITEMS = 500  # in a transaction
MOST_WAITING = 20_000
_log = logging.getLogger("causeway.fleet.store")


class TooManyMessages(CausewayError):
    """The control plane gets more messages than its database takes."""

    status = 503
    code = "overloaded"
    retryable = True


class Grouped(Generic[Item, Result]):
    """Handles many items in one transaction; each caller returns when the transaction of its item is committed.

    `run` has to run meanwhile. `transactions` and `items` count what was committed.

    Args:
        transaction: `Store.write` or `Store.read`.
        work: Handles items in the given order and returns a result for each, or the error that refuses it.
    """

    def __init__(self, transaction: Transaction, work: Work[Item, Result]) -> None:
        self._transaction = transaction
        self._work = work
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._wake = asyncio.Event()
        self.transactions = 0
        self.items = 0

    async def submit(self, item: Item) -> Result:
        """Handle one item.

        Raises:
            CausewayError: The item is refused.
            StoreUnavailable: The database is away.
            TooManyMessages: Too many items wait already.
        """
        if len(self._waiting) >= MOST_WAITING:
            raise TooManyMessages("the control plane is overloaded", retry_after_s=30.0)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._wake.set()
        return await future

    async def run(self) -> None:
        """Handle what is submitted, until cancelled."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    count = min(len(self._waiting), MOST_ITEMS)
                    await self._run_group([self._waiting.popleft() for _ in range(count)])
        finally:
            for _, future in self._waiting:
                future.cancel()

    async def _run_group(self, group: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            async with self._transaction() as connection:
                results = await self._work(connection, [item for item, _ in group])
        except CausewayError as error:
            results = [error] * len(group)
        except Exception as error:
            if len(group) > 1:  # one item is at fault: the others are handled without it
                for pair in group:
                    await self._run_group([pair])
                return
            _log.exception("a database transaction failed")
            results = [CausewayError(f"the control plane failed: {type(error).__name__}")]
        except BaseException:  # cancelled: the server stops
            for _, future in group:
                future.cancel()
            raise
        else:
            self.transactions += 1
            self.items += len(group)
        for (_, future), result in zip(group, results, strict=True):
            if future.done():  # the client has left
                continue
            if isinstance(result, CausewayError):
                future.set_exception(result)
            else:
                future.set_result(result)
