"""Conditions: what compiles, what is refused at activation, and the effect of an absent signal."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.policy.cel_source import ExpressionError, conditions, scan
from causeway_server.router.policy.expression import compile_expression, is_constant
from causeway_server.router.policy.signals import (
    GROUPS,
    SIGNALS,
    EvaluationFailure,
    Expression,
    RequiredSignals,
    SignalValues,
)
from causeway_server.router.types import (
    CloudSignals,
    DeviceSignals,
    EdgeSignals,
    Estimates,
    NowSignals,
    RoutingHints,
    Snapshot,
    SpendSignals,
)
from tests.router.sample_requests import chat


def evaluate(
    source: str, snapshot: Snapshot | None = None, *tags: str, tokens: int | None = None
) -> bool | EvaluationFailure:
    expression = compile_expression(source)
    facts = RequiredSignals([expression]).read(chat(tags=tags), snapshot or Snapshot(), Estimates(prompt_tokens=tokens))
    return expression.evaluate(facts)


def hot(temperature_c: float | None, **others: float | bool | None) -> Snapshot:
    return Snapshot(device=DeviceSignals(temperature_c=temperature_c, **others))  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", ["85", "85.0", "8.5e1"])
@pytest.mark.parametrize(("temperature_c", "answer"), [(85.5, True), (84.5, False), (85.0, False), (86, True)])
def test_doubles_compare_with_ints_and_doubles(bound: str, temperature_c: float, answer: bool) -> None:
    """Also if the reading is an int."""
    assert evaluate(f"device.temperature_c > {bound}", hot(temperature_c)) is answer


@pytest.mark.parametrize("bound", ["30", "30.0"])
def test_ints_compare_with_ints_and_doubles(bound: str) -> None:
    assert evaluate(f"request.prompt_tokens < {bound}", tokens=29) is True
    assert evaluate(f"request.prompt_tokens == {bound}", tokens=30) is True


REFUSED = {
    # condition → (offset of the mistake, words)
    "device.temprature_c > 85": (0, "did you mean `device.temperature_c`?"),
    "request.stream || devise.cpu > 1": (18, "did you mean `device.cpu`?"),
    "temperature_c > 85": (0, "did you mean `device.temperature_c`?"),
    "xyzzy": (0, "unknown signal `xyzzy`"),
    "device > 3": (0, "`device` is a group of signals, name one: device.temperature_c"),
    'device["cpu"] > 1': (0, "is a group of signals"),
    "has(device.batery)": (4, "did you mean `device.battery`?"),
    "has(request.tags[0])": (None, "not valid CEL"),
    "device.temperature_c.max > 1": (21, "a signal has no fields"),
    ".device.cpu > 1": (1, "a signal has no fields"),
    "foo(1) > 2": (0, "unknown function `foo`"),
    'request.client.startswith("x")': (15, "did you mean `startsWith`?"),
    "request.prompt_tokens + 1": (0, "is a number"),
    "request.client": (0, "is text"),
    "request.tags": (0, "is a list"),
    'request.prompt_tokens > "x"': (0, "mixes types"),
    "device.temperature_c - 5 > 80": (0, "device.temperature_c is a double"),
    'request.stream && request.prompt_tokens > "x"': (18, "mixes types"),
    'request.stream || request.prompt_tokens > "x"': (18, "mixes types"),
    "!(request.stream || (request.prompt_tokens + 1))": (21, "is a number"),
    "request.stream ? request.json : request.n": (32, "is a number"),
    'request.tags == "private"': (0, 'write "private" in request.tags'),
    '"private" == request.tags': (13, 'write "private" in request.tags'),
    "request.tools == 1": (0, "request.tools is true or false, never 1"),
    "1 != request.client": (5, "request.client is text, never 1"),
    "request.client in [1, 2]": (0, "request.client is text, never 1"),
    "1 in request.tags": (5, "is a list of text"),
    '"a" in request.client': (7, "is not a list"),
    'cloud.breaker == "opened"': (17, "did you mean `open`?"),
    '"imag" in request.modalities': (0, "did you mean `image`?"),
    "request.client == null": (0, "is never null"),
    "request.tags.exists(device, true)": (20, "use another name"),
    'request.client.matches("(")': (0, "not a valid regex"),
    "request.n >": (11, "the condition ends where a value is expected"),
    "": (0, "the condition is empty"),
    "(" * 30 + "true" + ")" * 30: (24, "nest deeper"),
    "request.temperature = 0": (20, "write == to compare"),
    "request.temperature === 0": (20, "write == to compare"),
    "request.stream and request.tools": (15, "write && instead of `and`"),
    "request.stream OR request.tools": (15, "write || instead of `OR`"),
    "not request.stream": (0, "write ! instead of `not`"),
    "not(request.stream)": (0, "write ! instead of `not`"),
    '"a" not in request.tags': (4, "!(a in b)"),
    "request.prompt_tokens << 30": (22, "`<<` is not an operator of CEL: write <"),
    "request.prompt_tokens =< 30": (22, "write <="),
    "device.battery <> 0.5": (15, "write !="),
    "request.stream & request.tools": (15, "write &&"),
    "request.stream == True": (18, "write true instead of `True`"),
    "request.client == None": (18, "has(signal)"),
    "if request.stream then true": (0, "write condition ? a : b"),
    "edge.queue > 3 request.stream": (15, "unexpected `request`: put an operator such as && or || before it"),
    "(edge.queue > 3": (15, "`)` is missing at the end"),
    "edge.queue > 3)": (14, "`)` without an opening bracket"),
    'request.client == "a': (18, "no closing quote"),
    'request.client contains "x"': (15, "write x.contains(y)"),
    "device.temperature_c > 85°": (25, "unknown character `°`"),
    "edge.queue > && request.stream": (13, "a value is missing before it"),
    "request.stream || " * 200 + "true": (None, "longer than 2000"),
}


@pytest.mark.slow
@pytest.mark.parametrize("source", REFUSED)
def test_each_mistake_is_refused_at_activation(source: str) -> None:
    offset, words = REFUSED[source]
    with pytest.raises(ExpressionError) as caught:
        compile_expression(source)
    assert words in caught.value.message
    if offset is not None:
        assert caught.value.offset == offset


ACCEPTED = [
    'request.client == "a and b = c" // or not',
    "request.stream &&!request.tools",
    '"private" in request.tags',
    'request.tags.exists(t, t.startsWith("site-"))',
    "request.tags.all(t, t.size() > 2)",
    "size(request.tags) == 0",
    'request.client in ["kiosk", "till"]',
    'request.client.matches("^kiosk-[0-9]+$")',
    "now.hour >= 8 && now.hour < 18 && now.weekday <= 5",
    "has(device.battery) && device.battery < 0.2",
    "double(request.prompt_tokens) * 1.5 > 40.0",
    "device.temperature_c - 5.0 > 80",
    "request.stream ? request.n == 1 : request.json",
    "request.tags[3] == 'a'",
    "request.prompt_tokens / 0 > 1",
    "device . cpu > 0.5",
    "device.cpu // device.nothing\n > 0.5",
    '"device.nothing" == request.client',
    r'r"a\" == request.client',
    "-device.temperature_c < -85.0",
]


@pytest.mark.parametrize("source", ACCEPTED)
def test_valid_conditions_are_accepted(source: str) -> None:
    assert isinstance(compile_expression(source), Expression)


def test_names_in_strings_and_comments_are_not_signals() -> None:
    expression = compile_expression('request.client == "device.cpu" // edge.queue\n || has(device.battery)')
    assert expression.signals == {"request.client", "device.battery"}
    assert expression.presences == {"device.battery"}


def test_an_absent_signal_is_named() -> None:
    answer = evaluate("device.temperature_c > 85")
    assert isinstance(answer, EvaluationFailure)
    assert answer.absent == "device.temperature_c"


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("device.temperature_c > 85 || request.n == 1", True),
        ("request.n == 1 || device.temperature_c > 85", True),
        ("device.temperature_c > 85 && request.n == 2", False),
        ("has(device.temperature_c)", False),
        ("!has(device.temperature_c) || device.temperature_c > 85", True),
        ("has(device.temperature_c) && device.temperature_c > 85", False),
        ("has(request.n)", True),
    ],
)
def test_a_signal_is_needed_only_where_the_result_depends_on_it(source: str, answer: bool) -> None:
    assert evaluate(source, hot(None)) is answer


@pytest.mark.parametrize("reading", [float("nan"), float("inf")])
def test_a_reading_that_is_nan_is_absent(reading: float) -> None:
    assert isinstance(evaluate("device.temperature_c > 85", hot(reading)), EvaluationFailure)
    assert isinstance(evaluate("device.temperature_c <= 85", hot(reading)), EvaluationFailure)


def test_a_failure_at_run_time_is_a_result_and_no_exception() -> None:
    for source in ("request.tags[3] == 'a'", "request.n / 0 > 1"):
        answer = evaluate(source)
        assert isinstance(answer, EvaluationFailure)
        assert answer.absent == ""
        assert answer.message


def test_constants_are_recognised() -> None:
    assert is_constant(compile_expression("1 < 2")) is True
    assert is_constant(compile_expression("1 > 2")) is False
    assert is_constant(compile_expression("request.stream")) is None


def test_lone_surrogates_do_not_break_a_decision() -> None:
    assert evaluate('"private" in request.tags', None, "\udcff", "private") is True


@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_of_the_table_can_be_read_and_compared(name: str) -> None:
    spec = SIGNALS[name]
    snapshot = Snapshot(
        device=DeviceSignals(50, False, 900, 0.5, 7, 0.9),
        edge=EdgeSignals(0, 30, True, 0.9),
        cloud=CloudSignals(True, 20, "closed", "large", feedback=0.8),
        spend=SpendSignals(1, 2, 3),
        now=NowSignals(12, 3, 30, 1_700_000_000),
    )
    request = msgspec.structs.replace(chat(), max_tokens=10, hints=RoutingHints(deadline_ms=5))
    found = {"pii_classes": ("email",), "pii_count": 1, "key_count": 0}
    value = spec.read(request, snapshot, Estimates(12, 0.7, language="en", **found))  # type: ignore[arg-type]
    kinds = {"int": int, "double": float, "bool": bool, "string": str, "list": list}
    assert type(value) is kinds[spec.type]
    assert spec.meaning
    assert name.partition(".")[0] in GROUPS


def test_conditions_are_split_through_brackets_and_negation() -> None:
    tokens = [token for token in scan("!(a && (b || size(c || d))) ? e : f") if token.kind != "space"]
    found = ["".join(token.text for token in condition) for condition in conditions(tokens)]
    assert sorted(found) == ["a", "b", "e", "f", "size(c||d)"]


@given(
    st.text(max_size=60)
    | st.lists(
        st.sampled_from(
            [
                *SIGNALS,
                "&&",
                "||",
                "!",
                "(",
                ")",
                "[",
                "]",
                "?",
                ":",
                "==",
                "<",
                "in",
                "1",
                "0.5",
                '"a"',
                "true",
                "has(",
            ]
        ),
        max_size=12,
    ).map(" ".join)
)
def test_any_text_compiles_or_is_refused(source: str) -> None:
    try:
        expression = compile_expression(source)
    except ExpressionError:
        return
    assert isinstance(expression.evaluate(SignalValues({})), bool | EvaluationFailure)
