"""Conversations rendered by templates of each family: everything that was said is there, in the form it knows."""

from __future__ import annotations

import pytest

from causeway_server.models.chat.template import DEFAULT_TEMPLATE, render
from causeway_server.router.types import Message, TextPart, Tool, ToolCall

from . import family_templates as families

LAMP = Tool("lamp", "Turn a lamp on.", '{"type":"object"}')
ALL = {name: getattr(families, name) for name in ("CHATML", "HERMES", "LLAMA", "MISTRAL", "GEMMA", "PHI")} | {
    "DEFAULT": DEFAULT_TEMPLATE
}
RULE, HELLO = Message("system", "Be brief."), Message("user", "Turn it on.")
CALLS = Message(
    "assistant",
    "I will.",
    tool_calls=(ToolCall("call_aaaa000000001", "lamp", '{"room": "hall"}'), ToolCall("call_2", "fan", '{"v": 5}')),
)
RESULTS = (
    Message("tool", "lamp is on", tool_call_id="call_aaaa000000001"),
    Message("tool", "fan runs", tool_call_id="call_2"),
)
HISTORY = (RULE, HELLO, CALLS, *RESULTS, Message("assistant", "Done."), Message("user", "Thanks."))


@pytest.mark.parametrize("name", ALL)
def test_nothing_that_was_said_is_lost(name: str) -> None:
    """Rules, tools, calls and results, whatever the template has a form for."""
    text = render(ALL[name], HISTORY, (LAMP,))
    words = ["Be brief.", "Turn it on.", "lamp is on", "fan runs", "Thanks.", "Turn a lamp on.", "hall", "fan", "5"]
    assert [word for word in words if word not in text] == []
    assert text.index("hall") < text.index("lamp is on") < text.index("Thanks.")


@pytest.mark.parametrize("name", ALL)
def test_developers_are_obeyed_like_the_system(name: str) -> None:
    developer = Message("developer", "Be brief.")
    assert render(ALL[name], (developer, HELLO)) == render(ALL[name], (RULE, HELLO))


def test_a_template_that_names_developers_gets_them() -> None:
    template = families.CHATML + "{# developer #}"
    assert "<|im_start|>developer\nBe brief." in render(template, (Message("developer", "Be brief."), HELLO))


def test_gemma_reads_the_system_s_rules_in_the_user_s_turn() -> None:
    """Everywhere in a conversation; content of several parts too."""
    assert render(families.GEMMA, (RULE, HELLO)) == (
        "<start_of_turn>user\nBe brief.\n\nTurn it on.<end_of_turn>\n<start_of_turn>model\n"
    )
    parts = Message("user", (TextPart("Turn it"), TextPart("on.")))
    later = render(families.GEMMA, (parts, Message("assistant", "Yes."), RULE, HELLO, HELLO))
    assert later.endswith(
        "<start_of_turn>user\nBe brief.\n\nTurn it on.\n\nTurn it on.<end_of_turn>\n<start_of_turn>model\n"
    )


def test_gemma_is_told_how_to_call() -> None:
    """Its template ignores tools. A call and its result in the history have the same form."""
    text = render(families.GEMMA, (HELLO, Message("assistant", tool_calls=CALLS.tool_calls[:1]), RESULTS[0]), (LAMP,))
    assert text.count("<start_of_turn>") == 4
    assert '{"name": "function name", "parameters": ' in text
    assert '<start_of_turn>model\n{"name": "lamp", "parameters": {"room": "hall"}}<end_of_turn>' in text
    assert "<start_of_turn>user\nThe function lamp returned:\n\nlamp is on<end_of_turn>" in text


def test_gemma_is_told_how_to_call_several_functions() -> None:
    """Calls of its history have the form that is forced."""
    text = render(families.GEMMA, (HELLO, CALLS, *RESULTS), (LAMP,))
    assert 'To call several, answer with nothing but [{"name": "function name", "parameters": ' in text
    assert (
        'I will.\n\n[{"name": "lamp", "parameters": {"room": "hall"}}, {"name": "fan", "parameters": {"v": 5}}]' in text
    )


def test_llama_sees_each_call_before_its_result() -> None:
    text = render(families.LLAMA, HISTORY)
    order = ["I will." if "I will." in text else '"lamp"', "lamp is on", '"fan"', "fan runs", "Thanks."]
    assert [text.index(word) for word in order] == sorted(text.index(word) for word in order)


def test_mistral_s_call_ids_have_nine_characters() -> None:
    text = render(families.MISTRAL, HISTORY)
    assert text.count('"000000001"') == 1
    assert "lamp is on 000000001[/TOOL_RESULTS]" in text
    assert "fan runs 0000call2[/TOOL_RESULTS]" in text


def test_phi_reads_the_tools_in_the_system_message() -> None:
    """With or without rules of the client."""
    assert '<|system|><|tool|>[{"name": "lamp"' in render(families.PHI, (HELLO,), (LAMP,))
    assert '<|system|>Be brief.<|tool|>[{"name": "lamp"' in render(families.PHI, (RULE, HELLO), (LAMP,))
    assert "<|tool|>" not in render(families.PHI, (RULE, HELLO))
    assert '<|tool_call|>[{"name": "lamp", "arguments": {"room": "hall"}}, {"name": "fan"' in render(
        families.PHI, HISTORY
    )


def test_a_model_of_one_task_gets_the_user_s_words_alone() -> None:
    assert render(families.ONE_TASK, HISTORY, (LAMP,)) == "<|user|>Turn it on.<|user|>Thanks.<|assistant|>"


def test_a_template_that_renders_no_user_is_left_alone() -> None:
    assert render("{{ messages | length }}", HISTORY, (LAMP,)) == str(len(HISTORY))
