"""The pages of policies name the reasons, the keys of cases and the functions."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from causeway_server.router.checks.cases import CaseRequest, CaseSnapshot, Expect
from causeway_server.router.policy.cel_source import FUNCTIONS, METHODS
from causeway_server.router.types import ReasonCode

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*/*polic*.md")))
KEYS = [field.name for struct in (CaseRequest, CaseSnapshot, Expect) for field in msgspec.structs.fields(struct)]


@pytest.mark.parametrize("word", sorted({*get_args(ReasonCode), *KEYS, *FUNCTIONS, *METHODS}))
def test_the_page_names_it(word: str) -> None:
    assert f"`{word}`" in PAGE
