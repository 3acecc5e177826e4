from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.stack import Stack, running


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One stack for all tests that break nothing."""
    with running(tmp_path_factory.mktemp("stack")) as started:
        yield started


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[Stack]:
    """A separate stack for a test that breaks a part of it."""
    with running(tmp_path) as started:
        yield started


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.edge_url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
