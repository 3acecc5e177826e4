"""Bodies of `/v1/messages`: what is refused, by the path in the error; and what is accepted, by what it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from causeway_server.router.types import FilePart, ImagePart, Message, Request, TextPart, Tool, ToolCall, ToolChoice

Body = Mapping[str, Any]
MARK = {"type": "ephemeral", "ttl": "1h"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "input_schema": SCHEMA}
ENCODED = '{"type":"object","properties":{"city":{"type":"string"}}}'
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}
TEXT = {"type": "text", "text": "a"}


def user(*blocks: object) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def turns(*blocks: object) -> Body:
    """A user's message of these blocks."""
    return {"messages": [user(*blocks)]}


def after(*blocks: object) -> Body:
    """An assistant's message of these blocks, before one of the user."""
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": list(blocks)}, user(TEXT)]}


def body_of(fields: Body) -> dict[str, Any]:
    """A body with these fields; a field of `...` is left out."""
    body = {"model": "auto", "max_tokens": 2000, "messages": [{"role": "user", "content": "a"}], **fields}
    return {name: value for name, value in body.items() if value is not ...}


REFUSED: tuple[tuple[Body, str], ...] = (
    ({"model": ...}, "model"),
    ({"model": ""}, "model"),
    ({"model": 7}, "model"),
    ({"max_tokens": ...}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"messages": ...}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
    (turns({"type": "text"}), "messages[0].content[0].text"),
    (turns({**TEXT, "style": "bold"}), "messages[0].content[0].style"),
    (turns({**TEXT, "citations": [{"type": "char_location"}]}), "messages[0].content[0].citations"),
    (turns({**TEXT, "cache_control": {"type": "forever"}}), "messages[0].content[0].cache_control.type"),
    (turns({**TEXT, "cache_control": {"type": "ephemeral", "ttl": "2d"}}), "messages[0].content[0].cache_control.ttl"),
    (turns({**TEXT, "cache_control": {**MARK, "scope": "org"}}), "messages[0].content[0].cache_control.scope"),
    (turns({"type": "audio", "source": {}}), "messages[0].content[0].type"),
    (turns({"type": "redacted_thinking", "data": "x"}), "messages[0].content[0].type"),
    (turns({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}), "messages[0].content[0].type"),
    (turns({"type": "search_result", "source": "a", "title": "b", "content": []}), "messages[0].content[0].type"),
    (turns({"type": "container_upload", "file_id": "file-1"}), "messages[0].content[0].type"),
    (turns({"type": "image"}), "messages[0].content[0].source"),
    (turns({"type": "image", "source": {"type": "s3"}}), "messages[0].content[0].source.type"),
    (turns({"type": "image", "source": {"type": "base64", "data": "a"}}), "messages[0].content[0].source.media_type"),
    (
        turns({"type": "image", "source": {"type": "base64", "media_type": "a;b", "data": ""}}),
        "messages[0].content[0].source.media_type",
    ),
    (turns({**PNG, "transformations": {}}), "messages[0].content[0].transformations"),
    (turns({"type": "document", "source": {"type": "url", "url": "x"}}), "messages[0].content[0].source.type"),
    (turns({"type": "document", "source": {"type": "content"}}), "messages[0].content[0].source.type"),
    (turns({**PDF, "citations": {"enabled": True}}), "messages[0].content[0].citations"),
    (turns({**PDF, "context": "a letter"}), "messages[0].content[0].context"),
    (turns(USE), "messages[0].content[0]"),
    (turns({"type": "thinking", "thinking": "a", "signature": ""}), "messages[0].content[0]"),
    (turns(TEXT, {**RESULT, "content": "b"}), "messages[0].content[1]"),
    (turns({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (turns({**RESULT, "content": [USE]}), "messages[0].content[0].content[0].type"),
    (
        turns({**RESULT, "content": [{**PNG, "transformations": {}}]}),
        "messages[0].content[0].content[0].transformations",
    ),
    (turns({**RESULT, "is_error": "yes"}), "messages[0].content[0].is_error"),
    (turns({**RESULT, "toolset_name": "browser"}), "messages[0].content[0].toolset_name"),
    (after(RESULT), "messages[1].content[0]"),
    (after(PNG), "messages[1].content[0]"),
    (after(PDF), "messages[1].content[0]"),
    (after({**USE, "input": "Oslo"}), "messages[1].content[0].input"),
    (after({**USE, "caller": {"type": "code_execution_20250825"}}), "messages[1].content[0].caller.type"),
    ({"messages": [{"role": "system", "content": [PNG]}, user(TEXT)]}, "messages[0].content[0]"),
    ({"system": 7}, "system"),
    ({"system": [PNG]}, "system[0].type"),
    ({"system": [{**TEXT, "citations": [{}]}]}, "system[0].citations"),
    ({"tools": [{"name": "weather"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": SCHEMA}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search_20260318", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{**TOOL, "max_uses": 3}]}, "tools[0].max_uses"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{**TOOL, "input_examples": [{"city": "Oslo"}]}]}, "tools[0].input_examples"),
    ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20260120"]}]}, "tools[0].allowed_callers[0]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "time"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "weather"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "adaptive", "display": "raw"}}, "thinking.display"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"metadata": {"session": "a"}}, "metadata.session"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"speed": "fast"}, "speed"),
    ({"container": "c"}, "container"),
    ({"context_management": {"edits": []}}, "context_management"),
    ({"diagnostics": {"previous_message_id": "m"}}, "diagnostics"),
    ({"inference_geo": "us"}, "inference_geo"),
    ({"mcp_servers": []}, "mcp_servers"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"user_profile_id": "u"}, "user_profile_id"),
    ({"workspace_id": "w"}, "workspace_id"),
    ({"seed": 7}, "seed"),
    ({"max_completion_tokens": 7}, "max_completion_tokens"),
    ({"causeway": {"prefers": "only_cloud"}}, "causeway.prefers"),
)
PLAIN = Request(kind="chat", model="auto", messages=(Message("user", "a"),), max_tokens=2000)
CALL = ToolCall("t1", "weather", '{"city":"Oslo"}')


def chat(*messages: Message) -> Body:
    return {"messages": messages}


ACCEPTED: tuple[tuple[Body, Body], ...] = (
    ({}, {}),
    ({"system": ""}, {}),
    ({"system": "s"}, chat(Message("system", "s"), Message("user", "a"))),
    ({"system": [TEXT, {**TEXT, "cache_control": MARK}]}, chat(Message("system", "a\na"), Message("user", "a"))),
    ({"messages": [{"role": "user", "content": "a"}], "cache_control": MARK}, {}),
    (turns({**TEXT, "cache_control": MARK, "citations": None}), {}),
    (turns(TEXT, TEXT), chat(Message("user", "a\na"))),
    (turns(TEXT, PNG), chat(Message("user", (TextPart("a"), ImagePart("data:image/png;base64,aGk="))))),
    (
        turns({"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}),
        chat(Message("user", (ImagePart("https://a/b.png"),))),
    ),
    (
        turns({"type": "image", "source": {"type": "file", "file_id": "file-1"}}),
        chat(Message("user", (ImagePart("file-1"),))),
    ),
    (
        turns({**PDF, "title": "a.pdf", "citations": {"enabled": False}}),
        chat(Message("user", (FilePart('{"file_data":"data:application/pdf;base64,aGk=","filename":"a.pdf"}'),))),
    ),
    (
        turns({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}}),
        chat(Message("user", (FilePart('{"file_data":"data:text/plain;base64,aGk="}'),))),
    ),
    (
        turns({"type": "document", "source": {"type": "file", "file_id": "file-1"}}),
        chat(Message("user", (FilePart('{"file_id":"file-1"}'),))),
    ),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "s"}]},
        chat(Message("user", "a"), Message("system", "s")),
    ),
    (
        after(TEXT, {**USE, "caller": {"type": "direct"}, "cache_control": MARK}),
        chat(Message("user", "a"), Message("assistant", "a", tool_calls=(CALL,)), Message("user", "a")),
    ),
    (
        after({"type": "thinking", "thinking": "hm", "signature": "x"}, USE),
        chat(
            Message("user", "a"),
            Message("assistant", None, tool_calls=(CALL,), extra='{"reasoning_content":"hm"}'),
            Message("user", "a"),
        ),
    ),
    (
        after({"type": "thinking", "thinking": "", "signature": "x"}, TEXT),
        chat(Message("user", "a"), Message("assistant", "a"), Message("user", "a")),
    ),
    (
        turns({**RESULT, "content": "b"}, {"type": "tool_result", "tool_use_id": "t2"}, TEXT),
        chat(Message("tool", "b", tool_call_id="t1"), Message("tool", "", tool_call_id="t2"), Message("user", "a")),
    ),
    (turns({**RESULT, "content": [TEXT], "is_error": True}), chat(Message("tool", "Error: a", tool_call_id="t1"))),
    (turns({**RESULT, "is_error": False}), chat(Message("tool", "", tool_call_id="t1"))),
    (
        turns({**RESULT, "content": [PNG], "is_error": True}),
        chat(Message("tool", (TextPart("Error: "), ImagePart("data:image/png;base64,aGk=")), tool_call_id="t1")),
    ),
    ({"tools": []}, {}),
    ({"tools": [TOOL]}, {"tools": (Tool("weather", "", ENCODED),)}),
    (
        {"tools": [{**TOOL, "type": "custom", "description": "d", "strict": True, "cache_control": MARK}]},
        {"tools": (Tool("weather", "d", ENCODED, True),)},
    ),
    (
        {"tools": [{**TOOL, "allowed_callers": ["direct"], "defer_loading": False, "eager_input_streaming": True}]},
        {"tools": (Tool("weather", "", ENCODED),)},
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": (Tool("weather", "", ENCODED),), "tool_choice": ToolChoice("required"), "parallel_tool_calls": False},
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
        {"tools": (Tool("weather", "", ENCODED),), "tool_choice": ToolChoice("function", "weather")},
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tools": (Tool("weather", "", ENCODED),)}),
    ({"tool_choice": {"type": "none"}}, {"tool_choice": ToolChoice("none")}),
    ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
    ({"thinking": {"type": "adaptive"}}, {}),
    ({"thinking": {"type": "adaptive", "display": "summarized"}}, {}),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"reasoning_effort": "low"}),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 3000}, "max_tokens": 4000},
        {"reasoning_effort": "medium", "max_tokens": 4000},
    ),
    ({"output_config": {"effort": "max"}}, {"reasoning_effort": "xhigh"}),
    ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
    ({"stop_sequences": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"stream": True}, {"stream": True}),
    ({"metadata": {"user_id": "u"}}, {"user": "u"}),
    ({"metadata": {"user_id": None}, "service_tier": "auto", "speed": "standard", "thread": False}, {}),
    ({"container": None, "mcp_servers": None, "tools": None, "system": None, "stop_sequences": None}, {}),
)
