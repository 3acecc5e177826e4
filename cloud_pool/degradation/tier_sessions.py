"""Sessions at a gateway: the tier that answers the turns of an agent, shared by all gateways of one Redis.

    causeway:sessions:{<digest>}        zset: keys of the tenant's sessions by their last turn
    causeway:sessions:{<digest>}:<key>  string: state, without content (`router.decision.sessions`), by owner and turn

Each gateway also remembers its own newest sessions: they are all there is without Redis, and while it is unavailable.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from typing import Final

import anyio
import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from causeway_server.router.decision.sessions import NO_SESSION, SessionTurn, bound, keys_of, outcome_of, session_of
from causeway_server.router.residency import regions_of
from causeway_server.router.types import Request, Session, decode_row

from ..core.request_context import REASON_HEADER, VARIANT_HEADER, AnswerHead, TierTurn
from ..redis.connect import client_fault
from ..redis.keys import load_script
from .config import TierSessionsConfig

HEADER: Final = "x-causeway-session"
_TIMEOUT_S: Final = 0.5
_decoder = msgspec.msgpack.Decoder(Session)
_encode = msgspec.msgpack.Encoder().encode
log = logging.getLogger(__name__)


class TierSessions:
    """The sessions of one process. `chains`: the tiers that may answer for each; `wall_clock`: Unix seconds.

    `client`: Redis; None: the sessions of this process only.
    """

    def __init__(
        self,
        config: TierSessionsConfig,
        chains: Mapping[str, Collection[str]],
        client: redis.asyncio.Redis | None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._chains = chains
        self._redis = client
        self._now = wall_clock
        self._script = None if client is None else client.register_script(load_script(__package__, "keep_session"))
        self._own: dict[str, OrderedDict[bytes, Session]] = {}  # by tenant
        self.fault = ""

    async def bind(self, request: Request, tenant: str, owner: str) -> None:
        """Bind the session of a request that was read to the request's regions, whatever becomes of it."""
        if request.kind != "chat" or (regions := regions_of(request.hints.tags)) is None:
            return
        keys = keys_of(request, owner)
        known = await self._read(tenant, keys.owner, keys.bindings)
        own = {key: known.get(key, NO_SESSION) for key in keys.bindings}
        states = {key: bound(state, on_device=False, regions=regions) for key, state in own.items()}
        if states != own:
            now = self._now()
            stamped = {key: msgspec.structs.replace(one, at=now) for key, one in states.items()}
            await self._write(tenant, keys.owner, stamped)

    async def find(
        self, request: Request, tenant: str, owner: str, tier: str, *, is_placed: bool = False
    ) -> TierTurn | None:
        """Return the turn of a request for `tier`; None if it is not a chat. `is_placed`: an accepted job, which stays
        there. Raises SessionTargetUnavailable if the only tier that may answer cannot be that of the request.
        """
        if request.kind != "chat":
            return None
        keys = keys_of(request, owner)
        known = await self._read(tenant, keys.owner, keys.known)
        session = session_of(keys, known.get, self._now())
        turn = TierTurn(SessionTurn(keys, session), tenant)
        pinned = session.target and (self._config.pin == "conversation" or session.tool_result)
        if not pinned:
            return turn
        only = self._config.mode == "require"
        asked = TierTurn(turn.turn, tenant, session.target, session.model, only)
        if session.target in self._chains.get(tier, ()):
            return asked
        if only and not is_placed:
            raise asked.gone(f"That tier does not answer requests for `{tier}`. Name `{session.target}` as the model.")
        return turn

    def decided(self, turn: TierTurn, head: AnswerHead) -> AnswerHead:
        """Note the tier that answers, and return the head with the session's header."""
        own = turn.turn
        own.outcome = outcome_of(own.session, None, head.model, head.header(VARIANT_HEADER), head.header(REASON_HEADER))
        return msgspec.structs.replace(head, headers=(*head.headers, (HEADER, own.outcome.header)))

    async def keep(self, turn: TierTurn, head: AnswerHead, request: Request) -> None:
        """Keep the session after a complete answer. Never raises."""
        regions = regions_of(request.hints.tags)
        state = msgspec.structs.replace(
            turn.turn.session,
            target=head.model,
            model=head.header(VARIANT_HEADER),
            regions=None if regions is None else tuple(sorted(regions)),
            tool_result=False,
            at=self._now(),
        )
        states, owner = turn.turn.states(state), turn.turn.keys.owner
        known = await self._read(turn.tenant, owner, states)  # another turn may have been bound since
        for key, one in known.items():
            states[key] = bound(state, on_device=False, regions=one.regions)
        await self._write(turn.tenant, owner, states)

    async def _write(self, tenant: str, owner: bytes, states: Mapping[bytes, Session]) -> None:
        own = self._own.setdefault(tenant, OrderedDict())
        for key, state in states.items():
            own[key] = state
            own.move_to_end(key)
        while len(own) > self._config.max_per_tenant:
            own.popitem(last=False)
        if self._script is None:
            return
        rows = [part for key, state in states.items() for part in ((owner + key).hex(), _encode(state))]
        arguments = [int(self._config.ttl_s * 1000), self._config.max_per_tenant, *rows]
        try:
            with anyio.fail_after(_TIMEOUT_S):
                await self._script([list_of(tenant)], arguments)
            self.fault = ""
        except (RedisError, OSError, TimeoutError) as error:
            self._note(error)

    async def _read(self, tenant: str, owner: bytes, keys: Collection[bytes]) -> dict[bytes, Session]:
        """Return the states that are known; this gateway's own while Redis is unavailable."""
        oldest = self._now() - self._config.ttl_s
        own: Mapping[bytes, Session] = self._own.get(tenant, {})
        found = {key: own[key] for key in keys if key in own and own[key].at > oldest}
        if self._redis is None:
            return found
        try:
            with anyio.fail_after(_TIMEOUT_S):
                rows = await self._redis.mget([f"{list_of(tenant)}:{(owner + key).hex()}" for key in keys])
        except (RedisError, OSError, TimeoutError) as error:
            self._note(error)
            return found
        for key, row in zip(keys, rows, strict=True):
            state, known = decode_row(_decoder, row), found.get(key, NO_SESSION)
            if state is not None:
                # The clock of one gateway may be ahead: what either of the two is bound to holds.
                last, other = (state, known) if state.at >= known.at else (known, state)
                found[key] = bound(last, on_device=False, regions=other.regions)
        return found

    def _note(self, error: Exception) -> None:
        if not self.fault and self._redis is not None:
            log.warning("Sessions are not shared between gateways: %s", client_fault(error, self._redis))
        self.fault = "Sessions are known to each gateway alone, because their Redis is unavailable."


def list_of(tenant: str) -> str:
    """Return the key of the list of a tenant's sessions, with which the keys of their states begin."""
    return f"causeway:sessions:{{{blake2b(tenant.encode('utf-8', 'replace'), digest_size=16).hexdigest()}}}"
