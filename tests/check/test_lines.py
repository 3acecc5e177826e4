"""How much there is to read: lines and files of each room of the product.

`lines.json` has the bound of each room. A change that needs more room raises the bound in the same commit and says in
its message how many lines it adds and removes; one that needs less lowers it. `python -m tests.check.test_lines` writes
the figures of today.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .sources import PACKAGES, ROOT, python_files

BOUNDS = Path(__file__).with_name("lines.json")


class Size(NamedTuple):
    lines: int
    files: int


def sizes() -> dict[str, Size]:
    """Return the size of each room: a folder below its package, or the package's own modules."""
    found: dict[str, Size] = {}
    for package in PACKAGES:
        for path in python_files(package):
            parts = path.relative_to(ROOT).parts
            name = "/".join(parts[:2]) if len(parts) > 2 else package
            lines, files = found.get(name, Size(0, 0))
            found[name] = Size(lines + path.read_text(encoding="utf-8").count("\n"), files + 1)
    return found


def beyond(found: Mapping[str, Size], bounds: Mapping[str, Size]) -> dict[str, str]:
    """Return the rooms that are larger than their bound, and how far."""
    none = Size(0, 0)
    return {
        name: f"{size.lines} lines in {size.files} files, bound {bounds.get(name, none)}"
        for name, size in found.items()
        if size.lines > bounds.get(name, none).lines or size.files > bounds.get(name, none).files
    }


def read_bounds() -> dict[str, Size]:
    return {name: Size(*size) for name, size in json.loads(BOUNDS.read_text()).items()}


def test_no_room_is_larger_than_its_bound() -> None:
    assert beyond(sizes(), read_bounds()) == {}


def test_a_bound_is_of_a_room_that_is_there() -> None:
    assert read_bounds().keys() <= sizes().keys()


def test_a_room_that_grows_is_seen() -> None:
    bounds = {"router/a": Size(10, 2), "router/b": Size(10, 2)}
    grown = {"router/a": Size(11, 2), "router/b": Size(10, 3), "router/c": Size(1, 1)}
    assert beyond(bounds, bounds) == {}
    assert beyond(grown, bounds).keys() == grown.keys()


if __name__ == "__main__":
    found = sizes()
    rows = [f'  "{name}": [{size.lines}, {size.files}]' for name, size in sorted(found.items())]
    BOUNDS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(f"{sum(size.lines for size in found.values())} lines in {sum(size.files for size in found.values())} files")
