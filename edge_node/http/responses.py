"""Stored responses on a device: private ones stay in memory, those in the background become jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from causeway_server.router.errors import UnsupportedFeature
from causeway_server.router.openai.responses.request import ResponseEcho, parse_document
from causeway_server.router.openai.responses.state import StoredTurn, Turn
from causeway_server.router.residency import region_tags
from causeway_server.router.serving.request import AiohttpRequest, HttpExchange, read_credential
from causeway_server.router.serving.responses import Handler, ServerResponse
from causeway_server.router.serving.stored.api import PATHS, StoredResponseApi
from causeway_server.router.session_tags import tags_of_session
from causeway_server.router.types import AUTO, Priority, RoutingHints, folded_tags

from ..serving.requests import RequestContext
from ..serving.service import Service
from .api import ParsedRequest, RequestReader, routing_hints


class StartResponseJob(Protocol):
    """Accepts the job of a response in the background."""

    async def __call__(
        self, http: HttpExchange, hints: RoutingHints, most: Priority, name: str, body: bytes, /
    ) -> None:
        """Accept the job of the response `name`; `most`: its highest priority. Raises CausewayError."""
        ...


@dataclass(eq=False, repr=False)
class DeviceResponses:
    """The handlers of stored responses, and the handling of requests that make them (`StatefulResponses`)."""

    api: StoredResponseApi
    service: Service
    reader: RequestReader
    start: StartResponseJob

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        return {path: (methods, self._handle) for path, methods in PATHS.items()}

    async def keep(self, context: RequestContext, turn: Turn, response: bytes) -> bool:
        """Store a response, in memory if its request was private. Return whether it is stored."""
        owner, private = context.request.hints.client, context.generation.on_device
        tags = region_tags(context.generation.regions)
        return await self.api.stored.keep(owner, turn, response, private=private, tags=tags)

    async def in_background(self, http: HttpExchange, parsed: ParsedRequest, turn: Turn) -> ServerResponse:
        """Accept a response as a job. Raises UnsupportedFeature for a private one, which is never on the disk."""
        request, echo = parsed.request, parsed.echo
        assert isinstance(echo, ResponseEcho)
        caller = self.reader.caller(http, "jobs")
        await self.service.bind_session(request)
        decision = await self.service.preview(request)
        if decision.on_device:
            message = "`background`: jobs wait on the disk, where private requests are never written. Leave it out."
            raise UnsupportedFeature(message, param="background")
        owner, tags = request.hints.client, region_tags(decision.regions)
        named = tags_of_session(request.hints.tags)
        hints = routing_hints(http.headers, caller)
        hints = msgspec.structs.replace(hints, tags=folded_tags((*hints.tags, *tags, *named)))
        self.service.admit(owner)
        await self.api.stored.accept(
            owner, turn, echo, request.model, partial(self.start, http, hints, caller.priority), tags
        )
        if turn.request.stream:
            return await self.api.follow(http, owner, turn.id, partial(self._served, http))
        return await self.api.show(owner, turn.id)

    async def _handle(self, http: AiohttpRequest) -> ServerResponse:
        owner = self.reader.caller(http).name
        if http.method == "POST":
            self.service.admit(owner)
        read, bind = partial(self.reader.body, http), partial(self._bind, http)
        return await self.api.handle(http, owner, read, partial(self._served, http), bind)

    async def _bind(self, http: HttpExchange, items: StoredTurn) -> StoredTurn:
        hints = routing_hints(http.headers, self.reader.caller(http))
        request, _ = parse_document({"model": AUTO, "input": [*items.items]}, hints)
        decision = await self.service.preview(request)
        tags = region_tags(decision.regions)
        return msgspec.structs.replace(items, private=decision.on_device, tags=tags)

    def _served(self, http: HttpExchange) -> bool:
        self.reader.check_again(read_credential(http))
        return not self.service.draining
