"""Request headers of the daemon on a real socket: no line of a list is lost, and tags have no case."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from multidict import CIMultiDict

from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig

from ..device import POLICY, Device, running

CLOUD_FIRST = ("x-causeway-tags", "cloud")


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    async with running(tmp_path) as device:
        yield device


def lines(*pairs: tuple[str, str]) -> CIMultiDict[str]:
    """Headers of which a name may come twice, each on a line of its own."""
    return CIMultiDict(pairs)


async def ask(device: Device, *pairs: tuple[str, str]) -> tuple[int, str | None]:
    """Return the status of an answer, and its route."""
    body = {"model": "auto", "messages": [{"role": "user", "content": "hello"}]}
    async with device.session.post("/v1/chat/completions", json=body, headers=lines(*pairs)) as response:
        await response.read()
        return response.status, response.headers.get("x-causeway-route")


@pytest.mark.parametrize("second", ["private", "Private", "x,PRIVATE"])
async def test_a_tag_on_a_second_line_binds(device: Device, second: str) -> None:
    assert await ask(device, CLOUD_FIRST, ("x-causeway-tags", second)) == (200, "edge")
    assert "private" in device.newest().request.tags
    assert device.cloud.bodies == []


async def test_a_tag_on_a_second_line_fails_closed(device: Device) -> None:
    device.engine.fault = "refuse"
    assert (await ask(device, CLOUD_FIRST, ("x-causeway-tags", "private")))[0] == 503
    assert device.cloud.bodies == []


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("x-causeway-prefer", "prefer_cloud", "only_on_device"),
        ("x-causeway-deadline-ms", "1000", "2000"),
        ("x-causeway-priority", "bulk", "standard"),
        ("x-causeway-experiment", "1", "2"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/route", "/v1/jobs", "/v1/responses"])
async def test_a_header_with_two_values_is_a_400_that_names_it(
    device: Device, path: str, name: str, first: str, second: str
) -> None:
    body = {"model": "auto", "messages": [{"role": "user", "content": "a"}]}
    async with device.session.post(path, json=body, headers=lines((name, first), (name, second))) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == name
    assert (device.cloud.bodies, device.engine.calls) == ([], [])


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_two_keys_are_a_400_as_the_tags_of_either_may_protect(tmp_path: Path, method: str) -> None:
    keys = tuple(KeyConfig(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("till", "office"))
    async with running(tmp_path, server=ServerConfig(port=0, keys=keys)) as device:
        sent = lines(("Authorization", "Bearer till"), ("Authorization", "Bearer office"))
        async with device.session.request(method, "/v1/jobs", json={}, headers=sent) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "authorization")


async def test_a_job_of_two_idempotency_keys_is_a_400(device: Device) -> None:
    body = {"model": "auto", "messages": [{"role": "user", "content": "a"}]}
    sent = lines(("Idempotency-Key", "a"), ("Idempotency-Key", "b"))
    async with device.session.post("/v1/jobs", json=body, headers=sent) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "idempotency-key")


async def test_the_same_value_twice_is_one_value(device: Device) -> None:
    stays = ("x-causeway-prefer", "only_on_device")
    assert await ask(device, CLOUD_FIRST, stays, stays) == (200, "edge")


@pytest.mark.parametrize("tag", ["a\x01b", "a b", "a,private", " private", "a\u0085b", "private\n"])
async def test_a_malformed_tag_of_a_body_is_a_400(device: Device, tag: str) -> None:
    """A tag with a comma would be two tags in a header, and one with a space would match no policy."""
    answer = await device.ask(causeway={"tags": [tag]})
    assert answer.status == 400
    assert "causeway.tags" in answer.message
    assert device.engine.calls == []


@pytest.mark.parametrize("headers", [{"x-causeway-tags": "Private,cloud"}, {}])
async def test_case_does_not_count_in_headers_and_bodies(device: Device, headers: dict[str, str]) -> None:
    hints = {} if headers else {"tags": ["PRIVATE", "Cloud"]}
    answer = await device.ask(headers=headers, causeway=hints)
    assert answer.headers["x-causeway-route"] == "edge"
    assert device.newest().request.tags == ("cloud", "private")
    assert device.cloud.bodies == []


async def test_case_does_not_count_in_the_tags_of_keys_and_in_the_policy(tmp_path: Path) -> None:
    key = KeyConfig("till", hashlib.sha256(b"secret").hexdigest(), ("PRIVATE",))
    policy = POLICY.replace('"private" in', '"Private" in')
    async with running(tmp_path, policy=policy, server=ServerConfig(port=0, keys=(key,))) as device:
        answer = await device.ask(tags="cloud", headers={"Authorization": "Bearer secret"})
        assert answer.headers["x-causeway-route"] == "edge"
        assert device.cloud.bodies == []
