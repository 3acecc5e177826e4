"""The example of a page on another origin, in a browser: a daemon that lists the origin, and one that does not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from playwright.async_api import Browser, Page, expect

from causeway_server.edge_node.config.schema import ServerConfig
from tests.edge_node.device import running
from tests.edge_node.scripted import EDGE_WORDS

from .browser import accessibility_faults

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[3] / "examples" / "browser"


@asynccontextmanager
async def opened(chromium: Browser, tmp_path: Path, *, listed: bool) -> AsyncIterator[Page]:
    """The page on a port of its own, with a question in its field; `listed`: the daemon lists its origin."""
    app = web.Application()
    app.router.add_static("/", EXAMPLE)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    origin = f"http://localhost:{runner.addresses[0][1]}"
    server = ServerConfig(port=0, drain_s=1.0, origins=(origin,) if listed else ())
    async with running(tmp_path, server=server) as device:
        context = await chromium.new_context(permissions=["local-network-access"])
        page = await context.new_page()
        try:
            await page.goto(f"{origin}/index.html?edge=http://127.0.0.1:{device.app.port}")
            yield page
        finally:
            await context.close()
            await runner.cleanup()


@pytest.mark.asyncio(loop_scope="session")
async def test_the_page_shows_the_answer_word_by_word_and_why(tmp_path: Path, chromium: Browser) -> None:
    async with opened(chromium, tmp_path, listed=True) as page:
        await page.get_by_role("button", name="Ask").click()
        await expect(page.locator("#why")).to_have_text("edge: edge-first")
        assert await page.locator("output").text_content() == "".join(EDGE_WORDS)
        assert await accessibility_faults(page) == []


@pytest.mark.asyncio(loop_scope="session")
async def test_a_page_that_the_device_does_not_list_gets_nothing(tmp_path: Path, chromium: Browser) -> None:
    async with opened(chromium, tmp_path, listed=False) as page:
        await page.get_by_role("button", name="Ask").click()
        await expect(page.locator("#why")).to_contain_text("No answer: ")
        assert await page.locator("output").text_content() == ""


def test_the_configuration_lists_the_origin_that_it_names() -> None:
    text = (EXAMPLE / "edge.yaml").read_text(encoding="utf-8")
    (origin,) = yaml.safe_load(text)["server"]["origins"]
    assert f"python -m http.server {origin.rpartition(':')[2]} " in text
