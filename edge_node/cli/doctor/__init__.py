"""The command `causeway-edge doctor`, which checks everything that the daemon needs and tells how to fix each problem.

It changes nothing and may run beside a daemon. Read `report` first (all checks in order, printed or as JSON). Each
check is a function that returns one or more `Finding`s: see `packages`, `policy_and_models`, `report` and `network`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. `warn`: the daemon works, with reduced function. `fail`: it cannot start or answer."""

    check: str
    level: Level
    found: str
    advice: str = ""  # the fix; empty if the level is ok


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, "warn", found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(check, "fail", found, advice)


def worst(findings: Iterable[Finding]) -> Level:
    """Return the most severe level; ok for no findings."""
    levels = {finding.level for finding in findings}
    return "fail" if "fail" in levels else "warn" if "warn" in levels else "ok"
