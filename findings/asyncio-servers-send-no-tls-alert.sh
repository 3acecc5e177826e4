#!/bin/sh
# asyncio of CPython 3.11 and later, and uvloop 0.23.0 (PyPI): a server that refuses a client in the TLS handshake, such
# as one without the certificate that it asks for, closes the connection without the alert that says so.
#
# Guess: the alert arrives, as it does from a server with a blocking socket of the same `ssl` module, and as RFC 8446
# (6.2: "implementations SHOULD send" it) and every TLS library of C do.
# Seen: OpenSSL writes the alert into the outgoing MemoryBIO, and the event loops abort the transport without sending
# what is in there. The client learns of an end of file or a reset, and nothing of certificates.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet uvloop==0.23.0
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost \
  -keyout "$folder/key.pem" -out "$folder/cert.pem" 2>/dev/null
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio
import socket
import ssl
import sys
import threading

import uvloop

folder = sys.argv[1]
ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
ours.load_cert_chain(f"{folder}/cert.pem", f"{folder}/key.pem")
ours.load_verify_locations(f"{folder}/cert.pem")
ours.verify_mode = ssl.CERT_REQUIRED


def ask(port):
    """Return what a client without a certificate learns."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.check_hostname, theirs.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as raw, theirs.wrap_socket(raw) as tls:
            return "the end of the connection" if tls.recv(1) == b"" else "data"
    except (ssl.SSLError, ConnectionError) as error:
        return getattr(error, "reason", None) or type(error).__name__


def blocking():
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        client, _ = listening.accept()
        try:
            ours.wrap_socket(client, server_side=True)
        except ssl.SSLError:
            client.close()

    threading.Thread(target=serve, daemon=True).start()
    return ask(listening.getsockname()[1])


async def looped():
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, ssl=ours)
    learned = await asyncio.to_thread(ask, server.sockets[0].getsockname()[1])
    server.close()
    return learned


seen = {"blocking": blocking(), "asyncio": asyncio.run(looped()), "uvloop": uvloop.run(looped())}
for server, learned in seen.items():
    print(f"Python {sys.version.split()[0]}, {server} server: the client learns: {learned}")
assert seen["blocking"] == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
assert "ALERT" not in seen["asyncio"] + seen["uvloop"]
PYTHON
