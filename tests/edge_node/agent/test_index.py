"""The index of bad days names tests that exist."""

from __future__ import annotations

import re

import pytest

import tests.edge_node.agent
from tests.check.sources import ROOT

IDS = re.findall(r"^    (tests/\S+)::(test_\w+)$", tests.edge_node.agent.__doc__ or "", flags=re.MULTILINE)


@pytest.mark.parametrize("path", sorted({path for path, _ in IDS}))
def test_each_test_of_the_index_exists(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    for name in (name for other, name in IDS if other == path):
        assert f"def {name}(" in source
