"""The start of a process: collections of garbage, and the certificates of aiohttp's client."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

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
