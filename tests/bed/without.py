"""`python -m tests.bed.without MECHANISM serve|worker ...`: the gateway or a worker with one mechanism switched off.

The product has no such switches. Where a configuration key turns a mechanism off, `CONFIG` has it; otherwise `PATCHES`
replaces the function that makes it work, before the program starts.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from causeway_server.cloud_pool.admission import scheduler
from causeway_server.cloud_pool.admission.permits import PermitAllocator
from causeway_server.cloud_pool.cache.store import AnswerStore, RemoteLeader, StreamEntry
from causeway_server.cloud_pool.degradation import fallback
from causeway_server.cloud_pool.degradation.tier_health import offer_share
from causeway_server.cloud_pool.dispatch import endpoint_selection
from causeway_server.cloud_pool.observability.metrics import EventLoopLag
from tests.tool import run_tool


class Off(msgspec.Struct, frozen=True):
    """What the gateway's configuration says when a mechanism is off: in each tier, and at the top level."""

    tier: dict[str, Any] = {}
    top: dict[str, Any] = {}


CONFIG: dict[str, Off] = {
    "kept places": Off(tier={"admission": {"reserved_share": 0}}),
    "preemption": Off(tier={"admission": {"preemption_share": 0}}),
    "warm-up": Off(top={"degradation": {"warm_up_after_idle_s": 0}}),
}


def _without_trust() -> None:
    """Late first tokens count in the measured slowness only; no endpoint becomes `slow` or goes on trial."""
    vars(endpoint_selection)["LATE_LIMIT"] = 1_000_000_000


def _without_credits() -> None:
    """A light tenant has no requests ahead of its turn."""
    vars(scheduler)["_credit"] = lambda permits: 0.0


def _without_bunching() -> None:
    """A flood's sequences may all start together."""
    setattr(PermitAllocator, "is_bunched", lambda self, even_pending: False)  # noqa: B010


def _without_lag_correction() -> None:
    """A first token that was read late counts as one that came late."""
    setattr(EventLoopLag, "lost_s", lambda self: 0.0)  # noqa: B010


def _without_shares_by_device() -> None:
    """A tier's share is drawn for each request instead of for each device."""
    vars(fallback)["offer_share"] = lambda health, position: offer_share(health, random.random())


def _without_answer_streaming() -> None:
    """A request that follows an equal one at another gateway gets that answer when it is complete."""
    read = AnswerStore.read
    held: dict[RemoteLeader, list[StreamEntry]] = {}

    async def read_whole(self: AnswerStore, leader: RemoteLeader, after: bytes, wait_s: float) -> list[StreamEntry]:
        waiting = held.setdefault(leader, [])
        waiting += await read(self, leader, waiting[-1].id if waiting else after, wait_s)
        return held.pop(leader) if any(entry.kind != b"chunks" for entry in waiting) else []

    setattr(AnswerStore, "read", read_whole)  # noqa: B010


PATCHES: dict[str, Callable[[], None]] = {
    "trust": _without_trust,
    "credits": _without_credits,
    "bunching": _without_bunching,
    "lag correction": _without_lag_correction,
    "shares by device": _without_shares_by_device,
    "answer streaming": _without_answer_streaming,
}


MECHANISMS = (*CONFIG, *PATCHES)


def add_without(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--without", choices=MECHANISMS, default="", help="a mechanism that is off")


def main() -> None:
    mechanism = sys.argv.pop(1)
    PATCHES[mechanism]()
    from causeway_server.cloud_pool.cli.main import main as run

    run()


if __name__ == "__main__":
    sys.exit(run_tool(main))
