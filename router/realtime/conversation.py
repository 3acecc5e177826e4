"""The conversation of a session: its items in order, as JSON, bounded in number, size and audio."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from ..errors import InvalidRequest, MissingField, NotFound, UnsupportedFeature
from ..openai.request_body import merge_hints
from ..openai.responses.request import parse_response
from ..openai.wire import WireRoutingHints
from ..parts.uploads import NamedFiles
from ..types import Prefer, Request, RoutingHints
from .audio import AudioBuffer
from .wire import JSONObject, RealtimeSettings

ROOT = "root"
"""The value of `previous_item_id` for an item that becomes the first."""

_encode = msgspec.json.Encoder().encode
_TYPES = ("message", "function_call", "function_call_output")
_FIELDS = ("type", "role", "content", "call_id", "name", "arguments", "output")


class ConversationFull(InvalidRequest, code="conversation_full"):
    """The conversation has no room for another item."""


class ConversationItem(msgspec.Struct, frozen=True):
    """An item. `body`: its JSON as the client sees it. `request_body`: its JSON in a request with audio. `clips`: the
    positions of audio in its content. `tags`, `prefer`: the hints of the requests that contained or created it, which
    apply to every later request that contains it.
    """

    id: str
    body: msgspec.Raw
    size_bytes: int
    request_body: msgspec.Raw | None = None
    clips: tuple[int, ...] = ()
    audio_bytes: int = 0
    tags: tuple[str, ...] = ()
    prefer: Prefer | None = None  # only_on_device or only_cloud

    @property
    def requested(self) -> msgspec.Raw:
        """Return the JSON of the item in a request."""
        return self.body if self.request_body is None else self.request_body

    def restricted(self, hints: RoutingHints) -> ConversationItem:
        """Return the item with the tags and the restriction of a request, which include those of its items."""
        return msgspec.structs.replace(self, tags=hints.tags, prefer=hints.restriction or self.prefer)

    def with_transcript(self, index: int, transcript: str) -> ConversationItem:
        """Return the item with the transcript of the audio at `index` of its content."""
        document = msgspec.json.decode(self.body)
        document["content"][index]["transcript"] = transcript
        body = _encode(document)
        return msgspec.structs.replace(self, body=msgspec.Raw(body), size_bytes=len(body))


class Conversation:
    """The items of a conversation. `max_bytes`: maximum size of all items together, without their audio."""

    def __init__(self, max_items: int, max_bytes: int, max_clips: int = 0, max_audio_bytes: int = 0) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._max_clips = max_clips
        self._max_audio_bytes = max_audio_bytes
        self._items: list[ConversationItem] = []
        self._bytes = 0
        self._clips = 0
        self.audio_bytes = 0  # of all audio clips together

    def __iter__(self) -> Iterator[ConversationItem]:
        return iter(self._items)

    def __contains__(self, item_id: str) -> bool:
        return any(item.id == item_id for item in self._items)

    def get(self, item_id: str) -> ConversationItem:
        """Find an item by its id. Raises NotFound."""
        return self._items[self._index(item_id)]

    def previous(self, item_id: str) -> str | None:
        """Return the id of the item before this one."""
        at = self._index(item_id)
        return self._items[at - 1].id if at else None

    def insert(self, item: ConversationItem, after: str | None = None) -> None:
        """Add an item, at the end or after another one. Raises InvalidRequest if its id is taken; NotFound without
        `after`; ConversationFull if the item alone is too large.
        """
        if item.id in self:
            raise InvalidRequest(f"An item {item.id!r} exists already. Send another `id`.", param="item.id")
        if item.size_bytes > self._max_bytes:
            message = f"The item has {item.size_bytes} bytes, but a conversation may have only {self._max_bytes}."
            raise ConversationFull(message, param="item")
        at = len(self._items) if after is None else 0 if after == ROOT else self._index(after, "previous_item_id") + 1
        self._items.insert(at, item)
        self._count(item, 1)

    def replace(self, item: ConversationItem) -> None:
        """Replace the item with the same id, if it still exists."""
        if item.id in self:
            at = self._index(item.id)
            self._count(self._items[at], -1)
            self._count(item, 1)
            self._items[at] = item

    def restrict(self, requested: Iterable[ConversationItem], hints: RoutingHints) -> None:
        """Add the hints of a request to its items that belong to the conversation."""
        item_ids = {id(item) for item in requested}  # by identity: a response's own item may have the same id
        self._items = [item.restricted(hints) if id(item) in item_ids else item for item in self._items]

    def protect(self, items: Iterable[ConversationItem], hints: RoutingHints) -> None:
        """Add the tags and the restriction of a refused request to its items."""
        for item in items:
            more = RoutingHints(prefer=item.prefer or hints.prefer, tags=(*item.tags, *hints.tags))
            self.replace(item.restricted(more))

    def delete(self, item_id: str) -> None:
        """Delete an item by its id. Raises NotFound."""
        at = self._index(item_id)
        self._count(self._items.pop(at), -1)

    def check_room(self, item: ConversationItem | None = None) -> None:
        """Check that an item, or the smallest one, fits in addition to the others. Raises ConversationFull."""
        size_bytes = 0 if item is None else item.size_bytes
        if item is not None and self._has_more_audio(item.clips, item.audio_bytes):
            has = f"{self._clips} audio clips of {self.audio_bytes} bytes"
            bound = f"{self._max_clips} of {self._max_audio_bytes} bytes"
        elif len(self._items) >= self._max_items or self._bytes + size_bytes > self._max_bytes:
            has = f"{len(self._items)} items of {self._bytes} bytes"
            bound = f"{self._max_items} of {self._max_bytes} bytes"
        else:
            return
        message = f"The conversation has {has}, but may have only {bound}. Delete some, or set `truncation` to auto."
        raise ConversationFull(message, param="item")

    def shorten(self) -> list[str]:
        """Delete the oldest items beyond the bounds, but never the newest one. Returns their ids."""
        deleted = []
        while len(self._items) > 1 and self._is_over():
            deleted.append(self._items[0].id)
            self.delete(deleted[-1])
        return deleted

    def _is_over(self) -> bool:
        return len(self._items) > self._max_items or self._bytes > self._max_bytes or self._has_more_audio()

    def _has_more_audio(self, clips: tuple[int, ...] = (), audio_bytes: int = 0) -> bool:
        """Return whether the audio of all items, together with another one's, exceeds the limits."""
        return self._clips + len(clips) > self._max_clips or self.audio_bytes + audio_bytes > self._max_audio_bytes

    def _count(self, item: ConversationItem, sign: int) -> None:
        self._bytes += sign * item.size_bytes
        self._clips += sign * len(item.clips)
        self.audio_bytes += sign * item.audio_bytes

    def _index(self, item_id: str, param: str = "item_id") -> int:
        for at, item in enumerate(self._items):
            if item.id == item_id:
                return at
        raise NotFound(f"The conversation has no item {item_id[:64]!r}.", param=param)


def read_item(document: JSONObject, item_id: str, audio: AudioBuffer, param: str = "item") -> ConversationItem:
    """Check an item of a client, with `item_id` unless it has its own. InvalidRequest names the wrong field."""
    item_id_sent = document.get("id")
    if item_id_sent is not None and not (isinstance(item_id_sent, str) and 1 <= len(item_id_sent) <= 64):
        raise InvalidRequest(f"`{param}.id` must be a string of 1 to 64 characters.", param=f"{param}.id")
    fields = {name: document[name] for name in _FIELDS if name in document}
    if fields.get("type") not in _TYPES:
        raise InvalidRequest(f"`{param}.type` must be one of {', '.join(_TYPES)}.", param=f"{param}.type")
    _refuse_named_files(fields, param)
    clips = _read_clips(fields, audio, param)
    request_body = {**fields, "content": _request_content(fields["content"], clips)} if clips else fields
    try:
        parse_response(_encode({"model": "auto", "input": [request_body]}), RoutingHints())
    except InvalidRequest as error:
        where = param if error.param is None else error.param.replace("input[0]", param)
        raise type(error)(error.message.replace("input[0]", param), param=where) from None
    return make_item(item_id_sent or item_id, fields, "completed", clips)


def spoken_item(item_id: str, wav: str) -> ConversationItem:
    """Return a message of the user that is only audio. `wav`: the WAV file in base64."""
    fields: JSONObject = {"type": "message", "role": "user", "content": [{"type": "input_audio"}]}
    return make_item(item_id, fields, "completed", {0: wav})


def spoken_answer(item_id: str, text: str, status: str) -> ConversationItem:
    """Return a spoken message of the assistant: a transcript for the client, text in a request."""
    fields: JSONObject = {"type": "message", "role": "assistant"}
    shown = make_item(item_id, {**fields, "content": [{"type": "output_audio", "transcript": text}]}, status)
    request_body = _encode({**fields, "content": [{"type": "output_text", "text": text}]})
    return msgspec.structs.replace(shown, request_body=msgspec.Raw(request_body))


def make_item(
    item_id: str, fields: JSONObject, status: str, clips: Mapping[int, str] = MappingProxyType({})
) -> ConversationItem:
    """Create an item. `status`: in_progress, completed or incomplete; `clips`: WAV in base64, by place in the content,
    as the client's own audio is not sent back.
    """
    head = {"id": item_id, "object": "realtime.item", "status": status}
    if not clips:
        encoded = _encode({**head, **fields})
        return ConversationItem(item_id, msgspec.Raw(encoded), len(encoded))
    content = fields["content"]
    assert isinstance(content, list)
    shown = [{"type": "input_audio", "transcript": None} if at in clips else part for at, part in enumerate(content)]
    body = _encode({**head, **fields, "content": shown})
    request_body = _encode({**fields, "content": _request_content(content, clips)})
    size_bytes = sum(map(len, clips.values()))
    return ConversationItem(item_id, msgspec.Raw(body), len(body), msgspec.Raw(request_body), tuple(clips), size_bytes)


def _refuse_named_files(fields: JSONObject, param: str) -> None:
    for reference in NamedFiles({"input": [fields]}).references:
        where = reference.path.replace("input[0]", param)
        message = f"`{where}`: live sessions do not read uploaded files. Send the bytes as a data: URL in base64."
        raise UnsupportedFeature(message, param=where)


def _read_clips(fields: JSONObject, audio: AudioBuffer, param: str) -> dict[int, str]:
    """Return the audio of an item, WAV in base64, by place in its content. Raises InvalidRequest."""
    content = fields.get("content")
    clips = {}
    for at, part in enumerate(content if isinstance(content, list) else ()):
        where = f"{param}.content[{at}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "output_audio":
            raise UnsupportedFeature(f"`{where}`: answers of this server are text. Send `output_text`.", param=where)
        if kind == "input_audio":
            if fields.get("role") != "user":
                raise InvalidRequest(f"`{where}`: only a user's message can have audio.", param=where)
            clips[at] = audio.read(part.get("audio"), f"{where}.audio")
    return clips


def _request_content(content: object, clips: Mapping[int, str]) -> list[object]:
    """Return the content as a request contains it."""
    assert isinstance(content, list)
    return [
        {"type": "input_audio", "input_audio": {"data": clips[at], "format": "wav"}} if at in clips else part
        for at, part in enumerate(content)
    ]


_MAX_TAGS: Final = 128

ANYTHING: Final[JSONObject] = {"type": "message", "role": "user", "content": "."}
"""An item with which settings are checked."""


def build_request(settings: RealtimeSettings, items: Sequence[object], hints: RoutingHints) -> tuple[Request, int]:
    """Return the request of a response to these items, in the form of `POST /v1/responses`, and its size as a body of
    HTTP. InvalidRequest names the wrong field.
    """
    if not items:
        raise MissingField("The conversation is empty. Create an item, or send `input`.", param="input")
    body: JSONObject = {
        "model": settings.model,
        "input": items,
        "instructions": settings.instructions or None,
        "tools": settings.tools or None,
        "tool_choice": settings.tool_choice,
        "parallel_tool_calls": settings.parallel_tool_calls,
        "max_output_tokens": None if settings.max_output_tokens == "inf" else settings.max_output_tokens,
        "temperature": settings.temperature,
        "reasoning": settings.reasoning,
        "causeway": settings.causeway,
        "stream": True,
    }
    encoded = _encode({name: value for name, value in body.items() if value is not None})
    return parse_response(encoded, hints)[0], len(encoded)


def with_items(hints: RoutingHints, items: Sequence[ConversationItem]) -> RoutingHints:
    """Return the hints of a request with these items: all their tags, and the narrowest preference. Raises
    InvalidRequest if the preferences contradict each other, or there are too many tags.
    """
    for prefer in {item.prefer for item in items if item.prefer is not None}:
        hints = merge_hints(hints, WireRoutingHints(prefer=prefer))
    return bounded(merge_hints(hints, WireRoutingHints(tags=[tag for item in items for tag in item.tags])))


def narrowed(before: WireRoutingHints | None, update: WireRoutingHints | None) -> WireRoutingHints | None:
    """Return the hints of a session after an update, which adds tags, narrows the preference and replaces the deadline.
    Raises InvalidRequest as `with_items`.
    """
    if before is None:
        return update
    kept = merge_hints(RoutingHints(prefer=before.prefer, tags=tuple(before.tags or ())), update)
    more = update or WireRoutingHints()
    return msgspec.structs.replace(more, prefer=kept.prefer, tags=[*kept.tags] or None)


def protection(causeway: object) -> RoutingHints:
    """Return an object's `causeway` tags, and its preference if `only_on_device`; neither if malformed."""
    try:
        hints = msgspec.convert(causeway, WireRoutingHints)
    except msgspec.ValidationError:
        return RoutingHints()
    stays = hints.prefer == "only_on_device"
    return RoutingHints(prefer="only_on_device" if stays else None, tags=tuple(hints.tags or ()))


def bounded(hints: RoutingHints) -> RoutingHints:
    """Return the hints if they do not have too many tags. Raises InvalidRequest."""
    if len(hints.tags) > _MAX_TAGS:
        message = (
            f"A session and its conversation may have {_MAX_TAGS} tags together. Delete items, or start a new session."
        )
        raise InvalidRequest(message, param="causeway.tags")
    return hints
