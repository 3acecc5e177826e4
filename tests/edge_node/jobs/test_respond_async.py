"""`Prefer: respond-async` (RFC 7240): a request that takes longer than `wait` becomes a job."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from causeway_server.router.jobs.job import wait_of

from ..device import Answer, Device, running
from .cloud import JobCloud
from .support import PROMPT, ended, request, text_of

CHAT = {"model": "auto", "messages": [{"role": "user", "content": "hello"}]}


async def ask(device: Device, prefer: str, tags: str = "edge", **fields: object) -> Answer:
    headers = {"Prefer": prefer, "x-causeway-tags": tags}
    return await request(device, "POST", "/v1/chat/completions", {**CHAT, **fields}, headers)


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        (["respond-async, wait=2"], 2.0),
        (["wait=10", "Respond-Async"], 10.0),
        (['respond-async; foo="bar", WAIT = "3"'], 3.0),
        (["respond-async"], 0.0),
        (["respond-async, wait=abc"], 0.0),
        (["respond-async, wait=999999"], 300.0),
        (["wait=2, return=minimal"], None),
        (["respond-asynchronously"], None),
        ([], None),
    ],
)
def test_the_preference_is_read_as_the_rfc_says(headers: list[str], wait_s: float | None) -> None:
    assert wait_of(headers) == wait_s


@pytest.mark.slow
async def test_a_request_becomes_a_job_if_it_takes_longer(tmp_path: Path) -> None:
    async with running(tmp_path, cloud=JobCloud(), jobs=PROMPT) as device:
        quick = await ask(device, "respond-async, wait=60")
        assert (quick.status, quick.text, quick.headers["x-causeway-route"]) == (200, "edge says so", "edge")
        assert quick.headers["Preference-Applied"] == "respond-async"
        device.engine.gate = asyncio.Event()
        slow = await ask(device, "respond-async")
        assert (slow.status, slow.json["object"]) == (202, "job")
        device.engine.gate.set()
        assert text_of(await ended(device, slow.json["id"])) == "edge says so"
        completion = await request(
            device, "POST", "/v1/completions", {"model": "auto", "prompt": "x"}, {"Prefer": "respond-async, wait=60"}
        )
        assert completion.json["object"] == "text_completion"


@pytest.mark.slow
async def test_a_job_that_fails_within_the_wait_answers_with_its_error(tmp_path: Path) -> None:
    cloud = JobCloud()
    cloud.ends = "dead"
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        failed = await ask(device, "respond-async, wait=60", tags="cloud")
        assert (failed.status, failed.code, failed.message) == (502, "cloud_failed", "it crashed")


async def test_what_is_no_job_ignores_the_preference(device: Device) -> None:
    """Other preferences; a streamed answer cannot become one."""
    assert (await ask(device, "return=minimal")).status == 200
    assert device.parts.jobs.stats is None
    assert (await ask(device, "respond-async", stream=True)).code == "invalid_value"


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["/v1/responses", "/v1/embeddings", "/v1/messages"])
async def test_a_job_names_any_endpoint_and_is_answered_as_that(device: Device, endpoint: str) -> None:
    """By a job's body and by the preference, on the device and in the cloud, from the cache as well."""
    for place in ("small", "large"):
        body: dict[str, Any] = {"model": place, "input": "hello"}
        if endpoint == "/v1/messages":
            body = {"model": place, "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
        plain = await request(device, "POST", endpoint, body)
        assert plain.status == 200, plain.body
        submitted = await request(device, "POST", "/v1/jobs", {**body, "endpoint": endpoint})
        assert submitted.status == 202, submitted.body
        result = (await ended(device, submitted.json["id"]))["result"]
        preferred = await request(device, "POST", endpoint, body, {"Prefer": "respond-async, wait=60"})
        assert preferred.headers["Preference-Applied"] == "respond-async"
        for answer in (result, preferred.json):
            assert _content(answer) == _content(plain.json)
    refused = await request(device, "POST", "/v1/jobs", {"model": "small", "input": "x", "endpoint": "/v1/images"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "endpoint")


def _content(answer: dict[str, Any]) -> object:
    output = [part["text"] for item in answer.get("output", ()) for part in item["content"]]
    vectors = [one["embedding"] for one in answer.get("data", ())]
    return answer.get("object", answer.get("type")), output, answer.get("content"), vectors, answer["usage"]
