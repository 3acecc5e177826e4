"""The pages say what the code does: tables are fresh, programs run, lines and links hold."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from .pages import PARTS, Block, blocks, headings, pages, table_names, with_fresh_tables
from .runner import run_page, script_of
from .tables import ROOT, TABLES, metric_names

ANCHORED = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*#[^)\s]+)\)")
PAGES = pages()
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in zip(NAMES, PAGES, strict=True)}
RUNNABLE = [name for name in NAMES if any(b.language in ("sh", "python") and not b.needs for b in blocks(TEXTS[name]))]
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
RECORDS = {"docs/history.md", "tests/bench/PROFILE.md", "tests/bench/RESULTS.md", "tests/bed/RESULTS.md"}
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|#|mailto:)([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_as_the_code_makes_them(name: str) -> None:
    """`make docs` writes them again."""
    assert with_fresh_tables(TEXTS[name]) == TEXTS[name]


def test_a_stale_table_is_seen() -> None:
    page = "<!-- generated: signals -->\n\n| old |\n\n<!-- /generated -->\n"
    assert "`device.temperature_c`" in with_fresh_tables(page)


def test_each_table_stands_in_a_page() -> None:
    assert set().union(*(table_names(text) for text in TEXTS.values())) == set(PARTS)


@pytest.mark.parametrize(("package", "table"), [("edge_node", "edge-metrics"), ("cloud_pool", "cloud-metrics")])
def test_each_metric_is_in_its_table(package: str, table: str) -> None:
    """The code and the table have the same metrics."""
    assert metric_names(package) == set(re.findall(r"^\| `(\w+)`", TABLES[table](), re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_short(name: str) -> None:
    """At most 120 characters outside of tables."""
    assert [line[:60] for line in TEXTS[name].splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_the_readme_takes_a_minute() -> None:
    """Lines with its code, words beside it; comments and the targets of links are not read."""
    text = TEXTS["README.md"]
    assert len(text.splitlines()) <= 60
    prose = re.sub(r"^```.*?^```|<!--.*?-->|(?<=\])\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= 450


@pytest.mark.parametrize("name", sorted(set(NAMES) - RECORDS))
def test_a_page_is_read_in_one_go(name: str) -> None:
    """At most 300 lines; kept figures and the history before 0.1.0 are records, not pages."""
    assert len(TEXTS[name].splitlines()) <= 300


@pytest.mark.parametrize("folder", ["router", "models", "edge_node", "cloud_pool", "fleet", "policies", "tests"])
def test_each_top_folder_has_its_page_and_the_readme_leads_to_it(folder: str) -> None:
    assert f"{folder}/README.md" in NAMES
    assert f"({folder}/README.md)" in TEXTS["README.md"] or f"({folder}/)" in TEXTS["README.md"]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    assert [target for target in LINK.findall(TEXTS[name]) if not (folder / target).exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_headings(name: str) -> None:
    folder = Path(name).parent
    lost = []
    for target in ANCHORED.findall(re.sub(r"`[^`]*`", "", TEXTS[name])):
        path, _, anchor = target.partition("#")
        page = os.path.normpath(folder / path) if path else name
        if page in TEXTS and anchor not in headings(TEXTS[page]):
            lost.append(target)
    assert lost == []


def test_a_link_to_a_heading_that_is_gone_is_seen() -> None:
    assert headings("# A `key`, and more\n```\n# no heading\n```\n## Twice: [a](b.md)") == {"a-key-and-more", "twice-a"}


@pytest.mark.parametrize("name", NAMES)
def test_tests_that_a_page_names_exist(name: str) -> None:
    for file, function in TEST.findall(TEXTS[name]):
        path = ROOT / file
        assert path.exists(), file
        assert not function or f"def {function}(" in path.read_text(encoding="utf-8"), f"{file}::{function}"


def test_each_claim_of_the_threat_model_names_its_test() -> None:
    is_claim, bare = False, []
    for line in TEXTS["router/THREATS.md"].splitlines():
        is_claim = line.endswith("| test |") or (is_claim and line.startswith("|"))
        if is_claim and not line.endswith(("| test |", "---|")) and not any(name for _, name in TEST.findall(line)):
            bare.append(line)
    assert bare == []


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_the_programs_of_a_page_run(name: str, tmp_path: Path) -> None:
    """Every sh and python block, in order, in an empty folder."""
    page = list(blocks(TEXTS[name]))
    _need_services(page)
    run = run_page(page, tmp_path)
    assert run.status == 0, f"{name} ended with {run.status}:\n{run.output[-6000:]}"


def test_a_broken_program_is_seen(tmp_path: Path) -> None:
    page = list(blocks("```sh\ntrue\n```\n\n```python\nraise SystemExit(3)\n```\n"))
    assert run_page(page, tmp_path).status == 3


def test_blocks_are_read_as_they_are_marked(tmp_path: Path) -> None:
    page = list(blocks('```sh needs="a GPU"\nfalse\n```\n```yaml file=a/p.yaml\nk: 1\n```\n```text\nno\n```\n'))
    assert [(block.language, block.needs, block.file) for block in page] == [
        ("sh", "a GPU", ""),
        ("yaml", "", "a/p.yaml"),
        ("text", "", ""),
    ]
    script = script_of(page, tmp_path)
    assert "false" not in script
    assert "a/p.yaml" in script


def _need_services(page: list[Block]) -> None:
    """Skip where the set-up was told to leave out what the page starts."""
    environment = Path(os.environ.get("CAUSEWAY_TRITON_ENV", ROOT / ".venv-triton"))
    text = "\n".join(block.text for block in page if not block.needs and block.language == "sh")
    if "redis-server" in text and shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    if ("causeway-cloud triton" in text or "causeway-edge up" in text) and not (environment / "triton.json").is_file():
        pytest.skip("Triton is not set up")
