#!/bin/sh
# nats-server 2.9.10 (Debian 12) with nats-py 2.16.0: a list of consumers holds null while a consumer is being deleted.
#
# Guess: `$JS.API.CONSUMER.LIST.<stream>` answers with the consumers that exist; one that is being deleted is in the list
# or it is not.
# Seen: its place in `consumers` is null, and `total` counts it. `consumers_info` of nats-py then raises AttributeError
# ('NoneType' object has no attribute 'get'), which is no error of NATS, so callers that catch those do not catch it.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
(cd "$folder" && apt-get -qq download nats-server=2.9.10-1+b3 2> /dev/null && dpkg-deb -x nats-server_*.deb .)
cat > "$folder/listing.py" <<'PYTHON'
import asyncio
import json
import socket
import subprocess
import sys
import time

import nats
from nats.js.api import ConsumerConfig


async def connected(url):
    """Connect to a server that is starting."""
    return await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.2, error_cb=silent)


async def silent(_error):
    pass


async def main(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [f"{folder}/usr/sbin/nats-server", "-js", "-sd", f"{folder}/data", "-a", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        maker, reader = [await connected(f"nats://127.0.0.1:{port}") for _ in range(2)]
        made = maker.jetstream()
        await made.add_stream(name="s", subjects=["t"])

        async def make_and_delete():
            while True:
                await made.add_consumer("s", ConsumerConfig(durable_name="c"))
                await made.delete_consumer("s", "c")

        making = asyncio.create_task(make_and_delete())
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            listed = json.loads((await reader.request("$JS.API.CONSUMER.LIST.s", b"", timeout=10)).data)
            if None in listed["consumers"]:
                print(listed["total"], json.dumps(listed["consumers"]))
                break
        while time.monotonic() < ends:
            try:
                await reader.jetstream().consumers_info("s")
            except AttributeError as error:
                print(type(error).__name__, error)
                break
        making.cancel()
    finally:
        server.kill()


asyncio.run(main(sys.argv[1]))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet nats-py==2.16.0
seen=$("$folder/venv/bin/python" "$folder/listing.py" "$folder")
printf '%s\n' "$seen"
[ "$seen" = "1 [null]
AttributeError 'NoneType' object has no attribute 'get'" ]
