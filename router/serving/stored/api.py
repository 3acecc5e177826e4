"""Stored responses and conversations over HTTP. Every handler acts for one client alone."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ...errors import (
    CausewayError,
    ClientGone,
    InvalidRequest,
    MethodNotAllowed,
    QueueFull,
    StreamBroken,
    UnsupportedFeature,
)
from ...numbers import read_page, whole_number
from ...openai.answer import DONE
from ...openai.request_body import JSONObject, load, validate
from ...openai.responses.encoder import failure, replay
from ...openai.responses.state import (
    StoredConversation,
    StoredTurn,
    WireConversation,
    WireItems,
    added_items,
    group_of,
    item_not_found,
    new_turn_id,
    without_item,
)
from ...trackers import FairShare, network_of
from ...types import folded_tags
from ..request import TAGS, AiohttpRequest, HttpExchange, allowed_methods, served_method
from ..responses import STREAMED, EventStream, ServerResponse, body_response, header_lines, json_response
from .ports import BindItems, RunText
from .responses import StoredResponses, not_found

_PATTERNS: Final = {
    "/v1/responses/{id}": "GET, DELETE",
    "/v1/responses/{id}/cancel": "POST",
    "/v1/responses/{id}/input_items": "GET",
    "/v1/conversations": "POST",
    "/v1/conversations/{id}": "GET, POST, DELETE",
    "/v1/conversations/{id}/items": "GET, POST",
    "/v1/conversations/{id}/items/{item_id}": "GET, DELETE",
}
PATHS: Final[Mapping[str, str]] = _PATTERNS
"""Methods by path; `{…}` stands for one step."""
_COMPILED: Final = {re.compile(re.sub(r"\{\w+\}", "[^/]+", path)): methods for path, methods in _PATTERNS.items()}
_COMMENT: Final = b": still there\n\n"
_DATA: Final = b"\ndata: "  # once in each event
_SILENT_POLLS = 15
_BEGUN_AGAIN: Final = "Another run makes the answer, which begins again. Follow the response from its beginning."
_encode = msgspec.json.encode


class _ItemPage(msgspec.Struct):
    data: list[JSONObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class _Deleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool = True


@dataclass(eq=False, repr=False)
class StoredResponseApi:
    """The handlers. `max_streams`: maximum number of clients that follow responses; one client may have half of it."""

    stored: StoredResponses
    max_streams: int = 64

    def __post_init__(self) -> None:
        self._streams = FairShare(self.max_streams)

    async def handle(
        self,
        http: AiohttpRequest,
        owner: str,
        body: Callable[[], Awaitable[bytes]],
        served: Callable[[], bool],
        bind: BindItems,
    ) -> ServerResponse:
        """Handle a request of `PATHS`. `served`: returns whether a stream may go on, and may raise CausewayError;
        `bind`: binds the items that the request adds.
        """
        kind, *names = http.path.split("/")[2:]
        method = served_method(http.method, http.headers)
        if kind == "responses":
            name, part = (*names, "")[:2]
            if part == "input_items":
                return self._page(http, await self._items_before(owner, await self.stored.turn(owner, name)))
            if part == "cancel":
                return await self._cancel(owner, name)
            if method == "DELETE":
                return await self._delete(owner, name, "response")
            return await self._get(http, owner, name, served)
        if len(names) == 3:
            return await self._item(owner, names[0], names[2], delete=method == "DELETE")
        if len(names) == 2:
            if method == "POST":
                return await self._add_items(owner, names[0], await body(), bind)
            _, turns = await self.stored.conversation(owner, names[0])
            return self._page(http, [item for turn in turns if not turn.pending for item in turn.items])
        if method == "DELETE":
            return await self._delete(owner, names[0], "conversation.deleted")
        if method == "POST":
            return await self._write_conversation(owner, names, await body(), bind)
        return json_response((await self.stored.conversation(owner, names[0]))[0])

    async def show(self, owner: str, name: str) -> ServerResponse:
        """Return a response as it is now, with headers that tell what binds it. Raises NotFound."""
        turn = await self.stored.turn(owner, name)
        bound = {TAGS: ",".join(turn.tags), "x-causeway-prefer": "only_on_device" if turn.private else ""}
        return body_response(bytes(turn.response), headers={name: value for name, value in bound.items() if value})

    async def _get(self, http: AiohttpRequest, owner: str, name: str, served: Callable[[], bool]) -> ServerResponse:
        turn = await self.stored.turn(owner, name)
        if http.query.get("stream") != "true":
            return await self.show(owner, name)
        response = msgspec.json.decode(turn.response, type=JSONObject)
        if not response.get("background"):
            raise UnsupportedFeature("`stream`: only a response in the background can be followed.", param="stream")
        after = -1
        if "starting_after" in http.query:
            number = whole_number(http.query["starting_after"], 1 << 31)
            if number is None:
                raise InvalidRequest("`starting_after` must be the number of an event.", param="starting_after")
            after = number
        return await self.follow(http, owner, name, served, after)

    async def follow(
        self, http: HttpExchange, owner: str, name: str, served: Callable[[], bool], after: int = -1
    ) -> ServerResponse:
        """Send the events of a response in the background, from the one after `after` to its end. Raises QueueFull."""
        stream, holder = EventStream(http, header_lines(STREAMED)), object()
        if not self._streams.hold(holder, network_of(owner)):
            message = f"You follow your share of {self.max_streams} event streams here. Poll the response instead."
            raise QueueFull(message, retry_after_s=5.0)
        try:
            async for events in self._events(owner, name, served, after):
                after += events.count(_DATA)
                stream.send(events)
                await stream.drain()
            stream.end(DONE)
        except ClientGone:
            raise
        except CausewayError as error:  # the client continues with `starting_after`
            stream.end(failure(error, after + 1) + DONE)
        finally:
            self._streams.release(holder)
        return stream

    async def _events(self, owner: str, name: str, served: Callable[[], bool], after: int) -> AsyncIterator[bytes]:
        sent, silent, run = b"", _SILENT_POLLS, RunText()
        shown: tuple[StoredTurn, RunText] | None = None
        while served():
            turn = await self.stored.turn(owner, name)
            run = await self.stored.jobs.text(owner, name, run) if turn.pending else RunText()
            accepted, response = (msgspec.json.decode(raw, type=JSONObject) for raw in (turn.accepted, turn.response))
            events = sent if shown == (turn, run) else replay(accepted, response, after, run.text)
            shown = turn, run
            if events.startswith(sent):
                if len(events) > len(sent):
                    yield events[len(sent) :]
                    sent, silent = events, 0
            elif response["status"] in ("failed", "cancelled"):  # of its text nothing is stored
                yield replay(accepted, response, max(after, -1) + sent.count(_DATA))
            elif not (turn.pending and sent.startswith(events)):
                raise StreamBroken(_BEGUN_AGAIN, phase="stream")
            if not turn.pending:
                return
            silent += 1
            if silent > _SILENT_POLLS:
                silent = 0
                yield _COMMENT
            await self.stored.jobs.change(owner, name)

    async def _cancel(self, owner: str, name: str) -> ServerResponse:
        turn = await self.stored.turn(owner, name)
        if not msgspec.json.decode(turn.response, type=JSONObject).get("background"):
            raise InvalidRequest("Only a response in the background can be cancelled.")
        if turn.pending:
            await self.stored.jobs.cancel(owner, name)
        return await self.show(owner, name)

    async def _delete(self, owner: str, name: str, kind: str) -> ServerResponse:
        if kind == "response":
            turn = await self.stored.turn(owner, name)
            if turn.pending:
                await self.stored.jobs.cancel(owner, name)
        if not await self.stored.store.delete(owner, name):
            raise not_found(name)
        return json_response(_Deleted(name, kind))

    async def _items_before(self, owner: str, turn: StoredTurn) -> list[JSONObject]:
        """Return the items that a response was made from: its own input, and what is left of the turns before it."""
        group = group_of(turn.id)
        if group != turn.id:
            _, turns = await self.stored.conversation(owner, group)
            before = turns[: next((at for at, one in enumerate(turns) if one.id == turn.id), 0)]
        else:
            before = [one for one in await self.stored.turns(owner, turn.chain) if one is not None]
        own = [msgspec.json.decode(item, type=JSONObject) for item in turn.input]
        return [*(item for one in before for item in one.items), *own]

    def _page(self, http: AiohttpRequest, items: list[JSONObject]) -> ServerResponse:
        """Return a page of items, the newest first unless `order` is `asc`."""
        limit, after = read_page(http.query)
        ordered = items if http.query.get("order") == "asc" else items[::-1]
        ids = [str(item.get("id")) for item in ordered]
        if after and after not in ids:
            raise item_not_found(after, "after")
        start = ids.index(after) + 1 if after else 0
        page, names = ordered[start : start + limit], ids[start : start + limit]
        first, last = (names[0], names[-1]) if names else (None, None)
        return json_response(_ItemPage(page, len(ids) > start + limit, first, last))

    async def _write_conversation(
        self, owner: str, names: Sequence[str], body: bytes, bind: BindItems
    ) -> ServerResponse:
        """Create a conversation, or replace the metadata of one."""
        stored, wire = self.stored, validate(load(body) if body else {}, WireConversation)
        if names:
            known, _ = await stored.conversation(owner, names[0])
            made = msgspec.structs.replace(known, metadata=wire.metadata or {})
        else:
            made = StoredConversation(f"conv_{stored.new_id()}", int(stored.wall_clock()), wire.metadata or {})
        items = None if names else wire.items
        added = await bind(added_items(items, new_turn_id(made.id, stored.new_id()))) if items else None
        await stored.store.put(owner, made.id, _encode(made), private=False, user="")
        if added is not None:
            await stored.put(owner, added)
        return json_response(made)

    async def _add_items(self, owner: str, name: str, body: bytes, bind: BindItems) -> ServerResponse:
        wire = validate(load(body), WireItems)
        _, turns = await self.stored.conversation(owner, name)
        added = await bind(added_items(wire.items, new_turn_id(name, self.stored.new_id())))
        tags = folded_tags(tag for turn in (*turns, added) for tag in turn.tags)
        added = msgspec.structs.replace(added, private=any(turn.private for turn in (*turns, added)), tags=tags)
        await self.stored.put(owner, added)
        items = [*added.items]
        return json_response(_ItemPage(items, False, str(items[0]["id"]), str(items[-1]["id"])))

    async def _item(self, owner: str, name: str, item_id: str, *, delete: bool) -> ServerResponse:
        conversation, turns = await self.stored.conversation(owner, name)
        for turn in turns:
            if turn.pending:
                continue
            item = next((item for item in turn.items if item.get("id") == item_id), None)
            if item is None:
                continue
            if not delete:
                return json_response(item)
            if (rest := without_item(turn, item_id)) is not None:
                await self.stored.put(owner, rest)
            return json_response(conversation)
        raise item_not_found(item_id)


def methods_of(path: str) -> str:
    """Return the methods of a path of stored responses; "" for any other path."""
    return next((methods for pattern, methods in _COMPILED.items() if pattern.fullmatch(path)), "")


def check_method(http: AiohttpRequest, methods: str) -> None:
    """Raise MethodNotAllowed unless the request has one of these methods."""
    if served_method(http.method, http.headers) not in methods.split(", "):
        allowed = allowed_methods(methods)
        raise MethodNotAllowed(f"{http.path[:200]} supports {allowed}, not {http.method[:20]}.", allow=allowed)
