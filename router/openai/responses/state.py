"""The state of responses: what a request names of earlier ones, and what is stored of each.

A turn is a response with its input, or the items that a client adds to a conversation. An id tells where its object is:

    resp_<24 hex>                              a turn of its own
    conv_<24 hex>                              a conversation
    resp_<24 hex of the conversation><24 hex>  a turn of a conversation
    <kind>_<hex of the turn>_<number>          an item of a turn's output, `_i<number>` of its input
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw

from ...errors import InvalidRequest, NotFound
from ...session_tags import session_tag
from ...types import Request, RoutingHints, folded_tags
from ..request_body import JSONObject, load, validate
from .request import ResponseEcho, WireItem, WireResponse, parse_document, with_item_types

MAX_CHAIN: Final = 1000
"""Maximum number of turns that one response continues."""
_MARKS: Final = (b'"store"', b'"previous_response_id"', b'"conversation"', b'"background"', b'"item_reference"')
_ID_HEX: Final = 24
_TURN: Final = re.compile(r"resp_([0-9a-f]{24}|[0-9a-f]{48})")
_ITEM: Final = re.compile(r"[a-z]+_([0-9a-f]{24}|[0-9a-f]{48})_i?[0-9]+")
_PREFIXES: Final = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs", "compaction": "cmp"}
_encode = msgspec.json.Encoder().encode
_REFERENCE: Final = "item_reference"
_PLACEHOLDER: Final = {"type": "reasoning"}  # of a reference, while the rest of the body is validated


class NotEnded(InvalidRequest, status=409, code="response_not_ended"):
    """The response is still being made, so it cannot be continued."""


class StoredConversation(msgspec.Struct, frozen=True):
    """A conversation, as the API shows it and as it is stored. `created_at`: Unix time in seconds."""

    id: str
    created_at: int
    metadata: dict[str, str] = {}
    object: str = "conversation"


class WireConversation(msgspec.Struct):
    """The body of a new conversation. `items`: its first ones."""

    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    items: list[JSONObject] | None = None


class WireItems(msgspec.Struct):
    """The body that adds items to a conversation."""

    items: Annotated[list[JSONObject], Meta(min_length=1)]


class StoredTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A turn as it is stored."""

    id: str
    chain: tuple[str, ...] = ()  # the ids of the turns before it, the oldest first. Turns of a conversation have none.
    input: tuple[Raw, ...] = ()
    accepted: Raw = Raw(b"null")  # the Response object of one in the background as it was accepted
    response: Raw = Raw(b"null")  # the Response object; null for items that a client added
    pending: bool = False  # whether the answer of one in the background has not been read from its job yet
    private: bool = False  # whether it must not leave this device
    tags: tuple[str, ...] = ()  # tags that bind to regions what continues it
    user: str = ""  # the end user that its request names

    @property
    def items(self) -> Iterator[JSONObject]:
        """The items of the turn, input first. Raises NotEnded."""
        if self.pending:
            raise NotEnded(f"The response {self.id} has not ended. Wait until its status is completed.")
        yield from (msgspec.json.decode(item, type=JSONObject) for item in self.input)
        yield from msgspec.json.decode(self.response, type=_Output | None) or ()


class _Output(msgspec.Struct):
    output: list[JSONObject] = []

    def __iter__(self) -> Iterator[JSONObject]:
        return iter(self.output)


class StateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A body, and what it names of stored responses."""

    document: JSONObject
    wire: WireResponse  # with a placeholder for each item that the input names by its id
    items: list[JSONObject]  # its input
    previous: str
    conversation: str
    background: bool
    stream: bool
    store: bool | None

    @property
    def references(self) -> list[str]:
        """The turns of the items that the input names by their id."""
        return [turn_of_item(str(item.get("id"))) for item in self.items if item["type"] == _REFERENCE]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a response whose state was resolved. `required`: the client was promised that the response is
    stored, so that it is a fault if it is not.
    """

    id: str
    document: JSONObject  # the request with its whole conversation as input, and without state
    resolved: bool  # whether items of other turns are part of it
    request: StateRequest
    chain: tuple[str, ...]
    input: tuple[Raw, ...]
    store: bool
    private: bool
    tags: tuple[str, ...] = ()  # tags of the turns that it continues, which bind it to regions

    @property
    def body(self) -> bytes:
        """The document as JSON."""
        return _encode(self.document)

    def parse(self, hints: RoutingHints) -> tuple[Request, ResponseEcho]:
        """Parse the document as `parse_response` does. Raises InvalidRequest."""
        plain = dict.fromkeys(_STATE & set(WireResponse.__struct_fields__))
        wire = None if self.resolved else msgspec.structs.replace(self.request.wire, **plain)
        return parse_document(self.document, hints, wire=wire)

    @property
    def required(self) -> bool:
        request = self.request
        return self.store and bool(request.store or request.background or request.conversation)

    @property
    def session_tags(self) -> tuple[str, ...]:
        """The tag of its conversation, or of its chain, as a session; () if nothing can continue it."""
        name = self.request.conversation or next(iter(self.chain), self.id if self.store else "")
        return (session_tag(name, "response"),) if name else ()

    def echo(self, echo: ResponseEcho) -> ResponseEcho:
        """Return the fields that the answer repeats, with those of its state, and its id."""
        request = self.request
        fields = msgspec.json.decode(echo.fields, type=JSONObject)
        fields |= {"store": self.store, "background": request.background}
        fields["previous_response_id"] = request.previous or None
        fields["conversation"] = {"id": request.conversation} if request.conversation else None
        return msgspec.structs.replace(echo, fields=_encode(fields).decode(), id=self.id if self.store else "")

    def stored(
        self, response: bytes, *, private: bool = False, pending: bool = False, tags: Iterable[str] = ()
    ) -> StoredTurn:
        """Return what is stored of the turn with this Response object. `tags`: those that bind it to regions."""
        raw = Raw(response)
        return StoredTurn(
            id=self.id,
            chain=self.chain,
            input=self.input,
            accepted=raw if pending else Raw(b"null"),
            response=raw,
            pending=pending,
            private=private or self.private,
            tags=folded_tags((*self.tags, *tags)),
            user=str(self.request.document.get("user") or ""),
        )


def names_state(body: bytes) -> bool:
    """Return whether a body may name stored responses, or ask to store its own."""
    return any(mark in body for mark in _MARKS)


def read_state(body: bytes) -> StateRequest:
    """Read what a body names of stored responses. Raises InvalidRequest for that, and for every other fault of it."""
    document = with_item_types(load(body))
    listed = document.get("input")
    given = listed if isinstance(listed, list) else []
    plain = [_PLACEHOLDER if isinstance(item, dict) and item["type"] == _REFERENCE else item for item in given]
    wire = validate({**document, "input": plain} if given else document, WireResponse)
    conversation = wire.conversation
    name = conversation if isinstance(conversation, str) else "" if conversation is None else conversation.id
    if name and wire.previous_response_id:
        message = "`previous_response_id`: a conversation has its own history. Send one of the two."
        raise InvalidRequest(message, param="previous_response_id")
    if wire.store is False and (wire.background or name):
        field = "background" if wire.background else "conversation"
        raise InvalidRequest(f"`store`: with `{field}` the response is stored. Leave `store` out.", param="store")
    named = Counter(str(item.get("id")) for item in given if item["type"] == _REFERENCE)
    if named.total() > len(named):  # a small body must not become one of gigabytes
        twice = next(name for name, times in named.items() if times > 1)
        raise InvalidRequest(f"`input` names the item {twice[:80]!r} twice. Name it once.", param="input")
    items: list[JSONObject] = given
    if isinstance(wire.input, str):
        items = [{"type": "message", "role": "user", "content": wire.input}]
    return StateRequest(
        document=document,
        wire=wire,
        items=items,
        previous=wire.previous_response_id or "",
        conversation=name,
        background=wire.background is True,
        stream=wire.stream is True,
        store=wire.store,
    )


def resolve(
    request: StateRequest, turn_id: str, history: Iterable[StoredTurn], named: Iterable[StoredTurn], *, store: bool
) -> Turn:
    """Return the turn of a request that continues the turns of `history`, the oldest first, and names items of `named`.
    Raises InvalidRequest if such an item is not there, or a turn has not ended.
    """
    turns, others = list(history), list(named)
    known = {str(item.get("id")): item for turn in others for item in turn.items}
    items = numbered([_referenced(item, known, at) for at, item in enumerate(request.items)], turn_id)
    document = {name: value for name, value in request.document.items() if name not in _STATE}
    document["input"] = [*(item for turn in turns for item in turn.items), *items]
    return Turn(
        id=turn_id,
        document=document,
        resolved=bool(turns or others),
        request=request,
        chain=() if request.conversation else tuple(turn.id for turn in turns),
        input=tuple(Raw(_encode(item)) for item in items),
        store=store,
        private=any(turn.private for turn in (*turns, *others)),
        tags=folded_tags(tag for turn in (*turns, *others) for tag in turn.tags),
    )


_STATE: Final = frozenset({"previous_response_id", "conversation", "background", "store", "stored_turn"})


def _referenced(item: JSONObject, known: dict[str, JSONObject], at: int) -> JSONObject:
    if item["type"] != _REFERENCE:
        return item
    found = known.get(str(item.get("id")))
    if found is None:
        raise item_not_found(str(item.get("id")), f"input[{at}].id")
    return found


def item_not_found(item: str, param: str | None = None) -> NotFound:
    """Return the error for an item that is not there, or belongs to another client."""
    message = f"Item {item[:80]!r} not found. It was not stored (`store: true` does that), has expired or was deleted."
    return NotFound(message, param=param)


def numbered(items: Sequence[JSONObject], turn_id: str) -> list[JSONObject]:
    """Return input items in the form of output items, with their ids."""
    suffix = turn_id.partition("_")[2]
    names = [f"{_PREFIXES.get(str(item['type']), 'msg')}_{suffix}_i{at}" for at, item in enumerate(items)]
    return [
        {**item, **_content_parts(item), "id": name, "status": "completed"}
        for name, item in zip(names, items, strict=True)
    ]


def _content_parts(item: JSONObject) -> JSONObject:
    """Return the content of a message that is a text as a list with one part."""
    text = item.get("content")
    if not isinstance(text, str):
        return {}
    if item.get("role") == "assistant":
        return {"content": [{"type": "output_text", "text": text, "annotations": []}]}
    return {"content": [{"type": "input_text", "text": text}]}


def added_items(items: Sequence[JSONObject], turn_id: str) -> StoredTurn:
    """Return the turn of items that a client adds to a conversation. Raises InvalidRequest."""
    typed = [{"type": "message", **item} for item in items]
    validate({"items": typed}, _Items)
    return StoredTurn(id=turn_id, input=tuple(Raw(_encode(item)) for item in numbered(typed, turn_id)))


class _Items(msgspec.Struct):
    items: list[WireItem]


def without_item(turn: StoredTurn, item_id: str) -> StoredTurn | None:
    """Return the turn without this item; None if it has none of this id."""

    def others(items: Iterable[JSONObject]) -> list[JSONObject]:
        return [item for item in items if item.get("id") != item_id]

    every = list(turn.items)
    if len(others(every)) == len(every):
        return None
    given = others(msgspec.json.decode(item, type=JSONObject) for item in turn.input)
    response = msgspec.json.decode(turn.response, type=JSONObject | None)
    if response is not None:
        response["output"] = others(msgspec.json.decode(turn.response, type=_Output))
    return msgspec.structs.replace(
        turn, input=tuple(Raw(_encode(item)) for item in given), response=Raw(_encode(response))
    )


def new_turn_id(conversation: str, own: str) -> str:
    """Return the id of a turn. `conversation`: "" for none; `own`: 24 random hexadecimal digits."""
    return f"resp_{conversation.partition('_')[2]}{own}"


def group_of(name: str) -> str:
    """Return what an object is stored, expires and is deleted with: its conversation, or itself."""
    digits = name.partition("_")[2]
    return f"conv_{digits[:_ID_HEX]}" if name.startswith("resp_") and len(digits) > _ID_HEX else name


def turn_of_item(item: str) -> str:
    """Return the id of an item's turn; "" if it is none of ours."""
    match = _ITEM.fullmatch(item)
    return f"resp_{match[1]}" if match else ""


def is_turn_id(name: str) -> bool:
    """Return whether an id has the form of a stored response's."""
    return _TURN.fullmatch(name) is not None
