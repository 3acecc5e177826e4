"""A lasting fault that operators must know: logged once when it begins and once when it ends; `/readyz` lists it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class Fault:
    """One kind of fault. `problem` describes it for `/readyz` while it lasts; "" otherwise.

    Args:
        log: the logger of the component that has the fault.
        level: of the line that says that the fault began; its end is logged as information.
        monotonic: the clock, seconds.
    """

    def __init__(self, log: logging.Logger, level: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._level = level
        self._monotonic = monotonic
        self._since = 0.0
        self.problem = ""

    def begin(self, problem: str) -> None:
        """The fault was noticed, for the first time or again."""
        if not self.problem:
            self._since = self._monotonic()
            self._log.log(self._level, problem)
        self.problem = problem

    def end(self, message: str) -> None:
        """The fault is over. Does nothing if there was none."""
        if self.problem:
            self._log.info("%s (after %.1f s)", message, self._monotonic() - self._since)
            self.problem = ""
