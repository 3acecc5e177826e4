"""Run the flows of all clients against one daemon, and print a table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.rows import Row, checks
from tests.stack import Stack

from .environments import CLIENTS, command
from .upstream import ScriptedServer

POLICY = """
version: 1
name: clients
targets:
  edge: {at: edge, model: qwen-05b, first_token_timeout: 5m, timeout: 10m}
  scripted: {at: cloud, model: scripted, first_token_timeout: 1m, timeout: 2m}
routes: [{name: all, use: [edge]}]
"""


def flows(client: str, environments: Path, url: str, only: str) -> Iterator[dict[str, Any]]:
    """Run the program of one client. Yields a row for each flow, and one for a program that ends before its end."""
    quiet = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"}
    with (environments / f"{client}.log").open("w") as log:
        arguments = [*command(client, environments), url, only]
        program = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | quiet)
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith("{"):
                yield {"client": client} | json.loads(line)
        if program.wait() != 0:
            yield {"client": client, "side": "", "flow": "program", "verdict": "failed", "found": log.name}


def run(clients: list[str], environments: Path, only: str) -> bool:
    """Return whether no flow failed, on either side."""
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="clients-") as folder, ScriptedServer() as upstream:
        stack = Stack(Path(folder))
        policy = Path(folder, "policy.yaml")
        policy.write_text(POLICY)
        try:
            config = f"policy: {policy}\nengine: {{threads: 1}}\n"
            stack.start_edge(config, server="default_deadline_s: 600", cloud_port=upstream.port).ready()
            stack.wait_until_loaded()
            for client in clients:
                for row in flows(client, environments, f"{stack.edge_url}/v1", only):
                    verdicts[row["verdict"]] += 1
                    print(_line(row), flush=True)
        finally:
            stack.close()
        for refusal in upstream.refusals:
            print(f"the scripted model refused: {refusal}")
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    return bool(verdicts) and not verdicts["failed"] and not upstream.refusals


def _line(row: dict[str, Any]) -> str:
    found = "" if row["verdict"] == "green" else json.dumps(row["found"], ensure_ascii=False)[:500]
    return f"| {row['client']} | {row['side']} | {row['flow']} | {row['verdict']} | {found} |"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--client", choices=CLIENTS, action="append", help="this client; repeatable")
    parser.add_argument("--only", default="", help="flows with this in `side: name`, such as `scripted: tool loop`")
    parser.add_argument("--environments", type=Path, help="folder of the clients' environments, which is kept")


def main(given: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="clients-") as temporary:
        environments = (given.environments or Path(temporary)).resolve()
        environments.mkdir(parents=True, exist_ok=True)
        passed = run(given.client or list(CLIENTS), environments, given.only)
    return checks([] if passed else ["a flow failed"])
