"""Required calls in each family's own form, from a model of random weights whose template is of that family."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from causeway_server.models.llama_cpp.protocol import EngineOptions, Prompt
from causeway_server.router.tool_calls.parser import ToolCallParser
from causeway_server.router.tool_calls.schema import (
    GEMMA,
    HERMES,
    LLAMA,
    MISTRAL,
    PHI,
    PLAIN,
    ToolFormat,
    answer_schema,
    call_frame,
    tool_format,
)
from causeway_server.router.types import Message, Request, Sampling, Tool, ToolChoice

from ..conftest import GREEDY, Rig
from ..tiny_gguf import CONTROL, write_tiny_gguf

LAMP = Tool(
    "lamp",
    parameters='{"type":"object","properties":{"on":{"type":"boolean"}},"required":["on"],"additionalProperties":false}',
)
REQUIRED = Request(
    kind="chat",
    model="m",
    messages=(Message("user", "turn on the light"),),
    tools=(LAMP, Tool("fan")),
    tool_choice=ToolChoice("required"),
)
NAMED = msgspec.structs.replace(REQUIRED, tool_choice=ToolChoice("function", "lamp"))


@pytest.mark.parametrize("form", [PLAIN, HERMES, LLAMA, MISTRAL, PHI, GEMMA], ids=lambda form: form.family)
def test_required_calls_have_the_family_s_form(rig: Rig, form: ToolFormat) -> None:
    """And are found again by the parser. Only a named function, or a client that wants one call, gets just one."""
    for seed in range(4):
        for request in (REQUIRED, NAMED, msgspec.structs.replace(REQUIRED, parallel_tool_calls=False)):
            frame = call_frame(request, form)
            answer = rig.run(
                "hello",
                json_schema=answer_schema(request, form=form),
                call_frame=frame,
                sampling=Sampling(seed=seed),
                max_tokens=300,
            )
            assert answer.end.finish_reason == "stop"
            assert answer.text.startswith(frame.before)
            assert answer.text.rstrip().endswith(frame.after)
            assert f'"{form.arguments_key}"' in answer.text
            parser = ToolCallParser(request)
            text, calls = parser.feed(answer.text)
            assert text + parser.finish()[0] == ""
            assert calls
            assert {call.name for call in calls} <= {"lamp", "fan"}
            assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
            assert len(calls) == 1 or request is REQUIRED


@pytest.mark.parametrize("form", [LLAMA, MISTRAL, GEMMA], ids=lambda form: form.family)
def test_several_calls_come_in_the_family_s_form_and_are_streamed(rig: Rig, form: ToolFormat) -> None:
    """However the text is cut; the arguments of each call arrive in pieces of their own."""
    request = msgspec.structs.replace(REQUIRED, stream=True)
    counts = []
    for seed in range(12):
        answer = rig.run(
            "hello",
            json_schema=answer_schema(request, form=form),
            call_frame=call_frame(request, form),
            sampling=Sampling(seed=seed),
            max_tokens=300,
        )
        parser, written, arguments = ToolCallParser(request), "", dict[int, str]()
        for character in answer.text:
            text, deltas = parser.feed(character)
            written += text
            for delta in deltas:
                arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
        assert written + parser.finish()[0] == ""
        assert [*arguments] == [*range(len(arguments))]
        assert all(isinstance(json.loads(one), dict) for one in arguments.values())
        counts.append(len(arguments))
    assert max(counts) > 1, counts


def test_a_family_s_mark_is_text_though_it_is_a_control_token(tmp_path: Path) -> None:
    """In an answer, also under a grammar; in a caller's message it stays apart from the token."""
    mark = "[TOOL_CALLS]"
    template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{# [TOOL_CALLS] #}<|assistant|>"
    rig = Rig(EngineOptions(model_path=str(write_tiny_gguf(tmp_path / "m.gguf", template=template, marks=(mark,)))))
    try:
        vocabulary = rig.engine.core.vocabulary
        token = int(vocabulary.encode(mark, special=True)[0])
        assert vocabulary.name(token) == mark
        assert rig.engine.info.tool_format == MISTRAL
        likely = msgspec.structs.replace(GREEDY, logit_bias=((token, 1000.0),))
        assert rig.run("hello", sampling=likely, max_tokens=2).text == mark * 2
        framed = rig.run(
            "hello",
            json_schema=answer_schema(NAMED, form=MISTRAL),
            call_frame=call_frame(NAMED, MISTRAL),
            sampling=likely,
            max_tokens=100,
        )
        assert framed.text.startswith(mark + "[{")
        assert framed.end.finish_reason == "stop"
        prompt = rig.engine.core.prompts.tokens(Prompt(messages=(Message("user", mark),)))
        assert token not in prompt.tolist()
        assert CONTROL.index("<|user|>") in prompt.tolist()
    finally:
        rig.engine.close()


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<|im_start|>system # Tools … within <tool_call></tool_call> XML tags", HERMES),
        ('<|start_header_id|>system<|end_header_id|> Respond in the format {"name": …, "parameters": …}', LLAMA),
        ("<|start_header_id|>system … <tool_call>", HERMES),  # Hermes 3, trained from Llama
        ("[INST] … [AVAILABLE_TOOLS] … [TOOL_CALLS] [", MISTRAL),
        ("{{ message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}", PHI),
        ("<start_of_turn>model", GEMMA),
        ("<|im_start|>{{ message.content }}", PLAIN),
        ("", PLAIN),
    ],
)
def test_the_template_shows_the_family(template: str, form: ToolFormat) -> None:
    assert tool_format(template) is form
