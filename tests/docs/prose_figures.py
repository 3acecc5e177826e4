"""The figures with a unit in the prose of pages, and what makes each one known.

A figure is known if one of these has its value, rounded as in the prose, in any unit of its kind (1.5 s is 1,500 ms):

1. A page of results, if the figure's section or the page's introduction names such a page or a bench.
2. A table or an output of the page itself.
3. The default of a configuration key whose name ends with a unit.
4. A constant or a field's default in the code, whose name ends with a unit.
5. `figures.yaml`, which says where any other figure of a page comes from.

In 1 and 2 a number counts in the unit that follows it, or that the head of its column names.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec
import yaml

from causeway_server.cloud_pool.config import Config as GatewayConfig
from causeway_server.edge_node.config.schema import Config as EdgeConfig
from causeway_server.fleet.repository.fleet_file import FleetDoc
from causeway_server.router.config import keys_of
from causeway_server.router.policy.file import PolicyDoc

from .tables import ROOT

_SCALES: Mapping[str, tuple[str, float]] = {
    **dict.fromkeys(("µs", "us"), ("time", 1e-6)),
    "ms": ("time", 1e-3),
    **dict.fromkeys(("s", "second", "seconds"), ("time", 1.0)),
    **dict.fromkeys(("min", "minute", "minutes"), ("time", 60.0)),
    **dict.fromkeys(("h", "hour", "hours"), ("time", 3600.0)),
    **dict.fromkeys(("day", "days"), ("time", 86400.0)),
    "bytes": ("size", 1.0),
    **dict.fromkeys(("kB", "KB"), ("size", 1e3)),
    "KiB": ("size", 2.0**10),
    "MB": ("size", 1e6),
    "MiB": ("size", 2.0**20),
    "GB": ("size", 1e9),
    "GiB": ("size", 2.0**30),
    **dict.fromkeys(("%", "points"), ("share", 0.01)),
    "tokens": ("tokens", 1.0),
    "tokens/s": ("speed", 1.0),
    "°C": ("temperature", 1.0),
    "W": ("power", 1.0),
    "USD": ("money", 1.0),
}
"""The kind of each unit, and its size."""
_SUFFIXES: Mapping[str, str] = {
    "tokens_per_s": "tokens/s", "_ms": "ms", "_s": "s", "_h": "h", "_days": "days", "_bytes": "bytes", "_kb": "KB",
    "_mb": "MB", "_tokens": "tokens", "_c": "°C", "_w": "W", "_usd": "USD",
}  # fmt: skip
"""The unit of a name that ends so. A share ends with `share`, `error` or `keep`, and is 1 for 100 %."""
_SHARES = ("share", "_abort", "_error", "keep", "jitter")
_UNIT = "|".join(sorted(map(re.escape, _SCALES), key=len, reverse=True))
_FIGURE = re.compile(rf"(?<![\w.,/#`-])(?P<number>\d[\d,]*(?:\.\d+)?)[ -]?(?P<unit>{_UNIT})(?![\w/])")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
_WORD = re.compile(rf"(?<![\w/])(?:{_UNIT})(?![\w/])")
_OUTSIDE_PROSE = re.compile(
    r"^ *```.*?^ *```|<!-- (generated|hops|job)\b.*?<!-- /\1 -->|^\|.*?$|`[^`\n]*`|\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)
_SOURCE = re.compile(r"(?:RESULTS|PROFILE|FAULTS|routing|report)\.md|models/artifacts/|tests[./](?:bench|bed)\b")
_SECTION = re.compile(r"^(?=#{2,4} )", re.MULTILINE)
_PACKAGES = ("router", "edge_node", "cloud_pool", "models", "fleet")
_LIST = Path(__file__).with_name("figures.yaml")


class Figure(msgspec.Struct, frozen=True):
    """A number with its unit. `text`: as written; `value` and `step`, which its last digit is, in the kind's unit."""

    text: str
    kind: str
    value: float
    step: float

    def is_in(self, values: Mapping[str, set[float]]) -> bool:
        """Return whether one of the values, rounded like this figure, is this figure."""
        return any(abs(value - self.value) <= self.step * (0.5 + 1e-9) for value in values.get(self.kind, ()))


def unknown_figures(name: str, page: str) -> list[str]:
    """Return the figures of a page's prose that nothing makes known. `name`: its path; `page`: its text."""
    introduction, *sections = _SECTION.split(page)
    has_source, own, rest = bool(_SOURCE.search(introduction)), _own_values(page), listed().get(name, {})
    found = []
    for section in (introduction, *sections):
        places = [own, _defaults(), _constants()]
        if has_source or _SOURCE.search(section):
            places.append(_results())
        figures = _figures(" ".join(_OUTSIDE_PROSE.sub(" ", section).split()))
        found += [one.text for one in figures if one.text not in rest and not any(map(one.is_in, places))]
    return found


@cache
def listed() -> dict[str, dict[str, str]]:
    """Return where a page's other figures come from, by page and figure."""
    pages: dict[str, dict[str, list[str]]] = yaml.safe_load(_LIST.read_text(encoding="utf-8"))
    return {page: {text: why for why, texts in found.items() for text in texts} for page, found in pages.items()}


def _figures(text: str) -> list[Figure]:
    found = []
    for match in _FIGURE.finditer(text):
        number = match["number"].replace(",", "")
        kind, scale = _SCALES[match["unit"]]
        step = scale * 10.0 ** -len(number.partition(".")[2])
        found.append(Figure(match[0], kind, float(number) * scale, step))
    return found


def _values(text: str) -> dict[str, set[float]]:
    """Return the values in a text by kind, of numbers before a unit, and in columns whose head names one."""
    found: dict[str, set[float]] = {}
    for figure in _figures(text):
        found.setdefault(figure.kind, set()).add(figure.value)
    for block in re.split(r"\n\s*\n", text):
        for unit, number in _in_columns(block):
            kind, scale = _SCALES[unit]
            found.setdefault(kind, set()).add(number * scale)
    return found


def _in_columns(block: str) -> Iterator[tuple[str, float]]:
    """Yield unit and number of the cells below a head with units, in a Markdown table or an output."""
    heads: list[list[str]] = []
    for line in block.splitlines():
        cells = line.strip("|").split("|") if line.startswith("|") else re.split(r"\s{2,}", line.strip())
        units = [_WORD.findall(cell) for cell in cells]
        if any(units) and not any(map(_NUMBER.search, cells[1:])):
            heads = units
        elif len(cells) == len(heads):
            for head, cell in zip(heads, cells, strict=True):
                yield from ((unit, float(each.replace(",", ""))) for unit in head for each in _NUMBER.findall(cell))


def _own_values(page: str) -> dict[str, set[float]]:
    """Return the values in the tables and outputs of a page."""
    outputs = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return _values("\n\n".join([*outputs, *re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]))


@cache
def _results() -> dict[str, set[float]]:
    """Return the values in the pages of results: the bench's, the bed's, the attacks', and the cards of models."""
    tests = ROOT / "tests"
    pages = [tests / "bench" / "RESULTS.md", tests / "bench" / "PROFILE.md", tests / "bed" / "RESULTS.md"]
    pages += [tests / "attacks" / "FAULTS.md", *sorted((ROOT / "models" / "artifacts").rglob("*.md"))]
    return _values("\n\n".join(page.read_text(encoding="utf-8") for page in pages))


@cache
def _defaults() -> dict[str, set[float]]:
    found: dict[str, set[float]] = {}
    for struct in (EdgeConfig, GatewayConfig, FleetDoc, PolicyDoc):
        for name, key in keys_of(struct).items():
            _add(found, name.rpartition(".")[2], key.default)
    return found


@cache
def _constants() -> dict[str, set[float]]:
    found: dict[str, set[float]] = {}
    for path in (path for package in _PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                values = node.value.elts if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) else []
                for name, value in zip(names, values or [node.value], strict=False):
                    _add(found, ast.unparse(name).rpartition(".")[2], _constant(value))
    return found


def _constant(node: ast.expr) -> object:
    """Return the value of a number, of a product or power of numbers, or of a tuple of such; None for others."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Tuple(elts=items):
            return tuple(_constant(item) for item in items)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Pow() | ast.LShift() as operator, right=right):
            first, second = _constant(left), _constant(right)
            if isinstance(first, int | float) and isinstance(second, int | float):
                return first * second if isinstance(operator, ast.Mult) else math.pow(first, second)
    return None


def _add(found: dict[str, set[float]], name: str, value: object) -> None:
    """Add the value of a name that ends with a unit, or each value of its tuple."""
    lower = name.lower()
    unit = next((unit for suffix, unit in _SUFFIXES.items() if lower.endswith(suffix)), "")
    kind, scale = _SCALES[unit] if unit else ("share", 1.0)
    if not unit and not lower.endswith(_SHARES):
        return
    for each in value if isinstance(value, tuple) else (value,):
        if isinstance(each, int | float):
            found.setdefault(kind, set()).add(each * scale)
