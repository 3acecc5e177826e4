"""A hostile page in a real Chromium against a daemon and a gateway on loopback, and a page whose origin is allowed.

The page is on another port of this machine (same site), on another site (`data:`, whose origin is `null`), or under a
name of its own that resolves to the daemon (DNS rebinding), where it is same-origin for the browser.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web
from playwright.async_api import Browser, Page, Route

from causeway_server.cloud_pool.accounts.identity.authenticator import OPERATOR_TOKEN_FILE
from causeway_server.cloud_pool.app import App, build
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig as GatewayServer
from causeway_server.edge_node.config.schema import DeviceFilesConfig, ServerConfig
from tests.cloud_pool.unreachable import unreachable_tier
from tests.edge_node.device import Device, running

from .conftest import REBOUND

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

PAGE = "<!doctype html><title>a page</title>"
PATIENCE_S = 120.0
ASK = """
async (url) => {
  const tried = {};
  const attempt = async (name, path, options = {}) => {
    try {
      const answer = await fetch(url + path, options);
      tried[name] = answer.type === "opaque" ? "opaque" : `${answer.status} ${await answer.text()}`;
    } catch (error) { tried[name] = "failed"; }
  };
  const chat = JSON.stringify({model: "auto", messages: [{role: "user", content: "hello"}]});
  const job = JSON.stringify({model: "auto", messages: [{role: "user", content: "a job"}]});
  const form = () => {
    const made = new FormData();
    made.set("purpose", "user_data");
    made.set("file", new Blob(["a"]), "a.txt");
    return made;
  };
  const post = (body, type, mode = "no-cors") => (
    {method: "POST", mode, body, headers: type === undefined ? {} : {"content-type": type}});
  for (const path of ["/v1/jobs", "/v1/decisions", "/v1/webhooks/secret", "/v1/models", "/console/state", "/metrics"])
    await attempt(`read ${path}`, path);
  for (const type of ["application/json", "text/plain"])
    await attempt(`chat ${type}`, "/v1/chat/completions", post(chat, type, "cors"));
  await attempt("chat simple", "/v1/chat/completions", post(chat));
  await attempt("chat typeless", "/v1/chat/completions", post(new Blob([chat])));
  await attempt("job json", "/v1/jobs", post(job, "application/json", "cors"));
  await attempt("job typeless", "/v1/jobs", post(new Blob([job])));
  await attempt("job bytes", "/v1/jobs", post(new TextEncoder().encode(job)));
  await attempt("file", "/v1/files", post(form()));
  await attempt("file read", "/v1/files", post(form(), undefined, "cors"));
  await attempt("rotate", "/v1/webhooks/secret", post(""));
  await attempt("rotate read", "/v1/webhooks/secret", post("", undefined, "cors"));
  await attempt("drain", "/drain", post(""));
  await attempt("drain read", "/drain", post("", undefined, "cors"));
  await attempt("dead letters", "/dlq");
  await attempt("readiness", "/readyz");
  tried["session"] = await new Promise((resolve) => {
    const socket = new WebSocket(`${url.replace("http", "ws")}/v1/realtime?model=auto`);
    socket.onopen = () => resolve("open");
    socket.onclose = () => resolve("failed");
  });
  return tried;
}
"""
HARMLESS = ("failed", "opaque")


@asynccontextmanager
async def other_port() -> AsyncIterator[str]:
    """Serve the page on another port: same site for the browser, but another origin."""

    async def send(_: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html")

    app = web.Application()
    app.router.add_get("/", send)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://localhost:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def daemon(tmp_path: Path, *origins: str) -> AsyncIterator[Device]:
    server = ServerConfig(port=0, drain_s=1.0, origins=origins)
    async with running(tmp_path, server=server, files=DeviceFilesConfig(accept=True)) as device:
        yield device


@asynccontextmanager
async def gateway(tmp_path: Path) -> AsyncIterator[App]:
    config = Config(server=GatewayServer(port=0), tiers=(unreachable_tier(),), state_dir=str(tmp_path / "state"))
    async with anyio.create_task_group() as tasks:
        app = build(config, tasks)
        await app.start()
        with anyio.fail_after(PATIENCE_S):
            yield app
        await app.stop()
    await app.close()


@asynccontextmanager
async def open_at(chromium: Browser, where: str) -> AsyncIterator[Page]:
    """A page there; of a rebound name the attacker's server answers the first request only."""
    context = await chromium.new_context()
    try:
        page = await context.new_page()
        if REBOUND in where:

            async def answer(route: Route) -> None:
                await route.fulfill(content_type="text/html", body=PAGE)

            await page.route(f"{where}/page", answer)
            await page.goto(f"{where}/page")
        else:
            await page.goto(where)
        yield page
    finally:
        await context.close()


async def state_of(device: Device) -> tuple[Any, ...]:
    """What a page could have changed."""
    jobs, files, secret = [(await device.get(path)).json for path in ("/v1/jobs", "/v1/files", "/v1/webhooks/secret")]
    stats = device.parts.sessions.stats
    return (
        jobs["data"],
        files["data"],
        secret,
        device.parts.decisions.newest,
        stats.opened,
        device.parts.admission.draining,
    )


@pytest.mark.parametrize("where", ["another port", "another site"])
async def test_a_page_of_another_origin_reads_and_changes_nothing(
    tmp_path: Path, chromium: Browser, where: str
) -> None:
    async with daemon(tmp_path) as device, other_port() as elsewhere:
        before = await state_of(device)
        async with open_at(chromium, elsewhere if where == "another port" else f"data:text/html,{PAGE}") as page:
            for host in ("127.0.0.1", "localhost"):
                tried = await page.evaluate(ASK, f"http://{host}:{device.app.port}")
                assert {name: got for name, got in tried.items() if got not in HARMLESS} == {}
        assert await state_of(device) == before


async def test_a_page_under_a_rebound_name_reads_and_changes_nothing(tmp_path: Path, chromium: Browser) -> None:
    """The browser lets it read all answers, and each is a refusal."""
    async with daemon(tmp_path) as device:
        before = await state_of(device)
        url = f"http://{REBOUND}:{device.app.port}"
        async with open_at(chromium, url) as page:
            tried = await page.evaluate(ASK, url)
        assert tried.pop("session") == "failed"
        assert {name: got for name, got in tried.items() if "misdirected_request" not in got} == {}
        assert await state_of(device) == before


async def test_a_page_drains_no_gateway_and_reads_nothing_of_it(tmp_path: Path, chromium: Browser) -> None:
    async with gateway(tmp_path) as app, other_port() as elsewhere:
        for address in (app.operator_url, app.url.removesuffix("/v1")):
            async with open_at(chromium, elsewhere) as page:
                tried = await page.evaluate(ASK, address)
                assert {name: got for name, got in tried.items() if got not in HARMLESS} == {}
            rebound = address.replace("127.0.0.1", REBOUND)
            async with open_at(chromium, rebound) as page:
                tried = await page.evaluate(ASK, rebound)
            assert tried.pop("session") == "failed"
            assert {name: got for name, got in tried.items() if "misdirected_request" not in got} == {}
        async with open_at(chromium, f"{app.operator_url}/readyz") as page:
            assert '"draining":false' in await page.content()
            # Even of the operators' own origin a page has no token.
            assert (await page.evaluate(ASK, app.operator_url))["drain read"].startswith("401 ")
        assert (tmp_path / "state" / OPERATOR_TOKEN_FILE).is_file()


async def test_a_page_of_an_allowed_origin_uses_the_daemon(tmp_path: Path, chromium: Browser) -> None:
    async with other_port() as elsewhere, daemon(tmp_path, elsewhere) as device:
        async with open_at(chromium, elsewhere) as page:
            tried = await page.evaluate(ASK, f"http://127.0.0.1:{device.app.port}")
        for name in ("read /v1/jobs", "read /v1/webhooks/secret", "chat application/json", "file read", "rotate read"):
            assert tried[name].startswith("200 "), (name, tried[name])
        assert tried["job json"].startswith("202 ")
        assert tried["chat text/plain"].startswith("415 ")
        assert tried["session"] == "open"
        async with open_at(chromium, elsewhere) as page:
            seen = await page.evaluate(
                """async (url) => {
                  const answer = await fetch(`${url}/v1/chat/completions`, {
                    method: "POST", headers: {"content-type": "application/json", "x-causeway-tags": "edge"},
                    body: JSON.stringify({model: "auto", stream: true, messages: [{role: "user", content: "hello"}]})});
                  return [answer.headers.get("x-causeway-route"), await answer.text()];
                }""",
                f"http://127.0.0.1:{device.app.port}",
            )
        assert seen[0] == "edge"
        assert seen[1].endswith("data: [DONE]\n\n")


async def test_an_embedded_page_is_allowed_by_name(tmp_path: Path, chromium: Browser) -> None:
    """The origin of a page of `file:` or `data:` is `null`."""
    (tmp_path / "page.html").write_text(PAGE)
    async with daemon(tmp_path / "device", "null") as device:
        for where in (f"file://{tmp_path}/page.html", f"data:text/html,{PAGE}"):
            async with open_at(chromium, where) as page:
                tried = await page.evaluate(ASK, f"http://127.0.0.1:{device.app.port}")
            assert tried["chat application/json"].startswith("200 ")
            assert tried["session"] == "open"
