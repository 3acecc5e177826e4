"""Sessions at a device: what is known of a request's session before it, and what is kept of it after its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from causeway_server.router.decision.decide import bound_at_arrival
from causeway_server.router.decision.sessions import (
    NO_SESSION,
    SessionTurn,
    answered,
    bound,
    is_pinned,
    keys_of,
    session_of,
)
from causeway_server.router.errors import JobStoreUnavailable
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.serving.reply import AnswerHead
from causeway_server.router.types import CachePlan, Estimates, Request, Session, Snapshot, Usage

from ..clock import Clock
from ..storage.sessions import SessionStore

if TYPE_CHECKING:
    from .generation import Generation

_NO_ESTIMATES = Estimates()


@dataclass(eq=False, repr=False)
class AgentSessions:
    """The sessions under policies with `session`."""

    store: SessionStore
    clock: Clock

    def turn(self, policy: Policy, request: Request) -> SessionTurn | None:
        """Return the turn of a request; None if its policy has no `session`, or it is not a chat."""
        if policy.session is None or request.kind != "chat":
            return None
        keys = keys_of(request, request.hints.client)
        return SessionTurn(keys, session_of(keys, partial(self.store.find, keys.owner), self.clock.unix()))

    def estimates(self, policy: Policy, request: Request) -> Estimates:
        """Return the estimates with which a decision about a request begins."""
        turn = self.turn(policy, request)
        return _NO_ESTIMATES if turn is None else Estimates(session=turn.session)

    def bypass(self, policy: Policy, session: Session) -> CachePlan | None:
        """Return the cache plan of a request that may not be answered by another request's answer; None: it may."""
        if not is_pinned(policy, session) and not session.on_device and session.regions is None:
            return None
        reason = "the session stays at its target, or is bound"
        return CachePlan(bypass=reason, private=session.on_device, regions=session.regions)

    def arrive(
        self, policy: Policy, request: Request, turn: SessionTurn, snapshot: Snapshot
    ) -> asyncio.Future[None] | None:
        """Bind the session of a request that was read, before it waits or is refused. Return what `written` awaits."""
        return self._bind(turn, *bound_at_arrival(policy, request, snapshot))

    def bind(self, turn: SessionTurn, generation: Generation) -> asyncio.Future[None] | None:
        """Bind the session of a request as it was decided, before its answer. Return what `written` awaits."""
        return self._bind(turn, generation.on_device, generation.regions)

    def _bind(self, turn: SessionTurn, on_device: bool, regions: Iterable[str] | None) -> asyncio.Future[None] | None:
        if not on_device and regions is None:
            return None
        states, owner = {}, turn.keys.owner
        for key in turn.keys.bindings:
            known = self.store.find(owner, key) or NO_SESSION
            binding = bound(known, on_device=on_device, regions=regions)
            if binding != known:
                states[key] = binding
        return self.store.put(owner, states) if states else None

    def keep(
        self, turn: SessionTurn, head: AnswerHead, generation: Generation, usage: Usage
    ) -> asyncio.Future[None] | None:
        """Keep the session after an answer, which another request may have generated. Return what `written` awaits."""
        target, tokens = generation.target, usage.prompt_tokens + usage.completion_tokens
        if head.route == "cache":
            target = next((one for one in generation.policy.targets if one.name == head.target), None)
            tokens = turn.session.warm.get(head.target, 0)
        if target is None:
            return None
        state = bound(turn.session, on_device=generation.on_device, regions=generation.regions)
        state = answered(state, target, tokens, self.clock.unix())
        states, owner = turn.states(state), turn.keys.owner
        for key in states:
            known = self.store.find(owner, key) or NO_SESSION  # another turn of the session may have been bound since
            states[key] = bound(state, on_device=known.on_device, regions=known.regions)
        return self.store.put(owner, states)


async def written(future: asyncio.Future[None] | None) -> None:
    """Wait until a state is on the disk. A disk that fails is a problem of `/readyz`, and not of the answer."""
    if future is not None:
        with suppress(JobStoreUnavailable):
            await future
