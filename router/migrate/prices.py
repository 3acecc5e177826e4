"""Prices of a table, written beside the models that a policy or a gateway's configuration names as `of`.

A file has its prices itself: they change when the file changes, and each device, gateway and replay reads the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..documents import strict_yaml
from ..documents.strict_yaml import Scalar, read_yaml
from ..errors import ConfigError
from .rewrite import Edit, Rewritten, applied, keys_at, replaced, steps_of

_PLACES = ("targets.NAME.price.of", "tenants.prices[].of")


def with_prices(text: str, file: str, table: str, find: Callable[[str], Mapping[str, str]]) -> Rewritten:
    """Return a policy's or gateway's text with the prices of each model that it names; comments and layout stay.
    `table`: name and version, which are written, too; `find`: the prices by their keys, or LookupError with what to do
    instead. ConfigError names file, line and key: it cannot be read, or the table has no such model.
    """
    try:
        tree = read_yaml(text, file)
    except strict_yaml.YamlError as error:
        raise ConfigError(error.problem.message, where=str(error.problem.location)) from error
    lines, edits = text.splitlines(keepends=True), list[Edit]()
    for path in _PLACES:
        for price, _, model in keys_at(tree, steps_of(path)):
            if isinstance(model, Scalar) and model.text:
                try:
                    found = {"table": table, **find(model.text)}
                except LookupError as error:
                    raise ConfigError(str(error.args[0]), where=str(model.location)) from None
                edits += _edits(price, model, found, lines)
    return applied(lines, edits, file)


def _edits(price: strict_yaml.Mapping, model: Scalar, found: Mapping[str, str], lines: list[str]) -> Iterator[Edit]:
    """Yield the edits that replace the known keys of a price, and add the others behind its model."""
    known = {key.text: value for key, value in zip(price.keys, price.values, strict=True)}
    for key, number in found.items():
        value = known.get(key)
        if value is not None and not (isinstance(value, Scalar) and value.text == number):
            yield replaced(value, number)
    added = [f"{key}: {number}" for key, number in found.items() if key not in known]
    if not added:
        return
    at, start = model.location.line - 1, price.location
    if lines[start.line - 1][start.column - 1] == "{":
        end = replaced(model, "").column + len(model.text) + (1 if model.offset else 0)  # behind its quote
        yield Edit(at, end, "", "".join(f", {one}" for one in added))
        return
    line = lines[at].rstrip("\r\n")
    break_ = lines[at][len(line) :] or "\n"
    indent = " " * (next(key for key in price.keys if key.text == "of").location.column - 1)
    yield Edit(at, len(line), "", "".join(f"{break_}{indent}{one}" for one in added))
