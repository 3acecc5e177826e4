"""What a browser's page gets from a gateway: by its `Host`, its origin, and the type of its body."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import msgspec
import pytest

from causeway_server.cloud_pool.app import build
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.storage.config import JobsConfig
from tests.cloud_pool.accounts.identity.gateway import running
from tests.redis_server import RedisServer

from ..unreachable import unreachable_tier

PATIENCE_S = 60.0
APP, EVIL = "https://app.example", "https://evil.example"
ASK = b'{"model": "large", "messages": [{"role": "user", "content": "hello"}]}'
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def serving(server: ServerConfig, redis: str = "") -> AsyncIterator[aiohttp.ClientSession]:
    config = Config(server=msgspec.structs.replace(server, port=0), tiers=(unreachable_tier(),), redis=redis)
    config = msgspec.structs.replace(config, jobs=JobsConfig(redis=redis))
    async with anyio.create_task_group() as tasks:
        app = build(config, tasks)
        await app.start()
        with anyio.fail_after(PATIENCE_S):
            async with aiohttp.ClientSession(app.url.removesuffix("/v1")) as session:
                yield session
        await app.stop()
    await app.close()


async def code_of(
    http: aiohttp.ClientSession, path: str, body: bytes | None = ASK, /, **headers: str
) -> tuple[int, str]:
    """POST a body, without a type unless `headers` has one; the names' underscores are hyphens."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.post(path, data=body, headers=names, skip_auto_headers=("Content-Type",)) as answer:
        return answer.status, (await answer.json())["error"]["code"]


async def test_on_loopback_without_tokens_a_rebound_name_gets_nothing() -> None:
    async with serving(ServerConfig(hosts=("gateway.local",))) as http:
        for path in ("/v1/models", "/healthz", "/openapi.json"):
            async with http.get(path, headers={"host": "evil.example"}) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (421, "misdirected_request")
            for host in ("localhost:1", "gateway.local"):
                async with http.get(path, headers={"host": host}) as answer:
                    assert answer.status == 200
        assert (await code_of(http, "/v1/chat/completions", host="evil.example", **JSON))[0] == 421


async def test_a_public_gateway_is_called_by_any_name(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("kiosk secret\n")
    async with serving(ServerConfig(token_file=str(tmp_path / "tokens"))) as http:
        headers = {"host": "gateway.example", "authorization": "Bearer secret"}
        async with http.get("/v1/models", headers=headers) as answer:
            assert answer.status == 200


async def test_a_foreign_page_sends_nothing_that_counts(redis_server: RedisServer) -> None:
    async with serving(ServerConfig(), redis_server.url) as http:
        for page in ({"origin": EVIL}, {"origin": "null"}, {"sec_fetch_site": "cross-site"}):
            for path in ("/v1/chat/completions", "/v1/jobs", "/v1/batches", "/v1/webhooks/secret"):
                sent = page | {"content_type": "application/json"}
                assert await code_of(http, path, **sent) == (403, "origin_not_allowed")
            form = page | {"content_type": "multipart/form-data; boundary=b"}
            assert await code_of(http, "/v1/files", b"--b--", **form) == (403, "origin_not_allowed")
        async with http.get("/v1/jobs") as answer:
            assert (await answer.json())["data"] == []


async def test_a_body_without_a_type_is_refused(redis_server: RedisServer) -> None:
    async with serving(ServerConfig(), redis_server.url) as http:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/jobs"):
            for sent in ({}, {"content_type": "text/plain"}, {"content_type": "application/x-www-form-urlencoded"}):
                assert await code_of(http, path, **sent) == (415, "unsupported_media_type"), path
        assert await code_of(http, "/v1/batches") == (415, "unsupported_media_type")
        for sent in ({}, {"content_type": "multipart/form-dataset"}):
            assert await code_of(http, "/v1/files", b"--b--", **sent) == (415, "unsupported_media_type")


async def test_a_page_of_an_allowed_origin_reads_answers() -> None:
    async with serving(ServerConfig(origins=(APP,))) as http:
        asked = {"origin": APP, "access-control-request-method": "POST", "access-control-request-headers": "a,b"}
        async with http.options("/v1/chat/completions", headers=asked) as answer:
            assert answer.status == 204
            assert answer.headers["access-control-allow-headers"] == "a,b"
            assert answer.headers["access-control-allow-origin"] == APP
        page = JSON | {"origin": APP, "sec-fetch-site": "cross-site"}
        async with http.post("/v1/chat/completions", data=ASK, headers=page) as answer:
            assert answer.status == 503  # there is no Triton
            assert answer.headers["access-control-allow-origin"] == APP
            assert answer.headers["access-control-expose-headers"] == "*"
            assert answer.headers["server"] == "causeway"
        async with http.options("/v1/models", headers=asked | {"origin": EVIL}) as answer:
            assert answer.status == 405
            assert "access-control-allow-origin" not in answer.headers
        async with http.get("/v1/models") as answer:
            assert answer.headers["vary"] == "Origin"


async def test_a_page_of_an_allowed_origin_reads_a_stream() -> None:
    async with running(Config(server=ServerConfig(origins=(APP,)))) as gateway, aiohttp.ClientSession() as http:
        for origin, read_by in ((APP, APP), (None, None)):
            headers = {} if origin is None else {"origin": origin}
            body = {"stream": True, "model": "assistant-large", "messages": [{"role": "user", "content": "hello"}]}
            async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.headers.get("access-control-allow-origin") == read_by
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("origin", ["*", "app.example", f"{APP}/"])
def test_an_origin_is_written_as_browsers_send_it(origin: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"server": {"origins": [origin]}}, Config)
