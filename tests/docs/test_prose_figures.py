"""Each figure with a unit in a page's prose is a result, a default, a constant, or a line of `figures.yaml`."""

from __future__ import annotations

import pytest

from .prose_figures import listed, unknown_figures
from .test_pages import RECORDS, TEXTS

PAGES = sorted(set(TEXTS) - RECORDS - {"CHANGELOG.md", "tests/attacks/FAULTS.md"})
ROW = "| server | p99 ms |\n|---|---|\n| ours | 417.3 |\n"


@pytest.mark.parametrize("name", PAGES)
def test_each_figure_is_known(name: str) -> None:
    """If this fails: correct a stale figure, link the section to its results, or add a line to `figures.yaml`."""
    assert unknown_figures(name, TEXTS[name]) == []


@pytest.mark.parametrize("figure", ["417.3 ms", "93.71 %", "73.9 MB", "12.34 s", "5,913 tokens", "7.77\n  µs"])
def test_a_figure_that_was_made_up_is_found(figure: str) -> None:
    """Also in a section that names the results, whose figures are then looked up there."""
    made_up = " ".join(figure.split())
    assert unknown_figures("a.md", f"# A\n\nIt takes {figure}.\n") == [made_up]
    assert unknown_figures("a.md", f"# A\n\nIt takes {figure} (tests/bench/RESULTS.md).\n") == [made_up]


@pytest.mark.parametrize(
    ("prose", "unknown"),
    [
        ("It takes 417.3 ms.", []),
        ("It takes 417 ms, or 0.417 s.", []),
        ("It takes 417.4 ms.", ["417.4 ms"]),
        ("It takes 417.3 s.", ["417.3 s"]),
        ("`417.4 ms` is code.", []),
    ],
)
def test_a_figure_may_be_that_of_a_table_of_the_page(prose: str, unknown: list[str]) -> None:
    assert unknown_figures("a.md", f"# A\n\n{prose}\n\n{ROW}") == unknown


def test_results_make_a_figure_known_where_the_section_names_them() -> None:
    """The edge's first token beside other proxies is a figure of the README."""
    prose = "LiteLLM adds 866.89 ms."
    assert unknown_figures("a.md", f"# A\n\n## B\n\n{prose}\n") == ["866.89 ms"]
    assert unknown_figures("a.md", f"# A\n\n## B\n\n{prose} See tests/bench/RESULTS.md.\n") == []
    assert unknown_figures("a.md", f"# A\n\nSee tests/bench/RESULTS.md.\n\n## B\n\n{prose}\n") == []


def test_a_default_and_a_constant_are_known() -> None:
    assert unknown_figures("a.md", "A webhook is given up after 35 days, and a file has at most 256 KiB.") == []


def test_the_list_has_only_figures_that_need_it() -> None:
    for name, figures in listed().items():
        assert figures.keys() - set(unknown_figures("", TEXTS[name])) == set(), name
