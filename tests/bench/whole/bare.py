"""`python -m tests.bench.whole.bare answer|upstream|forward …`: aiohttp's least on uvloop, to measure against.

    answer BODY_FILE         reads a POST and returns the file's bytes
    upstream [PEM_FILE]      an OpenAI-compatible server with one fixed answer; PEM_FILE: TLS, certificate and key
    forward UPSTREAM_URL     parses a chat's JSON, forwards it over a keep-alive pool, returns what comes back

A port may follow; otherwise a free one is taken. Each prints its port and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

from .load import one_cipher

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "assistant-large",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The lights in the kitchen are on now. " * 3},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 20, "completion_tokens": 30, "total_tokens": 50},
    }
).encode()
JSON = {"Content-Type": "application/json"}
PATH = "/v1/chat/completions"

Handler = Callable[[web.Request], Awaitable[web.Response]]


def answer(body: bytes) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, headers=JSON)

    return handle


def forward(url: str, session: aiohttp.ClientSession) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        async with session.post(url + PATH, data=json.dumps(body).encode(), headers=JSON) as response:
            return web.Response(status=response.status, body=await response.read(), headers=JSON)

    return handle


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": []})


async def main(kind: str, argument: str = "", port: str = "0") -> None:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=100))
    handler = {
        "answer": lambda: answer(Path(argument).read_bytes()),
        "upstream": lambda: answer(ANSWER),
        "forward": lambda: forward(argument, session),
    }[kind]()
    app = web.Application()
    app.router.add_post(PATH, handler)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    tls = None
    if kind == "upstream" and argument:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(argument)
        one_cipher(tls)
    await web.TCPSite(runner, "127.0.0.1", int(port), ssl_context=tls).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(main(*sys.argv[1:]))
