"""The signal table: what is derived from a request."""

from __future__ import annotations

import msgspec
import pytest

from causeway_server.router.policy.signals import SIGNALS, is_sampled, modalities, wants_json, wants_tools
from causeway_server.router.types import (
    AudioPart,
    Estimates,
    FilePart,
    ImagePart,
    Message,
    Part,
    ResponseFormat,
    Snapshot,
    TextPart,
    Tool,
    ToolChoice,
)
from tests.router.sample_requests import chat


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ((TextPart("a"),), ["text"]),
        ((ImagePart("data:"),), ["text", "image"]),
        ((FilePart("{}"), AudioPart("", "wav"), TextPart("a"), ImagePart("data:")), ["text", "image", "audio", "file"]),
    ],
)
def test_modalities_are_those_of_all_messages(parts: tuple[Part, ...], found: list[str]) -> None:
    """Each kind once, text first."""
    messages = (Message("user", parts), Message("assistant", None), Message("user", "and now?"))
    assert modalities(msgspec.structs.replace(chat(), messages=messages)) == found


def test_a_request_without_temperature_reads_as_openais_default() -> None:
    """So a rule for greedy requests does not hold by accident."""
    read = SIGNALS["request.temperature"].read
    assert read(chat(), Snapshot(), Estimates()) == 1.0
    assert read(chat(temperature=0), Snapshot(), Estimates()) == 0.0
    assert read(msgspec.structs.replace(chat(), kind="embedding"), Snapshot(), Estimates()) == 0.0


@pytest.mark.parametrize(
    ("temperature", "n", "default", "sampled"),
    [
        (None, 1, 1.0, True),
        (None, 1, 0.0, False),
        (None, 2, 0.0, True),
        (0.0, 1, 1.0, False),
        (0, 2, 0.0, True),
        (0.1, 1, 0.0, True),
    ],
)
def test_only_temperature_zero_with_one_choice_is_not_sampled(
    temperature: float | None, n: int, default: float, sampled: bool
) -> None:
    assert is_sampled(chat(temperature=temperature, n=n), default) is sampled


def test_tools_and_json_are_wanted_only_where_they_may_be_used() -> None:
    offered = msgspec.structs.replace(chat(), tools=(Tool("t"),))
    assert wants_tools(offered)
    assert not wants_tools(msgspec.structs.replace(offered, tool_choice=ToolChoice("none")))
    assert not wants_tools(msgspec.structs.replace(chat(), tool_choice=ToolChoice("required")))
    assert wants_json(msgspec.structs.replace(chat(), response_format=ResponseFormat("json_schema", schema="{}")))
    assert not wants_json(msgspec.structs.replace(chat(), response_format=ResponseFormat("text")))


@pytest.mark.parametrize("name", ["request.max_tokens", "request.deadline_ms", "request.prompt_tokens"])
def test_values_that_are_not_set_are_absent(name: str) -> None:
    assert SIGNALS[name].read(chat(), Snapshot(), Estimates()) is None
