"""Hostile uploads: each gets a clear error in bounded memory, nothing of it stays, and the next good one is taken."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai
import pytest

from causeway_server.edge_node.config.schema import ServerConfig
from tests.edge_node.cli.test_serve import ready_line, serve
from tests.edge_node.parts.test_fusion import ask, prompt, texts
from tests.models.parts.test_files import NOTE
from tests.waiting import until

from .support import contents, filing, folder_of, form, post_form
from .test_parts import named

MIB = 1024 * 1024
PURPOSE = ("name=purpose", b"user_data")
FILE = ("name=file; filename=a.txt", b"hello")
GOOD = form(PURPOSE, FILE)
HOSTILE: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "not valid multipart"),
    ("no form", b"hello", "not valid multipart"),
    ("no end", GOOD[:-6], ""),
    ("another boundary", GOOD.replace(b"--b", b"--c"), "not valid multipart"),
    ("no purpose", form(FILE), "purpose"),
    ("purpose of a batch", form(("name=purpose", b"batch"), FILE), "user_data"),
    ("no file", form(PURPOSE), "`file` is missing"),
    ("an empty file", form(PURPOSE, ("name=file; filename=a.txt", b"")), "empty"),
    ("two files", form(PURPOSE, FILE, FILE), "twice"),
    ("a long field", form(("name=purpose", b"x" * 5000), FILE), "1024"),
    ("many fields", form(*[PURPOSE] * 20, FILE), "too many fields"),
    ("a wrong anchor", form(PURPOSE, ('name="expires_after[anchor]"', b"now"), FILE), "created_at"),
    (
        "forever",
        form(
            PURPOSE, ('name="expires_after[anchor]"', b"created_at"), ('name="expires_after[seconds]"', b"9" * 30), FILE
        ),
        "604800",
    ),
    (
        "a form in the form",
        b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c\r\n\r\nx\r\n--c--\r\n--b--\r\n",
        "form in it",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("body", "words"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
async def test_a_wrong_form_is_refused_and_leaves_nothing(tmp_path: Path, body: bytes, words: str) -> None:
    async with filing(tmp_path) as (device, client):
        refused = await post_form(device, body)
        assert refused.status in (400, 413), refused.body
        assert words in refused.message
        assert contents(folder_of(device)) == []
        assert (await post_form(device, b"{}", headers={"Content-Type": "application/json"})).status == 415
        assert (await post_form(device, GOOD, headers={"Content-Encoding": "gzip"})).status == 415
        assert (await client.files.create(file=("a.txt", b"hello"), purpose="user_data")).bytes == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("../../../etc/passwd", "passwd"),
        ("..\\\\..\\\\boot.ini", "boot.ini"),
        ("/etc/shadow", "shadow"),
        ("..", "file"),
        ("x" * 3000, "x" * 255),
        ("\u202etxt.exe", "txt.exe"),
    ],
)
async def test_a_name_is_shown_and_never_a_path(tmp_path: Path, sent: str, kept: str) -> None:
    async with filing(tmp_path) as (device, _):
        answer = await post_form(device, form(PURPOSE, (f'name="file"; filename="{sent}"', b"hello")))
        assert (answer.status, answer.json["filename"]) == (200, kept)
        assert [path.name for path in contents(folder_of(device))] == [answer.json["id"]]
        assert (await ask(device, named(answer.json["id"]))).status == 200
        assert texts(prompt(device.engine))[0].startswith(f"[A file named {kept[:100]}; text in it:")


async def test_a_file_without_a_name_is_taken(tmp_path: Path) -> None:
    async with filing(tmp_path) as (device, _):
        answer = await post_form(device, form(PURPOSE, ("name=file", b"hello")))
        assert (answer.status, answer.json["filename"]) == (200, "file")


@pytest.mark.slow
async def test_a_file_is_as_large_as_a_request_can_carry_and_no_larger(tmp_path: Path) -> None:
    server = ServerConfig(port=0, drain_s=1.0, max_body_bytes=100_000)
    async with filing(tmp_path, server=server) as (device, client):
        most = device.parts.files.max_file_bytes
        largest = await client.files.create(file=("a.txt", b"x" * most), purpose="user_data")
        assert (await ask(device, named(largest.id))).status == 200
        with pytest.raises(openai.APIStatusError, match=r"server\.max_body_bytes") as refused:
            await client.files.create(file=("a.txt", b"x" * (most + 1)), purpose="user_data")
        assert refused.value.status_code == 413

        async def endless() -> AsyncIterator[bytes]:
            yield form(PURPOSE, ("name=file; filename=a", b""))[:-9]
            while True:
                yield b"x" * 65536

        writer = aiohttp.payload.AsyncIterablePayload(endless(), content_type="multipart/form-data; boundary=b")
        try:
            async with device.session.post("/v1/files", data=writer) as response:
                assert response.status == 413
        except aiohttp.ClientConnectionError:
            pass  # it was cut while it still sent
        await until(lambda: len(contents(folder_of(device))) == 1)


async def test_a_client_that_leaves_or_stops_in_its_upload_leaves_nothing(tmp_path: Path) -> None:
    server = ServerConfig(port=0, drain_s=1.0, read_timeout_s=0.5)
    async with filing(tmp_path, server=server) as (device, client):
        _, writer = await asyncio.open_connection("127.0.0.1", device.app.port)
        head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        begun = f"{head}Content-Length: 3000000\r\n\r\n".encode() + form(PURPOSE, FILE)[:-9] + b"x" * 2_000_000
        writer.write(begun)
        await until(lambda: contents(folder_of(device)))
        writer.close()
        await until(lambda: not contents(folder_of(device)))
        reader, writer = await asyncio.open_connection("127.0.0.1", device.app.port)
        writer.write(begun)
        async with asyncio.timeout(60.0):
            assert b" 408 " in await reader.readline()
        await until(lambda: not contents(folder_of(device)))
        writer.close()
        assert (await client.files.create(file=("a.txt", NOTE.encode()), purpose="user_data")).bytes


@pytest.mark.slow
async def test_ten_at_once_take_little_memory(tmp_path: Path) -> None:
    """60 MB in ten uploads: the daemon's peak grows by less than half of that."""
    with serve(tmp_path, "--set", "files.accept=true") as daemon:
        url, _ = ready_line(daemon)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            await client.files.create(file=("a.txt", b"x" * MIB), purpose="user_data")
            before = _peak_bytes(daemon.pid)
            uploads = [client.files.create(file=("a.txt", b"x" * (6_000_000)), purpose="user_data") for _ in range(10)]
            assert {one.bytes for one in await asyncio.gather(*uploads)} == {6_000_000}
            assert _peak_bytes(daemon.pid) - before < 30_000_000
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{os.fspath(str(pid))}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
