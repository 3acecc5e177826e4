"""One Chromium for all tests of the pages, and one event loop, in which it lives."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser

from .browser import browser


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as running:
        yield running
