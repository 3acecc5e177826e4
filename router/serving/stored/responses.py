"""The state of responses: what a request names is resolved, and what is made of it is stored.

A client sees only what is its own: anything else is a 404, as if it did not exist. A response in the background is a
job, whose Idempotency-Key is the response's id; its answer is read from the job, and stored, when the job ends, or, if
that was interrupted, when a client first asks.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ...errors import CausewayError, InvalidRequest, NotFound
from ...jobs.job import JobState
from ...openai.request_body import JSONObject
from ...openai.responses.request import ResponseEcho, WireTurn
from ...openai.responses.state import (
    MAX_CHAIN,
    StateRequest,
    StoredConversation,
    StoredTurn,
    Turn,
    is_turn_id,
    new_turn_id,
    read_state,
    resolve,
)
from ...residency import check_region, regions_of
from .ports import BackgroundJobs, ReadHistory, StartJob, StateStore

log = logging.getLogger(__name__)
_encode = msgspec.json.encode
_decode_turn = msgspec.json.Decoder(StoredTurn).decode
_decode_conversation = msgspec.json.Decoder(StoredConversation).decode


@dataclass(eq=False, repr=False, kw_only=True)
class StoredResponses:
    """The state of responses. Every method acts for one client, `owner`, alone. `region`: this gateway's: what is bound
    to others is not read; None: not checked.
    """

    store: StateStore
    jobs: BackgroundJobs
    by_default: bool  # whether a response is stored if its request does not say
    region: str | None = None
    wall_clock: Callable[[], float] = time.time
    new_id: Callable[[], str] = lambda: secrets.token_hex(12)  # function that returns 24 random hexadecimal digits

    # --- requests ----------------------------------------------------------------------------------------------------

    async def begin(self, body: bytes, owner: str, key: str = "", elsewhere: ReadHistory | None = None) -> Turn:
        """Resolve what a body names. Two requests in the background with the same Idempotency-Key (`key`) are one.
        `elsewhere`: reads a response that is not stored here. Raises InvalidRequest, NotFound, or the store's own
        errors.
        """
        request = read_state(body)
        store = (self.by_default if request.store is None else request.store) or request.background
        store = store or bool(request.conversation)
        history = await self._history(owner, request)
        if history is None:
            last = None if elsewhere is None or not is_turn_id(request.previous) else await elsewhere(request.previous)
            if last is None:
                raise not_found(request.previous, "previous_response_id")
            history = [msgspec.structs.replace(last, id=new_turn_id("", self.new_id()))]
            if store:
                await self.put(owner, history[0])
        if len(history) > MAX_CHAIN:
            message = f"`previous_response_id`: a chain has at most {MAX_CHAIN} responses. Begin another one."
            raise InvalidRequest(message, param="previous_response_id")
        named = await self.turns(owner, list(dict.fromkeys(filter(None, request.references))))
        own = self.new_id()
        if key and request.background:
            own = hashlib.sha256(f"{owner}\0{key}".encode("utf-8", "replace")).hexdigest()[:24]
        turn_id = new_turn_id(request.conversation, own)
        return resolve(request, turn_id, history, [turn for turn in named if turn], store=store)

    async def keep(
        self, owner: str, turn: Turn, response: bytes, *, private: bool = False, tags: Iterable[str] = ()
    ) -> bool:
        """Store a turn with its Response object and the `tags` that bind to regions what continues it. Return False if
        that failed and the client was not promised it.
        """
        try:
            await self.put(owner, turn.stored(response, private=private, tags=tags))
        except CausewayError:
            if turn.required:
                raise
            return False
        return True

    async def accept(
        self, owner: str, turn: Turn, echo: ResponseEcho, model: str, start: StartJob, tags: Iterable[str] = ()
    ) -> None:
        """Store a response that a job will make, then `start` the job. Raises as that does, and nothing is stored.
        `model`: the one that the request names; `tags`: as for `keep`.
        """
        fields = msgspec.json.decode(echo.fields, type=JSONObject)
        response = {
            "id": turn.id,
            "object": "response",
            "created_at": int(self.wall_clock()),
            "model": model,
            "status": "queued",
            **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
            "output": [],
            **fields,
        }
        is_new = not (await self.store.read(owner, [turn.id]))[0]
        if is_new:
            await self.put(owner, turn.stored(_encode(response), pending=True, tags=tags))
        document = {name: value for name, value in turn.document.items() if name != "stream"}
        try:
            await start(turn.id, _encode({**document, "stored_turn": WireTurn(turn.id, fields)}))
        except CausewayError:
            if is_new:
                await self.store.delete(owner, turn.id)
            raise

    async def _history(self, owner: str, request: StateRequest) -> list[StoredTurn] | None:
        """Return the turns that a request continues; None if its last one is not there."""
        if request.conversation:
            return (await self.conversation(owner, request.conversation))[1]
        if not request.previous:
            return []
        param, name = "previous_response_id", request.previous
        (last,) = await self.turns(owner, [name]) if is_turn_id(name) else [None]
        if last is None or last.response == b"null":
            return None
        before = await self.turns(owner, last.chain)
        missing = next((gone for gone, turn in zip(last.chain, before, strict=True) if turn is None), None)
        if missing is not None:
            message = f"`{param}`: {name} continues {missing}, which has expired or was deleted. Send all as `input`."
            raise NotFound(message, param=param)
        return [*(turn for turn in before if turn is not None), last]

    # --- reading -----------------------------------------------------------------------------------------------------

    async def put(self, owner: str, turn: StoredTurn, *, only_known: bool = False) -> None:
        """Store a turn, in the place of one with its id. `only_known`: not if that was deleted."""
        data = _encode(turn)
        await self.store.put(owner, turn.id, data, private=turn.private, user=turn.user, only_known=only_known)

    async def settle(self, owner: str, body: bytes) -> None:
        """Store the end of a job with this body, if it is a response's: jobs are kept for less time than responses."""
        try:
            turn = msgspec.json.decode(body, type=_JobBody).stored_turn
            if turn is not None:
                await self.turns(owner, [turn.id])
        except CausewayError as error:
            log.warning("The answer of a background response is not stored yet: %s", error.message)

    async def turns(self, owner: str, names: Sequence[str]) -> list[StoredTurn | None]:
        """Return turns as they are now, None for each that is not there."""
        found = [_decode_turn(data) if data else None for data in await self.store.read(owner, names)]
        return [None if turn is None else await self._settled(owner, turn) for turn in found]

    async def turn(self, owner: str, name: str) -> StoredTurn:
        """Return a response. Raises NotFound."""
        (turn,) = await self.turns(owner, [name]) if is_turn_id(name) else [None]
        if turn is None or turn.response == b"null":
            raise not_found(name)
        return turn

    async def conversation(self, owner: str, name: str) -> tuple[StoredConversation, list[StoredTurn]]:
        """Return a conversation and its turns. Raises NotFound."""
        rows = await self.store.read_group(owner, name) if name.startswith("conv_") else []
        if not rows:
            raise NotFound(f"Conversation {name[:80]!r} not found. It has expired, was deleted, or never existed.")
        turns = [await self._settled(owner, _decode_turn(row)) for row in rows[1:]]
        return _decode_conversation(rows[0]), [turn for turn in turns if turn is not None]

    async def _settled(self, owner: str, turn: StoredTurn) -> StoredTurn | None:
        """Return a turn with its job's answer if that has ended; None if the job is gone. Raises OutsideRegion."""
        if self.region is not None:
            check_region(regions_of(turn.tags), self.region, "this gateway (identity.region)")
        if not turn.pending:
            return turn
        run = await self.jobs.look(owner, turn.id)
        if run is None:
            return None
        if run.state is JobState.SUCCEEDED:
            created_at = msgspec.json.decode(turn.accepted, type=JSONObject)["created_at"]
            made = msgspec.json.decode(run.result, type=JSONObject) | {"created_at": created_at}
            turn = msgspec.structs.replace(turn, response=msgspec.Raw(_encode(made)), pending=False)
        else:
            status, ended = _STATUS[run.state]
            response = msgspec.json.decode(turn.response, type=JSONObject) | {"status": status}
            if run.error and ended:
                response["error"] = msgspec.json.decode(run.error, type=_JobError)
            turn = msgspec.structs.replace(turn, response=msgspec.Raw(_encode(response)), pending=not ended)
        if not turn.pending:
            await self.put(owner, turn, only_known=True)
        return turn


class _JobBody(msgspec.Struct):
    stored_turn: WireTurn | None = None


class _JobError(msgspec.Struct):
    message: str
    code: str = "server_error"


_STATUS: Final[Mapping[JobState, tuple[str, bool]]] = {
    JobState.QUEUED: ("queued", False),
    JobState.WAITING: ("queued", False),
    JobState.RUNNING: ("in_progress", False),
    JobState.FAILED: ("failed", True),
    JobState.DEAD: ("failed", True),
    JobState.EXPIRED: ("failed", True),
    JobState.CANCELLED: ("cancelled", True),
}
"""The status of a response, and whether it has ended, by the state of its job."""


def not_found(name: str, param: str | None = None) -> NotFound:
    """Return the error for a response that is not there, or belongs to another client."""
    message = (
        f"Response {name[:80]!r} not found. It was not stored (`store: true` does that), has expired or was deleted."
    )
    return NotFound(message, param=param)
