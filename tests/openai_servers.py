"""Real servers with OpenAI's HTTP API, as processes of their own: `llama_cpp.server`, llama.cpp's own, and vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from causeway_server.edge_node.cli.up.models import VllmDescription, read_vllm
from causeway_server.models.catalog.artifact import find_artifact

from .ports import free_port
from .prepare.places import find_places
from .prepare.vllm import vllm_description

START_S = 300.0
_POLL_S = 0.1
_GRACE_S = 20.0


class OpenAIServer:
    """A server at a port of its own, which it keeps over a restart.

    Args:
        name: Name in messages, and of the log in `folder`.
        model: Name of its model.
        command: Command line, without the port.
    """

    def __init__(
        self, name: str, model: str, command: Sequence[str], folder: Path, environ: Mapping[str, str] = {}
    ) -> None:
        self.name = name
        self.model = model
        self.port = free_port()
        self._log = folder / f"{name}.log"
        self._command = [*command, "--port", str(self.port)]
        self._environ = {**os.environ, **environ}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environ, stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        """Wait until it makes a token. Raises RuntimeError with the end of its log."""
        assert self._process is not None, "it does not run"
        deadline = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(URLError, ConnectionError, TimeoutError):
                post(self, "/completions", {"prompt": "Hello", "max_tokens": 1})
                return
            time.sleep(_POLL_S)
        raise RuntimeError(f"{self.name} did not start:\n{self._log.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """End it and its children by SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.send_signal(number)
            _, left = psutil.wait_procs([psutil.Process(self._process.pid), *children], _GRACE_S * (number != 9))
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()
        self._process = None


def llama_server_command(model: Path, threads: int, name: str = "small") -> list[str]:
    """Return the command of `llama_cpp.server`, whose requests wait for one another."""
    flags = [f"--n_threads={threads}", f"--n_threads_batch={threads}", "--n_ctx=2048", "--interrupt_requests=False"]
    server = [sys.executable, "-m", "llama_cpp.server", f"--model={model}", f"--model_alias={name}"]
    return [*server, *flags, "--verbose=False"]


def xllamacpp_command(model: Path, threads: int, streams: int) -> list[str]:
    """Return the command of llama.cpp's own server, by the package xllamacpp, which decodes `streams` side by side."""
    program = Path(__file__).with_name("bench") / "decoding" / "xllamacpp_server.py"
    return [sys.executable, str(program), str(model), str(threads), str(streams)]


def llama_server(folder: Path, *flags: str) -> OpenAIServer:
    """Return a `llama_cpp.server` with the device's model."""
    command = llama_server_command(find_artifact("assistant").path, 1)
    return OpenAIServer("llama_cpp.server", "small", [*command, *flags], folder)


def vllm_server(folder: Path, *flags: str) -> OpenAIServer:
    """Return the vLLM that `make test-vllm` installs. Raises ArtifactError if it is not installed."""
    description: VllmDescription = read_vllm(vllm_description(find_places(os.environ)), 0).description
    return OpenAIServer("vllm", description.model, [*description.command, *flags], folder, description.environ)


@contextlib.contextmanager
def running(server: OpenAIServer) -> Iterator[OpenAIServer]:
    """Start a server, wait until it answers, and stop it at the end."""
    server.start()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def post(server: OpenAIServer, path: str, body: Mapping[str, object]) -> dict[str, object]:
    """Ask a server directly, and return its answer."""
    from urllib.request import Request

    data = json.dumps({"model": server.model, **body}).encode()
    asked = Request(f"{server.url}{path}", data, {"content-type": "application/json"})
    with urlopen(asked, timeout=START_S) as response:
        found: dict[str, object] = json.load(response)
        return found
