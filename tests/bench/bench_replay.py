"""`causeway-fleet replay` of 100,000 records, in a process of its own: start, reading and printing included.

The process has one thread; its CPU time is what it takes on a machine with nothing else to do.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from causeway_server.router.decision.decide import decide, features_of
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.policy.signals import ON_DEMAND
from causeway_server.router.types import AttemptRecord, DecisionRecord, DeviceSetup, Estimates, Outcome, Usage
from tests.tool import run_tool

from .bench_decide import POLICY, mixed
from .rows import Row, scaled

NAME = "replay of a new policy over 100,000 records: CPU time per record, in yardsticks"
RECORDS = 100_000
LIMIT = 20.0  # of a record
ROOT = Path(__file__).parents[2]
# Moves requests by signals that are recorded, and by one that often is not.
NEW = POLICY.read_text().replace("request.prompt_tokens < 48", "request.prompt_tokens < 24 || edge.quality > 0.7")


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        records, new = Path(folder) / "records.jsonl", Path(folder) / "new.yaml"
        new.write_text(NEW)
        _write(records)
        command = [
            sys.executable,
            "-m",
            "causeway_server.fleet",
            "replay",
            str(new),
            "--over",
            str(records),
            "--format",
            "json",
        ]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        started, used = time.monotonic(), _children_s()
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, check=False)
        took_s, cpu_s = time.monotonic() - started, _children_s() - used
        assert done.returncode in (0, 1), done.stderr.decode()
        size_mib = records.stat().st_size / 2**20
        note = f"CPU time {cpu_s:.2f} s and elapsed time {took_s:.1f} s for {size_mib:.0f} MiB of JSON lines"
        return [scaled(NAME, 1e6 * cpu_s / RECORDS, LIMIT, note)]


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _write(path: Path) -> None:
    policy = parse_policy(POLICY.read_text(), str(POLICY))
    setup = DeviceSetup(engine=True, cloud=True)
    made = []
    for request, snapshot, estimates in mixed():
        taken = msgspec.structs.replace(snapshot, setup=setup)
        unrecorded = (ON_DEMAND[1],) if request.model == "auto" else ON_DEMAND
        known = estimates if request.model == "auto" else Estimates()
        decision = decide(policy, request, taken, known)
        plans = decision.attempts[:1]
        attempts = tuple(AttemptRecord(p.target.name, p.target.at, "done", 0.1, 40.0, 900.0, 30) for p in plans)
        outcome = Outcome(
            "ok" if plans else "error", 200, plans[0].target.at if plans else "none",
            plans[0].target.name if plans else "", attempts=attempts, ttft_ms=40.0, total_ms=900.0,
            usage=Usage(40, 30), finish_reason="stop",
        )  # fmt: skip
        made.append(DecisionRecord("", 0.0, features_of(request), known, unrecorded, taken, decision, outcome))
    with path.open("wb") as lines:
        for number in range(RECORDS):
            one = made[number % len(made)]
            outcome = msgspec.structs.replace(one.outcome, total_ms=500.0 + number % 997, ttft_ms=20.0 + number % 89)
            record = msgspec.structs.replace(one, id=f"{number:024x}", created=1.7e9 + number, outcome=outcome)
            lines.write(msgspec.json.encode(record) + b"\n")


def _print_rows() -> None:
    for row in main():
        print(f"{row.name}: {row.value:.2f} {row.unit}  {row.note}")


if __name__ == "__main__":
    sys.exit(run_tool(_print_rows))
