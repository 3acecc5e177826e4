"""The request of a response: what the session has, in the form of `POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from ..errors import MissingField
from ..openai import parse_response
from ..types import Request, RoutingHints
from .wire import JSONObject, RealtimeSettings

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
