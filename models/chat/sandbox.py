"""The sandbox in which a model file's chat template runs: jinja2's own, with a budget of steps, text and time.

jinja2 keeps a template away from Python's insides; what it does not stop is a template that loops for ever or doubles a
text until memory is gone. So every loop turn, macro call, made list and grown text is charged before it happens.
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

from router.errors import InvalidRequest

if TYPE_CHECKING:
    from jinja2.parser import Parser

MARK = "\ufdd0"
"""Behind the first letter of what may be a control token in a caller's text. A Unicode noncharacter: no text has it."""

_MARK_ESCAPED = "\\ufdd0"
_STEPS = 200_000  # loop turns and calls of one rendering
_TIME_S = 2.0
_MOST_TEXT = 16 * 1024 * 1024  # characters made on the way, also those thrown away
_COMPILED = 8
_FILTERS = (
    frozenset({"abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last"})
    | frozenset({"length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "round", "select"})
    | frozenset({"selectattr", "sort", "title", "trim", "unique", "upper"})
)
_GROWING = frozenset(
    {"center", "join", "ljust", "replace", "rjust", "zfill"}
)  # methods of str, charged before they run
_UNBOUNDED = frozenset({"expandtabs", "format", "format_map", "translate"})  # refused
_LARGEST_BITS = 4096  # of a whole number


class TemplateFailed(InvalidRequest):
    """The template refused these messages, or went past its budget; the message says which."""


class _Budget(threading.local):
    """What is left of one rendering, per thread."""

    steps = 0
    text = 0
    until = 0.0

    def start(self, text: int) -> None:
        self.steps, self.text, self.until = _STEPS, text, time.monotonic() + _TIME_S

    def step(self, text: int = 0) -> str:
        """One more turn, which writes at most `text` characters of the template's own."""
        self.steps -= 1
        if self.steps < 0 or (self.steps & 255 == 0 and time.monotonic() > self.until):
            raise TemplateFailed("the model's chat template runs too long")
        self.spend(text)
        return ""

    def spend(self, characters: int) -> None:
        self.text -= characters
        if self.text < 0:
            raise TemplateFailed("the model's chat template writes too much")


_budget = _Budget()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what the model said, for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own convention

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Charge(NodeTransformer):
    """Has a template pay for what can grow: each turn of a loop, each call of a macro, each list made, each `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's own convention
        return self._body_pays(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._body_pays(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _charged("_concat", *node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._made(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._made(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._made(node) if node.ctx == "load" else node

    def _made(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        try:
            node.as_const()
        except nodes.Impossible:
            return _charged("_made", node)
        return node

    def _body_pays(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_charged("_step", nodes.Const(written))))
        return node


def _charged(name: str, first: nodes.Expr, *others: nodes.Expr) -> nodes.Filter:
    """Through a filter: a call would go through the sandbox, which is there for what the template itself calls."""
    return nodes.Filter(first, name, list(others), [], None, None)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Attributes are guarded by jinja2; here calls and everything that makes text are charged."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        return not (isinstance(obj, str) and attr in _UNBOUNDED) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: object) -> None:
        """jinja2 lets a guarded `str.format` through; its widths have no bound, so here it is no safe attribute."""

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            bits = sum(number.bit_length() for number in (left, right) if isinstance(number, int))
            if operator == "**" or bits > _LARGEST_BITS:
                raise TemplateFailed("the model's chat template counts too far")
        elif operator == "*":
            _budget.spend(_count(left) * _count(right))
        elif operator == "%":
            _bounded_format(left)
            _weigh(right)
        else:
            _budget.spend(_count(left) + _count(right))
        result: object = super().call_binop(context, operator, left, right)
        return result

    def call(self, context: jinja2.runtime.Context, called: object, /, *args: object, **kwargs: object) -> object:
        _budget.step()
        owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
        if isinstance(owner, str) and name in _GROWING:
            _grows(owner, name, args)
        elif kwargs:
            _weigh(kwargs)
        result: object = super().call(context, called, *args, **kwargs)
        return result


def generate(template: jinja2.Template, variables: Mapping[str, object], given: int) -> str:
    """Render. `given`: characters of what goes in; the budget for text grows with it. Raises TemplateFailed."""
    _budget.start(text=_MOST_TEXT + 8 * given)
    try:
        return "".join(_counted(template.generate(variables)))
    except InvalidRequest:
        raise
    # Whatever a template does wrong (a missing attribute, a wrong type, endless recursion) is the template's failure.
    except Exception as error:
        raise TemplateFailed(f"the model's chat template failed: {str(error) or type(error).__name__}") from error


@lru_cache(maxsize=_COMPILED)
def compile_template(template: str) -> jinja2.Template:
    sandbox = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation], finalize=_finalize
    )
    sandbox.filters = {name: made for name, made in sandbox.filters.items() if name in _FILTERS}
    sandbox.filters |= {"tojson": _tojson, "replace": _replace, "join": _join, "safe": str, "string": _string}
    sandbox.filters |= {"_step": _step, "_concat": _concatenated, "_made": _made}
    sandbox.globals = {
        "raise_exception": _raise,
        "strftime_now": time.strftime,
        "range": _range,
        "namespace": jinja2.utils.Namespace,
        "dict": dict,
    }
    try:
        tree = _Charge().visit(sandbox.parse(template))
        tree.set_environment(sandbox)
        return jinja2.Template.from_code(sandbox, sandbox.compile(tree), sandbox.globals)
    except (jinja2.TemplateError, RecursionError) as error:
        raise TemplateFailed(f"the model's chat template does not compile: {error}") from error


def _counted(pieces: Iterable[str]) -> Iterable[str]:
    for piece in pieces:
        _budget.spend(len(piece))
        yield piece


def _finalize(value: object) -> object:
    if isinstance(value, (str, list, tuple, dict)):
        _budget.spend(_weigh(value))
    return value


@jinja2.pass_context
def _step(_context: jinja2.runtime.Context, written: int) -> None:
    """It and the next two want the context for one reason: jinja2 works no such filter out beforehand."""
    _budget.step(written)


@jinja2.pass_context
def _concatenated(_context: jinja2.runtime.Context, *parts: object) -> str:
    return _concat(*parts)


@jinja2.pass_context
def _made(_context: jinja2.runtime.Context, value: object) -> object:
    """A list that holds itself twice doubles with each turn: what it holds in all is charged when it is made."""
    _budget.spend(_weigh(value))
    return value


def _concat(*parts: object) -> str:
    _budget.spend(sum(_weigh(part) for part in parts))
    return "".join(map(str, parts))


def _string(value: object) -> str:
    return _concat(value)


def _weigh(value: object) -> int:
    """About the length of `str(value)`; raises TemplateFailed on the way when there are too many items."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (list, tuple, dict)):
        _budget.step()
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return sum(_weigh(item) + 2 for item in inner)
    return 8


def _raise(message: object = "") -> NoReturn:
    raise TemplateFailed(f"the model's chat template refused the messages: {str(message)[:500]}", param="messages")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _budget.spend(_weigh(value))
    indent = min(indent, 16) if isinstance(indent, int) else None
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(_MARK_ESCAPED, MARK) if ensure_ascii else text


def _replace(text: object, old: str, new: str, count: int | None = None) -> str:
    _grows(str(text), "replace", (old, new))
    return str(text).replace(old, new, -1 if count is None else count)


def _join(values: Iterable[object], d: str = "", attribute: str | None = None) -> str:
    items = [_concat(value[attribute] if attribute and isinstance(value, Mapping) else value) for value in values]
    _budget.spend(len(d) * len(items))
    return d.join(items)


def _range(*bounds: int) -> range:
    turns = range(*bounds)
    if len(turns) > _STEPS:
        raise TemplateFailed("the model's chat template counts too far")
    return turns


def _grows(owner: str, method: str, args: tuple[object, ...]) -> None:
    """Charge for what a string method will make, before it makes it."""
    if method == "replace" and len(args) > 1:
        old, new = str(args[0]), str(args[1])
        _budget.spend(len(owner) + (owner.count(old) if old else len(owner) + 1) * len(new))
    elif method == "join":
        _budget.spend(_weigh(list(args)) + len(owner) * _count(args[0] if args else 0))
    else:
        _budget.spend(len(owner) + sum(arg for arg in args if isinstance(arg, int)))


def _bounded_format(layout: object) -> None:
    if isinstance(layout, str) and re.search(r"%[^%a-zA-Z]*(\*|\d{4,})", layout):
        raise TemplateFailed("the model's chat template formats to an unbounded width")
    _budget.spend(_count(layout))


def _count(value: object) -> int:
    """Items of a sequence, characters of a text, and of a number its value: the factor it is in `text * number`."""
    if isinstance(value, (str, list, tuple, dict)):
        return len(value)
    return max(0, value) if isinstance(value, int) else 0
