"""A condition of a policy: CEL, compiled once, over the signals of router/features.

What CEL's binding does not check at compile time is checked here, at activation: that each signal, function and bound
name exists, that the result is a bool, that types fit (`request.tags == "private"` would be false for ever and say
nothing), and that a text which is compared can occur. Source of the language: https://github.com/google/cel-spec

`a || b` is true if either side is, also when the other's signal is absent: a condition needs a signal only where its
answer hangs on it.
"""

from __future__ import annotations

import cel

from .cel_source import ExpressionError, Token, conditions, rewrite, scan
from .signals import SIGNALS, Expression, SignalSpec, SignalValues, Value

MAX_LENGTH = 2000


def compile_expression(source: str) -> Expression:
    """Raises ExpressionFault (message, offset in the source where it is known)."""
    if len(source) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    tokens = scan(source)
    _compile(source)  # on the original first: the binding's own message then points into what was written
    flat, signals, presences = rewrite(tokens)
    program = _compile(" ".join(token.text for token in flat))
    for condition in conditions(flat):
        _check(condition, source[condition[0].offset : condition[-1].end])
    return Expression(source, program, signals, presences)


def is_constant(expression: Expression) -> bool | None:
    """The answer of a condition that names no signal; None if it names one."""
    if expression.signals:
        return None
    answer = expression.evaluate(SignalValues({}))
    return answer if isinstance(answer, bool) else None


def _compile(source: str) -> cel.Program:
    try:
        return cel.compile(source)
    except Exception as error:
        lines = str(error).splitlines()
        message = lines[0].partition("ERROR: <input>:")[2] or lines[0]
        line, _, rest = message.partition(":")
        column, _, words = rest.partition(": ")
        at = int(column) - 1 if line == "1" and column.isdigit() else None
        raise ExpressionError(f"not valid CEL: {words or message}", at) from error


def _check(condition: list[Token], written: str) -> None:
    """Runs one operand of `&&`, `||`, `?:` on typical values, so that no short circuit hides a type error."""
    program = _compile(" ".join(token.text for token in condition))
    for facts in _SAMPLES:
        try:
            result = program.execute(facts.context)
        except (IndexError, ZeroDivisionError, OverflowError, KeyError):
            continue  # hangs on the values, not on the types
        except TypeError as error:
            raise ExpressionError(
                f"`{written}` mixes types: {_types(condition)}CEL never mixes int, double and text in one operation; "
                "write 1.0 for a double, double(x) to convert",
                condition[0].offset,
            ) from error
        except Exception as error:
            message = str(error).partition(". Check")[0].partition("\n")[0]
            raise ExpressionError(f"`{written}`: {message}", condition[0].offset) from error
        if not isinstance(result, bool):
            raise ExpressionError(
                f"`{written}` gives {_kind(result)}, not true or false: compare it with something", condition[0].offset
            )


def _types(condition: list[Token]) -> str:
    named = {token.signal.name: token.signal.type for token in condition if token.signal is not None}
    return "".join(f"{name} is {_ARTICLES[kind]}, " for name, kind in named.items())


def _kind(result: object) -> str:
    return {int: "a number", float: "a number", str: "text", list: "a list"}.get(type(result), type(result).__name__)


_ARTICLES = {"int": "an int", "double": "a double", "bool": "a bool", "string": "text", "list": "a list of texts"}
_LOW: dict[str, Value] = {"int": 1, "double": 0.5, "bool": False, "string": "a", "list": ["a"]}
_HIGH: dict[str, Value] = {"int": 20000, "double": 2000.5, "bool": True, "string": "zz", "list": ["a", "zz"]}


def _sample(values: dict[str, Value]) -> SignalValues:
    return SignalValues({variable: value for spec in SIGNALS.values() for variable, value in _pair(spec, values)})


def _pair(spec: SignalSpec, values: dict[str, Value]) -> tuple[tuple[str, Value], ...]:
    return ((spec.variable, values[spec.type]), (spec.known_variable, True))


_SAMPLES = (_sample(_LOW), _sample(_HIGH))
