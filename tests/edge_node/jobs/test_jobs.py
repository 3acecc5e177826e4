from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from causeway_server.edge_node.config.schema import OutboxConfig, ServerConfig
from causeway_server.edge_node.http.api import RequestReader
from causeway_server.edge_node.jobs.api import JobIntake, SubmittedJob
from causeway_server.router.types import RoutingHints
from tests.edge_node.http.test_server import connected
from tests.waiting import until

from ..device import POLICY, Device, running
from .cloud import JobCloud
from .support import PROMPT, accepted, all_events, away, delta_of, ended, read_event, request, submit, text_of, view

BOUND = POLICY.replace('"private" in request.tags', '"private" in request.tags || "cloud" in request.tags')
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"priority": "urgent"}, "invalid_value"),
    ({"deadline_ms": 5, "not_before_ms": 10}, "invalid_value"),
    ({"not_before_ms": -1}, "invalid_value"),
    ({"deadline_ms": 0}, "invalid_value"),
    ({"deadline_ms": -1}, "invalid_value"),
    ({"revise_within_ms": 5000}, "invalid_value"),
    ({"not_befor_ms": 1}, "unknown_parameter"),
    ({"model": "nobody"}, "model_not_found"),
    ({"endpoint": "/v1/images/generations"}, "invalid_value"),
    ({"webhook": "http://example.com"}, "webhook_refused"),
    ({"window": "off_peak"}, "invalid_value"),
    ({"messages": 7}, "invalid_value"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "unsupported_feature"),
]
pytestmark = pytest.mark.slow


async def test_a_job_is_answered_by_the_device_where_the_policy_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, cloud=JobCloud(), jobs=PROMPT) as device:
        answer = await submit(device)
        assert answer.status == 202
        assert answer.headers["Location"] == f"/v1/jobs/{answer.json['id']}"
        found = await ended(device, answer.json["id"])
        assert (found["status"], found["route"], text_of(found)) == ("succeeded", "edge", "edge says so")
        record = await device.get(f"/v1/decisions/{found['decision']}")
        assert record.json["outcome"]["status"] == "ok"
        device.assert_nothing_leaks()


async def test_a_client_that_leaves_during_the_commit_has_submitted_its_job(tmp_path: Path) -> None:
    """The runner is woken all the same: its next look may be a minute away."""
    async with running(tmp_path, cloud=JobCloud(), jobs=PROMPT) as device:
        store = (await device.parts.jobs.open()).store
        runner: Any = Mock()
        intake = JobIntake(PROMPT, store, runner, device.parts.service, RequestReader(ServerConfig()))
        body = b'{"model": "auto", "messages": [{"role": "user", "content": "hello"}]}'
        leaving = asyncio.ensure_future(intake.accept(SubmittedJob(body, RoutingHints(client="me"))))
        async with asyncio.timeout(60.0):
            while not store.stats.accepted:  # noqa: ASYNC110 -- counted before the commit
                await asyncio.sleep(0.0)
        leaving.cancel()
        await asyncio.wait([leaving])
        runner.wake.assert_called_once()
        assert len(await store.list_owned("me", "", 10)) == 1


async def test_a_job_waits_for_the_cloud_and_is_done_there_once(tmp_path: Path) -> None:
    """The policy's first target is in the cloud: the device's fallback does not take its place."""
    cloud = away()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        job = await accepted(device, "later", tags="cloud")
        assert (await device.ask("now", tags="cloud")).headers["x-causeway-route"] == "edge"
        assert (await view(device, job))["status"] == "queued"
        await cloud.come_back()
        found = await ended(device, job)
        assert (found["status"], found["route"], text_of(found)) == ("succeeded", "cloud", "cloud says so")
        assert cloud.effects == {"later": 1}


async def test_a_job_that_the_cloud_has_lost_is_sent_again(tmp_path: Path) -> None:
    """With the same key: whichever of the two the cloud remembers, it is done once."""
    cloud = JobCloud()
    cloud.waits = True
    async with running(tmp_path, cloud=cloud, jobs=PROMPT) as device:
        job = await accepted(device, "later", tags="cloud")
        await until(lambda: cloud.submissions == 1)
        cloud.forget()
        cloud.waits = False
        found = await ended(device, job)
        assert (found["status"], text_of(found)) == ("succeeded", "cloud says so"), found["error"]
    assert cloud.submissions == 2
    assert len(set(cloud.keys)) == 1


async def test_a_server_without_jobs_gets_a_plain_request_with_the_key(tmp_path: Path) -> None:
    cloud = JobCloud(has_jobs=False)
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        job = await accepted(device, tags="cloud")
        assert text_of(await ended(device, job)) == "cloud says so"
        assert cloud.request_headers[-1]["idempotency-key"] == job


@pytest.mark.parametrize(("before", "after"), [(BOUND, POLICY), (POLICY, BOUND)], ids=["loosened", "tightened"])
async def test_a_job_leaves_only_if_both_policies_allow_it(tmp_path: Path, before: str, after: str) -> None:
    """The policy at acceptance and the policy at sending."""
    cloud = away()
    path = tmp_path / "policy.yaml"
    async with running(tmp_path, policy=before, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        job = await accepted(device, tags="cloud", not_before_ms=50)
        path.write_text(after)
        await device.parts.policies.reload()
        await cloud.come_back()
        found = await ended(device, job)
        assert (found["route"], text_of(found)) == ("edge", "edge says so")
        assert cloud.effects == {}
        assert cloud.bodies == []


async def test_a_key_names_one_job(tmp_path: Path) -> None:
    async with running(tmp_path, cloud=JobCloud(), jobs=PROMPT) as device:
        first = await submit(device, key="report-1")
        again = await submit(device, key="report-1")
        assert (again.status, again.json["id"]) == (202, first.json["id"])
        assert again.headers["Idempotent-Replayed"] == "true"
        body = {"messages": [{"content": "hello", "role": "user"}], "model": "auto"}
        for data in (json.dumps(body, indent=1).encode(), b"\xef\xbb\xbf" + json.dumps(body).encode()):
            sent = {"Content-Type": "application/json", "Idempotency-Key": "report-1"}
            async with device.session.post("/v1/jobs", data=data, headers=sent) as same:
                assert (same.status, (await same.json())["id"]) == (202, first.json["id"])
        other = await submit(device, "something else", key="report-1")
        assert (other.status, other.code) == (409, "idempotency_conflict")
        assert f"was used for the job {first.json['id']} with another body" in other.message


async def test_bulk_jobs_give_way_to_others_oldest_first_and_say_so(tmp_path: Path) -> None:
    full = OutboxConfig(max_jobs=4, bulk_share=0.5)
    cloud = away()
    async with running(tmp_path, cloud=cloud, jobs=full) as device:
        bulk = [await accepted(device, tags="cloud", priority="bulk") for _ in range(3)]
        states = [(await view(device, job))["status"] for job in bulk]
        assert states == ["cancelled", "queued", "queued"]  # bulk jobs have a half of the room
        for _ in range(4):
            await accepted(device, tags="cloud", priority="interactive")
        dropped = await view(device, bulk[2])
        assert (dropped["status"], dropped["error"]["code"]) == ("cancelled", "job_dropped")
        refused = await submit(device, tags="cloud", priority="interactive")
        assert (refused.status, refused.code) == (429, "outbox_full")
        assert "Retry-After" in refused.headers
        assert any("outbox is full" in problem for problem in (await device.get("/readyz")).json["problems"])
        assert "causeway_edge_jobs_dropped_total 3.0" in (await device.get("/metrics")).body.decode()


async def test_a_handoff_waits_for_the_cloud_and_does_not_ask_the_device_again(tmp_path: Path) -> None:
    cloud = away()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        device.engine.score = 0.1
        job = await accepted(device, "unsure", tags="handoff")
        await until(lambda: len(device.parts.decisions.memory), 60.0)
        await cloud.come_back()
        assert text_of(await ended(device, job)) == "cloud says so"
        assert cloud.effects == {"unsure": 1}
        assert len(device.engine.calls) == 2  # before, and when the cloud was back


async def test_a_job_is_cancelled_while_it_waits_and_while_it_runs(tmp_path: Path) -> None:
    cloud = away()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT) as device:
        waiting = await accepted(device, tags="cloud")
        device.engine.gate = asyncio.Event()
        runs = await accepted(device)
        await device.engine.entered.wait()
        for job in (waiting, runs):
            assert (await request(device, "DELETE", f"/v1/jobs/{job}")).json["status"] == "cancelled"
            assert (await request(device, "DELETE", f"/v1/jobs/{job}")).code == "job_ended"
        await until(lambda: device.engine.running == 0, 60.0)


async def test_jobs_survive_a_restart(tmp_path: Path) -> None:
    """One waits for the cloud, one is running: it is given back and runs again."""
    cloud = away()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT) as device:
        waiting = await accepted(device, "waiting", tags="cloud")
        device.engine.gate = asyncio.Event()
        runs = await accepted(device, "runs", key="k")
        await device.engine.entered.wait()
    await cloud.come_back()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        assert (await submit(device, "runs", key="k")).json["id"] == runs
        assert text_of(await ended(device, runs)) == "edge says so"
        assert text_of(await ended(device, waiting)) == "cloud says so"
        listed = (await request(device, "GET", "/v1/jobs?limit=1")).json
        assert (listed["has_more"], [row["id"] for row in listed["data"]]) == (True, [runs])


async def test_an_end_in_the_cloud_is_the_end_here_with_its_reason(tmp_path: Path) -> None:
    cloud = JobCloud()
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        for there, here in (("failed", "failed"), ("dead", "dead"), ("expired", "expired"), ("cancelled", "failed")):
            cloud.ends = there
            found = await ended(device, await accepted(device, tags="cloud"))
            assert (found["status"], found["error"]["code"]) == (here, "cloud_failed")


async def test_a_job_that_fails_again_and_again_is_a_dead_letter(tmp_path: Path) -> None:
    async with running(tmp_path, cloud=JobCloud(), jobs=OutboxConfig(max_attempts=1)) as device:
        device.engine.fault = "corrupt"
        found = await ended(device, await accepted(device, tags="edge"))
        assert (found["status"], found["attempts"], found["error"]["code"]) == ("dead", 1, "backend_error")


async def test_bad_submissions_are_refused_with_their_reason(device: Device) -> None:
    for fields, code in REFUSED:
        answer = await submit(device, **fields)
        assert (answer.status in (400, 404), answer.code) == (True, code), fields
        assert answer.json["error"]["param"] in fields, answer.message
    assert "Use interactive, standard or bulk." in (await submit(device, priority="high")).message
    assert (await request(device, "POST", "/v1/jobs", [1])).code == "invalid_value"
    assert (await submit(device, key="with spaces")).code == "invalid_value"
    assert (await submit(device, headers={"x-causeway-priority": "urgent"})).code == "invalid_value"
    for limit in ("0", "x", "-1", "9" * 5000, "%D9%A1"):
        assert (await request(device, "GET", f"/v1/jobs?limit={limit}")).code == "invalid_value"
    assert (await request(device, "GET", "/v1/jobs")).json["data"] == []


async def test_a_tag_that_is_no_text_is_accepted_as_in_a_request(device: Device) -> None:
    body = b'{"model": "auto", "messages": [{"role": "user", "content": "hello"}]}'
    head = (
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nx-causeway-tags: edge,\xff\r\n"
    )
    async with connected(device.app.port) as raw:
        await raw.send(b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body))
        status, answer = await raw.answer()
    assert status == 202, answer
    assert (await ended(device, json.loads(answer)["id"]))["status"] == "succeeded"
    assert (await device.get("/readyz")).json["problems"] == []


async def test_without_a_job_nothing_is_opened(device: Device) -> None:
    assert (await device.ask()).status == 200
    assert (await request(device, "GET", "/v1/jobs/job_1")).code == "not_found"
    assert (await request(device, "PUT", "/v1/jobs")).headers["Allow"] == "GET, HEAD, POST"
    assert device.parts.jobs.stats is None
    assert not await asyncio.to_thread((Path(device.app.config.state_dir) / "jobs-3.sqlite").exists)


async def test_a_corrupt_outbox_is_set_aside_and_said_and_nothing_else_is_lost(tmp_path: Path) -> None:
    async with running(tmp_path, cloud=JobCloud(), jobs=PROMPT) as device:
        await ended(device, await accepted(device))
        decision = (await device.ask()).headers["x-causeway-decision"]
    path = tmp_path / "state" / "jobs-3.sqlite"
    path.write_bytes(b"nonsense" * 1000)
    async with running(tmp_path, cloud=JobCloud(), jobs=PROMPT) as device:
        assert any("was corrupt" in problem for problem in (await device.get("/readyz")).json["problems"])
        assert (await device.get(f"/v1/decisions/{decision}")).status == 200
        assert (await ended(device, await accepted(device)))["status"] == "succeeded"
    assert path.with_name("jobs-3.sqlite.bad").read_bytes().startswith(b"nonsense")


async def test_head_changes_no_job_and_waits_for_no_event(tmp_path: Path) -> None:
    async with running(tmp_path, cloud=JobCloud(), jobs=PROMPT) as device:
        job = (await submit(device, not_before_ms=3_600_000)).json["id"]
        for path, kind in ((f"/v1/jobs/{job}", "application/json"), (f"/v1/jobs/{job}/events", "text/event-stream")):
            async with device.session.head(path) as head:
                assert (head.status, head.content_type, await head.read()) == (200, kind, b"")
        assert (await device.get(f"/v1/jobs/{job}/")).json["status"] == "queued"


async def test_events_bring_the_answer_while_it_is_made_and_resume(tmp_path: Path) -> None:
    """Each character once, whether the client reconnects during the run, after it, or after another run."""
    async with running(tmp_path, cloud=JobCloud(), jobs=PROMPT) as device:
        device.engine.gate = asyncio.Event()
        job = await accepted(device, tags="edge")
        async with device.session.get(f"/v1/jobs/{job}/events") as response:
            assert await read_event(response) in (("1-0", "running"), ("0-0", "queued"))
            device.engine.gate.set()
            events = [event async for event in all_events(response)]
        assert (events[-1].id, events[-1].type) == (b"1-end", b"succeeded")
        assert "".join(delta_of(event) for event in events) == "edge says so"
        for last, rest in (("1-5", "says so"), ("1-0", "edge says so"), ("1-12", "")):
            async with device.session.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": last}) as response:
                events = [event async for event in all_events(response)]
            assert ("".join(delta_of(event) for event in events), events[-1].type) == (rest, b"succeeded")
        async with device.session.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": "1-end"}) as response:
            assert await response.read() == b""
        assert (await request(device, "GET", f"/v1/jobs/{job}/events", headers={"Last-Event-ID": "x"})).status == 400
        assert (await request(device, "GET", "/v1/jobs/job_0/events")).status == 404


async def test_events_of_a_run_that_fails_say_so_and_the_next_run_begins_again(tmp_path: Path) -> None:
    patient = OutboxConfig(max_attempts=1000)
    async with running(tmp_path, cloud=JobCloud(), jobs=patient) as device:
        device.engine.fault = "die"
        job = await accepted(device, tags="edge")
        seen: list[tuple[str, str]] = []
        async with device.session.get(f"/v1/jobs/{job}/events") as response:
            async for event in all_events(response):
                seen.append((event.type.decode(), delta_of(event)))
                if event.type == b"waiting":
                    device.engine.fault = "none"
        waited = max(at for at, (name, _) in enumerate(seen) if name == "waiting")
        assert "".join(text for _, text in seen[waited:]) == "edge says so"
        assert seen[-1] == ("succeeded", "")


async def test_a_dead_letter_is_retried_and_an_ended_job_purged(tmp_path: Path) -> None:
    """In the cloud a retry is another job: the first one's key finds its end."""
    cloud = JobCloud()
    cloud.ends = "dead"
    async with running(tmp_path, cloud=cloud, jobs=PROMPT, probe_interval_s=0.02) as device:
        job = await accepted(device, "again", tags="cloud")
        assert (await ended(device, job))["status"] == "dead"
        cloud.ends = "succeeded"
        assert (await request(device, "POST", f"/v1/jobs/{job}/retry")).json["status"] == "queued"
        assert text_of(await ended(device, job)) == "cloud says so"
        assert cloud.effects == {"again": 2}
        assert (await request(device, "POST", f"/v1/jobs/{job}/retry")).code == "job_not_dead"
        assert (await request(device, "POST", f"/v1/jobs/{job}/purge")).status == 200
        assert (await request(device, "GET", f"/v1/jobs/{job}")).status == 404
        stats = device.parts.jobs.stats
        assert stats is not None
        assert (stats.unfinished, stats.bytes) == (0, 0)
        waiting = await accepted(device, not_before_ms=60_000)
        assert (await request(device, "POST", f"/v1/jobs/{waiting}/purge")).code == "job_not_ended"
