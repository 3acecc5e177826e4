"""The page's paths, and the box's state for it. Nothing here runs, and nothing is in memory, until a browser asks.

GET  /console, /console/FILE     the page: static files, the same for everyone, without an API key
GET  /console/state              the box at this moment
POST /console/what-if            {id, signals: {name: value}} → a recorded request decided anew; nothing is run

The last two need the API key where `server.keys` names some, as `/v1/decisions` does; the page asks for it. They answer
the page that this daemon served and no other origin: nothing sends CORS headers.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import hdrs, web

from router.checks.what_if import what_if
from router.errors import NotFound
from router.openai.request_body import check_media_type, load, validate
from router.serving.console import HEADERS, file_response, page_files
from router.serving.request import Handler
from router.serving.responses import JSON
from router.types import Snapshot

from ..daemon.components import Components
from ..http.api import RequestReader
from ..http.inspection import Readiness
from ..observability.metrics import RequestCount
from ..storage.decisions import DecisionStore
from ..storage.policies import PolicyStore

PAGE: Final = Path(__file__).parent / "page"


class WhatIfQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/console/what-if`: a decision's id, and signals with the values that they shall have."""

    id: str
    signals: dict[str, object] = {}


class Console:
    """Answers the page's requests.

    Args:
        reader: Checks API keys and reads bodies.
        decisions: The records.
        policies: The active policy decides recorded requests anew.
        state: Reads the box, for each request.
    """

    def __init__(
        self,
        *,
        reader: RequestReader,
        decisions: DecisionStore,
        policies: PolicyStore,
        state: Callable[[], ConsoleState],
    ) -> None:
        self._reader = reader
        self._decisions = decisions
        self._policies = policies
        self._state = state

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        """Return the method and the handler of each path."""
        return {
            **{name: ("GET", partial(file_response, path)) for name, path in page_files(PAGE).items()},
            "/console/state": ("GET", self._read_state),
            "/console/what-if": ("POST", self._what_if),
        }

    async def _read_state(self, http: web.BaseRequest) -> web.StreamResponse:
        self._reader.caller(http)
        return _json(self._state())

    async def _what_if(self, http: web.BaseRequest) -> web.StreamResponse:
        caller = self._reader.caller(http)
        check_media_type(http.headers.get(hdrs.CONTENT_TYPE), http.headers.get(hdrs.CONTENT_ENCODING))
        question = validate(load(await self._reader.body(http)), WhatIfQuestion)
        record = await self._decisions.get(question.id, client=caller.reads_decisions_of)
        if record is None:
            raise NotFound(f"no decision {question.id[:100]!r}; old ones are deleted")
        return _json(what_if(self._policies.active, record, question.signals))


def _json(value: object) -> web.Response:
    headers = {**HEADERS, "Content-Type": JSON, "Cache-Control": "no-store"}
    return web.Response(body=msgspec.json.encode(value), headers=headers)


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
