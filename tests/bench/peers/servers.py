"""The servers of the comparison, one at a time, each pinned to one core in front of the same upstream."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from tests.ports import free_port

from .programs import Programs

ROOT = Path(__file__).parents[3]
READY_S, POLL_S = 120.0, 0.005
POLICY = """
version: 1
name: peers
targets: {mock: {at: cloud, model: mock}}
routes: [{name: all, use: [mock]}]
cache: [{when: request.temperature == 0.0, exact: {ttl: 1h}}]
limits: {concurrent: 256, queue: 256}
"""
_NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; keepalive_requests 100000000;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream cloud {{ server 127.0.0.1:{upstream}; keepalive 64; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://cloud; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
_ENVOY = """
static_resources:
  listeners:
    - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
      filter_chains:
        - {tls}
          filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": {extensions}.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: http
                route_config:
                  virtual_hosts:
                    - {{name: all, domains: ["*"], routes: [{{match: {{prefix: /}}, route: {{cluster: cloud}}}}]}}
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config: {{"@type": {extensions}.http.router.v3.Router}}
  clusters:
    - name: cloud
      type: STATIC
      load_assignment:
        cluster_name: cloud
        endpoints:
          - lb_endpoints:
              - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {upstream}}}}}}}
"""
_LITELLM = """
model_list:
  - model_name: mock
    litellm_params: {{model: openai/mock, api_base: "http://127.0.0.1:{upstream}/v1", api_key: none}}
"""

_LITELLM_SETTINGS = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it fetches prices otherwise
    "LITELLM_LOG": "ERROR",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # the others have no key to check, either
}


class Running(msgspec.Struct, frozen=True):
    """A server that has answered its first request, `ready_s` after its start."""

    port: int
    pid: int
    ready_s: float

    def memory_mb(self) -> tuple[float, float]:
        """Return RSS and PSS of all its processes."""
        process = psutil.Process(self.pid)
        found = [each.memory_full_info() for each in (process, *process.children(recursive=True))]
        return sum(each.rss for each in found) / 2**20, sum(each.pss for each in found) / 2**20


class Start(msgspec.Struct, frozen=True):
    """What a server is started with."""

    folder: Path  # empty
    port: int
    upstream: int  # port
    programs: Programs


def _ours(start: Start) -> list[str]:
    policy = start.folder / "policy.yaml"
    policy.write_text(POLICY)
    settings = {
        "policy": policy,
        "server.port": start.port,
        "state_dir": start.folder,
        "engine.enabled": "false",
        "clouds.main.url": f"http://127.0.0.1:{start.upstream}/v1",
        "log": "warning",
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "causeway_server.edge_node", "serve", *flags]


def _aiohttp(start: Start) -> list[str]:
    url = f"http://127.0.0.1:{start.upstream}"
    return [sys.executable, "-m", "tests.bench.whole.bare", "forward", url, str(start.port)]


def _aiohttp_constant(start: Start) -> list[str]:
    answer = str(start.programs.answer)
    return [sys.executable, "-m", "tests.bench.whole.bare", "answer", answer, str(start.port)]


def _nginx(start: Start) -> list[str]:
    config = start.folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=start.folder, upstream=start.upstream, port=start.port))
    return [str(start.programs.nginx), "-c", str(config), "-p", str(start.folder)]


def envoy(start: Start, pem_file: str = "") -> list[str]:
    """Return Envoy's command. `pem_file`: certificate and key of its listener; "": no TLS."""
    config = start.folder / "envoy.yaml"
    extensions = "type.googleapis.com/envoy.extensions"
    tls = ""
    if pem_file:
        files = f"{{certificate_chain: {{filename: {pem_file}}}, private_key: {{filename: {pem_file}}}}}"
        context = f'"@type": {extensions}.transport_sockets.tls.v3.DownstreamTlsContext'
        typed = f"{{{context}, common_tls_context: {{tls_certificates: [{files}]}}}}"
        tls = f"transport_socket: {{name: tls, typed_config: {typed}}}"
    config.write_text(
        _ENVOY.format(upstream=start.upstream, port=start.port, extensions=f"{extensions}.filters", tls=tls)
    )
    flags = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
    return [str(start.programs.envoy), "-c", str(config), *flags]


def _router(start: Start, *command: str) -> list[str]:
    return [
        *command,
        *("--worker-urls", f"http://127.0.0.1:{start.upstream}", "--policy", "round_robin"),
        *("--host", "127.0.0.1", "--port", str(start.port), "--prometheus-port", str(free_port())),
        *("--log-level", "error"),
    ]


def _vllm_router(start: Start) -> list[str]:
    return _router(start, str(start.programs.vllm_router))


def _smg(start: Start) -> list[str]:
    return _router(start, str(start.programs.smg), "launch")


def _litellm(start: Start) -> list[str]:
    config = start.folder / "litellm.yaml"
    config.write_text(_LITELLM.format(upstream=start.upstream))
    flags = ["--host", "127.0.0.1", "--port", str(start.port), "--telemetry", "False"]
    return [str(start.programs.litellm), "--config", str(config), *flags]


COMMANDS: Mapping[str, Callable[[Start], list[str]]] = {
    "ours": _ours,
    "aiohttp": _aiohttp,
    "constant": _aiohttp_constant,
    "smg": _smg,
    "vllm-router": _vllm_router,
    "envoy": envoy,
    "nginx": _nginx,
    "litellm": _litellm,
}


@contextlib.contextmanager
def running(name: str, start: Start, core: int, program: Sequence[str] = ()) -> Iterator[Running]:
    """Start a server on `core`. It ends with the block.

    Args:
        program: Arguments of Python instead of our daemon's own module.
    """
    environ = {**os.environ, **_LITELLM_SETTINGS}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a start that compiles modules is not a user's
    command = COMMANDS[name](start)
    if program:
        command[1:3] = program
    argv = ["taskset", "--cpu-list", str(core), *command]
    log = start.folder / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        started = time.perf_counter()
        try:
            while not _answers(start.port):
                if process.poll() is not None or time.perf_counter() - started > READY_S:
                    raise RuntimeError(f"{name} did not become ready: {log.read_text(errors='replace')[-2000:]}")
                time.sleep(POLL_S)
            yield Running(start.port, process.pid, time.perf_counter() - started)
        finally:
            process.terminate()
            process.wait(READY_S)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    body = b'{"model":"mock","messages":[{"role":"user","content":"ready?"}],"temperature":0.7}'
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
