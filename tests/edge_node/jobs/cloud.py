"""A cloud with jobs: the gateway's `/v1/jobs` in memory, which does each key once."""

from __future__ import annotations

import hashlib
import socket
from collections import Counter

from aiohttp import web

from ..scripted import CLOUD_WORDS, ScriptedCloud, whole_answer


class JobCloud(ScriptedCloud):
    """`waits`: jobs stay queued until it is False. `ends`: the state that they get instead of an answer."""

    def __init__(self, *, has_jobs: bool = True) -> None:
        super().__init__()
        self.has_jobs = has_jobs
        self.waits = False
        self.ends = "succeeded"
        self.effects: Counter[str] = Counter()  # by the text of the question
        self.order: list[str] = []
        self.submissions = 0
        self.keys: list[str] = []
        self.cancelled: list[str] = []  # keys of jobs that it knew, or did not
        self.cancel_status = 0  # in place of its own answer
        self._jobs: dict[str, tuple[str, str]] = {}  # by key: the digest of the body, the question
        self._reserved: socket.socket | None = None

    def be_away(self) -> None:
        """Take an address on which nothing listens until `come_back`."""
        self._reserved = socket.socket()
        self._reserved.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._reserved.getsockname()[1]}/v1"

    async def come_back(self) -> None:
        await self.start(sock=self._reserved)

    def __del__(self) -> None:
        if self._reserved is not None:
            self._reserved.close()

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        if self.has_jobs:
            app.router.add_post("/v1/jobs", self._create)
            app.router.add_get("/v1/jobs/{key}", self._get)
            app.router.add_delete("/v1/jobs", self._cancel)

    async def _create(self, request: web.Request) -> web.Response:
        body, key = await request.read(), request.headers["Idempotency-Key"]
        digest = hashlib.sha256(request.headers["x-causeway-priority"].encode() + body).hexdigest()
        content = (await request.json())["messages"][-1]["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        self.submissions += 1
        if key not in self._jobs:
            self._jobs[key] = (digest, text)
            self.effects[text] += 1
            self.order.append(text)
            self.keys.append(key)
        elif self._jobs[key][0] != digest:
            return web.json_response({"error": {"code": "idempotency_conflict", "message": "x"}}, status=409)
        return web.json_response(self.view(key) | {"result": None}, status=202)  # as the gateway answers

    async def _get(self, request: web.Request) -> web.Response:
        if (key := request.match_info["key"]) not in self._jobs:
            return web.json_response({"error": {"code": "not_found", "message": "no such job"}}, status=404)
        return web.json_response(self.view(key))

    async def _cancel(self, request: web.Request) -> web.Response:
        key = request.headers["Idempotency-Key"]
        self.cancelled.append(key)
        status = self.cancel_status or (200 if key in self._jobs else 404)
        return web.json_response({"id": key}, status=status)

    def forget(self) -> None:
        """Lose every job, as with a Redis that a replica without them has replaced."""
        self._jobs.clear()

    def view(self, key: str) -> dict[str, object]:
        state = "queued" if self.waits else self.ends
        error = {"code": "cloud_failed", "message": "it crashed", "type": "backend_error", "param": None}
        return {
            "id": key,
            "object": "job",
            "status": state,
            "result": whole_answer("".join(CLOUD_WORDS)) if state == "succeeded" else None,
            "error": None if state in ("queued", "succeeded") else error,
        }
