"""Blocks of prompts, and which endpoint has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.dispatch.prefix_index import BLOCK_CHARACTERS, BLOCK_TOKENS, PrefixIndex, prompt_blocks
from causeway_server.cloud_pool.upstreams.inference import EncodePart, InferenceRequest
from causeway_server.cloud_pool.upstreams.triton.messages import EncodeJob, SamplingParameters
from causeway_server.router.types import ImagePart, Message, Request, TextPart, Tool

LONG = "a long text of a system prompt " * 100


def rendered(prompt: str | tuple[int, ...], model: str = "m", adapter: str = "", **more: object) -> tuple[int, ...]:
    parameters = SamplingParameters(lora_name=adapter)
    return prompt_blocks(InferenceRequest(model=model, prompt=prompt, parameters=parameters, deadline=1.0, **more))  # type: ignore[arg-type]


def chat(*messages: Message, tools: tuple[Tool, ...] = ()) -> tuple[int, ...]:
    return rendered("", openai=Request(kind="chat", model="m", messages=messages, tools=tools))


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=False))


def test_equal_beginnings_have_equal_blocks_and_nothing_after_a_difference_has() -> None:
    one = rendered(LONG + "x" * 2000)
    assert common(one, rendered(LONG + "y" + "x" * 1999)) == len(LONG) // BLOCK_CHARACTERS
    assert len(one) == (len(LONG) + 2000) // BLOCK_CHARACTERS


@pytest.mark.parametrize(("model", "adapter"), [("other", ""), ("m", "legal")])
def test_another_model_or_adapter_shares_no_block(model: str, adapter: str) -> None:
    assert common(rendered(LONG), rendered(LONG, model, adapter)) == 0


def test_token_ids_are_cut_as_texts_are() -> None:
    ids = tuple(range(1000))
    assert common(rendered(ids), rendered((*ids[:900], -1))) == 900 * 8 // BLOCK_CHARACTERS


def test_a_chat_shares_its_first_turns_with_its_next_request() -> None:
    first = (Message("system", LONG), Message("user", "hi"))
    later = chat(*first, Message("assistant", "hello"), Message("user", LONG))
    assert common(chat(*first), later) == len(chat(*first)) > 0


def test_a_message_shares_its_beginning_with_a_longer_one() -> None:
    """No length comes before a text."""
    assert common(chat(Message("user", LONG)), chat(Message("user", LONG + "and more"))) == len(
        chat(Message("user", LONG))
    )


@pytest.mark.parametrize(
    "other",
    [
        chat(Message("system", LONG), tools=(Tool("search"),)),
        chat(Message("user", LONG)),
        chat(Message("user", (ImagePart("data:,x"), TextPart(LONG)))),
    ],
    ids=["tools", "role", "parts"],
)
def test_what_stands_before_a_text_counts(other: tuple[int, ...]) -> None:
    assert common(chat(Message("system", LONG)), other) == 0


@pytest.mark.parametrize("what", [{"embed": True}, {"part": EncodePart(EncodeJob("image"), b"x" * 9999)}])
def test_what_generates_nothing_has_no_blocks(what: dict[str, object]) -> None:
    assert rendered(LONG, **what) == ()  # type: ignore[arg-type]


def test_a_very_long_prompt_has_a_bounded_number_of_blocks() -> None:
    assert len(rendered("x" * 10_000_000)) == 4 * 1024 * 1024 // BLOCK_CHARACTERS


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 9)), max_size=40), st.integers(1, 12)
)
def test_the_index_keeps_the_newest_blocks_and_finds_the_longest_beginning(
    prompts: list[tuple[str, int, int]], room: int
) -> None:
    """Against a list in the order of use, from which the oldest blocks are removed."""
    index, used = PrefixIndex(room * BLOCK_TOKENS), {"a": [], "b": []}  # type: ignore[var-annotated]
    for address, talk, length in prompts:
        blocks = tuple(100 * talk + at for at in range(length))
        index.record(address, blocks)
        used[address] = [*(each for each in used[address] if each not in blocks), *reversed(blocks)][-room:]
        for known in used:
            found = sum(block in used[known] for block in blocks)
            assert index.cached_tokens(blocks).get(known, 0) == found * BLOCK_TOKENS
            assert index.blocks.get(known, 0) == len(used[known])
    index.set_room("b", 2 * BLOCK_TOKENS)
    index.record("b", (1, 2, 3))
    assert index.cached_tokens((1, 2, 3))["b"] == 2 * BLOCK_TOKENS, "the room that the server reports"
    index.forget("a")
    assert "a" not in index.blocks
