"""Tool calls in a model's text."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.errors import StreamBroken
from causeway_server.router.tool_calls.parser import ToolCallParser
from causeway_server.router.tool_calls.schema import with_own_ids
from causeway_server.router.types import Chunk, Message, Request, Tool, ToolCallDelta, ToolChoice

LAMP = Request(
    kind="chat",
    model="m",
    messages=(Message("user", "x"),),
    tools=(Tool("lamp"), Tool("fan", parameters='{"type":"object"}')),
)
CALL = '{"name": "lamp", "arguments": {"on": true}}'

Call = tuple[str, str]
BOTH: list[Call] = [("lamp", '{"on": true}'), ("fan", "{}")]


def parse(text: str, *cuts: int, request: Request = LAMP) -> tuple[str, list[Call]]:
    """Return the client's text and the calls (name, arguments) of an answer that arrives in pieces."""
    parser = ToolCallParser(request)
    ends = [*sorted(cuts), len(text)]
    results = [parser.feed(text[start:end]) for start, end in zip([0, *ends], ends, strict=False)] + [parser.finish()]
    calls: list[Call] = []
    for delta in [delta for _, found in results for delta in found]:
        assert (delta.id is None) is (delta.name is None)
        if delta.name is not None:
            assert delta.index == len(calls)
            calls.append((delta.name, ""))
        calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    assert parser.called is bool(calls)
    return "".join([piece for piece, _ in results]), calls


FAN = "<tool_call>\n<function=fan>\n</function>\n</tool_call>"
ROOM = "<parameter=room>\nthe <hall>\n12\n</parameter>\n"

# text → (text for the client, calls)
CASES: list[tuple[str, str, list[Call]]] = [
    (CALL, "", [("lamp", '{"on": true}')]),
    (f"  \n{CALL}\n", "", [("lamp", '{"on": true}')]),
    ('{"name":"lamp","parameters":{"a":"}\\"{"}}', "", [("lamp", '{"a":"}\\"{"}')]),
    ('{"type":"function","name":"fan","parameters":{}}', "", [("fan", "{}")]),
    ('{"type":"function","function":{"name":"fan","arguments":{"v":1}}}', "", [("fan", '{"v":1}')]),
    ('{"arguments":{},"name":"lamp"}', "", [("lamp", "{}")]),
    ('{"name":"lamp","arguments":"{\\"on\\":1}"}', "", [("lamp", '{"on":1}')]),
    ('{"name":"lamp","arguments":{"on":1e999}}', "", [("lamp", '{"on":1e999}')]),
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
    # Other families, as their models write.
    (f"```json\n{CALL}\n```", "", [("lamp", '{"on": true}')]),  # Qwen2.5 Coder
    (f"Sure:\n```json\n{CALL}\n```\nDone.", "Sure:\nDone.", [("lamp", '{"on": true}')]),
    (f"```\n{CALL}\n```", "", [("lamp", '{"on": true}')]),
    ('<|python_tag|>{"name": "fan", "parameters": {"v": 1}}', "", [("fan", '{"v": 1}')]),  # Llama 3.1
    ('{"name":"fan","parameters":{}}; {"name":"lamp","parameters":{}}', "", [("fan", "{}"), ("lamp", "{}")]),
    ("[lamp(on=True), fan()]", "", [("lamp", '{"on": true}'), ("fan", "{}")]),  # Llama 3.2
    ("<|python_start|>[fan(v=-1.5, w=[{'a': null}])]<|python_end|>", "", [("fan", '{"v": -1.5, "w": [{"a": null}]}')]),
    ("""[lamp(room="it's ] \\" here", n=None)]""", "", [("lamp", '{"room": "it\'s ] \\" here", "n": null}')]),
    (f"[TOOL_CALLS][{CALL}]", "", [("lamp", '{"on": true}')]),  # Mistral
    (f'I will. [TOOL_CALLS] [{CALL}, {{"name":"fan","arguments":{{}},"id":"abcdefghi"}}]', "I will. ", BOTH),
    ('[TOOL_CALLS]lamp[ARGS]{"on": true}[TOOL_CALLS]fan{}', "", BOTH),
    ('[TOOL_CALLS]lamp[CALL_ID]abcdefghi[ARGS]{"on": true}', "", [("lamp", '{"on": true}')]),
    (f'[{CALL}, {{"name": "fan"}}]', "", BOTH),  # a server dropped the mark
    (f"<|tool_call|>[{CALL}]<|/tool_call|>", "", [("lamp", '{"on": true}')]),  # Phi
    (f"functools[{CALL}]", "", [("lamp", '{"on": true}')]),
    ("```tool_code\nfan(v=1)\n```", "", [("fan", '{"v": 1}')]),  # Gemma
    (FAN, "", [("fan", "{}")]),  # Qwen3-Coder
    (
        f"I will.\n<tool_call>\n<function=lamp>\n{ROOM}</function>\n</tool_call>\n{FAN}",
        "I will.\n",
        [("lamp", '{"room": "the <hall>\\n12"}'), ("fan", "{}")],
    ),
    ('<function=lamp>{"on": true}</function>', "", [("lamp", '{"on": true}')]),  # Llama 3.1
    (
        "<start_function_call>call:lamp{on:true,to:-1.5,room:<escape>a, {b}<escape>,w:[1,{c:null}]}<end_function_call>",
        "",
        [("lamp", '{"on": true, "to": -1.5, "room": "a, {b}", "w": [1, {"c": null}]}')],
    ),  # FunctionGemma
    ("<start_function_call>call:fan{}", "", [("fan", "{}")]),  # a server dropped the end
    # No calls: passed on as they came.
    ("<function=other>\n</function> so", "<function=other>\n</function> so", []),
    ("<tool_call>\n<function=lamp>\n<parameter=on", "<tool_call>\n<function=lamp>\n<parameter=on", []),
    ("<start_function_call>call:lamp{on", "<start_function_call>call:lamp{on", []),
    ("if a <function b", "if a <function b", []),
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
    (f'<tool_call>{CALL}{{"name":"x"}}', '{"name":"x"}', [("lamp", '{"on": true}')]),
    *[
        (text, text, [])
        for text in (
            '```json\n{"city": "Bern"}\n```',
            "```python\nlamp(on=True)\n```",
            "Use functools and functools.reduce [here].",
            "[TOOL_CALLS",
            "[TOOL_CALLS]",
            "[TOOL_CALLS] lamp",
            "[TOOL_CALLS]lamp[ARGS]",
            "[TOOL_CALLS]lamp[ARGS]{on}",
            "[TOOL_CALLS]other[ARGS]{}",
            "[TOOL_CALLS][]",
            "<|python_tag|>print(lamp(on=True))",
            "<|python_tag|>lamp.call(on=True)",
            "[lamp(True)]",
            "[lamp(**{'on': True})]",
            "[lamp(on=other)]",
            "[lamp(on=True), other()]",
            "[lamp(on=1e999)]",
            "[lamp(on=True",
            "[lamp(on='\\ud800')]",
            "[1, 2] is a list",
            "[lamp] is a list",
            "lamp(on=True)",
        )
    ],
]


@pytest.mark.parametrize(("text", "left", "calls"), CASES)
def test_what_is_a_call_and_what_is_text(text: str, left: str, calls: list[Call]) -> None:
    assert parse(text) == (left, calls)


@pytest.mark.slow
def test_arguments_too_deep_to_read_are_text() -> None:
    text = '{"name":"lamp","arguments":' + '{"a":' * 100_000 + "1" + "}" * 100_001
    left, calls = parse(text, 10, 1000, 400_000)
    assert left == text
    assert calls == []


@pytest.mark.parametrize("text", [case[0] for case in CASES])
def test_token_by_token_is_the_same(text: str) -> None:
    assert parse(text, *range(len(text))) == parse(text)


STREAMED = msgspec.structs.replace(LAMP, stream=True)


@pytest.mark.parametrize(("text", "left", "calls"), CASES)
def test_a_stream_has_the_same_calls(text: str, left: str, calls: list[Call]) -> None:
    """Unless the arguments turn out to be no JSON after they were partly sent: then the answer ends with an error."""
    for cuts in ((), range(len(text))):
        try:
            assert parse(text, *cuts, request=STREAMED) == (left, calls)
        except StreamBroken:
            assert not calls
            assert "{" in text


@pytest.mark.parametrize(
    "start",
    [
        '{"name": "lamp", "arguments": ',
        '<tool_call>\n{"name": "lamp", "arguments": ',  # Hermes, Qwen
        '```json\n{"name": "lamp", "arguments": ',  # Qwen2.5 Coder
        '{"name": "lamp", "parameters": ',  # Llama 3.x, Gemma
        '<|python_tag|>{"name": "lamp", "parameters": ',
        '[TOOL_CALLS][{"name":"lamp","arguments":',  # Mistral
        "[TOOL_CALLS]lamp[ARGS]",
        '<|tool_call|>[{"name": "lamp", "arguments": ',  # Phi
        'functools[{"name": "lamp", "arguments": ',
    ],
)
def test_a_streamed_call_s_arguments_arrive_while_they_are_written(start: str) -> None:
    """Its name comes first, with an id; the token limit may cut them."""
    parser = ToolCallParser(STREAMED)
    assert parser.feed(start) == ("", ())
    ((delta,), more) = parser.feed('{"room": "ha')[1], parser.feed('ll"')[1]
    assert (delta.index, delta.name, delta.arguments) == (0, "lamp", '{"room": "ha')
    assert delta.id
    assert more == (ToolCallDelta(0, 'll"'),)
    assert parser.called
    assert parser.finish(cut=True) == ("", ())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("text", "left", "calls"),
    [
        ('<tool_call>\n{"name": "lamp", "arguments": {"room": "ha', "", [("lamp", '{"room": "ha')]),
        (
            f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name": "fan", "arguments": {{',
            "",
            [*BOTH[:1], ("fan", "{")],
        ),
        ('{"name": "lamp", "parameters": {"on"', "", [("lamp", '{"on"')]),
        ('[TOOL_CALLS]lamp[ARGS]{"on": t', "", [("lamp", '{"on": t')]),
        ('I will. <tool_call>\n{"name": "la', "I will. ", []),
        ("I will. <tool_call>\n", "I will. ", []),
        (f"{FAN}\n<tool_call>\n<function=lamp>\n<parameter=room>\nha", "", [("fan", "{}")]),
        ('{"name": "la', '{"name": "la', []),  # perhaps not a call
        ('```json\n{"name": "la', '```json\n{"name": "la', []),
        ("import functools", "import functools", []),
    ],
)
def test_a_call_that_the_token_limit_cuts_is_an_incomplete_call(
    text: str, left: str, calls: list[Call], stream: bool
) -> None:
    parser = ToolCallParser(STREAMED if stream else LAMP)
    (shown, found), (rest, last) = parser.feed(text), parser.finish(cut=True)
    made: dict[int, Call] = {}
    for delta in (*found, *last):
        name, arguments = made.get(delta.index, (delta.name or "", ""))
        made[delta.index] = name, arguments + delta.arguments
    assert (shown + rest, list(made.values()), parser.called) == (left, calls, bool(calls))


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("[fan(), lamp(room='ha", "ll')]"),  # Llama 3.2 and 4
        ("```tool_code\n[fan(), lamp(room='ha", "ll')]\n```"),  # Gemma
        (f"{FAN}\n<tool_call>\n<function=lamp>\n<parameter=room>\nha", "ll\n</parameter>\n</function>\n</tool_call>"),
        (
            "<start_function_call>call:fan{}<end_function_call><start_function_call>call:lamp{room:<escape>ha",
            "ll<escape>}<end_function_call>",
        ),
    ],
    ids=["pythonic", "tool_code", "qwen3-coder", "functiongemma"],
)
def test_a_streamed_call_that_is_no_json_arrives_when_it_is_whole(start: str, end: str) -> None:
    """Nothing of a half one is shown, whatever it turns out to be."""
    parser = ToolCallParser(STREAMED)
    text, calls = parser.feed(start)
    assert (text, [call.name for call in calls if call.name == "lamp"]) == ("", [])
    *_, lamp = parser.feed(end)[1]
    assert (lamp.index, lamp.name, lamp.arguments) == (1, "lamp", '{"room": "hall"}')
    assert parser.finish() == ("", ())


def test_a_streamed_call_that_stops_before_its_end_is_an_error() -> None:
    parser = ToolCallParser(STREAMED)
    parser.feed('{"name": "lamp", "arguments": {"room": "ha')
    with pytest.raises(StreamBroken, match="lamp"):
        parser.finish()


def test_without_parallel_calls_the_first_one_counts() -> None:
    text = f'[TOOL_CALLS][{CALL}, {{"name": "fan", "arguments": {{}}}}]'
    for stream in (False, True):
        single = msgspec.structs.replace(LAMP, parallel_tool_calls=False, stream=stream)
        assert parse(text, request=single) == ("", BOTH[:1])


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
            "[",
            "]",
            "[TOOL_CALLS]",
            "lamp",
            "(on=1)",
            "```json\n",
            "```",
            "[ARGS]",
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


def test_call_ids_are_unique_by_request() -> None:
    """Equal calls in one answer, in two choices and in two requests; an answer read twice has the same ids."""

    def ids(choice: int, identity: str) -> list[str | None]:
        return [call.id for call in ToolCallParser(LAMP, choice, identity).feed(f"{CALL}\n{CALL}")[1]]

    assert len({*ids(0, "a"), *ids(1, "a"), *ids(0, "b")}) == 6
    assert ids(0, "a") == ids(0, "a")


def test_another_request_gets_an_answer_with_ids_of_its_own() -> None:
    """An upstream's ids, in another form, stay; so does everything else."""
    deltas = ToolCallParser(LAMP, 0, "a").feed(f"{CALL}\n{CALL}")[1]
    made = Chunk(text="t", tool_calls=deltas)
    other = with_own_ids(made, "b")
    assert not {call.id for call in other.tool_calls} & {call.id for call in deltas}
    assert other == with_own_ids(with_own_ids(made, "c"), "b")
    assert [(call.name, call.arguments) for call in other.tool_calls] == [
        (call.name, call.arguments) for call in deltas
    ]
    upstream = Chunk(tool_calls=(ToolCallDelta(0, "{}", "a1B2c3D4e", "lamp"), ToolCallDelta(1, "{}")))
    assert with_own_ids(upstream, "b") == upstream


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


def test_arguments_in_markup_have_the_types_of_the_schema() -> None:
    """A text stays one though it looks like a number; what does not fit its type stays text, for the tool to refuse."""
    kinds = {"a": "string", "b": "integer", "c": "boolean", "d": "array", "e": "integer"}
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
    request = msgspec.structs.replace(LAMP, tools=(Tool("lamp", parameters=json.dumps(schema)),))
    values = {"a": "12", "b": "12", "c": "True", "d": '["x"]', "e": "many", "f": "1"}
    text = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    _, [(_, arguments)] = parse(f"<tool_call>\n<function=lamp>\n{text}</function>\n</tool_call>", request=request)
    assert json.loads(arguments) == {"a": "12", "b": 12, "c": True, "d": ["x"], "e": "many", "f": "1"}
