"""`python -m tests.bench.fleet.server bare | plane FOLDER DATABASE DEVICES`: prints its port and serves until killed.

bare    aiohttp's least on uvloop: a handler that reads a status report's body and returns fixed bytes
plane   the control plane with so many devices of the cohort `everyone`
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web
from jwt.algorithms import OKPAlgorithm
from sqlalchemy import insert

from causeway_server.fleet.app import ServeSettings, running
from causeway_server.fleet.repository.folder import new_fleet
from causeway_server.fleet.store.database import Store
from causeway_server.fleet.store.devices import Device
from causeway_server.fleet.store.tables import devices as device_table
from causeway_server.router.bundle.protocol import StatusReply
from causeway_server.router.serving.addresses import raise_file_limit

from .devices import SERVER_KEY, STATUS, device_name, public_key

FLEET = "version: 1\nname: bench\ncohorts:\n  everyone: {policy: policies/default.yaml}\n"


async def bare() -> None:
    answer = msgspec.json.encode(StatusReply(may_change=True, now=time.time(), cohort="everyone"))

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    app = web.Application()
    app.router.add_post(STATUS, handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


async def make_devices(folder: Path, database: str, count: int) -> None:
    """Make a fleet and its devices; every third one is of the cohort `others`."""
    new_fleet(folder)
    (folder / "fleet.yaml").write_text(FLEET)
    (folder / "data").mkdir(mode=0o700)
    key = folder / "data" / "token-key.jwk"
    key.write_text(json.dumps(OKPAlgorithm.to_jwk(SERVER_KEY, as_dict=True)))
    key.chmod(0o600)
    store = await Store.open(database)
    kinds = [
        (device_name(number), "everyone" if number % 3 else "others", public_key(number)) for number in range(count)
    ]
    rows = [
        msgspec.structs.asdict(Device(name, "acme", cohort, key, enrolled=time.time())) for name, cohort, key in kinds
    ]
    async with store.write() as connection:
        await connection.execute(insert(device_table), rows)
    await store.close()


async def plane(folder: Path, database: str) -> None:
    settings = ServeSettings(folder, folder / "keys", folder / "data", database, host="0.0.0.0", port=0)
    async with running(settings) as (_, url):
        print(url.rpartition(":")[2], flush=True)
        await asyncio.Event().wait()


def main() -> None:
    logging.getLogger("alembic").setLevel(logging.WARNING)
    raise_file_limit()
    if sys.argv[1] == "bare":
        uvloop.run(bare())
    elif sys.argv[1] == "devices":
        uvloop.run(make_devices(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
    else:
        uvloop.run(plane(Path(sys.argv[2]), sys.argv[3]))


if __name__ == "__main__":
    main()
