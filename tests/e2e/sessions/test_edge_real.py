"""Live sessions on real parts: the engine child, OpenAI's client, a browser, and the daemon as a process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from playwright.async_api import Browser

from causeway_server.edge_node.backends.engine.supervisor import RestartBackoff
from tests.e2e.console.browser import browser
from tests.edge_node.backends.test_engine_restarts import real_engine
from tests.edge_node.cli.test_serve import ready_line, serve
from tests.waiting import until

from .peer import SAY_HELLO, Peer, done, text_of

pytestmark = pytest.mark.slow
TALK = """(url) => new Promise((resolve) => {
  const events = [], socket = new WebSocket(`${url}?model=auto`, ["realtime"]);
  const send = (event) => socket.send(JSON.stringify(event));
  socket.onmessage = (message) => {
    events.push(JSON.parse(message.data));
    const type = events.at(-1).type;
    if (type === "session.created") {
      const content = [{type: "input_text", text: "hello"}];
      send({type: "conversation.item.create", item: {type: "message", role: "user", content}});
      send({type: "response.create", response: {max_output_tokens: 8}});
    }
    if (type === "response.done") resolve(events);
  };
})"""


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as running:
        yield running


@pytest.mark.engine
async def test_openais_client_holds_a_conversation_and_interrupts_it(tmp_path: Path) -> None:
    pytest.importorskip("websockets", reason="OpenAI's client speaks Realtime with it; `make setup` installs it")
    async with real_engine(tmp_path, RestartBackoff()) as (device, engine):
        client = AsyncOpenAI(base_url=f"http://127.0.0.1:{device.app.port}/v1", api_key="none")
        async with client.realtime.connect(model="auto") as connection:
            seen: list[str] = []

            async def until_event(kind: str) -> Any:
                while True:
                    event = await connection.recv()
                    seen.append(event.type)
                    if event.type == kind:
                        return event

            assert (await until_event("session.created")).session.model == "auto"
            await connection.session.update(session={"type": "realtime", "instructions": "Be brief."})
            assert (await until_event("session.updated")).session.instructions == "Be brief."
            for tokens in (4, 4000):
                await connection.conversation.item.create(item=SAY_HELLO)  # type: ignore[arg-type]
                await connection.response.create(response={"max_output_tokens": tokens})
                await until_event("response.output_text.delta")
                if tokens > 4:
                    await connection.response.cancel()
                response = (await until_event("response.done")).response
                assert response.status in (("completed", "incomplete") if tokens == 4 else ("cancelled",))
            assert response.output[0].content[0].text
            await until(lambda: engine.jobs == 0)
            await connection.response.cancel()
            assert (await until_event("error")).error.code == "response_cancel_not_active"
        assert {"response.created", "conversation.item.added", "response.output_item.done"} <= set(seen)
        await until(lambda: device.parts.sessions.stats.connected == 0)


@pytest.mark.engine
@pytest.mark.chromium
async def test_a_page_of_the_device_talks_to_it(tmp_path: Path, chromium: Browser) -> None:
    """Under the console's content security policy; a page of another origin gets no session."""
    async with real_engine(tmp_path, RestartBackoff()) as (device, _):
        page = await chromium.new_page()
        await page.goto(f"http://127.0.0.1:{device.app.port}/console")
        events = await page.evaluate(TALK, f"ws://127.0.0.1:{device.app.port}/v1/realtime")
        assert events[-1]["response"]["status"] in ("completed", "incomplete")
        assert text_of(events)
        await page.goto("data:text/html,<p>elsewhere</p>")
        closed = await page.evaluate(
            "(url) => new Promise((resolve) => { new WebSocket(url).onclose = (event) => resolve(event.code); })",
            f"ws://127.0.0.1:{device.app.port}/v1/realtime",
        )
        assert closed == 1006
        await until(lambda: device.parts.sessions.stats.connected == 0)


@pytest.mark.engine
async def test_an_engine_that_is_killed_in_mid_answer_is_told_and_the_next_answer_comes(tmp_path: Path) -> None:
    async with real_engine(tmp_path, RestartBackoff(first_s=0.1, healthy_s=0.0)) as (device, engine):
        await engine.ready(asyncio.get_running_loop().time() + 60.0)
        client = await Peer.connect(device.app.port, headers={"x-causeway-prefer": "only_on_device"})
        await client.event()
        await client.send("conversation.item.create", item=SAY_HELLO)
        await client.send("response.create", response={"max_output_tokens": 4000})
        await client.until("response.output_text.delta")
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        response = done(await client.until("response.done"))
        assert response["status_details"]["error"]["code"] == "engine_crashed"
        assert done(await client.ask(max_output_tokens=4))["status"] in ("completed", "incomplete")
        await client.close()


async def test_a_daemon_that_gets_sigterm_closes_its_sessions(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon:
        url, _ = ready_line(daemon)
        client = await Peer.connect(int(url.rpartition(":")[2].split("/")[0]))
        await client.event()
        daemon.send_signal(signal.SIGTERM)
        assert (await client.event())["error"]["code"] == "draining"
        assert (await client.closed()).code == 1001
        daemon.communicate(timeout=120)
    assert daemon.returncode == 0
