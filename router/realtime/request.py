"""The request of a response: what the session has, in the form of `POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from ..errors import InvalidRequest, MissingField
from ..openai import parse_response
from ..openai.request_body import merge_hints
from ..openai.wire import WireRoutingHints
from ..types import Request, RoutingHints
from .conversation import ConversationItem
from .wire import JSONObject, RealtimeSettings

_MOST_TAGS: Final = 128

ANYTHING: Final[JSONObject] = {"type": "message", "role": "user", "content": "."}
"""An item to check settings with."""
_encode = msgspec.json.Encoder().encode


def build_request(settings: RealtimeSettings, items: Sequence[object], hints: RoutingHints) -> tuple[Request, int]:
    """Return the request of a response, and its size as a body of HTTP.

    Args:
        items: of the conversation, or the response's own.

    Raises:
        InvalidRequest: names the field that is wrong.
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
    """Return the hints of a request that has these items: tags add up, and the narrowest preference applies.

    Raises:
        InvalidRequest: the preferences contradict each other, or there are too many tags.
    """
    for prefer in {item.prefer for item in items if item.prefer is not None}:
        hints = merge_hints(hints, WireRoutingHints(prefer=prefer))
    return bounded(merge_hints(hints, WireRoutingHints(tags=[tag for item in items for tag in item.tags])))


def narrowed(before: WireRoutingHints | None, update: WireRoutingHints | None) -> WireRoutingHints | None:
    """Return the hints of a session after an update, which adds tags and narrows the preference.

    A deadline protects nothing, and is the update's. Raises InvalidRequest as `with_items`.
    """
    if before is None:
        return update
    kept = merge_hints(RoutingHints(prefer=before.prefer, tags=tuple(before.tags or ())), update)
    more = update or WireRoutingHints()
    return msgspec.structs.replace(more, prefer=kept.prefer, tags=[*kept.tags] or None)


def protection(causeway: object) -> RoutingHints:
    """Return the tags of an object `causeway`, and `only_on_device` where it says so. A malformed one has neither."""
    try:
        hints = msgspec.convert(causeway, WireRoutingHints)
    except msgspec.ValidationError:
        return RoutingHints()
    stays = hints.prefer == "only_on_device"
    return RoutingHints(prefer="only_on_device" if stays else None, tags=tuple(hints.tags or ()))


def bounded(hints: RoutingHints) -> RoutingHints:
    """Return hints that have not too many tags. Raises InvalidRequest."""
    if len(hints.tags) > _MOST_TAGS:
        message = f"A session and its conversation may have {_MOST_TAGS} tags. Delete items, or start a new session."
        raise InvalidRequest(message, param="causeway.tags")
    return hints
