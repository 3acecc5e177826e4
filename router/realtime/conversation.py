"""The conversation of one session: items in order, as JSON, bounded in number and size."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..errors import InvalidRequest, NotFound, UnsupportedFeature
from ..openai import parse_response
from ..types import RoutingHints
from .wire import JSONObject

ROOT = "root"
"""`previous_item_id` of an item that becomes the first."""

_encode = msgspec.json.Encoder().encode
_TYPES = ("message", "function_call", "function_call_output")
_FIELDS = ("type", "role", "content", "call_id", "name", "arguments", "output")


class ConversationFull(InvalidRequest):
    """The conversation has no room for another item."""

    code = "conversation_full"


class ConversationItem(msgspec.Struct, frozen=True):
    """`body`: the item's JSON, as the client sees it and as a request contains it."""

    id: str
    body: msgspec.Raw
    size_bytes: int


class Conversation:
    """Owns the items.

    Args:
        max_items: how many there may be.
        max_bytes: how large they may be together.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: list[ConversationItem] = []
        self._bytes = 0

    def __iter__(self) -> Iterator[ConversationItem]:
        return iter(self._items)

    def __contains__(self, item_id: str) -> bool:
        return any(item.id == item_id for item in self._items)

    def get(self, item_id: str) -> ConversationItem:
        """Raises NotFound."""
        return self._items[self._index(item_id)]

    def previous(self, item_id: str) -> str | None:
        """The id of the item before this one."""
        at = self._index(item_id)
        return self._items[at - 1].id if at else None

    def insert(self, item: ConversationItem, after: str | None = None) -> None:
        """Add an item, at the end or after another one.

        Raises:
            InvalidRequest: the conversation has an item of this id.
            NotFound: it has no item `after`.
            ConversationFull: the item alone is too large.
        """
        if item.id in self:
            raise InvalidRequest(f"The conversation has an item {item.id!r}. Send another `id`.", param="item.id")
        if item.size_bytes > self._max_bytes:
            message = f"The item has {item.size_bytes} bytes; a conversation may have {self._max_bytes}."
            raise ConversationFull(message, param="item")
        at = len(self._items) if after is None else 0 if after == ROOT else self._index(after, "previous_item_id") + 1
        self._items.insert(at, item)
        self._bytes += item.size_bytes

    def replace(self, item: ConversationItem) -> None:
        """Put an item in the place of the one with its id, if that is still there."""
        if item.id in self:
            at = self._index(item.id)
            self._bytes += item.size_bytes - self._items[at].size_bytes
            self._items[at] = item

    def delete(self, item_id: str) -> None:
        """Raises NotFound."""
        at = self._index(item_id)
        self._bytes -= self._items.pop(at).size_bytes

    def check_room(self, size_bytes: int = 0) -> None:
        """Raises ConversationFull if an item of this size does not fit beside the others."""
        if len(self._items) >= self._max_items or self._bytes + size_bytes > self._max_bytes:
            message = (
                f"The conversation has {len(self._items)} items of {self._bytes} bytes; it may have {self._max_items} "
                f"of {self._max_bytes} bytes. Delete some, or set `truncation` to auto."
            )
            raise ConversationFull(message, param="item")

    def shorten(self) -> list[str]:
        """Delete the oldest items beyond the bounds, all but the newest. Returns their ids."""
        deleted = []
        while len(self._items) > 1 and (len(self._items) > self._max_items or self._bytes > self._max_bytes):
            deleted.append(self._items[0].id)
            self.delete(deleted[-1])
        return deleted

    def _index(self, item_id: str, param: str = "item_id") -> int:
        for at, item in enumerate(self._items):
            if item.id == item_id:
                return at
        raise NotFound(f"The conversation has no item {item_id[:64]!r}.", param=param)


def read_item(document: JSONObject, item_id: str, param: str = "item") -> ConversationItem:
    """Check an item of a client. `item_id`: for one without an id.

    Raises:
        InvalidRequest: names the field that is wrong.
    """
    given = document.get("id")
    if given is not None and not (isinstance(given, str) and 1 <= len(given) <= 64):
        raise InvalidRequest(f"`{param}.id`: expected a string of 1 to 64 characters.", param=f"{param}.id")
    fields = {name: document[name] for name in _FIELDS if name in document}
    if fields.get("type") not in _TYPES:
        raise InvalidRequest(f"`{param}.type`: use {', '.join(_TYPES)}.", param=f"{param}.type")
    content = fields.get("content")
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") in ("input_audio", "output_audio"):
            raise UnsupportedFeature(
                f"`{param}.content[{at}]`: sessions here take and give text. Send `input_text`.",
                param=f"{param}.content[{at}]",
            )
    try:
        parse_response(_encode({"model": "auto", "input": [fields]}), RoutingHints())
    except InvalidRequest as error:
        where = param if error.param is None else error.param.replace("input[0]", param)
        raise type(error)(error.message.replace("input[0]", param), param=where) from None
    return make_item(given or item_id, fields, "completed")


def make_item(item_id: str, fields: JSONObject, status: str) -> ConversationItem:
    """An item of these fields. `status`: in_progress, completed or incomplete."""
    body = {"id": item_id, "object": "realtime.item", "status": status, **fields}
    encoded = _encode(body)
    return ConversationItem(item_id, msgspec.Raw(encoded), len(encoded))
