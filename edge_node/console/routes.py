"""The page's paths, and the device's state for it. Nothing here runs, and nothing is in memory, until a browser asks.

GET  /console, /console/FILE     the page: static files, the same for everyone, without an API key
GET  /console/state              the device at this moment
POST /console/what-if            {id, signals: {name: value}} → a recorded request decided anew; nothing is run

The last two need the API key where `server.keys` names some, as `/v1/decisions` does; the page asks for it. They answer
the page that this daemon served and no other origin: nothing sends CORS headers.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import hdrs, web

from causeway_server.router.errors import NotFound
from causeway_server.router.openai.request_body import check_media_type, load, validate
from causeway_server.router.serving.console import HEADERS, file_response, page_files
from causeway_server.router.serving.request import Handler
from causeway_server.router.serving.responses import JSON
from causeway_server.router.types import Snapshot

from ..daemon.components import Components
from ..http.inspection import Readiness
from ..observability.metrics import RequestCount

if TYPE_CHECKING:  # most devices are in no fleet and load none of its code
    from ..agent.agent import Agent
    from ..agent.journal import JournalRow
    from ..agent.trial import TrialProgress

PAGE: Final = Path(__file__).parent / "page"
_ROWS = 20  # of the journal: two updates


class WhatIfQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/console/what-if`: a decision's id, and signals with the values that they shall have."""

    id: str
    signals: dict[str, object] = {}


class Console:
    """Answers the page's requests.

    Args:
        parts: The daemon's components; the active policy decides recorded requests anew.
        agent: Of a device in a fleet.
    """

    def __init__(self, parts: Components, agent: Agent | None) -> None:
        self._parts = parts
        self._agent = agent

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        """Return the method and the handler of each path."""
        return {
            **{name: ("GET", partial(file_response, path)) for name, path in page_files(PAGE).items()},
            "/console/state": ("GET", self._read_state),
            "/console/what-if": ("POST", self._what_if),
        }

    async def _read_state(self, http: web.BaseRequest) -> web.StreamResponse:
        self._parts.reader.caller(http)
        return _json(read_state(self._parts, self._agent))

    async def _what_if(self, http: web.BaseRequest) -> web.StreamResponse:
        parts = self._parts
        caller = parts.reader.caller(http)
        check_media_type(http.headers.get(hdrs.CONTENT_TYPE), http.headers.get(hdrs.CONTENT_ENCODING))
        question = validate(load(await parts.reader.body(http)), WhatIfQuestion)
        record = await parts.decisions.get(question.id, client=caller.reads_decisions_of)
        if record is None:
            raise NotFound(f"no decision {question.id[:100]!r}; old ones are deleted")
        from causeway_server.router.checks.what_if import what_if  # much code, for a page that few open

        return _json(what_if(parts.policies.active, record, question.signals))


def _json(value: object) -> web.Response:
    headers = {**HEADERS, "Content-Type": JSON, "Cache-Control": "no-store"}
    return web.Response(body=msgspec.json.encode(value), headers=headers)


class FleetState(msgspec.Struct, frozen=True):
    """The body's part `fleet` of `/console/state`. Times are Unix seconds.

    Attributes:
        fleet: The fleet's name; "" for a device without a control plane, as are `device` and `cohort`.
        reachable: Whether the control plane answered last; None: there is none.
        last_seen: When it answered last; 0.0: not since the daemon started.
        row: The newest row of the journal: the agent's state, its last refusal, the bundles in quarantine.
        doing: What the agent does in this state.
        running: The bundle that serves requests; None: the device's own files.
        wanted: The bundle that the plan assigns, if another one.
        serials: The number in its cohort of each bundle whose manifest this daemon has read.
        trial: How far the trial is; None: none is in progress.
        journal: The rows before, the newest first, without what only the newest tells.
    """

    fleet: str
    device: str
    cohort: str
    reachable: bool | None
    last_seen: float
    row: JournalRow
    doing: str
    running: str | None
    wanted: str | None
    serials: dict[str, int]
    trial: TrialProgress | None
    journal: tuple[JournalRow, ...]


class ConsoleState(msgspec.Struct, frozen=True):
    """The body of `/console/state`.

    Attributes:
        device: The host's name.
        now: The device's clock, Unix seconds.
        readiness: As in `/readyz`.
        snapshot: The signals that a decision would read now.
        running: Generations in progress, of `concurrent` at most.
        waiting: Requests in the queue, of `queue` at most.
        requests: Requests since the daemon started.
        fleet: The device in its fleet; None for one that joined none.
    """

    device: str
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
    """Return the state of the daemon with these parts. `agent`: of a device in a fleet."""
    policy = parts.policies.active
    admission = parts.admission
    return ConsoleState(
        device=platform.node(),
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
    from ..agent.journal import MEANING

    row, connection = agent.row, parts.fleet
    identity = None if connection is None else connection.identity
    return FleetState(
        fleet="" if identity is None else identity.fleet,
        device="" if identity is None else identity.device,
        cohort="" if identity is None else identity.cohort,
        reachable=None if connection is None else connection.reachable,
        last_seen=0.0 if connection is None else connection.last_seen,
        row=row,
        doing=MEANING[row.state],
        running=agent.running,
        wanted=agent.wanted,
        serials=agent.serials,
        trial=agent.trial,
        journal=tuple(
            msgspec.structs.replace(one, quarantined={}, before=None) for one in reversed(agent.rows[-_ROWS:])
        ),
    )
