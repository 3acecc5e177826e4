from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from .browser import browser


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as running:
        yield running
