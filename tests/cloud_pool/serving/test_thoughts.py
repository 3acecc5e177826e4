"""A tier's thoughts: apart from its answer, counted, and bounded or closed by the prompt."""

from __future__ import annotations

import itertools

import msgspec

from causeway_server.cloud_pool.serving.service import AnswerBuilder
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.cloud_pool.triton_server.model_runtime import ModelRequest, jobs_of
from causeway_server.cloud_pool.upstreams.inference import Delta
from causeway_server.cloud_pool.upstreams.triton.messages import decode_parameters as decode
from causeway_server.cloud_pool.upstreams.triton.messages import encode_parameters as encode
from causeway_server.cloud_pool.upstreams.triton.messages import from_request
from causeway_server.router.types import Chunk, Message, Request, Tool, ToolCallDelta, Usage

ASK = Request(kind="chat", model="m", messages=(Message("user", "2 + 2?"),), tools=(Tool("add"),))
PIECES = ("Hm", ".\n", "</think>", "\n\n", '{"name": "add", "arguments": {}}')


def test_thoughts_and_calls_are_apart_from_the_text() -> None:
    builder = AnswerBuilder(ASK, "open")
    chunks: list[Chunk] = []
    for at, piece in enumerate(PIECES):
        reason = "stop" if at == len(PIECES) - 1 else None
        chunks += builder.add(0, Delta(piece, reason, 1, input_tokens=7))
    assert "".join(chunk.reasoning for chunk in chunks) == "Hm."
    assert "".join(chunk.text for chunk in chunks) == ""
    (call,) = [call for chunk in chunks for call in chunk.tool_calls]
    assert (call.name, call.arguments) == ("add", "{}")
    assert isinstance(call, ToolCallDelta)
    assert chunks[-1].finish_reason == "tool_calls"
    assert builder.end().usage == Usage(7, 5, 0, 3)


def test_the_effort_bounds_the_thoughts_of_our_engine() -> None:
    """It travels with the constraints, which a stock backend is not sent."""
    low = msgspec.structs.replace(ASK, reasoning_effort="low")
    for request, expected in ((ASK, None), (low, 512)):
        parameters = from_request(request, max_tokens=9, schema="", guided_key="guided_decoding", thinking="open")
        (job,) = jobs_of(ModelRequest(parameters=decode(encode(parameters))), itertools.count(1))
        assert job.thinking_tokens == expected
    assert b"guided" not in encode(from_request(low, max_tokens=9, schema="", guided_key="guided_decoding"))


def test_without_effort_the_prompt_ends_the_thought() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}"
    tier = Tier(TierConfig(name="t"), ChatFormat(template, is_ours=True, thinking="open"))
    ask = msgspec.structs.replace(ASK, tools=())
    assert tier.prompts(ask) == ("2 + 2?<think>\n",)
    none = msgspec.structs.replace(ask, reasoning_effort="none")
    assert tier.prompts(none) == ("2 + 2?<think>\n\n</think>\n\n",)
