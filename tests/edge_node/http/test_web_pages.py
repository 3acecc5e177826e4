"""What a browser's page gets from a daemon: by its `Host`, its origin, and the type of its body."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from causeway_server.edge_node.config.schema import DeviceFilesConfig, KeyConfig, ServerConfig

from ..device import Device, running

APP = "https://app.example"
EVIL = "https://evil.example"
ASK = b'{"model": "auto", "messages": [{"role": "user", "content": "hello"}]}'
JSON = {"Content-Type": "application/json"}
READ = ("/v1/jobs", "/v1/decisions", "/v1/webhooks/secret", "/v1/models", "/console/state", "/metrics", "/healthz")
POSTS = {
    "/v1/chat/completions": ASK,
    "/v1/completions": b'{"model": "auto", "prompt": "a"}',
    "/v1/embeddings": b'{"model": "auto", "input": "a"}',
    "/v1/responses": b'{"model": "auto", "input": "a"}',
    "/v1/route": ASK,
    "/v1/jobs": ASK,
    "/v1/audio/speech": b'{"model": "auto", "input": "a"}',
    "/console/what-if": b'{"id": "a"}',
}
FORMS = ("/v1/files", "/v1/audio/transcriptions")


@asynccontextmanager
async def serving(tmp_path: Path, **server: object) -> AsyncIterator[Device]:
    settings = ServerConfig(**{"port": 0, "drain_s": 1.0, **server})  # type: ignore[arg-type]
    async with running(tmp_path, server=settings, files=DeviceFilesConfig(accept=True)) as device:
        yield device


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    async with serving(tmp_path, origins=(APP, "null")) as device:
        yield device


async def send(
    device: Device, method: str, path: str, body: bytes | None = None, /, **headers: str
) -> tuple[int, str, dict[str, str]]:
    """Return the status, the code of an error, and the headers. Without a type the body has none."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    skipped = () if "Content-Type" in names else ("Content-Type",)
    async with device.session.request(method, path, data=body, headers=names, skip_auto_headers=skipped) as response:
        failed = response.status >= 400
        code = (await response.json())["error"]["code"] if failed else ""
        return response.status, code, dict(response.headers)


# --- the name under which the daemon is called -----------------------------------------------------------------------


@pytest.mark.parametrize("path", READ)
async def test_a_rebound_name_reads_nothing(device: Device, path: str) -> None:
    """Not even the health: a page learns nothing, not that there is a daemon with a model."""
    status, code, _ = await send(device, "GET", path, Host=f"evil.example:{device.app.port}")
    assert (status, code) == (421, "misdirected_request")
    for host in (f"localhost:{device.app.port}", "app.localhost", "127.0.0.1", "[::1]:80"):
        status, code, _ = await send(device, "GET", path, Host=host)
        assert status == 200, host


async def test_a_rebound_name_asks_and_changes_nothing(device: Device) -> None:
    for path in ("/v1/chat/completions", "/v1/jobs", "/v1/webhooks/secret"):
        same = {"Sec_Fetch_Site": "same-origin", "Origin": "http://evil.example", "Host": "evil.example"}
        assert (await send(device, "POST", path, ASK, Content_Type="application/json", **same))[0] == 421
    assert device.parts.decisions.newest is None


async def test_a_configured_name_is_taken(tmp_path: Path) -> None:
    async with serving(tmp_path, hosts=("device.local",)) as device:
        assert (await send(device, "GET", "/v1/models", Host="device.local:80"))[0] == 200
        assert (await send(device, "GET", "/v1/models", Host="evil.example"))[0] == 421


async def test_with_keys_any_name_is_taken_because_a_page_has_none(tmp_path: Path) -> None:
    key = KeyConfig("kiosk", hashlib.sha256(b"secret").hexdigest())
    async with serving(tmp_path, keys=(key,)) as device:
        assert (await send(device, "GET", "/v1/models", Host="evil.example"))[:2] == (401, "invalid_api_key")
        assert (await send(device, "GET", "/v1/models", Host="any.name", Authorization="Bearer secret"))[0] == 200


async def test_on_the_unix_socket_any_name_is_taken(tmp_path: Path) -> None:
    async with serving(tmp_path, socket=str(tmp_path / "socket")) as device:
        connector = aiohttp.UnixConnector(str(tmp_path / "socket"))
        async with aiohttp.ClientSession("http://edge.any", connector=connector) as session:
            async with session.post("/v1/chat/completions", data=ASK, headers=JSON) as response:
                assert response.status == 200
            async with session.post("/v1/chat/completions", data=ASK, headers=JSON | {"Origin": EVIL}) as response:
                assert response.status == 403
        assert (await send(device, "GET", "/v1/models", Host="edge.any"))[0] == 421


# --- the page that asks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        {"Origin": EVIL},
        {"Origin": "http://localhost:3000"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
async def test_a_foreign_page_sends_nothing_that_counts(device: Device, page: dict[str, str]) -> None:
    for path, body in POSTS.items():
        assert (await send(device, "POST", path, body, Content_Type="application/json", **page))[:2] == (
            403,
            "origin_not_allowed",
        )
    for path in FORMS:
        assert (await send(device, "POST", path, b"--b--", Content_Type="multipart/form-data; boundary=b", **page))[
            0
        ] == 403
    assert (await send(device, "POST", "/v1/webhooks/secret", **page))[0] == 403
    assert (await send(device, "DELETE", "/v1/jobs/job_1", **page))[0] == 403
    assert device.parts.decisions.newest is None


async def test_the_answer_to_a_foreign_page_has_no_headers_of_cors(device: Device) -> None:
    for method, path in (("GET", "/v1/decisions"), ("OPTIONS", "/v1/jobs"), ("POST", "/v1/jobs")):
        _, _, headers = await send(device, method, path, Origin=EVIL, Access_Control_Request_Method="POST")
        assert not [name for name in headers if name.lower().startswith("access-control-")]


async def test_the_consoles_own_page_goes_on_working(device: Device) -> None:
    answer = await device.ask("hello")
    own = {"Origin": f"http://127.0.0.1:{device.app.port}", "Sec_Fetch_Site": "same-origin"}
    body = b'{"id": "%s"}' % answer.headers["x-causeway-decision"].encode()
    assert (await send(device, "POST", "/console/what-if", body, Content_Type="application/json", **own))[0] == 200


# --- allowed origins -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [APP, "null"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_page_of_an_allowed_origin_reads_its_answer_whole_and_streamed(
    device: Device, origin: str, stream: bool
) -> None:
    page = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
    answer = await device.ask(headers=page, stream=stream)
    assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, origin)
    assert answer.headers["Access-Control-Expose-Headers"] == "*"
    assert answer.headers["Vary"] == "Origin"
    failed = await device.ask(headers=page, model="none")
    assert (failed.status, failed.headers["Access-Control-Allow-Origin"]) == (404, origin)


async def test_an_answer_from_the_cache_is_readable_by_its_own_page_only(device: Device) -> None:
    page = {"Origin": APP}
    for _ in range(2):
        answer = await device.ask(temperature=0, headers=page)
    assert answer.headers["x-causeway-cache"] == "hit"
    assert answer.headers["Access-Control-Allow-Origin"] == APP
    plain = await device.ask(temperature=0)
    assert plain.headers["x-causeway-cache"] == "hit"
    assert "Access-Control-Allow-Origin" not in plain.headers


async def test_a_preflight_of_an_allowed_origin_is_answered(device: Device) -> None:
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type,x-stainless-os"}
    for path in ("/v1/chat/completions", "/v1/jobs/job_1"):
        status, _, headers = await send(device, "OPTIONS", path, Origin=APP, **asked)
        assert status == 204
        assert headers["Access-Control-Allow-Origin"] == APP
        assert {"POST", "DELETE"} < {*headers["Access-Control-Allow-Methods"].split(", ")}
        assert headers["Access-Control-Allow-Headers"] == "content-type,x-stainless-os"
        assert headers["Server"] == "causeway"
    assert (await send(device, "OPTIONS", "/v1/jobs", Origin=EVIL, **asked))[0] == 405


# --- the body's type -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", POSTS)
async def test_a_body_without_a_type_is_not_json(device: Device, path: str) -> None:
    """A page sends `text/plain`, a form or no type without asking first; curl sends a form."""
    for sent in ({}, {"Content_Type": "text/plain"}, {"Content_Type": "application/x-www-form-urlencoded"}):
        status, code, _ = await send(device, "POST", path, POSTS[path], **sent)
        assert (status, code) == (415, "unsupported_media_type"), sent
    assert device.parts.decisions.newest is None
    wrong = {"Content_Type": "text/plain; a=application/json"}
    assert (await send(device, "POST", path, POSTS[path], **wrong))[0] == 415


@pytest.mark.parametrize("path", FORMS)
async def test_a_form_without_a_type_is_not_one(device: Device, path: str) -> None:
    for sent in ({}, {"Content_Type": "application/json"}, {"Content_Type": "multipart/form-dataset"}):
        assert (await send(device, "POST", path, b"--b--", **sent))[:2] == (415, "unsupported_media_type")


async def test_the_message_says_what_to_send(device: Device) -> None:
    for sent in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):
        async with device.session.post(
            "/v1/chat/completions", data=ASK, headers=sent, skip_auto_headers=("Content-Type",)
        ) as response:
            assert "Send `Content-Type: application/json`." in (await response.json())["error"]["message"]


async def test_a_json_subtype_is_json(device: Device) -> None:
    sent = {"Content_Type": "application/vnd.example+json; charset=utf-8"}
    assert (await send(device, "POST", "/v1/chat/completions", ASK, **sent))[0] == 200
