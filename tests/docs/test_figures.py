"""README's figures are those of the kept tables. That the page has them, test_pages.py checks with its other tables."""

from __future__ import annotations

import pytest

from .figures import RESULTS, readme_figures
from .tables import ROOT

PAGE = """# Measured figures

| what | measured | limit | | behind it |
|---|---|---|---|---|
| routing decision, median, in yardsticks | 2 x | | | 9.4 us; one yardstick is 4.6 us |
| cached answer, 1 connection: median time | 1.5 x | ≤ 1.6 x | holds | edge 0.055 ms, bare aiohttp 0.036 ms |

## Beside other proxies

Words.

| server | CPU time per forwarded request | 32 streams: time added to the first token, CPU time per stream |
|---|---|---|
| our edge | 40 µs, 60 µs | 1.25 ms, 900 µs |
| LiteLLM 1.108.7 | 9,000 µs, 9,500 µs | 1,018.5 ms, 57,900 µs |

| what | measured |
|---|---|
| our edge | 77 |

## Other

| server | first token |
|---|---|
| our edge | 99 ms |
"""


def test_the_paragraph_has_the_figures_of_the_tables() -> None:
    assert " ".join(readme_figures(PAGE).split()) == (
        "A decision takes 9.4 µs, and an answer from the cache takes 0.055 ms. While 32 clients receive streams, the "
        "daemon delays a first token by 1.25 ms, and LiteLLM delays it by 1,018.5 ms "
        "([figures](tests/bench/RESULTS.md))."
    )


def test_a_new_figure_makes_the_readme_stale() -> None:
    kept = RESULTS.read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme_figures(kept) in readme
    assert readme_figures(kept.replace("| our edge |", "| our edge | 0.1 ms |", 1)) not in readme


@pytest.mark.parametrize(
    "lost", ["routing decision, median", "cached answer", "our edge", "LiteLLM", "to the first token"]
)
def test_a_figure_that_is_gone_is_named(lost: str) -> None:
    with pytest.raises(LookupError, match="No figure of"):
        readme_figures(PAGE.replace(lost, "x"))
