#!/bin/sh
# nats-py 2.16.0 with its extra `fast-parse` (fast-mail-parser 0.10.0): header values of messages become lists of text.
#
# Guess: the extra makes parsing faster and changes nothing else; `Msg.headers` has the type `Dict[str, str]`.
# Seen: without the extra a header is text, and of two lines with one name the last one is left. With it each header is a
# list with all its lines, also one that stands once, so `headers["tag"] == "value"` is never true.
# The message here is one of NATS's protocol with headers (HMSG); several lines with one name are valid in it (ADR-4).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cat > "$folder/receive.py" <<'PYTHON'
import asyncio

import nats

HEAD = b"NATS/1.0\r\ntag: first\r\ntag: second\r\nother: one\r\n\r\n"
INFO = b'INFO {"server_id":"one","version":"2.9.10","proto":1,"headers":true,"max_payload":1048576}\r\n'


async def serve(reader, writer):
    writer.write(INFO)
    while line := await reader.readline():
        if line.startswith(b"PING"):
            writer.write(b"PONG\r\n")
        elif line.startswith(b"SUB"):
            writer.write(b"HMSG topic %b %d %d\r\n%bhi\r\n" % (line.split()[2], len(HEAD), len(HEAD) + 2, HEAD))
        await writer.drain()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = await nats.connect(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    subscription = await client.subscribe("topic")
    print((await subscription.next_msg(timeout=10)).headers)
    await client.close()
    server.close()


asyncio.run(main())
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet nats-py==2.16.0
plain=$("$folder/venv/bin/python" "$folder/receive.py")
"$folder/venv/bin/pip" install --quiet fast-mail-parser==0.10.0
fast=$("$folder/venv/bin/python" "$folder/receive.py")
printf 'without the extra: %s\nwith it:           %s\n' "$plain" "$fast"
[ "$plain" = "{'tag': 'second', 'other': 'one'}" ]
[ "$fast" = "{'tag': ['first', 'second'], 'other': ['one']}" ]
