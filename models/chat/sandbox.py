"""The sandbox in which a model file's chat template runs: jinja2's sandbox, with a budget of steps, text and time.

jinja2 keeps a template away from Python's internals, but not from endless loops or from doubling a text until memory
runs out. Every loop turn, macro call, new list and growing text is therefore charged to a budget before it happens.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from causeway_server.router.errors import InvalidRequest

if TYPE_CHECKING:
    from jinja2.parser import Parser

MARK = "\ufdd0"
"""A mark that interrupts control tokens in a caller's text, behind each possible beginning: a Unicode noncharacter."""

_MARK_ESCAPED = "\\ufdd0"
_MAX_STEPS = 200_000  # loop turns and calls of one rendering
_MAX_TIME_S = 2.0
_MAX_TEXT = 16 * 1024 * 1024  # characters produced during rendering, discarded ones included
_CACHED_TEMPLATES = 8
_FILTERS = (
    frozenset({"abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last"})
    | frozenset({"length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "round", "select"})
    | frozenset({"selectattr", "sort", "title", "trim", "unique", "upper"})
)
_GROWING = frozenset({"center", "join", "ljust", "replace", "rjust", "zfill"})  # str methods, charged before they run
_UNBOUNDED = frozenset({"expandtabs", "format", "format_map", "translate"})  # str methods, refused
_MAX_BITS = 4096  # of an integer


class TemplateFailed(InvalidRequest):
    """The template refused the messages, is broken, or exceeded its budget; the message says which of these."""


class _Budget(threading.local):
    """The remaining budget of the current rendering, per thread."""

    steps = 0
    characters = 0
    deadline = 0.0

    def start(self, characters: int) -> None:
        self.steps, self.characters, self.deadline = _MAX_STEPS, characters, time.monotonic() + _MAX_TIME_S

    def charge_step(self, characters: int = 0) -> None:
        """Charge one step, which writes at most `characters` of the template's own text."""
        self.steps -= 1
        if self.steps < 0 or (self.steps & 255 == 0 and time.monotonic() > self.deadline):
            raise TemplateFailed("The model's chat template runs too long.")
        self.charge_text(characters)

    def charge_text(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise TemplateFailed("The model's chat template writes too much.")


_budget = _Budget()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks the assistant's text for training; rendered as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own convention

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ChargeTransformer(NodeTransformer):
    """Inserts charges into a template: for each loop turn, macro call, new list, and `~`."""

    def visit_For(self, node: nodes.For | nodes.Macro) -> nodes.Node:  # noqa: N802 - jinja2's own convention
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_charged("_charge_step", nodes.Const(written))))
        return node

    visit_Macro = visit_For  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _charged("_concat", *node.nodes)

    def visit_List(self, node: nodes.Expr) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        try:
            node.as_const()
        except nodes.Impossible:
            return _charged("_charge_container", node)
        return node

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self.visit_List(node) if node.ctx == "load" else node


def _charged(name: str, first: nodes.Expr, *others: nodes.Expr) -> nodes.Filter:
    """Charge through a jinja2 filter, because the sandbox would check a call as if the template made it."""
    return nodes.Filter(first, name, list(others), [], None, None)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The jinja2 environment that charges calls and everything that produces text; jinja2 guards the attributes."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        return not (isinstance(obj, str) and attr in _UNBOUNDED) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: object) -> None:
        """Refuse `str.format`: jinja2 would allow a guarded form of it, but its widths are unbounded."""

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            bits = sum(number.bit_length() for number in (left, right) if isinstance(number, int))
            if operator == "**" or bits > _MAX_BITS:
                raise TemplateFailed("The model's chat template computes too large a number.")
        elif operator == "*":
            _budget.charge_text(_factor(left) * _factor(right))
        elif operator == "%":
            _check_format(left)
            _charged_length(right)
        else:
            _budget.charge_text(_factor(left) + _factor(right))
        result: object = super().call_binop(context, operator, left, right)
        return result

    def call(self, context: jinja2.runtime.Context, called: object, /, *args: object, **kwargs: object) -> object:
        _budget.charge_step()
        owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
        if isinstance(owner, str) and name in _GROWING:
            _charge_str_method(owner, name, args)
        elif kwargs:
            _charged_length(kwargs)
        result: object = super().call(context, called, *args, **kwargs)
        return result


def generate(template: jinja2.Template, variables: Mapping[str, object], input_length: int) -> str:
    """Render a compiled template within the budget, whose text grows with `input_length` (characters of `variables`).

    Raises TemplateFailed if it is broken, exceeds its budget, or calls `raise_exception`.
    """
    _budget.start(_MAX_TEXT + 8 * input_length)
    try:
        pieces = []
        for piece in template.generate(variables):
            _budget.charge_text(len(piece))
            pieces.append(piece)
        return "".join(pieces)
    except InvalidRequest:
        raise
    # A missing attribute, a wrong type, endless recursion: every other exception is the template's failure.
    except Exception as error:
        raise TemplateFailed(f"The model's chat template failed: {str(error) or type(error).__name__}") from error


@lru_cache(maxsize=_CACHED_TEMPLATES)
def compile_template(template: str) -> jinja2.Template:
    """Compile a template for `generate`; recent ones are cached. Raises TemplateFailed."""
    sandbox = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation], finalize=_finalize
    )
    sandbox.filters = {name: function for name, function in sandbox.filters.items() if name in _FILTERS}
    sandbox.filters |= {"tojson": _tojson, "replace": _replace, "join": _join, "safe": str, "string": _concat}
    sandbox.filters |= {one.__name__: one for one in (_charge_step, _charge_container, _concat)}
    sandbox.globals = {
        "raise_exception": _raise,
        "strftime_now": time.strftime,
        "range": _range,
        "namespace": jinja2.utils.Namespace,
        "dict": dict,
    }
    try:
        tree = _ChargeTransformer().visit(sandbox.parse(template))
        tree.set_environment(sandbox)
        return jinja2.Template.from_code(sandbox, sandbox.compile(tree), sandbox.globals)
    except (jinja2.TemplateError, RecursionError) as error:
        raise TemplateFailed(f"The model's chat template does not compile: {error}") from error


def _finalize(value: object) -> object:
    if isinstance(value, str):
        _budget.charge_text(len(value))
    elif isinstance(value, (list, tuple, dict)):
        _budget.charge_text(_charged_length(value))
    return value


@jinja2.pass_context
def _charge_step(_context: jinja2.runtime.Context, written: int) -> None:
    """Charge a loop turn or macro call. `pass_context` keeps jinja2 from evaluating this at compile time."""
    _budget.charge_step(written)


@jinja2.pass_context
def _charge_container(_context: jinja2.runtime.Context, value: object) -> object:
    """Charge a new container for all its content: one nested twice in itself doubles with each turn."""
    _budget.charge_text(_charged_length(value))
    return value


@jinja2.pass_context
def _concat(_context: jinja2.runtime.Context | None, *parts: object) -> str:
    _budget.charge_text(sum(_charged_length(part) for part in parts))
    return "".join(map(str, parts))


def _charged_length(value: object) -> int:
    """Return the approximate length of `str(value)`, and charge a step for each container in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (list, tuple, dict)):
        _budget.charge_step()
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return sum(_charged_length(item) + 2 for item in inner)
    return 8


def _raise(message: object = "") -> NoReturn:
    raise TemplateFailed(f"The model's chat template refused the messages: {str(message)[:500]}", param="messages")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _budget.charge_text(_charged_length(value))
    indent = min(indent, 16) if isinstance(indent, int) else None
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(_MARK_ESCAPED, MARK) if ensure_ascii else text


def _replace(text: object, old: str, new: str, count: int | None = None) -> str:
    _charge_str_method(str(text), "replace", (old, new))
    return str(text).replace(old, new, -1 if count is None else count)


def _join(values: Iterable[object], d: str = "", attribute: str | None = None) -> str:
    items = [_concat(None, value[attribute] if attribute and isinstance(value, Mapping) else value) for value in values]
    _budget.charge_text(len(d) * len(items))
    return d.join(items)


def _range(*bounds: int) -> range:
    turns = range(*bounds)
    if len(turns) > _MAX_STEPS:
        raise TemplateFailed("The model's chat template loops too often.")
    return turns


def _charge_str_method(owner: str, method: str, args: tuple[object, ...]) -> None:
    """Charge a string method for the text that it will return."""
    if method == "replace" and len(args) > 1:
        old, new = str(args[0]), str(args[1])
        _budget.charge_text(len(owner) + (owner.count(old) if old else len(owner) + 1) * len(new))
    elif method == "join":
        _budget.charge_text(_charged_length(list(args)) + len(owner) * _factor(args[0] if args else 0))
    else:
        _budget.charge_text(len(owner) + sum(arg for arg in args if isinstance(arg, int)))


def _check_format(layout: object) -> None:
    if isinstance(layout, str) and re.search(r"%[^%a-zA-Z]*(\*|\d{4,})", layout):
        raise TemplateFailed("The model's chat template formats to an unbounded width.")
    _budget.charge_text(_factor(layout))


def _factor(value: object) -> int:
    """Return the length of the other operand of a multiplication such as `text * number`, or the number itself."""
    if isinstance(value, (str, list, tuple, dict)):
        return len(value)
    return max(0, value) if isinstance(value, int) else 0
