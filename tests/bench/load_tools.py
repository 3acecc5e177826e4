"""`python -m tests.bench load-tools AIPERF GUIDELLM TOKENIZER`: `causeway-cloud load` beside aiperf and guidellm.

AIPERF and GUIDELLM are the programs, each in an environment of its own; TOKENIZER is a folder that transformers reads.
The servers are an edge with the shipped assistant on the device, and a gateway before a scripted Triton with a token
every 5 ms. In each round the tools take turns: the same prompts, none of them twice at a server, at most 64 tokens,
streams, token counts of the server's usage. The open loop has equal gaps, which all three tools can make. The table has
medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import urllib3

from causeway_server.cloud_pool.load.report import Summary
from causeway_server.cloud_pool.load.traces import made
from tests.tool import run_tool

from .results import RESULTS, origin, with_section
from .streaming.run import gateway, process, server

TITLE = "## Load tools side by side"
HEADS = (
    "server",
    "load",
    "tool",
    "answers/s",
    "time to the first token: median, p99",
    "median time between tokens",
    "failed requests",
)
MAX_TOKENS, WORDS, PROMPTS = 64, 16, 1000


class Load(NamedTuple):
    name: str
    users: int | None
    rate: float | None


class Case(NamedTuple):
    url: str  # of the server, without /v1
    model: str
    load: Load
    seconds: float
    prompts: Sequence[str]
    folder: Path  # an empty one


class Seen(NamedTuple):
    per_s: float
    first_p50_ms: float
    first_p99_ms: float
    between_p50_ms: float
    failed: int


LOADS = (Load("4 users", 4, None), Load("16 users", 16, None), Load("8 a second", None, 8.0))


def ours(case: Case) -> Seen:
    rate = case.load.rate
    path = _prompts(case, lambda number, text: {"turns": [text], "at_s": number / rate if rate else None})
    command = [sys.executable, "-m", "causeway_server.cloud_pool", "load", f"{case.url}/v1", "--model", case.model]
    command += ["--trace", str(path), "--duration-s", str(case.seconds), "--max-tokens", str(MAX_TOKENS)]
    command += ["--users", str(case.load.users)] if case.load.users else []
    done = subprocess.run([*command, "--format", "json"], stdout=subprocess.PIPE, check=False)  # 1: some failed
    found = msgspec.json.decode(done.stdout, type=Summary)
    assert found.first_token is not None
    assert found.between_tokens is not None
    first, between, failed = found.first_token, found.between_tokens, sum(found.faults.values())
    return Seen(found.requests_per_s, first.p50 * 1000, first.p99 * 1000, between.p50 * 1000, failed)


def aiperf(program: str, tokenizer: Path, case: Case) -> Seen:
    path = _prompts(case, lambda _, text: {"text": text})
    command = [program, "profile", "--model", case.model, "--url", case.url, "--streaming", "--tokenizer", tokenizer]
    command += ["--input-file", path, "--custom-dataset-type", "single_turn", "--benchmark-duration", str(case.seconds)]
    command += ["--extra-inputs", f"max_tokens:{MAX_TOKENS}", "--use-server-token-count", "--no-gpu-telemetry"]
    command += ["--no-server-metrics", "--ui", "none", "--output-artifact-dir", case.folder]
    rate = ["--request-rate", str(case.load.rate), "--arrival-pattern", "constant"]
    command += ["--concurrency", str(case.load.users)] if case.load.users else rate
    subprocess.run(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=True)
    found = json.loads((case.folder / "profile_export_aiperf.json").read_bytes())
    first, between, failed = (
        found["time_to_first_token"],
        found["inter_token_latency"],
        found.get("error_request_count"),
    )
    return Seen(
        found["request_throughput"]["avg"],
        first["p50"],
        first["p99"],
        between["p50"],
        int((failed or {"avg": 0})["avg"]),
    )


def guidellm(program: str, tokenizer: Path, case: Case) -> Seen:
    path, report = _prompts(case, lambda _, text: {"prompt": text}), case.folder / "report.json"
    profile = f"concurrent,streams={case.load.users}" if case.load.users else f"constant,rate={case.load.rate}"
    backend = f"kind=openai_http,target={case.url},model={case.model},max_tokens={MAX_TOKENS}"
    command = [program, "run", "--backend", backend, "--profile", f"kind={profile}", "--constraint"]
    command += [f"kind=max_duration,seconds={case.seconds}", "--data", f"kind=json_file,path={path}", "--tokenizer"]
    command += [f"kind=hf_auto,model={tokenizer}", "--output", f"kind=json,path={report}", "--disable-console"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=True)
    found = json.loads(report.read_bytes())["benchmarks"][0]["metrics"]
    first, between = (found[name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    per_s, failed = found["requests_per_second"]["successful"]["mean"], found["request_totals"]["errored"]
    return Seen(per_s, first["median"], first["percentiles"]["p99"], between["median"], failed)


def _prompts(case: Case, line: Callable[[int, str], object]) -> Path:
    path = case.folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line(*pair)) + "\n" for pair in enumerate(case.prompts)))
    return path


@contextlib.contextmanager
def edge() -> Iterator[str]:
    """The daemon as users start it, with the shipped assistant and no cloud."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("serve", "--state-dir", folder, "--port", "0", "--log", "warning")
        with process("-m", "causeway_server.edge_node", *flags, ready="ready url=") as (url, _):
            urllib3.request(
                "GET", f"{url}/readyz", retries=urllib3.Retry(20, status_forcelist=[503], backoff_factor=0.1)
            )
            yield url


def play(tools: dict[str, Callable[[Case], Seen]], rounds: int, seconds: float) -> list[tuple[str, ...]]:
    """Measure; return the rows of the table."""
    rng, seen = random.Random(1), dict[tuple[str, str, str], list[Seen]]()
    with edge() as device, server("triton", "triton") as triton, gateway(triton.port) as pool:
        models = {"edge": (device, "auto"), "gateway": (f"http://127.0.0.1:{pool.port}", "assistant-large")}
        for turn in range(rounds):
            for name, (url, model) in models.items():
                for load in LOADS:
                    for tool, run in [*tools.items()][:: 1 - 2 * (turn % 2)]:
                        prompts = [made(rng, 1, WORDS, 0.0).turns[0] for _ in range(PROMPTS)]
                        with tempfile.TemporaryDirectory() as folder:
                            found = run(Case(url, model, load, seconds, prompts, Path(folder)))
                        seen.setdefault((name, load.name, tool), []).append(found)
                        print(turn + 1, name, load.name, tool, found, file=sys.stderr)
    return [(*key, *_cells(found)) for key, found in sorted(seen.items(), key=lambda pair: pair[0][0])]


def _cells(found: Sequence[Seen]) -> tuple[str, ...]:
    per_s, first_p50, first_p99, between, _ = (statistics.median(values) for values in zip(*found, strict=True))
    failed = str(sum(one.failed for one in found))
    return f"{per_s:.2f}", f"{first_p50:.1f} ms, {first_p99:.1f} ms", f"{between:.2f} ms", failed


def version(program: str) -> str:
    """Return what it prints as its version, without its name."""
    printed = subprocess.run([program, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return printed.split()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench load-tools",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("aiperf", metavar="AIPERF", help="the program")
    parser.add_argument("guidellm", metavar="GUIDELLM", help="the program")
    parser.add_argument("tokenizer", metavar="TOKENIZER", type=Path, help="folder of a tokenizer, for both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="time in which requests begin")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {RESULTS.name}")
    options = parser.parse_args()
    tools: dict[str, Callable[[Case], Seen]] = {
        "causeway-cloud load": ours,
        f"aiperf {version(options.aiperf)}": lambda case: aiperf(options.aiperf, options.tokenizer, case),
        f"guidellm {version(options.guidellm)}": lambda case: guidellm(options.guidellm, options.tokenizer, case),
    }
    load, started = psutil.getloadavg()[0], time.monotonic()
    rows = play(tools, options.rounds, options.seconds)
    lines = [f"| {' | '.join(cells)} |" for cells in (HEADS, *rows)]
    lines.insert(1, "|---" * len(HEADS) + "|")
    print(*lines, sep="\n")
    if options.write:
        shown = f"python -m tests.bench load-tools AIPERF GUIDELLM TOKENIZER --rounds {options.rounds}"
        about = origin(f"{shown} --seconds {options.seconds:g}", time.monotonic() - started, load)
        about.append(
            f"All processes ran at nice {os.nice(0)}. Figures are medians of the rounds; failed requests are summed."
        )
        RESULTS.write_text(with_section(RESULTS.read_text(), TITLE, "\n".join([TITLE, "", *about, "", *lines])))
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
