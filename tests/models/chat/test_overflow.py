"""Chats that exceed a context: what is left out, what stays, and that the next turn leaves out the same."""

from __future__ import annotations

import pytest

from causeway_server.models.chat.overflow import NOTE, TrimmedRequest, trim_middle
from causeway_server.router.errors import ContextLengthExceeded
from causeway_server.router.openai.tokens import TokenizeRequest, TokenList
from causeway_server.router.types import Message, Request, TextPart, ToolCall

CONTEXT = 100


def said(role: str, words: int = 10, name: str = "w") -> Message:
    return Message(role, " ".join([name] * words))


def call(*ids: str) -> Message:
    return Message("assistant", None, tool_calls=tuple([ToolCall(one, "look", "{}") for one in ids]))


def result(call_id: str, words: int = 10) -> Message:
    return Message("tool", " ".join(["r"] * words), tool_call_id=call_id)


async def words_of(asked: TokenizeRequest) -> TokenList:
    """A token for each word, and one for each call."""
    count = 0
    for message in asked.request.messages:
        texts = message.content if isinstance(message.content, tuple) else (TextPart(message.content or ""),)
        count += sum(len(part.text.split()) for part in texts if isinstance(part, TextPart)) + len(message.tool_calls)
    return TokenList(count, CONTEXT, tuple(range(count)))


async def trimmed(*messages: Message, max_tokens: int | None = 5) -> TrimmedRequest | None:
    return await trim_middle(Request(kind="chat", model="m", messages=messages, max_tokens=max_tokens), 0, words_of)


async def kept(*messages: Message) -> list[Message]:
    """What stays, without the note."""
    found = await trimmed(*messages)
    assert found is not None
    first, *rest = found.request.messages
    assert isinstance(first.content, str)
    assert NOTE in first.content
    own = first.content.removesuffix(NOTE).strip()
    assert len(messages) - found.left_out == len(rest) + bool(own)
    return [*([Message(first.role, own)] if own else []), *rest]


async def test_the_oldest_turns_after_the_system_messages_go() -> None:
    system, last = said("system", 5, "rule"), said("user", 10, "last")
    middle = [said(role, 10, f"{role}{at}") for at in range(6) for role in ("user", "assistant")]
    found = await kept(system, *middle, last)
    assert (found[0], found[-1]) == (system, last)
    assert found[1:-1] == middle[-len(found[1:-1]) :]
    assert found[1].role == "user"


async def test_a_system_message_in_the_middle_stays() -> None:
    turns = [said(role) for _ in range(6) for role in ("user", "assistant")]
    rule = said("developer", 3, "rule")
    assert rule in await kept(*turns[:2], rule, *turns[2:], said("user"))


async def test_parts_of_a_system_message_stay_parts() -> None:
    system = Message("system", (TextPart("be kind"),))
    found = await trimmed(system, *[said(role) for _ in range(6) for role in ("user", "assistant")], said("user"))
    assert found is not None
    assert found.request.messages[0].content == (TextPart("be kind"), TextPart(NOTE))


async def test_steps_of_one_long_turn_go_with_their_results() -> None:
    """An agent's only user message is its task; the newest step is what the answer continues."""
    task = said("user", 8, "task")
    steps = [
        message for at in range(12) for message in (call(f"a{at}", f"b{at}"), result(f"a{at}", 4), result(f"b{at}", 4))
    ]
    found = await kept(task, *steps)
    assert found[0] == task
    assert found[1:] == steps[-len(found[1:]) :]
    assert len(found[1:]) % 3 == 0


async def test_a_result_goes_where_its_call_goes() -> None:
    """Also if another message stands between, and if later calls have the same id."""
    calls = [call("x"), said("user", 12), result("x", 12)]
    found = await kept(said("user"), *calls, *[said(role, 12) for _ in range(4) for role in ("assistant", "user")])
    ids = {one.id for message in found for one in message.tool_calls}
    assert {message.tool_call_id for message in found if message.role == "tool"} == ids


async def test_the_next_turns_leave_out_the_same() -> None:
    """So that the prompt before them is in the KV cache: over 24 turns there are few cuts."""
    history, cuts = [said("system", 5)], []
    for at in range(24):
        history += [said("user", 3, f"q{at}"), said("assistant", 3, f"a{at}")]
        found = await trimmed(*history, said("user", 3))
        if (await words_of(TokenizeRequest(Request(kind="chat", model="m", messages=tuple(history))))).count > CONTEXT:
            assert found is not None
            cuts.append(found.left_out)
    assert len(cuts) >= 8
    assert len(set(cuts)) <= 3
    assert cuts == sorted(cuts)


@pytest.mark.parametrize(
    "messages",
    [
        (said("user", 200),),
        (said("system", 200), said("user"), said("assistant"), said("user")),
        (said("user"), call("a"), result("a", 200)),
        (said("user", 5), said("assistant", 5), said("user", 200)),
    ],
    ids=["one message", "the system's", "the newest result", "the last message"],
)
async def test_what_may_not_be_left_out_is_too_long(messages: tuple[Message, ...]) -> None:
    assert await trimmed(*messages) is None


async def test_room_is_left_for_the_answer() -> None:
    turns = [said(role) for _ in range(8) for role in ("user", "assistant")]
    for max_tokens, room in ((None, 75), (5, 95), (1000, 75)):
        found = await trimmed(*turns, said("user"), max_tokens=max_tokens)
        assert found is not None
        assert (await words_of(TokenizeRequest(found.request))).count <= room


@pytest.mark.parametrize("context", [CONTEXT, 0])
async def test_a_chat_that_is_too_long_to_be_counted_is_trimmed(context: int) -> None:
    async def bounded(asked: TokenizeRequest) -> TokenList:
        found = await words_of(asked)
        if found.count > 150:
            raise ContextLengthExceeded("far too long")
        return found

    turns = [said(role) for _ in range(40) for role in ("user", "assistant")]
    request = Request(kind="chat", model="m", messages=(*turns, said("user")))
    found = await trim_middle(request, context, bounded)
    assert found is not None
    assert (await words_of(TokenizeRequest(found.request))).count <= 75
