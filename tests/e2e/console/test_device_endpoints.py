"""The paths behind the device's console, without a browser."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import pytest

from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig
from causeway_server.edge_node.console.routes import PAGE
from causeway_server.router.serving.console import page_files
from causeway_server.router.types import ReasonCode
from tests.edge_node.device import Device, running


@pytest.fixture
async def device(tmp_path: Path) -> AsyncIterator[Device]:
    async with running(tmp_path) as device:
        yield device


async def what_if(device: Device, decision: str, signals: object, **more: object) -> tuple[int, dict[str, Any]]:
    async with device.session.post("/console/what-if", json={"id": decision, "signals": signals, **more}) as response:
        return response.status, await response.json()


async def test_files_come_with_a_strict_policy_and_an_etag(device: Device) -> None:
    for path in page_files(PAGE):
        answer = await device.get(path)
        assert answer.status == 200, path
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        headers = {"If-None-Match": {name.lower(): value for name, value in answer.headers.items()}["etag"]}
        async with device.session.get(path, headers=headers) as again:
            assert (again.status, await again.read()) == (304, b"")


async def test_a_slash_after_the_page_leads_to_it(device: Device) -> None:
    """Its files have relative addresses: under another one the page would be without them."""
    async with device.session.get("/console/", allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (308, "../console")
    assert (await device.get("/console/")).body == (await device.get("/console")).body


@pytest.mark.parametrize("path", ["/console/index.html", "/console/../app.py", "/console/%2e%2e/routes.py"])
async def test_nothing_else_is_served(device: Device, path: str) -> None:
    assert (await device.get(path)).status == 404


async def test_the_state_counts_requests_by_route(device: Device) -> None:
    await device.ask("one", temperature=0)
    await device.ask("one", temperature=0)
    state = (await device.get("/console/state")).json
    assert {(each["route"], each["cache"]): each["count"] for each in state["requests"]} == {
        ("edge", "miss"): 1,
        ("cache", "hit"): 1,
    }
    assert (state["running"], state["waiting"], state["concurrent"], state["queue"]) == (0, 0, 4, 4)
    assert state["readiness"]["ready"] is True


async def test_what_if_decides_under_other_signals_and_runs_nothing(device: Device) -> None:
    answer = await device.ask("hidden words", tags="kiosk")
    calls = len(device.engine.calls)
    status, body = await what_if(device, answer.headers["x-causeway-decision"], {"request.tags": ["cloud"]})
    assert status == 200
    assert [one["rule"] for one in body["as_recorded"]["decisions"]] == ["edge-first"]
    assert [one["rule"] for one in body["changed"]["decisions"]] == ["cloud-first"]
    assert len(device.engine.calls) == calls
    assert "hidden words" not in str(body)


async def test_a_draft_is_tried_over_the_callers_own_decisions(tmp_path: Path) -> None:
    keys = tuple(KeyConfig(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("one", "two"))
    async with running(tmp_path, server=ServerConfig(port=0, drain_s=1.0, keys=keys)) as device:
        await device.ask("hidden words", headers={"authorization": "Bearer one"})
        for name, requests in (("one", 1), ("two", 0)):
            headers = {"authorization": f"Bearer {name}"}
            async with device.session.post("/console/policy", json={}, headers=headers) as response:
                report = await response.json()
            assert (report["text"], report["problems"]) == (device.parts.policies.text, [])
            assert report["old"] == report["policy"] != ""
            assert (report["replay"]["requests"], report["replay"]["unchanged"]) == (requests, requests)
        async with device.session.post("/console/policy", json={"policy": "version: 2"}, headers=headers) as response:
            report = await response.json()
        assert (report["policy"], report["replay"]) == ("", None)
        assert report["problems"][0]["location"]["path"] == "version"
        assert (await device.session.post("/console/policy", json={})).status == 401


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"id": "0" * 24, "signals": {}}, 404, "not_found"),
        ({"id": 7}, 400, "invalid_value"),
        ({"signals": {}}, 400, "missing_required_parameter"),
        ({"id": "x", "other": 1}, 400, "unknown_parameter"),
    ],
)
async def test_a_bad_question_is_refused(device: Device, body: dict[str, object], status: int, code: str) -> None:
    async with device.session.post("/console/what-if", json=body) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (status, code)


async def test_malformed_json_and_other_methods_are_refused(device: Device) -> None:
    headers = {"content-type": "application/json"}
    async with device.session.post("/console/what-if", data=b"{", headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_json")
    async with device.session.post("/console/what-if", data=b"{}", headers={"content-type": "text/plain"}) as response:
        assert response.status == 415
    assert (await device.get("/console/what-if")).status == 405


async def test_the_json_needs_the_api_key_and_the_page_does_not(tmp_path: Path) -> None:
    key = KeyConfig("kiosk", "28b89c06c1596835df703240ddb92ecca8f9126844cb7bf13af5e91a6e400295")
    async with running(tmp_path / "keyed", server=ServerConfig(port=0, drain_s=1.0, keys=(key,))) as device:
        assert (await device.get("/console")).status == 200
        assert (await device.get("/console/state")).status == 401
        assert (await what_if(device, "0" * 24, {}))[0] == 401
        headers = {"authorization": "Bearer kiosk-secret"}
        async with device.session.get("/console/state", headers=headers) as response:
            assert response.status == 200


def test_every_reason_has_words() -> None:
    """The page knows each code of `ReasonCode`, in the words of `causeway-edge route`."""
    words = (PAGE / "words.js").read_text(encoding="utf-8")
    table = words[words.index("REASONS = {") : words.index("};")]
    assert set(re.findall(r"^  (\w+): \[", table, flags=re.MULTILINE)) == set(get_args(ReasonCode))


def test_the_vendored_axe_is_the_one_that_was_checked() -> None:
    vendor = Path(__file__).parent / "vendor"
    (expected,) = re.findall(r"sha256 ([0-9a-f]{64})", (vendor / "README.md").read_text(encoding="utf-8"))
    assert hashlib.sha256((vendor / "axe.min.js").read_bytes()).hexdigest() == expected
