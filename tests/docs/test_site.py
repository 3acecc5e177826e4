"""The site: every page of docs/ is in its navigation, and its copy of the pages leads nowhere outside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .pages import pages
from .site import CONFIG, main, site_pages
from .tables import ROOT

MKDOCS = ROOT / ".venv-site" / "bin" / "mkdocs"


def navigation(nodes: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    for node in nodes if isinstance(nodes, list) else [nodes]:
        if isinstance(node, str):
            yield node
        else:
            for part in node.values():
                yield from navigation(part)


def test_the_navigation_has_each_page_of_docs_once_and_pages_that_exist() -> None:
    listed = list(navigation(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["nav"]))
    names = {str(page.relative_to(ROOT)) for page in pages()}
    assert len(listed) == len(set(listed))
    assert set(listed) - names == set()
    assert {name for name in names if name.startswith("docs/")} - set(listed) == set()


def test_the_four_parts_are_there() -> None:
    """Five tutorials, and each kind of page in its part."""
    parts = {
        name: list(navigation(part))
        for node in yaml.safe_load(CONFIG.read_text())["nav"]
        for name, part in node.items()
    }
    assert sum(name.startswith("docs/tutorials/") for name in parts["Tutorials"]) == 5
    for title, folder in (("Tutorials", "tutorials"), ("How to", "how-to"), ("Reference", "reference")):
        kinds = {name.split("/")[1] for name in parts[title] if name.startswith("docs/")}
        assert kinds == {folder}, title


def test_the_copy_has_the_pages_their_images_and_no_other_links(tmp_path: Path) -> None:
    site_pages(tmp_path / "pages")
    copied = {str(path.relative_to(tmp_path / "pages")) for path in (tmp_path / "pages").rglob("*") if path.is_file()}
    assert {str(page.relative_to(ROOT)) for page in pages()} <= copied
    assert {"docs/request.svg", "edge_node/console/screenshot.png"} <= copied
    for name in copied:
        if name.endswith(".md"):
            text = (tmp_path / "pages" / name).read_text(encoding="utf-8")
            links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", text)
            assert [link for link in links if not ((tmp_path / "pages" / name).parent / link).is_file()] == [], name
            assert re.findall(r"(?m)^ *```[\w-]* +\S.*$", text) == [], name


@pytest.mark.slow
def test_the_site_is_built_without_a_warning() -> None:
    if not MKDOCS.is_file():
        pytest.skip("no MkDocs here: make site installs it")
    assert main(str(MKDOCS)) == 0
