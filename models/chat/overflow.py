"""A conversation that does not fit a model's context: the oldest turns of its middle are left out.

1. System and developer messages stay, and so do the user's last message and the newest step behind it.
2. A turn is left out whole: a user's message with the answers to it. So is a step behind the user's last message: the
   assistant's message with the results of its calls. The result of a tool goes where its call goes.
3. A multiple of a quarter of the room is left out. While the conversation grows by less, the same turns are left out,
   so that its next prompt begins like this one, which is in the KV cache.
4. The first system message tells the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from causeway_server.router.errors import ContextLengthExceeded
from causeway_server.router.openai.tokens import TokenizeRequest, TokenList
from causeway_server.router.types import Message, Request, TextPart

NOTE: Final = "The oldest messages after this one were left out, because the conversation exceeds the context."
_SYSTEM: Final = ("system", "developer")
_ANSWER_SHARE: Final = 4  # at most this part of the context is kept free for the answer
_STEPS: Final = 4  # parts of the room, of which a whole number is left out


class Tokenize(Protocol):
    """Returns the tokens of a prompt of the model. Raises CausewayError, ContextLengthExceeded for a very long one."""

    async def __call__(self, asked: TokenizeRequest, /) -> TokenList: ...


class TrimmedRequest(msgspec.Struct, frozen=True):
    """A chat that fits, and how many of its messages are left out."""

    request: Request
    left_out: int

    @property
    def detail(self) -> str:
        """The text for records."""
        return f"{self.left_out} messages left out to fit the context"


async def trim_middle(request: Request, context_tokens: int, tokenize: Tokenize) -> TrimmedRequest | None:
    """Return a chat of text that fits the context, with room for an answer; None if that cannot be.

    `context_tokens`: 0: that which `tokenize` reports. Raises CausewayError if the tokenizer fails.
    """
    units = _units(request.messages)
    found = await _tokens(request, tokenize)
    if not context_tokens and (known := found or await _tokens(_without(request, units), tokenize)) is not None:
        context_tokens = known.max_model_len
    if not units or not context_tokens:
        return None
    largest = context_tokens // _ANSWER_SHARE
    room = context_tokens - max(1, min(largest, request.max_tokens or largest))
    step = max(1, room // _STEPS)
    goal = room if found is None else found.count - -((room - found.count) // step) * step  # (3)

    async def fits(count: int, limit: int) -> bool:
        tokens = await _tokens(_without(request, units[:count]), tokenize)
        return tokens is not None and tokens.count <= limit

    for limit in dict.fromkeys((goal, room)):
        if await fits(len(units), limit):
            few, many = 0, len(units)
            while many - few > 1:
                middle = (few + many) // 2
                few, many = (few, middle) if await fits(middle, limit) else (middle, many)
            return TrimmedRequest(_without(request, units[:many]), sum(map(len, units[:many])))
    return None


def _units(messages: Sequence[Message]) -> list[list[int]]:
    """Return the indices of what may be left out, by turn or step, the oldest first. (1), (2)"""
    last_user = max((at for at, one in enumerate(messages) if one.role == "user"), default=-1)
    units: list[list[int]] = []
    unit_of_call: dict[str, list[int]] = {}
    for at, message in enumerate(messages):
        if message.role in _SYSTEM or at == last_user:
            continue
        unit = unit_of_call.get(message.tool_call_id or "")
        if unit is None:
            begins = message.role == ("user" if at < last_user else "assistant")
            if begins or not units or units[-1][0] < last_user < at:
                units.append([])
            unit = units[-1]
        unit.append(at)
        unit_of_call.update((call.id, unit) for call in message.tool_calls)
    if units and units[-1][0] > last_user:
        units.pop()
    return units


def _without(request: Request, units: Sequence[Sequence[int]]) -> Request:
    """Return a chat without some turns, whose first system message says so. (4)"""
    dropped = {at for unit in units for at in unit}
    kept = [message for at, message in enumerate(request.messages) if at not in dropped]
    if kept[0].role not in _SYSTEM:
        kept.insert(0, Message("system", NOTE))
    elif isinstance(kept[0].content, tuple):
        kept[0] = msgspec.structs.replace(kept[0], content=(*kept[0].content, TextPart(NOTE)))
    else:
        kept[0] = msgspec.structs.replace(kept[0], content=f"{kept[0].content}\n\n{NOTE}")
    return msgspec.structs.replace(request, messages=tuple(kept))


async def _tokens(request: Request, tokenize: Tokenize) -> TokenList | None:
    """Return the tokens of a chat; None if they are far too many to be counted."""
    try:
        return await tokenize(TokenizeRequest(request))
    except ContextLengthExceeded:
        return None
