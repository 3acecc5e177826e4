"""An event loop whose time a test moves: deadlines of minutes pass at once, and none passes by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_LATER_S = 61.0  # past every request's deadline


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time `jump` moves."""

    _ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self._ahead_s

    def jump(self, seconds: float = _LATER_S) -> None:
        self._ahead_s += seconds


def run_jumping(test: Callable[[JumpingLoop], Awaitable[None]]) -> None:
    """Run a test on a loop that it may move."""
    loop = JumpingLoop()

    async def main() -> None:
        await test(loop)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
