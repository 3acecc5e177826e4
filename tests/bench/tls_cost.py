"""`python -m tests.bench.tls_cost [--rounds 7] [--envoy]`: processor time that TLS adds to a request that is passed on.

Daemons run side by side: without TLS, with TLS to the client, with TLS to the client and to the cloud, and a second one
without TLS, which shows the noise; with `--envoy` also Envoy (`make bench-peers` sets it up), without and with TLS to
the client. They pass on the same requests over kept connections, in turns, with one cipher. A figure is a daemon's
processor time a request over that of the first daemon in the same round: the median over the rounds, the lowest and the
highest.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from tests.bed.figures import table
from tests.bench.whole.load import Contestant, Plan
from tests.certificates import Authority
from tests.ports import free_port
from tests.tool import run_tool

from . import bench_edge
from .peers.programs import set_up
from .peers.servers import POLICY, Start, envoy

ROOT = Path(__file__).parents[2]
REQUESTS = 1000
PLAIN, ENVOY = "no TLS", "Envoy"


class _Daemon(msgspec.Struct, frozen=True):
    port: int
    pid: int
    ca_file: str

    @property
    def cpu_s(self) -> float:
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=4, help="of a daemon in a round")
    parser.add_argument("--envoy", action="store_true")
    parser.add_argument("--connections", type=int, default=bench_edge.ONE)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        ca = Authority(Path(folder) / "ca")
        issued = ca.issue("server")
        both, policy = Path(folder) / "both.pem", Path(folder) / "policy.yaml"
        policy.write_text(POLICY)
        both.write_bytes(issued.cert.read_bytes() + issued.key.read_bytes())
        plain = servers.enter_context(_upstream(""))
        over_tls = servers.enter_context(_upstream(str(both)))
        own = {"server.tls.cert_file": both, "server.tls.key_file": both}
        to_cloud = {"clouds.main.url": f"https://127.0.0.1:{over_tls}/v1", "clouds.main.ca_file": ca.file}
        without = {"clouds.main.url": f"http://127.0.0.1:{plain}/v1"}
        kinds: Mapping[str, Mapping[str, object]] = {
            PLAIN: without,
            "TLS to the client": {**without, **own},
            "TLS to client and cloud": {**to_cloud, **own},
            "no TLS again": without,
        }
        daemons = {
            name: servers.enter_context(
                _daemon(
                    Path(folder) / str(number),
                    {"policy": policy, **settings},
                    str(ca.file) if own.items() <= settings.items() else "",
                )
            )
            for number, (name, settings) in enumerate(kinds.items())
        }
        if arguments.envoy:
            programs = set_up(["envoy"], agreed=False)
            for name, pem_file in ((ENVOY, ""), (f"{ENVOY}, TLS to the client", str(both))):
                (own_folder := Path(folder) / name).mkdir()
                start = Start(own_folder, free_port(), plain, programs)
                daemons[name] = servers.enter_context(_envoy(start, pem_file, str(ca.file) if pem_file else ""))
        plan = Plan((), arguments.connections, arguments.requests, arguments.turns)
        rounds = [_play(daemons, plan) for _ in range(arguments.rounds + 1)][1:]  # the first warms up
        base_us = statistics.median(one[PLAIN] for one in rounds)
        print(f"{base_us:.0f} us of processor time a request without TLS")
        print(table(("daemon", "times"), [(name, _interval(rounds, name)) for name in daemons]), flush=True)
        if arguments.envoy:
            for name, peer in ((PLAIN, ENVOY), ("TLS to the client", f"{ENVOY}, TLS to the client")):
                print(f"{name}: {_interval(rounds, name, peer)} x Envoy's")
            added = [
                (one["TLS to the client"] - one[PLAIN], one[f"{ENVOY}, TLS to the client"] - one[ENVOY])
                for one in rounds
            ]
            ours, theirs = (statistics.median(each) for each in zip(*added, strict=True))
            print(f"TLS to the client adds {ours:.1f} us, and {theirs:.1f} us to Envoy's")


def _interval(rounds: list[dict[str, float]], name: str, base: str = PLAIN) -> str:
    ratios = [one[name] / one[base] for one in rounds]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _play(daemons: Mapping[str, _Daemon], plan: Plan) -> dict[str, float]:
    """Return the processor time of a request by the daemon's name, us."""
    before = {name: daemon.cpu_s for name, daemon in daemons.items()}
    contestants = tuple(Contestant(name, one.port, bench_edge.PASSED, one.ca_file) for name, one in daemons.items())
    command = [sys.executable, "-m", "tests.bench.whole.load"]
    played = msgspec.json.encode(msgspec.structs.replace(plan, contestants=contestants))
    subprocess.run(command, input=played, cwd=ROOT, capture_output=True, check=True, timeout=300)
    return {name: 1e6 * (one.cpu_s - before[name]) / plan.requests / (plan.rounds + 1) for name, one in daemons.items()}


@contextlib.contextmanager
def _upstream(pem_file: str) -> Iterator[int]:
    with _process([sys.executable, "-m", "tests.bench.whole.bare", "upstream", pem_file]) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


@contextlib.contextmanager
def _daemon(folder: Path, settings: Mapping[str, object], ca_file: str) -> Iterator[_Daemon]:
    folder.mkdir()
    common = {"state_dir": folder / "state", "server.port": 0, "log": "warning"}
    values = {**common, "engine.enabled": "false", **settings}
    flags = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    with _process([sys.executable, "-m", "causeway_server.edge_node", "serve", *flags]) as process:
        assert process.stdout is not None
        url = next(line for line in process.stdout if line.startswith(b"ready url=")).decode().strip()
        yield _Daemon(int(url.rpartition(":")[2]), process.pid, ca_file)


@contextlib.contextmanager
def _envoy(start: Start, pem_file: str, ca_file: str) -> Iterator[_Daemon]:
    with _process(envoy(start, pem_file)) as process:
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", start.port), 1.0).close()
                break
            time.sleep(0.05)
        yield _Daemon(start.port, process.pid, ca_file)


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(10)


if __name__ == "__main__":
    sys.exit(run_tool(main))
