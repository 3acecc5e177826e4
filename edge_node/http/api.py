"""The HTTP API: which handler a path has, and the handlers of answers. Every error is sent as OpenAI's error object.

POST /v1/chat/completions /v1/completions /v1/embeddings     an answer
POST /v1/responses                                           the same, as a Response object; nothing is stored
POST /v1/route                                               the decision for such a request, without running it
GET  /v1/models, /v1/decisions, /healthz, …                  see `inspection`
POST /v1/audio/transcriptions /v1/audio/speech               see `modalities.api`
POST GET /v1/jobs, GET DELETE /v1/jobs/{id}                  see `jobs`
GET  /console…                                               the page, see `console.routes`
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from aiohttp import web

from router.errors import CausewayError, ClientGone, MethodNotAllowed, NotFound
from router.serving.logs import redacted
from router.serving.request import Handler, allowed_methods, read_traceparent, served_method
from router.serving.responses import HttpReplyWriter, device_header_lines, error_response, json_response

from ..serving.generation import Records, RequestContext, policy_label
from ..serving.service import Service
from ..storage.policies import PolicyStore
from .request_reader import Endpoint, RequestReader

if TYPE_CHECKING:
    from ..observability.tracing import RequestTracer

log = logging.getLogger(__name__)

_ANSWER_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
        *("/v1/audio/transcriptions", "/v1/audio/speech"),
    }
)
AsJob = Callable[[Endpoint, web.BaseRequest], Awaitable[web.StreamResponse | None]]
_ID_HEADERS = ("x-request-id", "x-causeway-decision")
_ID = "{id}"  # one step of a path
_ANY_ID = "{id:.*}"  # all the rest of it
_random = random.Random(os.urandom(32))


class Api:
    """Routes requests to handlers, and answers those for an answer.

    Args:
        more_paths: methods and handler of further paths, such as the console's; `{id}` stands for one step of a path,
            `{id:.*}` for the rest of it.
        as_job: answers a request with the header `Prefer`; None where that asks for nothing.

    Attributes:
        paths: the methods of each path.
    """

    def __init__(
        self,
        *,
        service: Service,
        reader: RequestReader,
        policies: PolicyStore,
        records: Records,
        tracing: RequestTracer | None = None,
        more_paths: Mapping[str, tuple[str, Handler]] = {},
        as_job: AsJob | None = None,
        heartbeat_s: float = 0.0,
    ) -> None:
        self._service = service
        self._reader = reader
        self._policies = policies
        self._metrics = records.metrics
        self._clock = records.clock
        self._tracing = tracing
        self._as_job = as_job
        self._heartbeat_s = heartbeat_s
        paths: Mapping[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", functools.partial(self._answer, "chat")),
            "/v1/completions": ("POST", functools.partial(self._answer, "completion")),
            "/v1/embeddings": ("POST", functools.partial(self._answer, "embedding")),
            "/v1/responses": ("POST", functools.partial(self._answer, "response")),
            "/v1/route": ("POST", self._explain),
            **more_paths,
        }
        self.paths = {path.replace(_ANY_ID, _ID): methods for path, (methods, _) in paths.items()}
        self._paths = {path: found for path, found in paths.items() if "{" not in path}
        self._patterns = [(_pattern(path), found) for path, found in paths.items() if "{" in path]

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Raises CancelledError only, when the client disconnects."""
        try:
            return await self._handler(http)(http)
        except ClientGone:
            raise asyncio.CancelledError from None
        except CausewayError as error:
            if http.path in _ANSWER_PATHS:
                self._metrics.request_rejected(error.code)
            return _refusal(http, error)
        except Exception as failure:
            log.error("%s failed unexpectedly: %s", http.path, redacted(failure))
            return _refusal(http, CausewayError("internal error"))

    def _handler(self, http: web.BaseRequest) -> Handler:
        """Raises NotFound or MethodNotAllowed."""
        found = self._paths.get(http.raw_path) or self._paths.get(http.path)
        if found is None:
            found = next((one for pattern, one in self._patterns if pattern.fullmatch(http.path)), None)
        if found is None:
            raise NotFound(f"there is nothing at {http.path[:200]}{self._advice(http.path)}")
        methods, handler = found
        if http.method != methods and served_method(http.method, http.headers) not in methods.split(", "):
            allowed = allowed_methods(methods)
            raise MethodNotAllowed(f"{http.path[:200]} takes {allowed}, not {http.method[:20]}", allow=allowed)
        return handler

    def _advice(self, path: str) -> str:
        """What is there instead, where a client's base URL lacks `/v1`, or has it twice."""
        if path in ("/", "/v1"):
            return "; the API is under /v1, the page at /console"
        near = next((one for one in (f"/v1{path}", path.removeprefix("/v1")) if one in self._paths), "")
        return f"; did you mean {near}?" if near else ""

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _answer(self, kind: Endpoint, http: web.BaseRequest) -> web.StreamResponse:
        arrived = self._clock.monotonic()
        if "Prefer" in http.headers and self._as_job is not None:
            response = await self._as_job(kind, http)
            if response is not None:
                return response
        parsed = await self._reader.request(http, kind)
        request, decision_id = parsed.request, new_decision_id()
        traceparent = read_traceparent(http.headers)
        trace = self._tracing.begin(request, traceparent, self._clock.unix()) if self._tracing is not None else None
        created = int(self._clock.unix())
        reply = HttpReplyWriter(
            request,
            http,
            device_header_lines,
            id=decision_id,
            created=created,
            echo=parsed.echo,
            heartbeat_s=self._heartbeat_s,
            id_headers=_ID_HEADERS,
        )
        try:
            await self._service.answer(
                RequestContext(
                    request,
                    reply,
                    id=decision_id,
                    arrived=arrived,
                    traceparent=traceparent,
                    trace=trace,
                    memo=parsed.memo,
                )
            )
            return reply.response
        except ClientGone:
            raise
        except CausewayError as error:
            headers = dict.fromkeys(_ID_HEADERS, decision_id)
            headers["x-causeway-policy"] = policy_label(self._policies.active)
            return await reply.fail(error, headers)

    async def _explain(self, http: web.BaseRequest) -> web.StreamResponse:
        parsed = await self._reader.request(http, None)
        return json_response(await self._service.explain(parsed.request))


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(path.replace(_ID, "[^/]+").replace(_ANY_ID, ".*"))


def _refusal(http: web.BaseRequest, error: CausewayError) -> web.Response:
    """Return the answer to a request that has no decision, and log both under one id."""
    request_id = new_decision_id()
    log.debug("%s refused: %s (%s) request=%s", http.path, error.status, error.code, request_id)
    return error_response(error, {"x-request-id": request_id})


def new_decision_id() -> str:
    """A decision's id: unique, but not secret."""
    return f"{_random.getrandbits(96):024x}"
