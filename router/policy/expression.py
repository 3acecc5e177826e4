"""Compiles a condition of a policy: CEL over the signals of `signals.py`, once, when the policy is activated.

CEL's binding does not check these things at compile time, so they are checked here: each signal, function and bound
name exists, the result is a bool, types fit (`request.tags == "private"` would silently be false), and a text that is
compared can occur.
Language definition: https://github.com/google/cel-spec

`a || b` is true if either side is true, even if a signal of the other side is absent: a condition needs a signal only
where its result depends on it.
"""

from __future__ import annotations

import cel

from .cel_mistakes import explain_syntax_error, find_habit
from .cel_source import ExpressionError, Token, conditions, needed_signals, rewrite, scan
from .signals import SIGNALS, Expression, SignalSpec, SignalValues, Value
from .tag_literals import fold_tag_literals

MAX_LENGTH = 2000


def compile_expression(source: str) -> Expression:
    """Compile and check a condition. Raises ExpressionError, with the offset in the source where it is known."""
    if len(source) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    tokens = scan(source)
    try:
        _compile(source)  # the original first, so that the binding's message points into the written text
        flat, signals, presences = rewrite(tokens)
    except ExpressionError as error:
        habit = find_habit(tokens)
        if habit is None:
            raise
        raise habit from error
    flat = fold_tag_literals(flat)
    program = _compile(" ".join(token.text for token in flat))
    for condition in conditions(flat):
        _check(condition, source[condition[0].offset : condition[-1].end])
    return Expression(source, program, signals, presences, needed_signals(flat))


def is_constant(expression: Expression) -> bool | None:
    """Return the result of a condition that names no signal; None if it names one."""
    if expression.signals:
        return None
    result = expression.evaluate(SignalValues({}))
    return result if isinstance(result, bool) else None


def _compile(source: str) -> cel.Program:
    """Raises ExpressionError, in plain words."""
    try:
        return cel.compile(source)
    except Exception as error:
        lines = str(error).splitlines()
        message = lines[0].partition("ERROR: <input>:")[2] or lines[0]
        line, _, rest = message.partition(":")
        column, _, explanation = rest.partition(": ")
        offset = int(column) - 1 if line == "1" and column.isdigit() else None
        explanation = explain_syntax_error(explanation or message, scan(source))
        raise ExpressionError(f"not valid CEL: {explanation}", offset) from error


def _check(condition: list[Token], written: str) -> None:
    """Run one operand of `&&`, `||`, `?:` on sample values, so that no short circuit hides a type error."""
    program = _compile(" ".join(token.text for token in condition))
    for values in _SAMPLES:
        try:
            result = program.execute(values.context)
        except (IndexError, ZeroDivisionError, OverflowError, KeyError):
            continue  # depends on the values, not on the types
        except TypeError as error:
            raise ExpressionError(
                f"`{written}` mixes types: {_types(condition)}CEL does not mix int, double and text in one operation; "
                "write 1.0 for a double, double(x) to convert",
                condition[0].offset,
            ) from error
        except Exception as error:
            message = str(error).partition(". Check")[0].partition("\n")[0]
            raise ExpressionError(f"`{written}`: {message}", condition[0].offset) from error
        if not isinstance(result, bool):
            raise ExpressionError(
                f"`{written}` is {_type_name(result)}, not true or false: compare it with something",
                condition[0].offset,
            )


def _types(condition: list[Token]) -> str:
    named = {token.signal.name: token.signal.type for token in condition if token.signal is not None}
    return "".join(f"{name} is {_ARTICLES[kind]}, " for name, kind in named.items())


def _type_name(result: object) -> str:
    return {int: "a number", float: "a number", str: "text", list: "a list"}.get(type(result), type(result).__name__)


_ARTICLES = {"int": "an int", "double": "a double", "bool": "a bool", "string": "text", "list": "a list of text"}
_LOW: dict[str, Value] = {"int": 1, "double": 0.5, "bool": False, "string": "a", "list": ["a"]}
_HIGH: dict[str, Value] = {"int": 20000, "double": 2000.5, "bool": True, "string": "zz", "list": ["a", "zz"]}


def _sample_values(values: dict[str, Value]) -> SignalValues:
    return SignalValues({variable: value for spec in SIGNALS.values() for variable, value in _variables(spec, values)})


def _variables(spec: SignalSpec, values: dict[str, Value]) -> tuple[tuple[str, Value], ...]:
    return ((spec.variable, values[spec.type]), (spec.presence_variable, True))


_SAMPLES = (_sample_values(_LOW), _sample_values(_HIGH))
