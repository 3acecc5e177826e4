"""`POST /v1/feedback`: a client scores one of its own answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from causeway_server.router.errors import NotFound
from causeway_server.router.openai.request_body import check_media_type
from causeway_server.router.serving.request import HttpExchange
from causeway_server.router.serving.responses import Handler, ServerResponse, json_response
from causeway_server.router.variants.feedback import FeedbackReceipt, parse_feedback

from ..serving.service import Service
from ..signals.collector import SignalCollector
from ..storage.decisions import DecisionStore
from .api import RequestReader


@dataclass(eq=False, repr=False)
class FeedbackApi:
    """The handler of feedback."""

    service: Service
    reader: RequestReader
    decisions: DecisionStore
    signals: SignalCollector

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        return {"/v1/feedback": ("POST", self._score)}

    async def _score(self, http: HttpExchange) -> ServerResponse:
        caller = self.reader.caller(http)
        self.service.admit(caller.name)
        check_media_type(http.headers.get("Content-Type"), http.headers.get("Content-Encoding"))
        feedback = parse_feedback(await self.reader.body(http))
        # Only the client's own, also for one that may read all: a score is its client's word.
        record = await self.decisions.get(feedback.id, client=caller.name)
        if record is None or not record.outcome.target:
            raise NotFound(
                f"Decision {feedback.id!r} not found, or it has no answer. Old decision records are deleted."
            )
        counted = self.service.records.variants.score(record, feedback)
        if counted and (at := self.service.place_of(record.outcome.target)) is not None:
            self.signals.scored(at, feedback.score)
            self.service.shadows.scored(record, feedback.score)
        return json_response(FeedbackReceipt(feedback.id, counted))
