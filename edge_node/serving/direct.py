"""The plain case in callbacks: a chat that a cloud answers whole, from the parsed request to its record, with no task.

The hops are those of `service`, in the same order, as one straight line: nothing is awaited before the answer, so there
is nothing for a coroutine to do. `DirectAnswers.begin` takes a request only if the general path would do just this:

1. the policy decides by the request's features alone, and has neither variants nor shadow requests: so equal requests
   are planned once for each snapshot of the signals, which is at most 50 ms old
2. the cache is bypassed, whatever the signals are
3. the first attempt is a cloud's, and nothing else is decided: no handoff, no binding to the device or to regions
4. a permit is free, the cloud is well at this moment, and one of its connections is idle

Whatever comes but a good answer (another status, an error, a timeout, a client that leaves or reads slowly, the end of
the daemon) goes to the general path together with the request that was sent: a task awaits the same response, so that
retries, fallbacks, records and the client's error have one place.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

import msgspec

from causeway_server.router.decision.attempts import AttemptSequence
from causeway_server.router.decision.decide import RequestMemo, decide_memoized, early_bypass, features_of
from causeway_server.router.errors import CausewayError
from causeway_server.router.openai.answer import encode_whole
from causeway_server.router.openai.upstream.decode import decode_answer
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.signals import LISTED_UNRECORDED, concerned
from causeway_server.router.prices import FREE, PICO_USD
from causeway_server.router.serving.http_client import HttpResponse
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.reply import AnswerHead
from causeway_server.router.serving.request import PlainRequest
from causeway_server.router.serving.responses import JSON, id_lines, send_plain, shared_header_lines
from causeway_server.router.types import (
    AttemptPlan,
    AttemptRecord,
    Chunk,
    Decision,
    DecisionRecord,
    Estimates,
    Outcome,
    Request,
    RequestFeatures,
    Snapshot,
    Target,
    Usage,
)

from ..backends.backend import BackendRequest, BegunCall, UpstreamInfo
from ..backends.cloud.backend import NO_INFO, CloudBackend, Clouds, upstream_info
from .generation import Generation, policy_label, with_temperature
from .service import Service, bypassed

log = logging.getLogger(__name__)

_NO_ESTIMATES: Final = Estimates()
_MAX_PLANS: Final = 256


class DirectConnection(Protocol):
    """The client's connection."""

    writing_paused: bool
    transport: asyncio.Transport | None

    def answered(self, http: PlainRequest, /) -> None:
        """Continue after an answer in callbacks, which was written."""
        ...

    def hand_over(self, http: PlainRequest, /) -> asyncio.Task[None]:
        """Let a task answer the request."""
        ...


class Arrival(msgspec.Struct, frozen=True):
    """A parsed request. `arrived`: monotonic seconds; `unix`: the same moment, Unix seconds."""

    id: str  # the decision's
    request: Request
    memo: RequestMemo
    traceparent: str
    arrived: float
    unix: float


class Plan(msgspec.Struct, frozen=True):
    """The decision for requests with the same features, and what follows from it."""

    features: RequestFeatures
    snapshot: Snapshot
    decision: Decision
    target: Target
    cloud: CloudBackend
    policy: Policy
    label: str  # name@revision
    bypass: str  # why the cache is bypassed
    lines: str  # header lines of an answer without a gateway's own, and without ids

    @property
    def reason(self) -> str:
        return self.decision.rule or "model_named"

    def head(self, info: UpstreamInfo) -> AnswerHead:
        """Return the head of an answer, without its id."""
        return AnswerHead(
            id="",
            policy=self.label,
            route="cloud",
            target=self.target.name,
            model=self.target.model,
            reason=self.reason,
            cache="bypass",
            cache_reason=self.bypass,
            loosened=info.loosened,
            variant=self.target.variant,
            modalities=info.modalities,
            trimmed=info.trimmed,
        )


class DirectAnswer:
    """An answer that is waiting for its cloud (`ResponseOwner`, `DirectWork`).

    Attributes:
        started: Time at which the request was sent, the loop's clock.
    """

    __slots__ = ("_call", "_connection", "_http", "_plan", "_response", "_service", "arrival", "started")

    def __init__(
        self,
        service: Service,
        arrival: Arrival,
        plan: Plan,
        call: BackendRequest,
        response: HttpResponse,
        started: float,
        http: PlainRequest,
        connection: DirectConnection,
    ) -> None:
        self.arrival, self.started = arrival, started
        self._service, self._plan, self._call, self._response = service, plan, call, response
        self._http, self._connection = http, connection
        http.begun = response.owner = self

    def fill(self, generation: Generation) -> None:
        """Let a generation go on with what was done (`BegunAnswer`)."""
        plan = self._plan
        generation.policy, generation.snapshot, generation.decision = plan.policy, plan.snapshot, plan.decision
        generation.cache_plan = bypassed(plan.bypass)
        generation.sequence = AttemptSequence(plan.decision, stream=False, choices=1, arrived=generation.arrived)
        generation.begun = BegunCall(self._response, self.started)

    def cancel(self) -> None:
        task = self._hand_over()
        # Its first step takes over the response, and only then can it tell why it ends.
        asyncio.get_running_loop().call_soon(task.cancel)

    def changed(self) -> None:
        response = self._response
        arrives = not response.status or (response.status == 200 and not response.complete and not response.is_crowded)
        if arrives and response.error is None:
            return
        try:
            if not self._deliver(response):
                self._hand_over()
        except Exception as failure:
            log.error("A direct answer failed unexpectedly: %s", redacted(failure))
            if response.owner is self:
                self._hand_over()

    def _hand_over(self) -> asyncio.Task[None]:
        self._response.owner = None
        return self._connection.hand_over(self._http)

    def _deliver(self, response: HttpResponse) -> bool:
        """Send a good answer to the client; return False, and do nothing, if it is not a usual one."""
        body, connection, plan = response.peek(), self._connection, self._plan
        transport = connection.transport
        gone = transport is None or transport.is_closing() or connection.writing_paused
        if response.error is not None or response.status != 200 or not response.complete or gone:
            return False
        arrival, target, info = self.arrival, plan.target, upstream_info(response)
        chunk = _answer_of(body, arrival.id)
        usage = None if chunk is None else chunk.usage
        if chunk is None or usage is None or info.degraded:
            return False
        if target.price is not FREE and not (usage.prompt_tokens or usage.completion_tokens):
            return False  # its cost is estimated
        answer = encode_whole(arrival.request, f"chatcmpl-{arrival.id}", target.model, int(arrival.unix), (chunk,))
        lines = plan.lines if info is NO_INFO else shared_header_lines(plan.head(info), JSON)
        send_plain(self._http, lines + id_lines(arrival.id), answer)
        response.owner = None
        plan.cloud.succeeded(self._call, response)
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._service.admission.release(now - self.started)
        # As after other answers, the response leaves first.
        loop.call_soon(self._record, chunk, usage, now, self._service.records.clock.monotonic())
        connection.answered(self._http)
        return True

    def _record(self, chunk: Chunk, usage: Usage, first: float, ended: float) -> None:
        """Record the answer. `first`, `ended`: when it came and when it was sent, monotonic seconds."""
        arrival, plan, records = self.arrival, self._plan, self._service.records
        target = plan.target
        usd = usage.pico_usd(target.price) / PICO_USD
        if usd > 0.0:
            records.spend.add(usd)
        started_ms = round((self.started - arrival.arrived) * 1000.0, 3)
        took_ms = round((first - self.started) * 1000.0, 3)
        total_ms = (ended - arrival.arrived) * 1000.0
        setup = plan.snapshot.setup
        attempt = AttemptRecord(
            target=target.name,
            at="cloud",
            state="done",
            started_ms=started_ms,
            ttft_ms=took_ms,
            duration_ms=took_ms,
            tokens=chunk.tokens,
            detail=chunk.note,
            cloud=target.cloud,
            region=setup.region_of(target) if setup is not None and setup.regions else "",
        )
        outcome = Outcome(
            status="ok",
            http_status=200,
            route="cloud",
            target=target.name,
            model=target.model,
            variant=target.variant,
            reason=plan.reason,
            cache="bypass",
            cache_reason=plan.bypass,
            attempts=(attempt,),
            ttft_ms=max(0.0, started_ms + took_ms),
            total_ms=total_ms,
            usage=usage,
            finish_reason=chunk.finish_reason or "",
            usd=usd,
        )
        records.decisions.add(
            DecisionRecord(
                id=arrival.id,
                created=records.clock.unix(),
                request=plan.features,
                estimates=_NO_ESTIMATES,
                unrecorded=concerned(LISTED_UNRECORDED, plan.features.modalities),
                snapshot=plan.snapshot,
                decision=plan.decision,
                outcome=outcome,
            )
        )
        records.metrics.passed_on(arrival.request, target, usage, attempt, usd=usd, total_s=total_ms / 1000.0)


class DirectAnswers:
    """Begins the answers of the plain case."""

    def __init__(self, service: Service, clouds: Clouds) -> None:
        self._service = service
        self._clouds = clouds
        self._policy: Policy | None = None
        self._snapshot: Snapshot | None = None
        self._plans: dict[RequestFeatures, Plan | None] = {}  # under that policy, for that snapshot

    def begin(self, arrival: Arrival, http: PlainRequest, connection: DirectConnection) -> DirectAnswer | None:
        """Send a request to its cloud. Returns None, and does nothing, if it is not a plain case."""
        service, request, admission = self._service, arrival.request, self._service.admission
        policy = service.direct_policy
        if policy is None or request.stream or request.kind != "chat" or not admission.has_room:  # (1) (4)
            return None
        plan = self._plan(policy, request, arrival.memo)
        if plan is None or connection.writing_paused or not plan.cloud.is_ready:  # (4)
            return None
        target, started = plan.target, asyncio.get_running_loop().time()
        timeout_s = service.attempts.cloud.timeout_s if target.timeout_s is None else target.timeout_s
        deadline = min(service.deadline(request, arrival.arrived), started + timeout_s)
        call = BackendRequest(
            id=arrival.id,
            request=with_temperature(request, target),
            target=target,
            deadline=deadline,
            first_token_by=deadline,
            traceparent=arrival.traceparent,
            policy=plan.label,
            cacheable=False,
        )
        try:
            admission.admit(request.hints.client, arrival.arrived)
        except CausewayError:
            return None  # the general path meets it again: a refusal costs the client nothing
        admission.try_acquire()
        response = None
        try:
            response = plan.cloud.begin(call)
        finally:
            if response is None:
                admission.release(0.0)
        if response is None:
            return None
        return DirectAnswer(service, arrival, plan, call, response, started, http, connection)

    def _plan(self, policy: Policy, request: Request, memo: RequestMemo) -> Plan | None:
        """Return the plan for a request; None if it is not a plain case."""
        snapshot = self._service.signals.recent_snapshot(policy)
        if snapshot is not self._snapshot or policy is not self._policy or len(self._plans) > _MAX_PLANS:
            self._policy, self._snapshot = policy, snapshot
            self._plans.clear()
        features = memo.features
        if features is None:
            features = memo.features = features_of(request)
        try:
            return self._plans[features]
        except KeyError:
            plan = self._plans[features] = self._new_plan(policy, snapshot, request, features)
            return plan

    def _new_plan(self, policy: Policy, snapshot: Snapshot, request: Request, features: RequestFeatures) -> Plan | None:
        bypass = early_bypass(policy, request)
        if not bypass or request.resume or request.n != 1 or len(features.modalities) > 1:  # (2)
            return None
        try:
            decision = decide_memoized(policy, request, snapshot, _NO_ESTIMATES, features)
        except CausewayError:
            return None
        # Whatever else a decision or a plan may ask for is done by the general path alone.
        usual = Decision(decision.policy, decision.revision, decision.rule, decision.attempts, decision.reasons)
        if not decision.attempts or decision != usual:  # (3)
            return None
        first = decision.attempts[0]
        cloud = self._clouds.of(first.target)
        if first.target.at != "cloud" or first != AttemptPlan(first.target) or cloud is None:  # (3)
            return None
        plan = Plan(features, snapshot, decision, first.target, cloud, policy, policy_label(policy), bypass, "")
        return msgspec.structs.replace(plan, lines=shared_header_lines(plan.head(NO_INFO), JSON))


def _answer_of(body: bytes, answer_id: str) -> Chunk | None:
    """Return the only choice of a whole answer, with its end and its usage; None for any other answer."""
    try:
        chunks = decode_answer(body, answer_id)
    except CausewayError:
        return None
    chunk = chunks[0]
    is_usual = len(chunks) == 1 and not chunk.index and chunk.finish_reason is not None and not chunk.resume
    return chunk if is_usual and (chunk.text or chunk.tokens) else None
