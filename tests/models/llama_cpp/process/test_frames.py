"""Frames between daemon and child: arbitrary cuts, and invalid input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.models.llama_cpp import protocol
from causeway_server.models.llama_cpp.protocol import Emission, EngineOptions, Prompt, SequenceRequest
from causeway_server.router.types import (
    Confidence,
    Message,
    Sampling,
    TextPart,
    TokenAlternative,
    TokenLogprob,
    Tool,
    ToolCall,
)

PROMPT = Prompt(
    messages=(
        Message(role="user", content=(TextPart(text="a"), TextPart(text="b"))),
        Message(role="assistant", tool_calls=(ToolCall(id="1", name="f", arguments="{}"),)),
    ),
    tools=(Tool(name="f"),),
)
TO_CHILD: list[protocol.DaemonMessage] = [
    protocol.Load(EngineOptions(model_path="m.gguf")),
    protocol.Submit(
        (
            SequenceRequest(id=1, prompt=PROMPT, sampling=Sampling(logit_bias=((1, 2.0),))),
            SequenceRequest(id=2, prompt=Prompt(text="x")),
        )
    ),
    protocol.Cancel((1, 2)),
    protocol.Count(3, Prompt(tokens=(1, 2, 3))),
    protocol.Ping(),
]
FROM_CHILD: list[protocol.ChildMessage] = [
    protocol.Failed("engine_unavailable", "no such file"),
    protocol.Step(
        (
            Emission(1, "é"),
            Emission(
                2,
                logprobs=(TokenLogprob("a", -1.0, (97,), (TokenAlternative("b", -2.0),)),),
                confidence=Confidence(1, 0.5, -0.7, 0.1, 2.0),
                finish_reason="stop",
                embedding=(0.5, 1.0),
            ),
        ),
        3,
        100.0,
    ),
    protocol.Counted(1, 20),
]


@given(st.lists(st.integers(1, 50), max_size=20))
def test_messages_survive_any_cut(sizes: list[int]) -> None:
    data = b"".join(bytes(protocol.encode(message)) for message in TO_CHILD)
    reader, messages = protocol.FrameReader(protocol.DAEMON_MESSAGES), []
    for size in sizes:
        messages += reader.feed(data[:size])
        data = data[size:]
    assert messages + reader.feed(data) == TO_CHILD


def test_the_child_s_messages_are_decoded() -> None:
    assert (
        protocol.FrameReader(protocol.CHILD_MESSAGES).feed(b"".join(bytes(protocol.encode(m)) for m in FROM_CHILD))
        == FROM_CHILD
    )


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00\x93\x01\x02",
        b"\x01\x00\x00\x00\xc1",
        bytes(protocol.encode(protocol.Counted(1, 2))),
    ],
)
def test_garbage_is_a_frame_error(data: bytes) -> None:
    """A length out of range, bytes that are not msgpack, a message of the wrong direction: never a wait."""
    with pytest.raises(protocol.FrameError):
        protocol.FrameReader(protocol.DAEMON_MESSAGES).feed(data)
