from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ..device import Device, running


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    async with running(tmp_path) as device:
        yield device
