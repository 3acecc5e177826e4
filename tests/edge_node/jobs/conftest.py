from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ..box import Box, running


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    async with running(tmp_path) as box:
        yield box
