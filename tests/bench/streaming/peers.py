"""`python -m tests.bench.streaming.peers`: our edge beside LiteLLM and nginx, for the same streams in one run.

Sets both up where they are missing: LiteLLM in an environment of its own (.venv-peers, versions pinned), nginx from the
distribution. Keeps the table as a section of tests/bench/RESULTS.md.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from tests.ports import free_port
from tests.tool import run_tool

from ..environment import make_environment
from ..results import RESULTS, machine, with_section
from .load import Plan, Round, Server
from .run import edge, median, play, server

STREAMS, TOKENS, ROUNDS = 32, 64, 9
LOCK = Path(__file__).with_name("requirements-peers.txt")
NGINX = "nginx-light"  # Debian's package
READY_S = 120.0
_NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream cloud {{ server 127.0.0.1:{upstream}; keepalive 64; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://cloud; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
_LITELLM = """
model_list:
  - model_name: large
    litellm_params: {{model: openai/assistant-large, api_base: "http://127.0.0.1:{upstream}/v1", api_key: none}}
"""
_TITLE = "## Streams beside other proxies"


def main() -> int:
    litellm, nginx = make_environment(".venv-peers", LOCK) / "litellm", _install_nginx()
    with (
        tempfile.TemporaryDirectory() as folder,
        server("direct", "upstream") as direct,
        server("bare aiohttp forwarder", "forward", f"http://127.0.0.1:{direct.port}") as bare,
        edge(direct.port) as daemon,
        _nginx(nginx, Path(folder), direct.port) as by_nginx,
        _litellm(litellm, Path(folder), direct.port) as by_litellm,
    ):
        ours = msgspec.structs.replace(daemon, name="our edge")
        servers = (direct, by_nginx, bare, ours, by_litellm)
        rounds = play(Plan(servers, "large", STREAMS, TOKENS, ROUNDS))
    section = _section([one.name for one in servers[1:]], rounds)
    print(section)
    RESULTS.write_text(with_section(RESULTS.read_text(), _TITLE, section))
    return 0


def _section(names: list[str], rounds: list[Round]) -> str:
    day, load = f"{datetime.now(UTC):%Y-%m-%d}", f"{psutil.getloadavg()[0]:.1f}"
    lines = [
        _TITLE,
        "",
        f"Command: `make bench-peers`, {day}.",
        f"Machine: {machine()}; load after the run {load}.",
        f"{STREAMS} streams of {TOKENS} tokens 5 ms apart, at once; medians of {ROUNDS} rounds in which they take",
        f"turns. nginx forwards bytes, the forwarder parses the request's JSON, LiteLLM is {_version('litellm')}.",
        "",
        "| server | added to the first token | added to the last token | CPU time per stream |",
        "|---|---|---|---|",
    ]
    for name in names:
        first_ms = median(rounds, lambda r: r[name].first_ms - r["direct"].first_ms)  # noqa: B023
        whole_ms = median(rounds, lambda r: r[name].whole_ms - r["direct"].whole_ms)  # noqa: B023
        cpu_ms = median(rounds, lambda r: r[name].cpu_ms)  # noqa: B023
        lines.append(f"| {name} | {first_ms:.1f} ms | {whole_ms:.1f} ms | {cpu_ms:.2f} ms |")
    return "\n".join(lines) + "\n"


def _install_nginx() -> str:
    if shutil.which("nginx") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "--yes", "--quiet", NGINX], check=True, stdout=subprocess.DEVNULL)
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        sys.exit(f"nginx is missing. Install it first: apt-get install {NGINX}")
    return found


def _version(package: str) -> str:
    return next(line.split("==")[1] for line in LOCK.read_text().splitlines() if line.startswith(f"{package}=="))


@contextlib.contextmanager
def _nginx(command: str, folder: Path, upstream: int) -> Iterator[Server]:
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, upstream=upstream, port=port))
    with _running([command, "-c", str(config), "-p", str(folder)], {}, f"http://127.0.0.1:{port}/v1/models") as pids:
        yield Server("nginx", port, pids)


@contextlib.contextmanager
def _litellm(command: Path, folder: Path, upstream: int) -> Iterator[Server]:
    port = free_port()
    config = folder / "litellm.yaml"
    config.write_text(_LITELLM.format(upstream=upstream))
    argv = [str(command), "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}  # it fetches prices and logs otherwise
    with _running(argv, local, f"http://127.0.0.1:{port}/health/liveliness") as pids:
        yield Server("LiteLLM", port, pids)


@contextlib.contextmanager
def _running(argv: list[str], environ: dict[str, str], probe: str) -> Iterator[tuple[int, ...]]:
    """The processes of a command, once `probe` answers."""
    with subprocess.Popen(
        argv, env={**os.environ, **environ}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        try:
            until = time.monotonic() + READY_S
            while not _answers(probe):
                if running.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{' '.join(argv)} did not become ready")
                time.sleep(0.2)
            yield running.pid, *(child.pid for child in psutil.Process(running.pid).children(recursive=True))
        finally:
            running.terminate()
            running.wait(READY_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(run_tool(main))
