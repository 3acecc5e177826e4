"""Tool calls in a model's text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tool_calls.parser import ToolCallParser
from router.types import Message, Request, Tool, ToolChoice

LAMP = Request(
    kind="chat",
    model="m",
    messages=(Message("user", "x"),),
    tools=(Tool("lamp"), Tool("fan", parameters='{"type":"object"}')),
)
CALL = '{"name": "lamp", "arguments": {"on": true}}'

Call = tuple[str, str]


def parse(text: str, *cuts: int, request: Request = LAMP) -> tuple[str, list[Call]]:
    """Return the client's text and the calls (name, arguments) of an answer that arrives in pieces."""
    parser = ToolCallParser(request)
    ends = [*sorted(cuts), len(text)]
    results = [parser.feed(text[start:end]) for start, end in zip([0, *ends], ends, strict=False)] + [parser.finish()]
    calls = [call for _, found in results for call in found]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert parser.called is bool(calls)
    return "".join([piece for piece, _ in results]), [(call.name or "", call.arguments) for call in calls]


# text → (text for the client, calls)
CASES: list[tuple[str, str, list[Call]]] = [
    (CALL, "", [("lamp", '{"on": true}')]),
    (f"  \n{CALL}\n", "", [("lamp", '{"on": true}')]),
    ('{"name":"lamp","parameters":{"a":"}\\"{"}}', "", [("lamp", '{"a":"}\\"{"}')]),
    ('{"type":"function","name":"fan","parameters":{}}', "", [("fan", "{}")]),
    ('{"type":"function","function":{"name":"fan","arguments":{"v":1}}}', "", [("fan", '{"v":1}')]),
    ('{"arguments":{},"name":"lamp"}', "", [("lamp", "{}")]),
    ('{"name":"lamp","arguments":"{\\"on\\":1}"}', "", [("lamp", '{"on":1}')]),
    ('{"name":"lamp"}', "", [("lamp", "{}")]),
    ('{"name":"lamp","arguments":null}', "", [("lamp", "{}")]),
    (f'{CALL}\n{{"name":"fan","arguments":{{}}}}', "", [("lamp", '{"on": true}'), ("fan", "{}")]),
    (f"{CALL}; {CALL}", "", [("lamp", '{"on": true}')] * 2),
    (f"{CALL}\nDone, I hope.", "Done, I hope.", [("lamp", '{"on": true}')]),
    (f"{CALL}, and so on", ", and so on", [("lamp", '{"on": true}')]),
    (f"<tool_call>\n{CALL}\n</tool_call>", "", [("lamp", '{"on": true}')]),
    (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", [("lamp", '{"on": true}')] * 2),
    (f"I will. <tool_call>{CALL}</tool_call> Done.", "I will. Done.", [("lamp", '{"on": true}')]),
    (f"<tool_call>{CALL}", "", [("lamp", '{"on": true}')]),
    # No calls: passed on as they came.
    ("", "", []),
    ("Hello { world }", "Hello { world }", []),
    ("  \n hello", "  \n hello", []),
    ('{"city":"Bern","name":"lamp","arguments":{}}', '{"city":"Bern","name":"lamp","arguments":{}}', []),
    ('{"name":"Eva","arguments":{}} ', '{"name":"Eva","arguments":{}} ', []),
    ('{"name":"lamp","arguments":[1]}', '{"name":"lamp","arguments":[1]}', []),
    ('{"name":"lamp","arguments":"on"}', '{"name":"lamp","arguments":"on"}', []),
    ('{"name":"lamp","arguments":{on}}', '{"name":"lamp","arguments":{on}}', []),
    ('{"name":5}', '{"name":5}', []),
    ('{"name":"lamp","argum', '{"name":"lamp","argum', []),
    ("{}", "{}", []),
    ("{ ", "{ ", []),
    ("{not json}", "{not json}", []),
    ('{"' + "x" * 300, '{"' + "x" * 300, []),
    (f"Sure: {CALL}", f"Sure: {CALL}", []),
    ("a < b <tool", "a < b <tool", []),
    ("<tool_call>", "<tool_call>", []),
    ("<tool_call> nothing </tool_call>", "<tool_call> nothing </tool_call>", []),
    (' <tool_call>{"name":"x"}</tool_call>', ' <tool_call>{"name":"x"}</tool_call>', []),
    ("</tool_call>", "</tool_call>", []),
    (f"<tool_call><tool_call>{CALL}</tool_call>", "<tool_call>", [("lamp", '{"on": true}')]),
    (f'{CALL}{{"name":"x"}}', '{"name":"x"}', [("lamp", '{"on": true}')]),
    ('{"name":"lamp","arguments":{"a":"\ud800"}}', '{"name":"lamp","arguments":{"a":"\ud800"}}', []),
]


@pytest.mark.parametrize(("text", "left", "calls"), CASES)
def test_what_is_a_call_and_what_is_text(text: str, left: str, calls: list[Call]) -> None:
    assert parse(text) == (left, calls)


def test_arguments_too_deep_to_read_are_text() -> None:
    text = '{"name":"lamp","arguments":' + '{"a":' * 100_000 + "1" + "}" * 100_001
    left, calls = parse(text, 10, 1000, 400_000)
    assert left == text
    assert calls == []


@pytest.mark.parametrize("text", [case[0] for case in CASES])
def test_token_by_token_is_the_same(text: str) -> None:
    assert parse(text, *range(len(text))) == parse(text)


_FRAGMENTS = st.lists(
    st.sampled_from(
        [
            CALL,
            "<tool_call>",
            "</tool_call>",
            '{"name":"x"}',
            '{"name":"fan",',
            '"arguments":{',
            "}",
            "{",
            '"',
            "\\",
            "\n",
            " ",
            ";",
            ",",
            "a<",
        ]
    ),
    max_size=7,
).map("".join)


@given(_FRAGMENTS | st.text(max_size=30), st.data())
def test_any_cutting_gives_the_same(text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    assert parse(text, *cuts) == parse(text)


@given(_FRAGMENTS | st.text(max_size=30))
def test_without_a_call_nothing_changes(text: str) -> None:
    left, calls = parse(text)
    if not calls:
        assert left == text


@pytest.mark.parametrize(
    "request_",
    [
        Request(kind="chat", model="m"),
        Request(kind="chat", model="m", tools=LAMP.tools, tool_choice=ToolChoice("none")),
    ],
)
def test_without_tools_text_passes_at_once(request_: Request) -> None:
    parser = ToolCallParser(request_)
    assert parser.feed('{"name"') == ('{"name"', ())
    assert parser.finish() == ("", ())
    assert parse(CALL, request=request_) == (CALL, [])


def test_text_is_held_only_while_it_may_become_a_call() -> None:
    """Prose passes at once; JSON as soon as its first key rules out a call."""
    parser = ToolCallParser(LAMP)
    assert parser.feed('{"ci') == ("", ())
    assert parser.feed('ty": ')[0] == '{"city": '
    assert parser.feed('"Bern"}')[0] == '"Bern"}'
    endless = '{"' + "x" * 300
    assert ToolCallParser(LAMP).feed(endless)[0] == endless
    assert ToolCallParser(LAMP).feed("Sure, I can")[0] == "Sure, I can"
    assert ToolCallParser(LAMP).feed("I <b")[0] == "I <b"


def test_equal_calls_have_different_ids() -> None:
    """In one answer and in two turns; the same answer read twice has the same ids."""

    def ids(request: Request) -> list[str | None]:
        return [call.id for call in ToolCallParser(request).feed(f"{CALL}\n{CALL}")[1]]

    later = Request(kind="chat", model="m", messages=LAMP.messages * 3, tools=LAMP.tools)
    assert len({*ids(LAMP), *ids(later)}) == 4
    assert ids(LAMP) == ids(LAMP)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
        max_size=4,
    ),
    st.booleans(),
)
def test_arguments_arrive_as_they_were_written(arguments: dict[str, object], ascii_only: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    assert parse(f'{{"name": "fan", "arguments": {written}}}') == ("", [("fan", written)])
