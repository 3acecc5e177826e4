"""Counts of tokens: by the device's own model, and at a gateway by the server of the tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic

from tests.cloud_pool.upstreams.http_gateway import http_tier, serving

from .conftest import Surface, on_edge
from .test_client import HI, WEATHER

PNG: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


async def test_the_count_is_that_of_the_model(surface: Surface) -> None:
    """The scripted one counts words."""
    messages: Any = [{"role": "user", "content": "one two three"}]
    counted = await surface.client.messages.count_tokens(
        model=surface.model, messages=messages, system="four five", tools=[WEATHER]
    )
    assert counted.input_tokens == 5
    assert surface.played.calls == []


@on_edge
async def test_a_named_target_and_auto_say_which_model_counted(surface: Surface) -> None:
    for model in ("auto", "small", "m-small"):
        body = {"model": model, "messages": HI}
        answer = await surface.post(body, "/v1/messages/count_tokens")
        assert (answer.headers["x-causeway-target"], answer.json) == ("small", {"input_tokens": 1})


async def test_what_the_server_cannot_count_is_refused(surface: Surface) -> None:
    parts: Any = [{"role": "user", "content": [PNG]}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        await surface.client.messages.count_tokens(model=surface.model, messages=parts)
    assert refused.value.body["error"]["details"]["param"] == "messages[0].content[0]"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        await surface.client.messages.count_tokens(model="none", messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="prefill"):
        await surface.client.messages.count_tokens(
            model=surface.model, messages=[*HI, {"role": "assistant", "content": "a"}]
        )


@on_edge
async def test_a_target_in_the_cloud_is_not_counted_by_the_device(surface: Surface) -> None:
    with pytest.raises(anthropic.BadRequestError, match="no target on this device"):
        await surface.client.messages.count_tokens(model="large", messages=HI)


async def test_a_model_that_is_not_loaded_is_a_503(surface: Surface) -> None:
    surface.played.state = "loading"
    with pytest.raises(anthropic.APIStatusError) as failed:
        await surface.client.messages.count_tokens(model=surface.model, messages=HI)
    assert failed.value.status_code in (429, 503)


class Counting:
    """A server with vLLM's `/tokenize`, with `count_tokens`, or with neither."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths
        self.bodies: list[tuple[str, dict[str, Any]]] = []

    async def answer(self, http: web.BaseRequest) -> web.StreamResponse:
        body = json.loads(await http.read())
        self.bodies.append((http.path, body))
        if http.path not in self.paths:
            return web.json_response({"error": {"message": "Not Found"}}, status=404)
        return web.json_response({"count": 7} if http.path == "/tokenize" else {"input_tokens": 8})


@pytest.mark.parametrize(
    ("paths", "tokens"),
    [(("/tokenize", "/v1/messages/count_tokens"), 7), (("/v1/messages/count_tokens",), 8), ((), None)],
    ids=["tokenize", "count_tokens", "neither"],
)
async def test_a_gateway_asks_the_server_of_the_tier(
    tmp_path: Path, paths: tuple[str, ...], tokens: int | None
) -> None:
    """It gets the chat that it would be asked, so that the count is that of the prompt."""
    counting = Counting(*paths)
    runner = web.ServerRunner(web.Server(counting.answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        async with serving(tmp_path, http_tier(url, model="m")) as gateway:
            url = gateway.app.url.removesuffix("/v1")
            async with AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:
                count = client.messages.count_tokens(model="large", messages=HI, system="s", tools=[WEATHER])
                if tokens is None:
                    with pytest.raises(anthropic.BadRequestError, match="does not count tokens"):
                        await count
                else:
                    assert (await count).input_tokens == tokens
    finally:
        await runner.cleanup()
    asked = dict(counting.bodies)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert (asked["/tokenize"]["model"], asked["/tokenize"]["messages"]) == ("m", chat)
    assert asked["/tokenize"]["tools"][0]["function"]["name"] == "weather"
    assert tokens == 7 or asked["/v1/messages/count_tokens"]["model"] == "m"
