"""The project's pages: their generated tables and their fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from .figures import readme_figures
from .tables import ROOT, TABLES

_MARKERS = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n)(?P<body>.*?)(<!-- /generated -->)", re.DOTALL)
PARTS: Mapping[str, Callable[[], str]] = {**TABLES, "figures": readme_figures}
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```\s*$", re.DOTALL | re.MULTILINE)
_NEEDS = re.compile(r'needs="([^"]+)"')
_FILE = re.compile(r"file=(\S+)")


class Block(msgspec.Struct, frozen=True):
    """One fenced block. `needs` says why it cannot run here; `file`: the block is written under that name."""

    line: int
    language: str
    text: str
    needs: str = ""
    file: str = ""


def pages() -> list[Path]:
    """README.md and its like of the whole tree; the cards of models and the changelog have no programs."""
    folders = ("docs", "edge_node", "cloud_pool", "router", "models", "policies", "fleet", "tests", "examples")
    found = {*ROOT.glob("*.md")}
    for folder in map(ROOT.joinpath, folders):
        found |= {
            path for path in folder.rglob("*.md") if "artifacts" not in path.parts and "node_modules" not in path.parts
        }
    return sorted(found)


def with_fresh_tables(text: str) -> str:
    """The page with each generated table made again. Raises KeyError for a table that does not exist."""
    return _MARKERS.sub(lambda match: f"{match[1]}\n{PARTS[match['name']]()}\n\n{match[4]}", text)


def headings(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#{1,6} +(.+)$", _FENCE.sub("", text), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


def table_names(text: str) -> set[str]:
    return {match["name"] for match in _MARKERS.finditer(text)}


def blocks(text: str) -> Iterator[Block]:
    for match in _FENCE.finditer(text):
        info = match["info"].strip()
        indent = match["indent"]
        body = "\n".join(line.removeprefix(indent) for line in match["body"].splitlines()) + "\n"
        needs, file = _NEEDS.search(info), _FILE.search(info)
        yield Block(
            line=text.count("\n", 0, match.start()) + 1,
            language=info.split(" ")[0],
            text=body,
            needs=needs[1] if needs else "",
            file=file[1] if file else "",
        )
