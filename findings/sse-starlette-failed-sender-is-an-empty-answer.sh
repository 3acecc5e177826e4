#!/bin/sh
# sse-starlette 3.7.0 under uvicorn 0.54.0 (PyPI): a sender that fails before its first event is a whole, empty 200.
#
# Guess: the body is cut, as where the response's generator itself fails, so that a client of HTTP/1.1 sees a broken
# stream.
# Seen: with a memory channel and `data_sender_callable`, the form of the library's own example, the failing sender
# closes the channel, the reader takes that for the end, and the last chunk is written: the body is complete and has no
# event. Only then is the connection closed, although the body was whole, so that a request that was sent on it meanwhile
# is lost. llama-cpp-python 0.3.36's server streams in this form: a streamed chat that is too long for the context
# was such an answer there, and the next request on its connection got nothing.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet sse-starlette==3.7.0 starlette==1.10.0 uvicorn==0.54.0 httptools==0.9.0 \
    anyio==4.16.0 h11==0.16.0 click==8.5.1
"$folder/venv/bin/python" - <<'PYTHON'
import socket
import threading
import time
from functools import partial

import anyio
import uvicorn
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.routing import Route


async def fails():
    raise ValueError("too long")
    yield {"data": "never"}


async def send(channel):
    async with channel:
        raise ValueError("too long")


async def events(request):
    sending, receiving = anyio.create_memory_object_stream(10)
    return EventSourceResponse(receiving, data_sender_callable=partial(send, sending))


async def generated(request):
    return EventSourceResponse(fails())


application = Starlette(routes=[Route("/events", events), Route("/generated", generated)])
listening = socket.socket()
listening.bind(("127.0.0.1", 0))
server = uvicorn.Server(uvicorn.Config(application, http="httptools", log_level="critical"))
threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
while not server.started:
    time.sleep(0.05)


def answer(path):
    """Return what comes back until the server closes the connection; the client keeps it open."""
    with socket.create_connection(listening.getsockname(), timeout=20) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        received = b""
        while data := client.recv(65536):
            received += data
    head, _, body = received.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], body


for path in ("/events", "/generated"):
    print(path, *answer(path))
assert answer("/events") == (b"HTTP/1.1 200 OK", b"0\r\n\r\n")
assert answer("/generated") == (b"HTTP/1.1 200 OK", b"")
server.should_exit = True
PYTHON
