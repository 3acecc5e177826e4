"""The TypeScript SDK in a real Chromium, on a page of an origin that the daemon allows (`server.origins`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from playwright.async_api import Browser, Page

from causeway_server.edge_node.config.schema import ServerConfig
from tests.e2e.console.browser import browser
from tests.edge_node.device import Device, running
from tests.ports import free_port
from tests.waiting import until

from .conftest import SDK

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("node")]
PROGRAM = """async (url) => {
  const sdk = await import("/dist/index.js");
  const causeway = new sdk.Causeway(url);
  const { CausewayAPIError } = sdk;
  %s
}"""
ASK = """
  const answer = await causeway.chat("hello", { tags: ["edge"] });
  const record = await causeway.decision(answer.decision.id);
  const stream = await causeway.chat("hello", { stream: true, tags: ["cloud"] });
  const chunks = [];
  for await (const chunk of stream) if (chunk.text) chunks.push(chunk.text);
  const refusal = await causeway.chat("hello", { model: "nobody" }).catch((error) => error);
  const job = await causeway.wait(await causeway.submit("hello", { tags: ["edge"] }), { timeout_s: 60 });
  const explained = await causeway.route("hello", { tags: ["cloud"] });
  return {
    text: answer.text, decision: answer.decision, recorded: record.id === answer.decision.id, chunks,
    streamed: stream.decision, refused: [refusal.name, refusal.status, refusal.code, refusal.decision.policy],
    job: [job.status, job.answer.text], rule: explained.decision.rule,
  };
"""
LEAVE = """
  const stream = await causeway.chat("hello", { stream: true, tags: ["edge"] });
  for await (const chunk of stream) if (chunk.text) return chunk.text;
"""
BUSY = """
  const error = await causeway.chat("hello", { tags: ["edge"] }).catch((caught) => caught);
  return [error.name, error.status, error.retry_after_s];
"""
FAIL = """
  const error = await causeway.chat("hello").catch((caught) => caught);
  return [error.name, error.message];
"""
SUBMIT = """
  const outbox = new sdk.Outbox(new sdk.IndexedDBStore(), causeway, { max_jobs: 2 });
  const first = await outbox.submit("one", { deadline_s: 3600, tags: ["edge"] });
  const keys = [first, await outbox.submit("two", { key: "k" })];
  await outbox.submit("two", { key: "k" });
  const full = await outbox.submit("three").catch((error) => error);
  const waiting = await outbox.send();
  await outbox.close();
  return { keys, waiting, full: [full.name, full.message] };
"""
COLLECT = """
  const outbox = new sdk.Outbox(new sdk.IndexedDBStore(), causeway);
  await outbox.send();
  const found = [];
  for await (const [key, job] of outbox.results({ timeout_s: 60 })) found.push([key, job.status, job.answer?.text]);
  return found;
"""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as made:
        yield made


@asynccontextmanager
async def site() -> AsyncIterator[str]:
    """Serve a page and the compiled SDK on a port of its own."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><title>a page</title>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_static("/dist", SDK / "dist")
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def daemon(folder: Path, *origins: str, port: int = 0) -> Any:
    return running(folder, server=ServerConfig(port=port, drain_s=1.0, default_deadline_s=60.0, origins=origins))


async def run(page: Page, program: str, device: Device | int) -> Any:
    port = device if isinstance(device, int) else device.app.port
    return await page.evaluate(PROGRAM % program, f"http://127.0.0.1:{port}")


async def test_a_page_asks_streams_and_submits(tmp_path: Path, chromium: Browser) -> None:
    """The decision is in headers that the daemon shows to pages of this origin, with errors, too."""
    async with site() as origin, daemon(tmp_path, origin) as device:
        page = await chromium.new_page()
        await page.goto(origin)
        told = await run(page, ASK, device)
        assert (told["text"], told["recorded"], told["chunks"]) == ("edge says so", True, ["cloud ", "says ", "so"])
        assert (told["decision"]["route"], told["decision"]["target"]) == ("edge", "small")
        assert told["decision"]["policy"].startswith("test@")
        assert (told["streamed"]["route"], told["streamed"]["first_token_ms"] > 0) == ("cloud", True)
        assert told["refused"][:3] == ["CausewayAPIError", 404, "model_not_found"]
        assert told["refused"][3].startswith("test@")
        assert told["job"] == ["succeeded", "edge says so"]
        assert told["rule"] == "cloud-first"
        device.engine.fault = "drip"
        assert await run(page, LEAVE, device) == "edge "
        await until(lambda: device.engine.running == 0)
        await until(lambda: device.parts.admission.running == 0)  # a turn later
        device.assert_nothing_leaks()
        device.engine.fault = "none"
        device.parts.admission.drain()
        name, status, retry_after_s = await run(page, BUSY, device)
        assert (name, status) == ("CausewayAPIError", 503)
        assert retry_after_s > 0
        await page.close()


async def test_a_page_of_another_origin_is_told_what_to_look_at(tmp_path: Path, chromium: Browser) -> None:
    """A browser says neither that the daemon refused the page nor that none was there."""
    async with site() as origin, daemon(tmp_path) as device:
        page = await chromium.new_page()
        await page.goto(origin)
        for port in (device.app.port, free_port()):
            name, message = await run(page, FAIL, port)
            assert name == "CausewayConnectionBroken"
            assert message.endswith("Does the device run, and allow this page (server.origins)?")
        assert device.engine.calls == []
        await page.close()


async def test_an_outbox_in_indexed_db_outlives_its_page(tmp_path: Path, chromium: Browser) -> None:
    """Submitted while no daemon runs, sent by two pages at once after it started: one job for each submission."""
    port = free_port()
    async with AsyncExitStack() as stack:
        origin = await stack.enter_async_context(site())
        context = await chromium.new_context()
        stack.push_async_callback(context.close)
        page = await context.new_page()
        await page.goto(origin)
        told = await run(page, SUBMIT, port)
        assert (told["waiting"], told["full"]) == (2, ["OutboxError", "The outbox is full: it holds 2 submissions."])
        await page.close()
        device = await stack.enter_async_context(daemon(tmp_path, origin, port=port))
        pages = [await context.new_page(), await context.new_page()]
        for one in pages:
            await one.goto(origin)
        found = [one for page in pages for one in await run(page, COLLECT, device)]
        assert {tuple(one) for one in found} == {(key, "succeeded", "edge says so") for key in told["keys"]}
        assert len(device.engine.calls) == 2
