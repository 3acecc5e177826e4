"""Files, health and the OpenAPI document."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import msgspec
import pytest

from causeway_server.fleet.app import all_routes, build_app
from causeway_server.fleet.openapi import fleet_document

from .conftest import Plane

pytestmark = pytest.mark.slow


@pytest.fixture
def database(tmp_path: Path) -> str:
    """Nothing here depends on which one it is."""
    return f"sqlite:///{tmp_path / 'fleet.db'}"


async def test_files_are_served_as_a_cdn_would(plane: Plane) -> None:
    """What never changes is cached for ever, what changes is asked for again; ranges resume a download."""
    blobs = plane.plane.folder / "published" / "blobs"
    blobs.mkdir()
    name = "c" * 64
    (blobs / name).write_bytes(b"0123456789")
    device = plane.device()
    blob = await device.send("GET", f"/blobs/{name}")
    assert (blob.body, blob.headers["cache-control"]) == (b"0123456789", "public, max-age=31536000, immutable")
    rest = await device.send("GET", f"/blobs/{name}", headers={"range": "bytes=4-"})
    assert (rest.status, rest.body, rest.headers["content-range"]) == (206, b"456789", "bytes 4-9/10")
    assert (await device.send("GET", "/tuf/metadata/1.root.json")).headers["cache-control"].endswith("immutable")
    timestamp = await device.send("GET", "/tuf/metadata/timestamp.json")
    assert timestamp.headers["cache-control"] == "no-cache"
    same = await device.send(
        "GET", "/tuf/metadata/timestamp.json", headers={"if-none-match": timestamp.headers["etag"]}
    )
    assert same.status == 304


async def test_head_is_answered_as_get_and_a_slash_too_many_is_ignored(plane: Plane) -> None:
    device = plane.device()
    for path in ("/healthz", "/openapi.json", "/tuf/metadata/root.json", "/tuf/metadata/2.root.json"):
        whole = await device.send("GET", path)
        head = await device.send("HEAD", f"{path}/")
        assert (head.status, head.body) == (whole.status, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]
    assert (await device.send("POST", "/v1/token/")).status == (await device.send("POST", "/v1/token")).status != 404
    page = await device.send("GET", "/console/")
    assert page.body == (await device.send("GET", "/console")).body


@pytest.mark.parametrize(
    "path",
    [
        "/tuf/../../fleet.yaml",
        "/tuf/metadata/%2e%2e/%2e%2e/%2e%2e/fleet.yaml",
        "/tuf/metadata/2.root.json",
        "/tuf/metadata/root.json.partial",
        "/blobs/%2e%2e%2ffleet.yaml",
        "/blobs/" + "d" * 64,
        "/v1/nothing",
    ],
)
async def test_nothing_else_is_served(plane: Plane, path: str) -> None:
    answer = await plane.device().send("GET", path)
    assert (answer.status, answer.code) == (404, "not_found")


async def test_a_wrong_method_names_the_right_one(plane: Plane) -> None:
    answer = await plane.device().send("GET", "/v1/enroll")
    assert (answer.status, answer.code, answer.headers["allow"]) == (405, "method_not_allowed", "POST")


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /console HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /tuf/metadata/1.root.json HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"DELETE /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"hello\r\n\r\n", 400),
    ],
)
async def test_no_response_names_versions_of_software(plane: Plane, sent: bytes, expected: int) -> None:
    address = urlsplit(plane.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(sent)
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    writer.close()
    fields = dict(line.lower().split(": ", 1) for line in lines)
    assert (int(status.split()[1]), fields["server"]) == (expected, "causeway")


@pytest.mark.parametrize(
    "page",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_a_foreign_page_changes_nothing(plane: Plane, page: dict[str, str]) -> None:
    """Whatever the path, with a token of an operator, too; what it reads the browser keeps from it."""
    for method, path in (("POST", "/v1/enroll"), ("POST", "/v1/session"), ("DELETE", "/v1/session"), ("PUT", "/no")):
        answer = await plane.device().send(method, path, b"{}", page | {"x-causeway-console": "1"})
        assert (answer.status, answer.code) == (403, "origin_not_allowed"), path
    read = await plane.device().send("GET", "/healthz", headers=page)
    assert (read.status, [name for name in read.headers if name.startswith("access-control-")]) == (200, [])


async def test_a_refused_body_is_not_read(plane: Plane) -> None:
    """The connection ends instead; one whose body has come stays open."""
    address = urlsplit(plane.url)
    head = b"POST /v1/enroll HTTP/1.1\r\nHost: x\r\nOrigin: https://evil.example\r\nContent-Length: "
    for sent, closes in ((b"1000000\r\n\r\n{", True), (b"2\r\n\r\n{}", False)):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(head + sent)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert (answer.split()[1], b"connection: close" in answer) == (b"403", closes)
        writer.close()


async def test_the_page_of_the_control_plane_is_no_foreign_one(plane: Plane) -> None:
    """Behind a proxy, whose name is not the `Host` that arrives here, the browser says so."""
    for page in ({"origin": plane.url}, {"origin": "https://fleet.example", "sec-fetch-site": "same-origin"}):
        assert (await plane.device().send("POST", "/v1/enroll", b"{", page)).code == "invalid_json"


async def test_a_body_without_a_type_is_refused(plane: Plane) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = await plane.device().send("POST", "/v1/enroll", b'{"token": "x"}', {"content-type": kind})
        assert (answer.status, answer.code) == (415, "unsupported_media_type"), kind


async def test_metrics_count_messages_and_polls(plane: Plane) -> None:
    await plane.enrolled()
    text = (await plane.device().send("GET", "/metrics")).body.decode()
    assert "causeway_fleet_messages_total 1.0" in text
    assert "causeway_fleet_parked_polls 0.0" in text


async def test_the_document_has_every_route(plane: Plane) -> None:
    """The one that is served, operators' routes included; every reference in it leads somewhere."""
    document = (await plane.device().send("GET", "/openapi.json")).body
    documented = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    own = build_app(all_routes(plane.plane))
    served = {(str(one.resource.canonical), one.method) for one in own.router.routes() if one.resource is not None}
    assert {pair for pair in served if pair[1] not in ("HEAD", "*")} <= documented
    assert {
        ("/v1/rollouts", "GET"),
        ("/v1/rollouts", "POST"),
        ("/v1/devices", "GET"),
        ("/console", "GET"),
    } <= documented
    for reference in re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', msgspec.json.encode(document).decode()):
        assert reference in document["components"]["schemas"]
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["summary"].endswith(".")
            assert operation["responses"]


async def test_answers_have_the_documented_form(plane: Plane) -> None:
    document = (await plane.device().send("GET", "/openapi.json")).body
    device = await plane.enrolled()
    answers = [
        ("/v1/status", "post", await device.report()),
        ("/v1/token", "post", await device.ask_token(sent=plane.plane.clock() + 5)),
        ("/v1/wake", "get", await device.wake()),
        ("/v1/revocations", "get", await device.send("GET", "/v1/revocations")),
        ("/healthz", "get", await device.send("GET", "/healthz")),
        ("/v1/enroll", "post", await device.enrol("unknown")),
        ("/v1/status", "post", await plane.device("unknown").report()),
    ]
    for path, method, answer in answers:
        operation: dict[str, Any] = document["paths"][path][method]
        response = operation["responses"][str(answer.status)]
        schema = response["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator(schema | {"components": document["components"]}).validate(answer.body)
        if answer.code:
            assert f"`{answer.code}`" in response["description"]


def test_a_document_of_no_routes_is_one() -> None:
    assert fleet_document([], "1.0")["paths"] == {}
