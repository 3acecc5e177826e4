"""Uploaded files keep the tags and the restriction of their upload: each request that names one carries them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from causeway_server.edge_node.config.schema import OutboxConfig
from causeway_server.edge_node.storage.sealed import unpacked
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from tests.edge_node.device import Answer, Device
from tests.models.parts.test_files import NOTE

from .support import contents, filing, folder_of, form, post, post_form

HEAD = 4096
CLOUD = {"x-causeway-tags": "cloud"}
UPLOAD = form(('name="purpose"', b"user_data"), ('name="file"; filename="note.txt"', NOTE.encode()))
RESTRICTED = [{"x-causeway-tags": "Private"}, {"x-causeway-prefer": "only_on_device"}]


async def upload(device: Device, headers: dict[str, str]) -> str:
    answer = await post_form(device, UPLOAD, headers=headers)
    assert answer.status == 200
    return str(msgspec.json.decode(answer.body)["id"])


def body(file_id: str, **more: object) -> dict[str, object]:
    content = [{"type": "text", "text": "Summarise."}, {"type": "file", "file": {"file_id": file_id}}]
    return {"model": "auto", "messages": [{"role": "user", "content": content}], **more}


async def ask(device: Device, file_id: str, **more: object) -> Answer:
    """Ask about a file; the route of the request's own tag prefers the cloud."""
    return await post(device, "/v1/chat/completions", body(file_id, **more), CLOUD)


@pytest.mark.slow
@pytest.mark.parametrize("headers", RESTRICTED, ids=["tag", "preference"])
async def test_a_file_that_was_uploaded_as_private_never_leaves(tmp_path: Path, headers: dict[str, str]) -> None:
    async with filing(tmp_path) as (device, _):
        assert (await ask(device, await upload(device, {}))).headers["x-causeway-route"] == "cloud"
        private = await upload(device, headers)
        answer = await ask(device, private)
        assert (answer.status, answer.headers["x-causeway-route"]) == (200, "edge")
        assert (await ask(device, private, causeway={"tags": ["a"]})).headers["x-causeway-route"] == "edge"
        assert len(device.cloud.bodies) == 1


async def test_a_private_file_fails_closed(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, _):
        private = await upload(device, RESTRICTED[0])
        device.engine.fault = "refuse"
        assert (await ask(device, private)).status == 503
        assert device.cloud.bodies == []


async def test_a_job_about_a_private_file_stays(tmp_path: Path) -> None:
    async with filing(tmp_path, jobs=OutboxConfig(accept_parts=True)) as (device, _):
        answer = await post(device, "/v1/jobs", body(await upload(device, RESTRICTED[0])), CLOUD)
        assert answer.status == 202
        job, _ = await (await device.parts.jobs.open()).store.get(msgspec.json.decode(answer.body)["id"], None)
        assert not job.may_leave


async def test_a_preference_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, _):
        private = await upload(device, RESTRICTED[1])
        answer = await ask(device, private, causeway={"prefer": "only_cloud"})
        assert (answer.status, device.cloud.bodies) == (400, [])
        assert "causeway.prefer" in answer.message


async def test_a_malformed_hint_of_a_body_is_still_refused_by_its_path(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, _):
        private = await upload(device, RESTRICTED[0])
        for wrong in ("private", {"tags": "private"}, {"prefr": "only_cloud"}):
            assert (await ask(device, private, causeway=wrong)).status == 400


@pytest.mark.slow
async def test_a_file_keeps_its_tags_over_a_restart_and_one_of_an_earlier_version_has_none(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, _):
        private, plain = await upload(device, RESTRICTED[0]), await upload(device, {})
        for path in contents(folder_of(device)):
            if path.name == plain:  # as it was written before files had tags, and were encrypted
                sealed = unpacked(path.read_bytes()[:HEAD])
                header = msgspec.json.decode(StateKeys(path.parents[1]).open(sealed, "file", plain))
                del header["tags"], header["prefer"], header["stored_bytes"]
                path.write_bytes(msgspec.json.encode(header).ljust(HEAD, b"\0") + NOTE.encode())
    async with filing(tmp_path) as (device, _):
        assert (await ask(device, private)).headers["x-causeway-route"] == "edge"
        assert (await ask(device, plain)).headers["x-causeway-route"] == "cloud"


@pytest.mark.parametrize("tags", ["ü" * 64 + "," + ",".join("ü" * 63 + chr(97 + n) for n in range(20)), "a b"])
async def test_tags_that_cannot_be_kept_are_refused_with_the_file(tmp_path: Path, tags: str) -> None:
    async with filing(tmp_path) as (device, _):
        answer = await post_form(device, UPLOAD, headers={"x-causeway-tags": tags})
        assert (answer.status, contents(folder_of(device))) == (400, [])
        assert "tags" in answer.message
