"""A local server that speaks the hub's API as far as huggingface_hub asks, and breaks on demand.

/api/models/OWNER/REPO            the repository: commit, licence, files with sizes and checksums
/OWNER/REPO/resolve/COMMIT/FILE   redirects to the file, as the hub does to its CDN
/cdn/FILE                         the file, with ranges; also for pulls of a plain URL
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "1" * 40
REPOSITORY = "owner/tiny-GGUF"


class HubServer:
    """Serves `files` as one repository.

    Attributes:
        cut_after: cut each transfer of a file off after so many bytes; 0: never.
        stall_after: stop sending after so many bytes, and keep the connection; 0: never.
        corrupt: change the last byte of each file on its way.
        token: required, if not empty.
        gated: the repository's licence has not been accepted.
        ignore_ranges: always send the whole file.
        requests: method, path, Range and Authorization of each request, in order.
    """

    def __init__(self, files: Mapping[str, bytes], licence: str = "apache-2.0") -> None:
        self.files = dict(files)
        self.licence = licence
        self.cut_after = self.stall_after = 0
        self.corrupt = self.gated = self.ignore_ranges = False
        self.token = ""
        self.requests: list[tuple[str, str, str, str]] = []
        self.stalled = threading.Event()
        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.cdn = f"http://localhost:{self._server.server_port}"  # another host, as the hub's is

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def ranges(self) -> list[str]:
        """Return the Range of each transfer of a file, without the look at its first bytes."""
        transfers = [span for method, path, span, _ in self.requests if method == "GET" and path.startswith("/cdn/")]
        return [span for span in transfers if span != f"bytes=0-{256 * 1024 - 1}"]

    def document(self) -> dict[str, Any]:
        return {
            "id": REPOSITORY,
            "modelId": REPOSITORY,
            "sha": COMMIT,
            "gated": "manual" if self.gated else False,
            "cardData": {"license": self.licence},
            "siblings": [
                {
                    "rfilename": name,
                    "size": len(content),
                    "blobId": "2" * 40,
                    "lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 135},
                }
                for name, content in self.files.items()
            ],
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        headers = self.headers
        self.hub.requests.append((self.command, path, headers.get("Range", ""), headers.get("Authorization", "")))
        allowed = not self.hub.token or headers.get("Authorization") == f"Bearer {self.hub.token}"
        if self.hub.gated and ("/resolve/" in path or path.endswith("/auth-check")):
            self.answer(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        elif not allowed and not path.startswith("/cdn/"):
            self.answer(401, {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/"):
            self.api(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            self.resolve(path)
        elif path.removeprefix("/cdn/") in self.hub.files:
            self.send_file(self.hub.files[path.removeprefix("/cdn/")])
        else:
            self.answer(404)

    def api(self, repository: str) -> None:
        if repository.partition("/revision/")[0] != REPOSITORY:
            self.answer(404, {"X-Error-Code": "RepoNotFound"})
            return
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(self.hub.document()).encode())

    def resolve(self, path: str) -> None:
        name = path.partition("/resolve/")[2].partition("/")[2]
        content = self.hub.files.get(name)
        if content is None:
            self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        digest = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{digest}"', "X-Repo-Commit": COMMIT}
        self.answer(302, {"Location": f"{self.hub.cdn}/cdn/{name}", **linked})

    def send_file(self, content: bytes) -> None:
        start, stop = 0, len(content)
        span = self.headers.get("Range", "")
        if span and not self.hub.ignore_ranges:
            first, _, last = span.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, stop) if last else stop
        if self.hub.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.send_response(206 if span and not self.hub.ignore_ranges else 200)
        if span and not self.hub.ignore_ranges:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "GET":
            self.send_body(content[start:stop])

    def send_body(self, body: bytes) -> None:
        is_peek = self.headers.get("Range") == f"bytes=0-{256 * 1024 - 1}"
        limit = 0 if is_peek else self.hub.cut_after or self.hub.stall_after
        try:
            self.wfile.write(body[:limit] if limit else body)
            if limit and self.hub.stall_after and len(body) > limit:
                self.wfile.flush()
                self.hub.stalled.set()
                self.hub.released.wait(60)
        except OSError:
            pass
        if limit and len(body) > limit:
            self.close_connection = True

    def answer(self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass
