"""Ids of tool calls that a model wrote as text. An answer may reach several requests, whose ids must all differ."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final

import msgspec

from ..types import Chunk

_OURS: Final = re.compile(r"call_[0-9a-f]{24}")


def call_id(identity: str, choice: int, index: int) -> str:
    """Return the id of call number `index` of an answer's choice. `identity`: of the request, unique."""
    digest = blake2b(f"{identity}\0{choice}\0{index}".encode(), digest_size=12).hexdigest()
    return f"call_{digest}"


def with_own_ids(chunk: Chunk, identity: str) -> Chunk:
    """Return a chunk of an answer that may have been made for another request, with this one's call ids.

    Ids in another form are an upstream's, which may mean something to it, and stay.
    """
    if not chunk.tool_calls:
        return chunk
    calls = [
        msgspec.structs.replace(call, id=call_id(identity, chunk.index, call.index))
        if call.id is not None and _OURS.fullmatch(call.id)
        else call
        for call in chunk.tool_calls
    ]
    return msgspec.structs.replace(chunk, tool_calls=tuple(calls))
