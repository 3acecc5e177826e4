"""Uploaded files as parts: the official client uploads a file and names it, and the request is the one with the bytes.

The load: files, images and audio clips, named in chats, responses and jobs, several times and by several clients.
The faults: the file is of another key, was deleted or expired, is no image, or is too large with the others.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import openai
import pytest

from causeway_sdk import AsyncCauseway, CausewayAPIError
from causeway_server.edge_node.config.schema import DeviceFilesConfig, ServerConfig
from tests.edge_node.parts.test_fusion import COMMAND, IMAGE, INVOICE, SPEECH, ask, audio, image, prompt, text, texts
from tests.models.parts.test_decoding import needs_pillow
from tests.models.parts.test_files import NOTE, file
from tests.router.decision.test_parts_constraint import KEPT

from ..scripted import ScriptedEngine
from .support import client_of, contents, filing, folder_of, post, server_of_keys, stands_still

pytestmark = needs_pillow


def named(file_id: str, **more: object) -> dict[str, object]:
    return {"type": "file", "file": {"file_id": file_id, **more}}


def seen(file_id: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": file_id}}


def heard(file_id: str) -> dict[str, object]:
    return {"type": "input_audio", "input_audio": {"data": file_id, "format": "wav"}}


async def test_head_deletes_no_file(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, client):
        note = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        for path in ("/v1/files/", f"/v1/files/{note.id}", f"/v1/files/{note.id}/content"):
            whole = await device.get(path)
            async with device.session.head(path) as head:
                assert (head.status, await head.read()) == (whole.status, b"")
        assert await client.files.retrieve(note.id) == note


@pytest.mark.slow
async def test_the_official_client_uploads_lists_names_and_deletes(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, client):
        note = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        assert (note.object, note.filename, note.bytes, note.purpose) == (
            *("file", "note.txt", len(NOTE.encode()), "user_data"),
        )
        assert (note.expires_at or 0) - note.created_at == 7 * 86400
        other = await client.files.create(
            file=("a.png", IMAGE), purpose="vision", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert (other.expires_at or 0) - other.created_at == 3600
        assert {one.id async for one in client.files.list()} == {note.id, other.id}
        assert [one.id async for one in client.files.list(purpose="vision")] == [other.id]
        assert [one.id async for one in client.files.list(limit=1)] == [other.id, note.id]
        assert await client.files.retrieve(note.id) == note
        answer = await client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": [{"type": "file", "file": {"file_id": note.id}}]}]
        )
        assert answer.choices[0].message.content
        assert texts(prompt(device.engine)) == [f"[A file named note.txt; text in it:\n{NOTE}\n]"]
        with pytest.raises(openai.BadRequestError, match="cannot be downloaded"):
            await client.files.content(note.id)
        assert (await client.files.delete(note.id)).deleted
        assert [path.name for path in contents(folder_of(device))] == [other.id]
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(note.id)
        device.assert_nothing_leaks()


@pytest.mark.slow
async def test_a_named_file_is_the_same_request_as_its_bytes(tmp_path: Path) -> None:
    """Text for the model, hash in the record, encoder's memory and the answer's cache."""
    async with filing(tmp_path) as (device, client):
        cases: list[tuple[str, bytes, Any, dict[str, object]]] = [
            ("note.txt", NOTE.encode(), named, file(filename="note.txt")),
            ("a.png", IMAGE, named, file(IMAGE, "image/png", filename="a.png")),
            ("photo", IMAGE, seen, image()),  # the bytes say that it is a PNG
            ("a.wav", SPEECH, heard, audio()),
        ]
        for name, data, part, inline in cases:
            uploaded = await client.files.create(file=(name, data), purpose="user_data")
            ours = await ask(device, text("What is it?"), part(uploaded.id))
            mine = prompt(device.engine)
            theirs = await ask(device, text("What is it?"), inline)
            assert (ours.status, theirs.status) == (200, 200), ours.body
            assert prompt(device.engine) == mine
            records = [(await device.record(one)).parts[0] for one in (ours, theirs)]
            assert [one.sha256 for one in records] == [records[0].sha256] * 2
            assert records[0].part == records[1].part
            assert records[1].cached is (part is not named or data is IMAGE)  # text is decoded each time
            first = await ask(device, text("And now?"), part(uploaded.id), temperature=0)
            again = await ask(device, text("And now?"), inline, temperature=0)
            assert [one.headers["x-causeway-cache"] for one in (first, again)] == ["miss", "hit"]


@pytest.mark.slow
async def test_responses_name_files_and_images(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, client):
        note = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        image = await client.files.create(file=("a.png", IMAGE), purpose="vision")
        answer = await client.responses.create(
            model="auto",
            input=[
                {
                    "role": "user",
                    "type": "message",
                    "content": [
                        {"type": "input_text", "text": "When is it due?"},
                        {"type": "input_file", "file_id": note.id},
                        {"type": "input_image", "file_id": image.id, "detail": "auto"},
                    ],
                }
            ],
        )
        assert answer.output_text
        question, written, shown = texts(prompt(device.engine))
        assert (question, written) == ("When is it due?", f"[A file named note.txt; text in it:\n{NOTE}\n]")
        assert INVOICE in shown
        empty = {"role": "user", "type": "message", "content": [{"type": "input_image"}]}
        assert "image_url" in (await post(device, "/v1/responses", {"model": "auto", "input": [empty]})).message


@pytest.mark.slow
async def test_messages_name_documents_and_images(tmp_path: Path) -> None:
    """In Anthropic's blocks; an image's block that names a text is refused by its path."""
    async with filing(tmp_path) as (device, client):
        note = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        image = await client.files.create(file=("a.png", IMAGE), purpose="vision")
        blocks: list[dict[str, object]] = [
            {"type": "text", "text": "When is it due?"},
            {"type": "document", "source": {"type": "file", "file_id": note.id}},
            {"type": "image", "source": {"type": "file", "file_id": image.id}},
        ]
        body = {"model": "auto", "max_tokens": 20, "messages": [{"role": "user", "content": blocks}]}
        assert (await post(device, "/v1/messages", body)).status == 200
        question, written, shown = texts(prompt(device.engine))
        assert (question, written) == ("When is it due?", f"[A file named note.txt; text in it:\n{NOTE}\n]")
        assert INVOICE in shown
        blocks[2]["source"] = {"type": "file", "file_id": note.id}
        refused = await post(device, "/v1/messages", body)
        assert (refused.status, b"messages[0].content[2].source.file_id" in refused.body) == (400, True)


@pytest.mark.slow
async def test_a_file_of_another_key_does_not_exist(tmp_path: Path) -> None:
    async with filing(tmp_path, server=server_of_keys()) as (device, kiosk):
        till = client_of(device, "till")
        uploaded = await kiosk.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        assert [one async for one in till.files.list()] == []
        for call in (till.files.retrieve, till.files.delete, till.files.content):
            with pytest.raises(openai.NotFoundError):
                await call(uploaded.id)
        body = {"model": "auto", "messages": [{"role": "user", "content": [named(uploaded.id)]}]}
        for path, sent in (("/v1/chat/completions", body), ("/v1/route", body)):
            refused = await post(device, path, sent, {"Authorization": "Bearer till"})
            assert (refused.status, refused.json["error"]["param"]) == (404, "messages[0].content[0].file.file_id")
            assert (await post(device, path, sent, {"Authorization": "Bearer kiosk"})).status == 200
        assert (await post(device, "/v1/files", {}, {})).status == 401
        await till.close()


async def test_the_cloud_gets_the_facts_of_a_named_file_that_must_stay(tmp_path: Path) -> None:
    async with filing(tmp_path, policy=KEPT) as (device, client):
        uploaded = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        answer = await ask(device, text("hello"), named(uploaded.id), tags="cloud")
        assert answer.headers["x-causeway-target"] == "large"
        sent = str(device.cloud.bodies[-1])
        assert NOTE.splitlines()[1] in sent
        assert uploaded.id not in sent
        assert base64.b64encode(NOTE.encode()).decode() not in sent


@pytest.mark.slow
async def test_what_cannot_be_named_is_refused_at_its_part(tmp_path: Path) -> None:
    server = ServerConfig(port=0, drain_s=1.0, max_body_bytes=40_000)
    async with filing(tmp_path, server=server) as (device, client):
        note = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        large = await client.files.create(file=("large.txt", b"x" * 20_000), purpose="user_data")
        cases: list[tuple[list[dict[str, object]], int, str, str]] = [
            ([named("file-gone")], 404, "[0].file.file_id", "not found"),
            ([named("file-../../../etc/passwd")], 404, "[0].file.file_id", "not found"),
            ([text("a"), seen(note.id)], 400, "[1].image_url.url", "not an image"),
            ([named(note.id, file_data="data:text/plain;base64,YQ==")], 400, "[0].file.file_id", "only one of them"),
            ([named(large.id), named(large.id)], 413, "[1].file.file_id", "40000"),
            ([named("assistant-1")], 400, "[0].file.file_id", "does not read uploaded files"),
        ]
        for parts, status, place, words in cases:
            answer = await ask(device, *parts)
            assert (answer.status, answer.json["error"]["param"]) == (status, f"messages[0].content{place}"), words
            assert words in answer.message
            assert (await ask(device, named(note.id))).status == 200
        assert (await ask(device, text('{"file-1": 1}'))).status == 200
        device.assert_nothing_leaks()


@pytest.mark.slow
async def test_a_file_that_goes_while_its_request_is_answered_is_answered_with(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.gate = asyncio.Event()
    async with filing(tmp_path, engine=engine) as (device, client):
        uploaded = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        answering = asyncio.ensure_future(ask(device, named(uploaded.id)))
        async with asyncio.timeout(60.0):
            await engine.entered.wait()
        await client.files.delete(uploaded.id)
        engine.gate.set()
        assert (await answering).status == 200
        assert NOTE in texts(prompt(engine))[0]
        assert (await ask(device, named(uploaded.id))).status == 404


@pytest.mark.slow
async def test_a_device_keeps_no_files_unless_its_owner_says_so(tmp_path: Path) -> None:
    """What it kept before can still be named, and deleted."""
    async with filing(tmp_path, files=DeviceFilesConfig()) as (device, client):
        with pytest.raises(openai.BadRequestError, match=r"files\.accept"):
            await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
        assert not folder_of(device).exists()
        assert "does not read uploaded files" in (await ask(device, named("file-1"))).message
    async with filing(tmp_path) as (_, client):
        uploaded = await client.files.create(file=("note.txt", NOTE.encode()), purpose="user_data")
    async with filing(tmp_path, files=DeviceFilesConfig()) as (device, client):
        assert (await ask(device, named(uploaded.id))).status == 200
        await client.files.delete(uploaded.id)
        assert contents(folder_of(device)) == []


async def test_files_expire_by_the_devices_own_time(tmp_path: Path) -> None:
    """A wall clock that jumps deletes none and keeps none, also over a restart."""
    now, clock = stands_still()
    async with filing(tmp_path, clock=clock) as (device, client):
        uploaded = await client.files.create(
            file=("note.txt", NOTE.encode()),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        now[1] += 10 * 86400
        assert (await client.files.retrieve(uploaded.id)).id == uploaded.id
    now[0] += 1800
    now[1] -= 40 * 86400
    async with filing(tmp_path, clock=clock) as (device, client):
        assert (await client.files.retrieve(uploaded.id)).expires_at == int(now[1]) + 1800
        now[0] += 1801
        assert "expired" in (await ask(device, named(uploaded.id))).message
        assert contents(folder_of(device)) != []
        await device.parts.files.sweep()
        assert contents(folder_of(device)) == []
        assert device.parts.files.stats.expired == 1


@pytest.mark.slow
async def test_an_audio_clip_in_a_file_is_a_spoken_command(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, client):
        uploaded = await client.files.create(file=("a.wav", SPEECH), purpose="user_data")
        assert (await ask(device, heard(uploaded.id))).status == 200
        assert prompt(device.engine).content == COMMAND


@pytest.mark.slow
async def test_the_sdk_uploads_a_file_and_deletes_it(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, _):
        async with AsyncCauseway(f"http://127.0.0.1:{device.app.port}") as client:
            file_id = await client.upload(NOTE.encode(), 'a "note".txt', expires_after_s=60)
            assert (await client.chat([{"role": "user", "content": [named(file_id)]}])).text
            assert texts(prompt(device.engine)) == [f"[A file named a %22note%22.txt; text in it:\n{NOTE}\n]"]
            await client.delete_file(file_id)
            with pytest.raises(CausewayAPIError) as gone:
                await client.delete_file(file_id)
            assert gone.value.status == 404
        assert contents(folder_of(device)) == []
