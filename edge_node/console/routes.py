"""The page's paths, and the device's state for the page. Everything is loaded at the first request of a browser.

GET  /console, /console/FILE     the page: static files, the same for everyone, without an API key
GET  /console/state              the device at this moment
POST /console/what-if            {id, signals: {name: value}} → a recorded request, decided again without running it
POST /console/policy             {policy: TEXT} → a draft's problems, and a replay of the newest decisions under it

The last three need an API key if `server.keys` lists any, as `/v1/decisions` does; the page asks for it. They send no
CORS headers, so that only the page of this daemon can read them.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from causeway_server.router.errors import NotFound
from causeway_server.router.openai.request_body import check_media_type, load, validate
from causeway_server.router.serving.console import HEADERS, file_response, page_files
from causeway_server.router.serving.request import AiohttpRequest
from causeway_server.router.serving.responses import Handler, ServerResponse, json_response
from causeway_server.router.types import Snapshot

from ..daemon.components import Components
from ..http.inspection import Readiness
from ..observability.metrics import RequestCount
from ..storage.decisions import DecisionQuery

if TYPE_CHECKING:  # most devices are not in a fleet and load none of its code
    from ..agent.agent import Agent
    from ..agent.journal import JournalRow
    from ..agent.trial import TrialProgress

PAGE: Final = Path(__file__).parent / "page"
_ROWS = 20  # rows of the journal: two updates
_REPLAYED = 500  # the newest decisions, over which a draft is replayed
_TRIAL_S: Final = 10.0  # of a draft


class WhatIfQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/console/what-if`: a decision's id, and the values to assume for signals."""

    id: str
    signals: dict[str, object] = {}


class PolicyDraft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/console/policy`. `policy`: the text of a draft; None for the active policy."""

    policy: str | None = None


class Console:
    """The request handlers of the page.

    Args:
        parts: The daemon's components; the active policy decides recorded requests again.
        agent: The agent of a device in a fleet; None without one.
    """

    def __init__(self, parts: Components, agent: Agent | None) -> None:
        self._parts = parts
        self._agent = agent
        self._trying = asyncio.Lock()  # one draft at a time: requests need the processor, too

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        return {
            **{name: ("GET", partial(file_response, path)) for name, path in page_files(PAGE).items()},
            "/console/state": ("GET", self._read_state),
            "/console/what-if": ("POST", self._what_if),
            "/console/policy": ("POST", self._try_policy),
        }

    async def _read_state(self, http: AiohttpRequest) -> ServerResponse:
        self._parts.reader.caller(http)
        return _json(read_state(self._parts, self._agent))

    async def _what_if(self, http: AiohttpRequest) -> ServerResponse:
        parts = self._parts
        caller = parts.reader.caller(http)
        check_media_type(http.headers.get("Content-Type"), http.headers.get("Content-Encoding"))
        question = validate(load(await parts.reader.body(http)), WhatIfQuestion)
        record = await parts.decisions.get(question.id, client=caller.reads_decisions_of)
        if record is None:
            raise NotFound(f"Decision {question.id[:100]!r} not found. Old decision records are deleted.")
        # loaded on demand: much code, for a page that is seldom opened
        from causeway_server.router.checks.what_if import what_if

        return _json(what_if(parts.policies.active, record, question.signals))

    async def _try_policy(self, http: AiohttpRequest) -> ServerResponse:
        parts = self._parts
        caller = parts.reader.caller(http)
        check_media_type(http.headers.get("Content-Type"), http.headers.get("Content-Encoding"))
        draft = validate(load(await parts.reader.body(http)), PolicyDraft)
        query = DecisionQuery(limit=_REPLAYED, client=caller.reads_decisions_of)
        records = await parts.decisions.find(query, caller.name)
        from causeway_server.router.checks.replay import report_draft
        from causeway_server.router.serving.console.apart import run_apart

        policies = parts.policies
        models = {target.model for target in policies.active.targets if target.at == "edge"}
        adapters = {name: found for name in models if (found := policies.model_adapters(name)) is not None}
        text = policies.text if draft.policy is None else draft.policy
        work = partial(run_apart, _TRIAL_S, report_draft, text, policies.text, records, adapters)
        async with self._trying:
            report = await asyncio.to_thread(work)
        return _json(report)


def _json(value: object) -> ServerResponse:
    return json_response(value, headers={**HEADERS, "Cache-Control": "no-store"})


class FleetState(msgspec.Struct, frozen=True):
    """The field `fleet` in the body of `/console/state`. Times are Unix seconds.

    Attributes:
        fleet: The fleet's name; "" for a device without a control plane, as are `device` and `cohort`.
        reachable: Whether the last request to the control plane succeeded; None: there is no control plane.
        last_seen: Time of the control plane's last response; 0.0: none since the daemon started.
        row: The newest row of the journal: the agent's state, its last refusal, the quarantined bundles.
        doing: Description of the agent's work in this state.
        running: The bundle that serves requests; None: the factory files.
        wanted: The bundle that the plan assigns; None if it is the running one.
        serials: The number in its cohort of each bundle whose manifest this daemon has read.
        trial: Progress of the trial; None if there is none.
        journal: The earlier rows, newest first, without the fields that only the newest row needs.
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
        readiness: The same as in `/readyz`.
        snapshot: The signals that a decision would read now.
        running: Number of generations in progress, out of at most `concurrent`.
        waiting: Number of queued requests, out of at most `queue`.
        requests: Number of requests since the daemon started.
        fleet: The device in its fleet; None if it has not joined one.
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
    """Return the state of the daemon with these parts. `agent`: the agent of a device in a fleet."""
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
