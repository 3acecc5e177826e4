"""Fake programs for `up`: real processes that print ready lines, serve HTTP and inject faults.

    python programs.py causeway-cloud triton|serve …      python programs.py causeway-edge serve …
    python programs.py vllm …

The file named by $FAKE_FAULTS lists faults, one per line. Starts, ends and requests are appended to $FAKE_EVENTS.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

FAULTS = Path(os.environ["FAKE_FAULTS"]).read_text().split()
EVENTS = Path(os.environ["FAKE_EVENTS"])


CHOSEN = ("--model-dir", "--model", "--policy", "--config")


def note(text: str) -> None:
    with EVENTS.open("a") as events:
        events.write(f"{text}\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    name = ""

    readiness_requests = 0

    def do_GET(self) -> None:
        """Report ready at once, as with the cloud alone; the engine is ready from the third request on."""
        Handler.readiness_requests += 1
        state = "failed" if "engine-fails" in FAULTS else "ready" if Handler.readiness_requests > 2 else "starting"
        note(f"engine {state}")
        self.reply(200, json.dumps({"ready": True, "edge": state}).encode(), "application/json")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "refuses" in FAULTS:
            self.reply(503, b'{"error": {"message": "no route", "code": "no_route"}}', "application/json")
            return
        if "vllm" in sys.argv:
            note(f"vllm is asked for {request['max_tokens']} token")
            self.reply(404 if "vllm-refuses" in FAULTS else 200, b'{"error": "no such model"}', "application/json")
            return
        tags = request.get("causeway", {}).get("tags", [])
        note(f"request {request['messages'][0]['content'][:20]} {tags}")
        delta = {"choices": [{"index": 0, "delta": {"content": "an answer"}, "finish_reason": "stop"}]}
        self.reply(200, f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")

    def reply(self, status: int, body: bytes, media: str) -> None:
        self.send_response(status)
        headers = {"content-type": media, "content-length": str(len(body)), "x-causeway-route": "edge"}
        for name, value in {**headers, "x-causeway-target": "small", "x-causeway-reason": "fast-path"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else ""


def main() -> None:
    program, command = sys.argv[1:3]
    name = {"causeway-edge": "edge", "vllm": "vllm"}.get(program, "triton" if command == "triton" else "gateway")
    if f"{name}-missing" in FAULTS:
        sys.exit(f"{name}: `make setup` makes its environment")
    # sigwait instead of a handler: the next SIGTERM could interrupt a handler that holds the lock of an Event.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    EVENTS.with_name(f"{name}.pid").write_text(str(os.getpid()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if flag("--token-file"):
        note(f"tokens {Path(flag('--token-file')).read_text().strip()}")
    if flag("--cloud-key-file"):
        note(f"key {Path(flag('--cloud-key-file')).read_text().strip()} for {flag('--cloud-url')}")
    chosen = [flag_and_value for flag_and_value in pairwise(sys.argv) if flag_and_value[0] in CHOSEN]
    if chosen:
        note(" ".join([name, *(word for pair in chosen for word in pair)]))
    if f"{name}-has-engine" in FAULTS:  # a process that does not end with its parent
        engine = subprocess.Popen(["sleep", "600"])
        note(f"engine-pid {engine.pid}")
    note(f"{name} starts")
    server = ThreadingHTTPServer(("127.0.0.1", int(flag("--port") or 0)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    if f"{name}-silent" not in FAULTS and name != "vllm":
        ready = {"triton": f"grpc=127.0.0.1:{flag('--grpc-port')}", "gateway": f"url={url}/v1", "edge": f"url={url}"}
        print(f"ready {ready[name]}", flush=True)
    if signal.sigwait({signal.SIGTERM, signal.SIGUSR1}) == signal.SIGUSR1:
        print(f"{name}: simulated crash", file=sys.stderr, flush=True)
        os._exit(7)
    while f"{name}-stubborn" in FAULTS:
        signal.sigwait({signal.SIGTERM})
    note(f"{name} ends")


main()
