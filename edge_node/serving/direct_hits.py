"""Answers of the cache in callbacks: a fresh one in memory is sent as soon as its request is read, without a task."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Final

from causeway_server.router.decision.decide import RequestMemo, features_of
from causeway_server.router.errors import CausewayError
from causeway_server.router.openai.answer import CachedAnswer
from causeway_server.router.policy.signals import LISTED_UNRECORDED, concerned
from causeway_server.router.serving.reply import AnswerHead
from causeway_server.router.serving.request import PlainRequest
from causeway_server.router.serving.responses import EVENTS, JSON, id_lines, send_plain, shared_header_lines
from causeway_server.router.types import DecisionRecord, Estimates, Outcome, Request, RequestFeatures, Snapshot, Usage

from ..storage.cache import CacheHit
from .generation import policy_label
from .service import Service

_NO_ESTIMATES: Final = Estimates()


class DirectHits:
    """Answers chats from memory as the general path would."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def answer(self, request: Request, memo: RequestMemo, ids: tuple[str, float], http: PlainRequest) -> bool:
        """Answer a chat, or do nothing and return False if memory has no fresh answer. Raises ClientGone. `ids`: the
        decision's id, and when the request arrived, monotonic seconds.
        """
        service, policy = self._service, self._service.direct_policy
        if policy is None:
            return False
        decision_id, arrived = ids
        found = service.hit_in_memory(policy, request, memo)
        if found is None or not isinstance(body := found[0].answer.body, CachedAnswer):
            return False
        try:
            service.admission.admit(request.hints.client, arrived)
        except CausewayError:
            return False  # the general path meets it again: a refusal costs the client nothing
        clock = service.records.clock
        body = body.with_own_ids(decision_id) if body.has_calls else body
        answer_id, created = f"chatcmpl-{decision_id}", int(clock.unix())
        if request.stream:
            data = body.stream(answer_id, created, include_usage=request.include_usage)
        else:
            data = body.whole(answer_id, created)
        answer = found[0].answer
        target = next((one for one in policy.targets if one.name == answer.target), None)
        variant = "" if target is None else target.variant
        lines = _lines(policy_label(policy), answer.target, answer.model, variant, is_stream=request.stream)
        features = memo.features
        if features is None:
            features = memo.features = features_of(request)
        send_plain(http, lines + id_lines(decision_id), data)
        total_ms = (clock.monotonic() - arrived) * 1000.0
        told = decision_id, variant, body.usage, body.choices[0].finish_reason or "", total_ms
        asyncio.get_running_loop().call_soon(self._record, told, features, *found)
        return True

    def _record(
        self, told: tuple[str, str, Usage, str, float], features: RequestFeatures, hit: CacheHit, snapshot: Snapshot
    ) -> None:
        decision_id, variant, usage, finish_reason, total_ms = told
        outcome = Outcome(
            status="ok",
            http_status=200,
            route="cache",
            target=hit.answer.target,
            model=hit.answer.model,
            variant=variant,
            reason="cache",
            cache="hit",
            cache_age_s=hit.age_s,
            ttft_ms=total_ms,
            total_ms=total_ms,
            usage=usage,
            finish_reason=finish_reason,
        )
        records = self._service.records
        records.decisions.add(
            DecisionRecord(
                id=decision_id,
                created=records.clock.unix(),
                request=features,
                estimates=_NO_ESTIMATES,
                unrecorded=concerned(LISTED_UNRECORDED, features.modalities),
                snapshot=snapshot,
                decision=None,
                outcome=outcome,
            )
        )
        records.metrics.request_finished(outcome)


@lru_cache(maxsize=256)
def _lines(policy: str, target: str, model: str, variant: str, *, is_stream: bool) -> str:
    """Return the header lines of a hit, without its id. `policy`: its label."""
    head = AnswerHead(
        id="", policy=policy, route="cache", target=target, model=model, reason="cache", cache="hit", variant=variant
    )
    return shared_header_lines(head, EVENTS if is_stream else JSON)
