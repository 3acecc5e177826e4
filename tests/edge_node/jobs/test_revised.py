"""Answers that are revised: a job is answered without a part that is still being read, and again when it has been.

The load: images and audio clips whose encoder takes longer than its branch may, answered by the device or by the cloud.
The faults: the daemon ends between answer and revision, the part is never read, the job is cancelled, the policy is
tightened meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from causeway_server.router.bundle.settings import PartsConfig
from causeway_server.router.jobs.job import MAX_LATE, RevisionOutcome
from causeway_server.router.openai.upstream.decode import Event
from causeway_server.router.types import Modality
from tests.edge_node.parts.test_fusion import COMMAND, INVOICE, audio, encoder, image, prompt, text, texts
from tests.models.parts.test_decoding import needs_pillow

from ..device import POLICY, Device, running
from ..scripted import CLOUD_WORDS, EDGE_WORDS
from .cloud import JobCloud
from .support import PROMPT, all_events, delta_of, ended, request, submit, text_of, view

pytestmark = pytest.mark.slow
JOBS = msgspec.structs.replace(PROMPT, accept_parts=True)
HASTY = PartsConfig(audio_timeout_s=0.2, image_timeout_s=0.2)
WITHIN_MS = 110_000
EDGE, CLOUD = "".join(EDGE_WORDS), "".join(CLOUD_WORDS)
UNREAD, READ = "[An audio clip that could not be read.]", COMMAND


class Late:
    """Encoders that hang until they may go on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.encoders = {
            kind: msgspec.structs.replace(spec, options=spec.options | {"until": str(folder / kind)})
            for kind, spec in (("audio", encoder(COMMAND, "hang")), ("image", encoder(INVOICE, "hang")))
        }

    def go_on(self, kind: Modality = "audio") -> None:
        (self._folder / kind).touch()


@asynccontextmanager
async def late_device(folder: Path, late: Late, **settings: Any) -> AsyncIterator[Device]:
    encoders: dict[Modality, Any] = {"audio": late.encoders["audio"], "image": late.encoders["image"]}
    async with running(folder, **({"jobs": JOBS, "parts": HASTY} | settings), encoders=encoders) as device:
        yield device


@pytest.fixture
def late(tmp_path: Path) -> Late:
    return Late(tmp_path)


async def answered(device: Device, *parts: dict[str, object], tags: str = "", within_ms: int = WITHIN_MS) -> str:
    """Submit a job, and wait for its first answer; its id."""
    content = [text("hello"), *(parts or (audio(),))]
    body = {"model": "auto", "messages": [{"role": "user", "content": content}], "revise_within_ms": within_ms}
    answer = await request(device, "POST", "/v1/jobs", body, {"x-causeway-tags": tags} if tags else {})
    assert answer.status == 202, answer.body
    found = await ended(device, answer.json["id"])
    assert (found["status"], found["revision"]) == ("succeeded", 0)
    return str(answer.json["id"])


async def events(device: Device, job: str, last: str = "") -> list[Event]:
    """What follows an event of a job, until its stream ends."""
    headers = {"Last-Event-ID": last} if last else {}
    async with device.session.get(f"/v1/jobs/{job}/events", headers=headers) as response:
        return [event async for event in all_events(response)]


def named(found: list[Event]) -> list[tuple[str, str]]:
    return [(event.id.decode(), event.type.decode()) for event in found]


def question(device: Device) -> list[str]:
    return texts(prompt(device.engine))


def bytes_of(device: Device) -> int:
    """What the device keeps of jobs."""
    assert device.parts.jobs.stats is not None
    return device.parts.jobs.stats.bytes


def revisions(device: Device) -> dict[RevisionOutcome, int]:
    """What became of revisions."""
    assert device.parts.jobs.stats is not None
    return device.parts.jobs.stats.revisions


async def test_an_answer_is_revised_once_its_late_part_was_read(tmp_path: Path, late: Late) -> None:
    async with late_device(tmp_path, late) as device:
        job = await answered(device)
        found = await view(device, job)
        assert (found["late_parts"], found["late_error"], text_of(found)) == (["audio"], None, EDGE)
        assert question(device) == ["hello", UNREAD]
        async with device.session.get(f"/v1/jobs/{job}/events") as response:
            following = all_events(response)
            first = [await anext(following) for _ in range(2)]
            assert named(first) == [(f"1-{len(EDGE)}", "delta"), ("1-end", "succeeded")]
            late.go_on()
            rest = [event async for event in following]
        assert named(rest) == [("1-r1", "job.revised")]
        assert json.loads(rest[0].data) == {"event": "job.revised", "revision": 1, "text": EDGE}
        assert READ in question(device)[1]
        found = await view(device, job)
        assert (found["status"], found["revision"], found["late_parts"]) == ("succeeded", 1, [])
        record = (await device.get(f"/v1/decisions/{found['decision']}")).json
        assert [part["status"] for part in record["parts"]] == ["ok"]
        assert bytes_of(device) == len(json.dumps(found["result"], separators=(",", ":"), ensure_ascii=False))
        assert named(await events(device, job, "1-3")) == [("1-end", "succeeded"), ("1-r1", "job.revised")]
        assert named(await events(device, job, "1-end")) == [("1-r1", "job.revised")]
        assert await events(device, job, "1-r1") == []
        assert len(device.engine.calls) == 2
        metrics = (await device.get("/metrics")).body.decode()
        assert 'causeway_edge_jobs_revisions_total{outcome="made"} 1.0' in metrics
        device.assert_nothing_leaks()


async def test_without_a_wish_a_late_part_is_left_out_for_good(tmp_path: Path, late: Late) -> None:
    async with late_device(tmp_path, late) as device:
        job = await answered(device, within_ms=0)
        found = await view(device, job)
        assert (found["late_parts"], found["late_error"]) == ([], None)
        assert named(await events(device, job, "1-end")) == []
        refused = await submit(device, revise_within_ms=-1)
        assert (refused.status, refused.json["error"]["param"]) == (400, "revise_within_ms")


@pytest.mark.parametrize("end", ["cancelled", "never read", "dead"])
async def test_a_revision_that_will_not_come_is_told(tmp_path: Path, late: Late, end: str) -> None:
    """Its request is deleted then, and the answer stays."""
    jobs = msgspec.structs.replace(JOBS, max_revise_s=0.5 if end == "never read" else 60.0)
    async with late_device(tmp_path, late, jobs=jobs) as device:
        job = await answered(device)
        if end == "cancelled":
            answer = await request(device, "DELETE", f"/v1/jobs/{job}")
            assert (answer.status, answer.json["status"]) == (200, "succeeded")
        if end == "dead":
            assert device.parts.encoders is not None
            await device.parts.encoders.close()
        (event,) = await events(device, job, "1-end")
        assert (event.id, event.type) == (b"1-last", b"job.not_revised")
        told = json.loads(event.data)["error"]["code"]
        assert told == ("job_cancelled" if end == "cancelled" else "revision_dropped")
        found = await view(device, job)
        assert (found["late_error"]["code"], found["late_parts"], found["revision"]) == (told, [], 0)
        assert text_of(found) == EDGE
        assert bytes_of(device) == len(json.dumps(found["result"], separators=(",", ":"), ensure_ascii=False))
        assert await events(device, job, "1-last") == []
        late.go_on()
        again = await request(device, "DELETE", f"/v1/jobs/{job}")
        assert (again.status, again.code) == (409, "job_ended")
        assert len(device.engine.calls) == 1
        outcomes: dict[str, RevisionOutcome] = {"cancelled": "cancelled", "never read": "too_late", "dead": "failed"}
        assert revisions(device) == {outcomes[end]: 1}


async def test_a_daemon_that_ended_in_between_revises_after_its_restart_once(tmp_path: Path, late: Late) -> None:
    async with late_device(tmp_path, late) as device:
        job = await answered(device)
    late.go_on()
    async with late_device(tmp_path, late) as device:
        assert named(await events(device, job, "1-end")) == [("1-r1", "job.revised")]
        assert READ in question(device)[1]
    async with late_device(tmp_path, late) as device:
        assert (await view(device, job))["revision"] == 1
        assert device.engine.calls == []


async def test_a_revision_is_one_more_job_in_the_cloud_which_sees_the_words_and_never_the_audio(
    tmp_path: Path, late: Late
) -> None:
    cloud = JobCloud()
    async with late_device(tmp_path, late, cloud=cloud, probe_interval_s=0.02) as device:
        job = await answered(device, tags="cloud")
        late.go_on()
        assert named(await events(device, job, "1-end")) == [("1-r1", "job.revised")]
        assert text_of(await view(device, job)) == CLOUD
        assert list(cloud.keys) == [job, f"{job}.r1"]
        assert all("input_audio" not in str(asked) for asked in cloud.order)
        assert READ in str(cloud.order[1])


async def test_a_policy_that_was_tightened_meanwhile_keeps_the_revision_on_the_device(
    tmp_path: Path, late: Late
) -> None:
    cloud = JobCloud()
    async with late_device(tmp_path, late, cloud=cloud, probe_interval_s=0.02) as device:
        job = await answered(device, tags="cloud")
        bound = POLICY.replace('"private" in request.tags', '"cloud" in request.tags')
        (tmp_path / "policy.yaml").write_text(bound)
        await device.parts.policies.reload()
        late.go_on()
        (event,) = await events(device, job, "1-end")
        assert delta_of(event) == EDGE
        assert ((await view(device, job))["route"], cloud.submissions) == ("edge", 1)


@needs_pillow
async def test_each_late_branch_revises_an_answer_once(tmp_path: Path, late: Late) -> None:
    """The revision for the first part does not wait for the second."""
    async with late_device(tmp_path, late) as device:
        job = await answered(device, image(), audio())
        assert (await view(device, job))["late_parts"] == ["audio", "image"]
        async with device.session.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": "1-end"}) as response:
            following = all_events(response)
            late.go_on("image")
            assert named([await anext(following)]) == [("1-r1", "job.revised")]
            assert INVOICE in question(device)[1]
            assert question(device)[2] == UNREAD
            late.go_on("audio")
            assert named([event async for event in following]) == [("1-r2", "job.revised")]
        assert INVOICE in question(device)[1]
        assert READ in question(device)[2]
        assert len(device.engine.calls) == 3


async def test_no_more_answers_wait_for_parts_than_there_is_room_for(tmp_path: Path, late: Late) -> None:
    jobs = msgspec.structs.replace(JOBS, device_concurrency=MAX_LATE + 1)
    async with late_device(tmp_path, late, jobs=jobs) as device:
        waiting = await asyncio.gather(*[answered(device) for _ in range(MAX_LATE + 1)])
        found = {job: (await view(device, job))["late_error"] for job in waiting}
        (refused,) = [job for job, error in found.items() if error is not None]
        assert found[refused]["code"] == "revision_dropped"
        purged = next(job for job in waiting if job != refused)
        assert (await request(device, "POST", f"/v1/jobs/{purged}/purge")).status == 200
        async with asyncio.timeout(60.0):  # what would revise it leaves the room
            while (await view(device, another := await answered(device)))["late_error"] is not None:
                pass
        late.go_on()
        for job in {another, *waiting} - {refused, purged}:
            assert named(await events(device, job, "1-end")) == [("1-r1", "job.revised")]
        assert (revisions(device)["cancelled"], revisions(device)["made"]) == (1, MAX_LATE)
