"""Tool calls of one choice, told apart: a new id or name begins a new call, whatever index the server gives it.

Servers leave out the index or the id, send every call at index 0, repeat the name with each piece, or send the
arguments as an object. A call goes on with a piece that has

1. the id of a call that has begun at the same index, or an id without a name for one that has none
2. no id, and the index of a call, or no index and a call before it: if the piece has no name, or repeats the name of a
   call whose arguments are not complete JSON yet

and any other piece begins a call.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from ...types import ToolCallDelta
from ..extra import JSONObject, extra_of
from .wire import number, text

_CALL: Final = frozenset({"index", "id", "type", "function"})
_FUNCTION: Final = frozenset({"name", "arguments"})
_encode = msgspec.json.Encoder().encode


class _Call:
    """A call that has begun. `position`: the index that the server gave it, or its number."""

    def __init__(self, number: int, position: int, identity: str, name: str) -> None:
        self.number = number
        self.position = position
        self.identity = identity
        self.name = name
        self.arguments = ""

    @property
    def complete(self) -> bool:
        try:
            msgspec.json.decode(self.arguments)
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


class CallTracker:
    """Numbers the calls of one choice. `request_id` makes the ids unique of calls that the server sends without one."""

    def __init__(self, request_id: str, choice: int) -> None:
        self._seed = f"{request_id}/{choice}"
        self._calls: list[_Call] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    def delta(self, piece: JSONObject) -> ToolCallDelta | None:
        """Return what a streamed piece adds; None: it adds nothing."""
        return self._delta(piece, self._find(piece))

    def whole(self, piece: JSONObject) -> ToolCallDelta | None:
        """Return a whole call: each begins a new one."""
        return self._delta(piece, None)

    def _delta(self, piece: JSONObject, call: _Call | None) -> ToolCallDelta | None:
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = text(function.get("name")), _arguments(function.get("arguments"))
        extra = extra_of(piece, _CALL, "function", _FUNCTION)
        if call is not None:
            call.arguments += arguments
            call.name = call.name or name
            return ToolCallDelta(call.number, arguments, extra=extra) if arguments or extra else None
        if not (name or arguments or text(piece.get("id"))):
            return None
        call = self._begin(piece, name)
        call.arguments = arguments
        identity = text(piece.get("id"))
        if not identity or any(other.identity == identity for other in self._calls[:-1]):
            identity = self._new_id(call.number)
        return ToolCallDelta(call.number, arguments, identity, name or None, extra)

    def _begin(self, piece: JSONObject, name: str) -> _Call:
        position = number(piece.get("index"))
        count = len(self._calls)
        call = _Call(count, count if position is None else position, text(piece.get("id")), name)
        self._calls.append(call)
        return call

    def _find(self, piece: JSONObject) -> _Call | None:
        """Return the call that this piece continues; None: it begins one."""
        identity, position = text(piece.get("id")), number(piece.get("index"))
        function = piece.get("function")
        name = text(function.get("name")) if isinstance(function, dict) else ""
        last = next((call for call in reversed(self._calls) if position in (call.position, None)), None)
        if identity:  # (1)
            known = (call for call in self._calls if call.identity == identity and position in (call.position, None))
            nameless = last if last is not None and not last.identity and not name else None
            return next(known, nameless)
        if last is not None and (not name or (name == last.name and not last.complete)):  # (2)
            return last
        return None

    def _new_id(self, number: int) -> str:
        return "call_" + hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=12).hexdigest()


def _arguments(value: object) -> str:
    """Return arguments as JSON text: some servers send the object itself."""
    return value if isinstance(value, str) else "" if value is None else _encode(value).decode()
