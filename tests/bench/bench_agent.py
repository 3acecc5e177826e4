"""A cached answer, a forwarded request and memory of a daemon in a fleet: with agent, token and a parked poll.

The control plane is a process of its own with signed metadata; the device has joined, looked for a plan, and waits.
Hits and requests that are passed on are held to the limits of `bench_edge`; its memory is compared with that of a
daemon that never joined, after both have answered the same requests.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.bed.fleet.demo import CAUSEWAY_EDGE, CAUSEWAY_FLEET, OFFLINE, ONLINE, run_command, write_folder, write_policy
from tests.bench.streaming.run import process
from tests.bench.whole.load import Contestant

from .bench_edge import HITS, PASSED, ask, bare, daemon, hit_rows, passed_rows
from .rows import Row

MORE_MB = 12.0
PARKED_S = 60.0


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        directory = Path(folder)
        upstream = servers.enter_context(bare("upstream"))
        plane, join_token = servers.enter_context(_control_plane(directory))
        for name in ("alone", "device"):
            (directory / name).mkdir()
        state = ("--state-dir", str(directory / "device" / "state"))
        run_command(*CAUSEWAY_EDGE, "fleet", "join", plane, "--token", join_token, "--name", "device", *state)
        alone = servers.enter_context(daemon(directory / "alone", upstream))
        device = servers.enter_context(daemon(directory / "device", upstream))
        _until_parked(plane)
        forwarder = servers.enter_context(bare("forward", f"http://127.0.0.1:{upstream}"))
        answer = directory / "answer.json"
        answer.write_bytes(ask(device.port, HITS[0]))
        fixed = servers.enter_context(bare("answer", str(answer)))
        for body in (*HITS, *PASSED):
            for port in (alone.port, device.port):
                ask(port, body)
        more_mb = device.rss_mb() - alone.rss_mb()
        note = f"a daemon without a fleet takes {alone.rss_mb():.1f} MB"
        rows = [
            *hit_rows(Contestant("ours", device.port, HITS), Contestant("bare", fixed, HITS)),
            *passed_rows(
                Contestant("ours", device.port, PASSED),
                Contestant("bare", forwarder, PASSED),
                Contestant("floor", upstream, PASSED),
            ),
        ]
        named = [msgspec.structs.replace(row, name=f"in a fleet, {row.name.strip()}") for row in rows]
        return [*named, Row("additional memory of a daemon in a fleet", more_mb, "MB", MORE_MB, note=note)]


@contextlib.contextmanager
def _control_plane(directory: Path) -> Iterator[tuple[str, str]]:
    """A control plane with signed metadata: its URL and a join token."""
    fleet, data = directory / "fleet", directory / "data"
    write_folder(fleet)
    write_policy(fleet, "first")
    for name in (*OFFLINE, ONLINE):
        run_command(*CAUSEWAY_FLEET, "keys", "new", name, "--keys", str(fleet / "keys"))
    keys = [part for name in ("anna", "ben", ONLINE) for part in ("--key", str(fleet / f"keys/{name}.pem"))]
    run_command(*CAUSEWAY_FLEET, "sign", str(fleet), *keys)
    flags = ["--keys", str(fleet / "keys"), "--state-dir", str(data), "--listen", "127.0.0.1:0"]
    with process("-m", "causeway_server.fleet", "serve", str(fleet), *flags, ready="ready url=") as (url, _):
        operator = ["--url", url, "--token-file", str(data / "bootstrap-token")]
        yield url, run_command(*CAUSEWAY_FLEET, "enroll", "--uses", "1", *operator).strip()


def _until_parked(url: str) -> None:
    """Return when the device's poll waits."""
    ends = time.monotonic() + PARKED_S
    while time.monotonic() < ends:
        with urllib.request.urlopen(f"{url}/metrics", timeout=PARKED_S) as response:
            if b"causeway_fleet_parked_polls 1.0" in response.read():
                return
        time.sleep(0.2)
    sys.exit(f"the device did not park a poll within {PARKED_S:.0f} s")
