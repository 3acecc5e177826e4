"""The box's state for the page, read at each request of the page."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import msgspec

from router.types import Snapshot

from ..daemon.components import Components
from ..http.inspection import Readiness
from ..observability.metrics import RequestCount

if TYPE_CHECKING:
    from ..agent.agent import Agent
    from .fleet import FleetState


class ConsoleState(msgspec.Struct, frozen=True):
    """The body of `/console/state`.

    Attributes:
        box: The host's name.
        now: The box's clock, Unix seconds.
        readiness: As in `/readyz`.
        snapshot: The signals that a decision would read now.
        running: Generations in progress, of `concurrent` at most.
        waiting: Requests in the queue, of `queue` at most.
        requests: Requests since the daemon started.
        fleet: The box in its fleet; None for one that joined none.
    """

    box: str
    now: float
    readiness: Readiness
    snapshot: Snapshot
    running: int
    waiting: int
    concurrent: int
    queue: int
    requests: tuple[RequestCount, ...]
    fleet: FleetState | None


def read_state(parts: Components, agent: Agent | None) -> ConsoleState:
    """Return the state of the daemon with these parts. `agent`: of a box in a fleet."""
    policy = parts.policies.active
    admission = parts.admission.stats()
    return ConsoleState(
        box=platform.node(),
        now=parts.clock.unix(),
        readiness=parts.readiness(),
        snapshot=parts.signals.snapshot(policy),
        running=admission.running,
        waiting=admission.waiting,
        concurrent=policy.limits.concurrent,
        queue=policy.limits.queue,
        requests=parts.metrics.request_counts(),
        fleet=_read_fleet(parts, agent),
    )


def _read_fleet(parts: Components, agent: Agent | None) -> FleetState | None:
    if agent is None:
        return None
    from .fleet import read_fleet  # most boxes are in no fleet and load none of its code

    return read_fleet(agent, parts.fleet)
