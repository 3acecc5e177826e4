"""Jobs that name uploaded files: an accepted job has the bytes, and is answered whatever becomes of the file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from causeway_server.edge_node.jobs.api import SubmittedJob
from causeway_server.edge_node.jobs.record import ReplyTo
from causeway_server.router.errors import UnsupportedFeature
from causeway_server.router.types import RoutingHints
from tests.edge_node.jobs.cloud import JobCloud
from tests.edge_node.jobs.support import PROMPT, ended, readable
from tests.edge_node.parts.test_fusion import prompt, text, texts
from tests.models.parts.test_files import NOTE

from .support import filing, post
from .test_parts import named

JOBS = msgspec.structs.replace(PROMPT, accept_parts=True)


def job(file_id: str, question: str = "When is it due?") -> dict[str, object]:
    return {"model": "auto", "messages": [{"role": "user", "content": [text(question), named(file_id)]}]}


@pytest.mark.slow
async def test_a_job_is_answered_after_its_file_was_deleted_and_its_repeat_is_the_same_job(tmp_path: Path) -> None:
    key = {"Idempotency-Key": "once"}
    async with filing(tmp_path, jobs=JOBS, cloud=JobCloud()) as (device, client):
        uploaded = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        device.engine.state = "starting"
        body = job(uploaded.id) | {"not_before_ms": 300}
        accepted = await post(device, "/v1/jobs", body, key)
        assert accepted.status == 202, accepted.body
        await client.files.delete(uploaded.id)
        again = await post(device, "/v1/jobs", body, key)
        assert (again.status, again.json["id"]) == (202, accepted.json["id"])
        assert again.headers["Idempotent-Replayed"] == "true"
        changed = await post(device, "/v1/jobs", job(uploaded.id, "Who pays?"), key)
        assert changed.status == 409
        assert (await post(device, "/v1/jobs", job(uploaded.id))).status == 404
        device.engine.state = "ready"
        assert (await ended(device, accepted.json["id"]))["status"] == "succeeded"
        assert texts(prompt(device.engine))[1] == f"[A file named note.txt; text in it:\n{NOTE}\n]"
        late = await post(device, "/v1/jobs", body, key)
        assert (late.json["id"], late.json["status"]) == (accepted.json["id"], "succeeded")
    state = Path(device.app.config.state_dir)
    assert not readable(state / "files", [NOTE.encode()])


async def test_a_device_whose_jobs_take_no_parts_takes_no_named_ones(tmp_path: Path) -> None:
    async with filing(tmp_path, jobs=PROMPT, cloud=JobCloud()) as (device, client):
        uploaded = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        refused = await post(device, "/v1/jobs", job(uploaded.id))
        assert "jobs.accept_parts" in refused.message


@pytest.mark.slow
async def test_a_request_that_becomes_a_job_has_its_file(tmp_path: Path) -> None:
    async with filing(tmp_path, jobs=JOBS, cloud=JobCloud()) as (device, client):
        uploaded = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        headers = {"Prefer": "respond-async, wait=50"}
        answer = await post(device, "/v1/chat/completions", job(uploaded.id), headers)
        assert answer.status == 200, answer.body
        assert NOTE in texts(prompt(device.engine))[1]


async def test_messages_of_a_broker_are_told_to_send_the_bytes(tmp_path: Path) -> None:
    async with filing(tmp_path, jobs=JOBS, cloud=JobCloud()) as (device, client):
        uploaded = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        intake = (await device.parts.jobs.open()).intake
        hints, body = RoutingHints(client="127.0.0.1"), msgspec.json.encode(job(uploaded.id))
        reply = ReplyTo(b"answers")
        with pytest.raises(UnsupportedFeature, match="data: URL"):
            await intake.accept(SubmittedJob(body, hints, key="once", reply=reply))
