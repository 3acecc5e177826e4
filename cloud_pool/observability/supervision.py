"""Background loops that go on after a fault that nothing expected."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from router.serving.logs import redacted

RESTART_S: Final = 5.0
_log = logging.getLogger("causeway.cloud")


async def keep_running(
    name: str, run: Callable[[], Awaitable[None]], *, sleep: Callable[[float], Awaitable[None]] = anyio.sleep
) -> None:
    """Run a loop until it returns or is cancelled. After an exception, which is logged, it begins again.

    One loop that fails would else end its task group, and with it all others of the process.

    Args:
        name: in the log
        run: the loop; what it holds has to survive a new beginning
    """
    while True:
        try:
            return await run()
        except Exception as error:
            _log.error("%s failed unexpectedly and begins again in %g s: %s", name, RESTART_S, redacted(error))
        await sleep(RESTART_S)
