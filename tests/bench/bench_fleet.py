"""Status posts at the control plane, on SQLite and on PostgreSQL, beside a bare handler that reads the body.

Each post's MAC is verified, and it is durable before it is answered. Server and load generator are processes of their
own; the servers take turns in short rounds, and each figure is the median of the rounds' own ratios of posts per second
of CPU time, PostgreSQL's own included: of a server that has a core of its own, that is the rate.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from tests.bench.fleet.load import CONNECTIONS, Figures, Plan
from tests.fleet.server.postgres import make_postgres

from .fleet import bare, plane
from .rows import Row

ROOT = Path(__file__).parents[2]
ROUNDS, REPORTS = 7, 10
LIMIT = 0.3


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        postgres = make_postgres()
        servers.callback(postgres.remove)
        servers.callback(postgres.stop)
        databases = {"SQLite": f"sqlite:///{folder}/fleet.db", "PostgreSQL": postgres.database()}
        port, pid = servers.enter_context(bare())
        running = {"bare handler": (port, [pid])}
        for name, database in databases.items():
            port, pid = servers.enter_context(plane(Path(folder) / name, database, CONNECTIONS))
            running[name] = (port, [pid])
        running["PostgreSQL"][1].append(postgres.pid)
        rounds = _play(Plan(running, ROUNDS, REPORTS))
    note = "; ".join(_note(name, rounds) for name in running)
    over_bare, over_sqlite = _ratio(rounds, "SQLite", "bare handler"), _ratio(rounds, "PostgreSQL", "SQLite")
    return [
        Row(
            "status posts that the control plane stores in SQLite ÷ posts to a bare handler, per second of CPU time",
            over_bare,
            "x",
            LIMIT,
            "higher",
            note,
        ),
        Row(
            "    status posts stored in PostgreSQL ÷ those stored in SQLite, per second of CPU time",
            over_sqlite,
            "x",
            0.5,
            "higher",
            note,
        ),
    ]


def _ratio(rounds: list[dict[str, Figures]], one: str, other: str) -> float:
    return statistics.median(found[one].per_cpu_s / found[other].per_cpu_s for found in rounds)


def _note(name: str, rounds: list[dict[str, Figures]]) -> str:
    per_cpu_s, rate = (
        statistics.median(getattr(found[name], figure) for found in rounds) for figure in ("per_cpu_s", "rate")
    )
    return f"{name} {per_cpu_s:.0f} posts per second of CPU time, {rate:.0f} posts/s"


def _play(plan: Plan) -> list[dict[str, Figures]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.fleet.load"],
        input=msgspec.json.encode(plan),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    return msgspec.json.decode(done.stdout, type=list[dict[str, Figures]])
