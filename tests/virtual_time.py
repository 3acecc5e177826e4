"""An event loop in virtual time, which jumps from timer to timer: minutes pass at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_BEGIN_S = 1000.0


class _VirtualTime(selectors.SelectSelector):
    """A selector without sockets: time passes at once."""

    now = _BEGIN_S

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "every task waits for ever"
        self.now += max(0.0, timeout)
        return []


def run_in_virtual_time(main: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """Run `main(clock)` in a loop in virtual time."""
    selector = _VirtualTime()

    def loop() -> asyncio.AbstractEventLoop:
        made = asyncio.SelectorEventLoop(selector)
        made.time = lambda: selector.now  # type: ignore[method-assign]
        return made

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main(lambda: selector.now))
