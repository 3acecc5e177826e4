"""The start of a process: collections of garbage, and the certificates of aiohttp's client."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from causeway_server.router.serving.logs import log_loop_errors, redacted
from causeway_server.router.serving.process import begin_imports, tune_garbage_collector
from tests.redis_deployments import Certificates


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)
    gc.enable()


def test_collections_begin_again_once_the_process_is_ready() -> None:
    begin_imports()
    assert not gc.isenabled()
    tune_garbage_collector()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


ASK = """
import asyncio, json, ssl, sys
import uvloop
from causeway_server.router.serving.process import begin_imports

find, read = ssl.SSLContext.set_default_verify_paths, []
ssl.SSLContext.set_default_verify_paths = lambda context: read.append(context) or find(context)
begin_imports()
import aiohttp

async def ask():
    seen = [len(read)]
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            try:
                async with session.get(sys.argv[1]) as answer:
                    seen.append(answer.status)
            except aiohttp.ClientConnectorCertificateError:
                seen.append("untrusted")
    return [*seen, len(read)]

runs = {"asyncio": asyncio.run, "uvloop": uvloop.run}
print(json.dumps(runs[sys.argv[2]](ask())))
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("trusted", [True, False])
async def test_certificates_are_read_once_and_checked_when_the_client_first_connects(
    loop: str, trusted: bool, tmp_path: Path
) -> None:
    certificates = Certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates.server, certificates.server_key)

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(headers={"Connection": "close"})

    server = await asyncio.get_running_loop().create_server(web.Server(answer), "127.0.0.1", 0, ssl=tls)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    environ = {**os.environ, "SSL_CERT_FILE": str(certificates.ca)} if trusted else {**os.environ}
    command = [sys.executable, "-c", ASK, url, loop]
    asked = await asyncio.to_thread(subprocess.run, command, env=environ, stdout=subprocess.PIPE, check=True)
    server.close()
    status = 200 if trusted else "untrusted"
    assert json.loads(asked.stdout) == [0, status, status, 1]


UNHANDLED = """
import asyncio, gc, sys, threading
from causeway_server.router.serving.logs import start_log
from causeway_server.router.serving.process import run_fast

def breaks(text):
    raise KeyError(text)

async def fails(text):
    raise ValueError(text)

async def main():
    asyncio.get_running_loop().call_soon(breaks, sys.argv[1])
    task = asyncio.ensure_future(fails(sys.argv[1]))
    await asyncio.sleep(0)
    del task
    gc.collect()
    thread = threading.Thread(target=breaks, args=(sys.argv[1],))
    thread.start()
    thread.join()
    raise RuntimeError(sys.argv[1])

start_log("info", "text")
run_fast(main())
"""


def test_errors_that_no_code_handles_are_logged_without_their_messages() -> None:
    """Of the loop, of a forgotten task, of a thread, and that which ends the process."""
    ended = subprocess.run(
        [sys.executable, "-c", UNHANDLED, "secret prompt"], capture_output=True, text=True, check=False
    )
    assert "secret prompt" not in ended.stderr
    assert [ended.stderr.count(name) for name in ("KeyError", "ValueError", "RuntimeError")] == [2, 1, 1]


WITHOUT_FILES = """
import asyncio, resource, socket
from causeway_server.router.serving.addresses import BACKLOG
from causeway_server.router.serving.logs import log_loop_errors, start_log

async def main():
    loop = asyncio.get_running_loop()
    log_loop_errors(loop)
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, backlog=BACKLOG)
    client = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, client.fileno() + 1))
    client.connect(server.sockets[0].getsockname())
    await asyncio.sleep(0)
    await asyncio.sleep(0)

start_log("info", "text")
asyncio.run(main())
"""


def test_a_process_without_free_files_says_so_once_a_second() -> None:
    """asyncio's loop reports it as often as there may be clients in the socket's queue."""
    ended = subprocess.run([sys.executable, "-c", WITHOUT_FILES], capture_output=True, text=True, check=False)
    assert ended.stderr.count(
        "The event loop reported a fault: socket.accept() out of system resource.\nOSError EMFILE <"
    ) in (1, 2)
    assert ended.returncode == 0


async def test_errors_of_the_system_are_held_back_only_for_want_of_files(caplog: pytest.LogCaptureFixture) -> None:
    """Each code for itself. All others are logged each time, and no line has arguments or messages."""
    loop = asyncio.get_running_loop()
    log_loop_errors(loop)
    loop.time = lambda: 1.5  # type: ignore[method-assign]
    try:
        for code in (errno.EMFILE, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EACCES):
            error = OSError(code, "secret")
            loop.call_exception_handler({"message": "Exception in f()(secret)", "exception": error})
    finally:
        del loop.time
    assert {record.getMessage() for record in caplog.records} == {"The event loop reported a fault: Exception in f()."}
    shown = [redacted(record.exc_info[1]) for record in caplog.records if record.exc_info and record.exc_info[1]]
    assert shown == ["OSError EMFILE", "OSError ENFILE", "PermissionError EACCES", "PermissionError EACCES"]


def test_only_codes_of_the_system_are_named() -> None:
    errors = OSError("secret"), ssl.SSLError(1, "secret"), socket.gaierror(-2, "secret")
    assert [redacted(error) for error in errors] == ["OSError", "SSLError", "gaierror"]
