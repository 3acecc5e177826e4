#!/bin/sh
# httpx 0.28.1 with httpcore 1.0.9 and anyio 4.12.1 (PyPI): an async request that the server refuses with a TLS alert
# after the handshake raises `ssl.SSLError`, which is not an `httpx.HTTPError`; the blocking client raises `ReadError`.
#
# Guess: an `httpx.TransportError`, as the documentation of exceptions says of all errors at the transport.
# Seen: with TLS 1.3 a client's handshake is complete before the server has seen its certificate, so the refusal of a
# missing one arrives with the first read. httpcore maps anyio's exceptions there, and not `ssl.SSLError`.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet httpx==0.28.1 httpcore==1.0.9 anyio==4.12.1
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost \
  -keyout "$folder/key.pem" -out "$folder/cert.pem" 2>/dev/null
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio
import contextlib
import os
import socket
import ssl
import sys
import threading

import httpx

folder = sys.argv[1]
ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
ours.load_cert_chain(f"{folder}/cert.pem", f"{folder}/key.pem")
ours.load_verify_locations(f"{folder}/cert.pem")
ours.verify_mode = ssl.CERT_REQUIRED
listening = socket.create_server(("127.0.0.1", 0))
url = f"https://127.0.0.1:{listening.getsockname()[1]}"


def serve():
    while True:
        client, _ = listening.accept()
        tls = ours.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        try:
            tls.do_handshake()
        except ssl.SSLError:  # the alert is sent; wait for the client's end, so that no reset overtakes it
            socket.socket.shutdown(tls, socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while os.read(tls.fileno(), 65536):
                    pass
        tls.close()


async def ask():
    async with httpx.AsyncClient(verify=False) as client:
        await client.get(url)


threading.Thread(target=serve, daemon=True).start()
seen = {}
for kind, call in (("blocking", lambda: httpx.get(url, verify=False)), ("async", lambda: asyncio.run(ask()))):
    try:
        call()
    except Exception as error:
        seen[kind] = error
        print(f"httpx {httpx.__version__}, {kind}: {type(error).__module__}.{type(error).__name__}: {error}")
assert isinstance(seen["blocking"], httpx.ReadError)
assert isinstance(seen["async"], ssl.SSLError)
assert not isinstance(seen["async"], httpx.HTTPError)
PYTHON
