"""The plain case in callbacks: a chat or Message that a cloud answers, from parsed request to record, without a task.

The hops are those of `service`, in the same order, as one straight line: nothing is awaited before the answer, so there
is nothing for a coroutine to do. `DirectAnswers.begin` takes a request only if the general path would do just this:

1. the policy decides by the request's features alone, and has neither variants nor shadow requests: so equal requests
   are planned once for each snapshot of the signals, which is at most 50 ms old
2. the cache is bypassed, whatever the signals are
3. the first attempt is a cloud's, and nothing else is decided: no handoff, no binding to the device or to regions
4. a permit is free, the cloud is well at this moment, and one of its connections is idle

Whatever comes but a good answer (another status, an error, a timeout, a client that leaves or reads slowly, the end of
the daemon) goes to the general path together with the request that was sent: a task awaits the same response, so that
retries, fallbacks, records and the client's error have one place. A stream has the general path's own reader and
encoder, so that a task can go on with them at any byte; its context, attempt and reply are made by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from causeway_server.router.anthropic.encoder import MessageEncoder
from causeway_server.router.anthropic.request import MessageTerms
from causeway_server.router.decision.attempts import Attempt, AttemptSequence
from causeway_server.router.decision.decide import RequestMemo, decide_memoized, early_bypass, features_of
from causeway_server.router.errors import CausewayError
from causeway_server.router.openai.answer import AnswerEncoder, encode_whole
from causeway_server.router.openai.upstream.decode import decode_answer
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.signals import LISTED_UNRECORDED, concerned
from causeway_server.router.prices import FREE, PICO_USD
from causeway_server.router.serving.http_client import HttpResponse
from causeway_server.router.serving.reply import AnswerHead
from causeway_server.router.serving.request import PlainRequest
from causeway_server.router.serving.responses import (
    COMMENT,
    EVENTS,
    JSON,
    EventStream,
    HttpReplyWriter,
    TextExchange,
    device_header_lines,
    id_lines,
    request_id_line,
    send_plain,
    shared_header_lines,
    waiting_lines,
)
from causeway_server.router.serving.upstream.direct import DirectConnection, DirectResponse
from causeway_server.router.serving.upstream.server import StreamReader
from causeway_server.router.types import (
    AttemptPlan,
    AttemptRecord,
    Chunk,
    Decision,
    DecisionRecord,
    Estimates,
    FinishReason,
    Outcome,
    Request,
    RequestFeatures,
    Snapshot,
    Target,
    Usage,
)

from ..backends.backend import BackendRequest, BegunCall, UpstreamInfo
from ..backends.cloud.backend import NO_INFO, CloudBackend, Clouds, upstream_info
from .generation import ChunkRelay, policy_label, with_temperature
from .requests import RequestContext
from .service import Service, bypassed

_NO_ESTIMATES: Final = Estimates()
_NO_USAGE: Final = Usage()
_MAX_PLANS: Final = 256
ID_HEADERS: Final = ("x-request-id", "x-causeway-decision")
Context = tuple[RequestContext, HttpReplyWriter[AnswerHead]]


class Arrival(msgspec.Struct, gc=False, frozen=True):
    """A parsed request. `arrived`: monotonic seconds; `unix`: the same moment, Unix seconds."""

    id: str  # the decision's
    request: Request
    memo: RequestMemo
    traceparent: str
    arrived: float
    unix: float
    encoded: bytes  # as of `ParsedRequest`
    terms: MessageTerms | None  # of a Message; None: it is a chat


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
    event_lines: str  # the same of a stream

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
            degraded=info.degraded,
            loosened=info.loosened,
            variant=self.target.variant,
            modalities=info.modalities,
            trimmed=info.trimmed,
        )


class _Ended(NamedTuple):
    """The end of an answer: monotonic and Unix seconds, and what it cost."""

    monotonic: float
    unix: float
    usd: float


class DirectAnswer(DirectResponse):
    """An answer that is waiting for its cloud. `started`: time at which the request was sent, the loop's clock."""

    __slots__ = ("_call", "_plan", "_service", "arrival", "started")
    _call: BackendRequest

    def __init__(
        self, service: Service, arrival: Arrival, plan: Plan, http: PlainRequest, connection: DirectConnection
    ) -> None:
        super().__init__(http, connection)
        self.arrival, self.started = arrival, asyncio.get_running_loop().time()
        self._service, self._plan = service, plan

    def send(self) -> bool:
        """Send the request. Returns False if there is no connection."""
        self._call = self._new_call()
        response = self._plan.cloud.begin(self._call)
        if response is None:
            return False
        self._own(response)
        return True

    def context(self) -> Context:
        """Return the request's context, with what was decided and sent, and the reply: the general path goes on."""
        context = self._new_context()
        context[0].generation.begun = BegunCall(self._response, self.started)
        return context

    def _new_call(self) -> BackendRequest:
        arrival, plan, service = self.arrival, self._plan, self._service
        request = with_temperature(arrival.request, plan.target)
        last = service.deadline(request, arrival.arrived)
        deadline, first_token_by = service.attempts.until(plan.target, last, last, self.started, streams=request.stream)
        return BackendRequest(
            id=arrival.id,
            request=request,
            target=plan.target,
            deadline=deadline,
            first_token_by=first_token_by,
            traceparent=arrival.traceparent,
            policy=plan.label,
            cacheable=False,
            encoded=arrival.encoded if request is arrival.request else b"",
        )

    def _new_context(self) -> Context:
        arrival, plan = self.arrival, self._plan
        request, number = arrival.request, arrival.id
        created = int(arrival.unix)
        reply = HttpReplyWriter(
            request,
            self._http,
            device_header_lines,
            id=number,
            created=created,
            echo=arrival.terms,
            id_headers=ID_HEADERS,
        )
        context = RequestContext(
            request, reply, id=number, arrived=arrival.arrived, traceparent=arrival.traceparent, memo=arrival.memo
        )
        self._service.begin(context)
        generation = context.generation
        generation.policy, generation.snapshot, generation.decision = plan.policy, plan.snapshot, plan.decision
        generation.cache_plan = bypassed(plan.bypass)
        generation.sequence = AttemptSequence(
            plan.decision, stream=request.stream, choices=1, arrived=generation.arrived
        )
        return context, reply

    def _advance(self, response: HttpResponse) -> bool:
        """Send a good answer to the client, or wait for it; return False, and do nothing, if it is not a usual one."""
        if response.error is not None or (response.status and response.status != 200):
            return False
        if not response.complete:
            return not response.is_crowded
        body, connection, plan = response.peek(), self._connection, self._plan
        if connection.writing_paused:
            return False
        arrival, target, info = self.arrival, plan.target, upstream_info(response)
        chunk = _answer_of(body, arrival.id)
        usage = None if chunk is None else chunk.usage
        if chunk is None or usage is None or info.degraded:
            return False
        if target.price is not FREE and not (usage.prompt_tokens or usage.completion_tokens):
            return False  # its cost is estimated
        created, terms = int(arrival.unix), arrival.terms
        if terms is None:
            answer = encode_whole(arrival.request, f"chatcmpl-{arrival.id}", target.model, created, (chunk,))
        else:
            encoder = MessageEncoder(arrival.request, terms, f"msg_{arrival.id}", target.model)
            answer = encoder.whole((chunk,), usage)
        lines = plan.lines if info is NO_INFO else shared_header_lines(plan.head(info), JSON)
        send_plain(self._http, lines + id_lines(arrival.id) + request_id_line(arrival.id, terms), answer)
        self._disown()
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._service.admission.release(now - self.started)
        plan.cloud.answered(response)
        plan.cloud.succeeded(self._call)
        # As after other answers, the response leaves first.
        told = chunk.tokens, chunk.note, chunk.finish_reason or ""
        loop.call_soon(self._record, told, usage, now, now, self._ended(usage))
        connection.answered(self._http)
        return True

    def _ended(self, usage: Usage) -> _Ended:
        """Charge what the answer costs; return that, and the time."""
        records, budgets = self._service.records, self._service.admission.budgets
        usd, monotonic = usage.pico_usd(self._plan.target.price) / PICO_USD, records.clock.monotonic()
        if usd > 0.0:
            records.spend.add(usd)
        if budgets is not None:
            charged = usage.prompt_tokens + usage.completion_tokens
            budgets.charge(self.arrival.request.hints.client, charged, usd, monotonic)
        return _Ended(monotonic, records.clock.unix(), usd)

    def _record(self, told: tuple[int, str, str], usage: Usage, first: float, last: float, end: _Ended) -> None:
        """Record the answer: tokens, note, finish reason, and when its first and last token came (loop's clock)."""
        tokens, note, finish_reason = told
        arrival, plan, records = self.arrival, self._plan, self._service.records
        target = plan.target
        started_ms = round((self.started - arrival.arrived) * 1000.0, 3)
        ttft_ms = round((first - self.started) * 1000.0, 3)
        total_ms = (end.monotonic - arrival.arrived) * 1000.0
        setup = plan.snapshot.setup
        attempt = AttemptRecord(
            target=target.name,
            at="cloud",
            state="done",
            started_ms=started_ms,
            ttft_ms=ttft_ms,
            duration_ms=round((last - self.started) * 1000.0, 3),
            tokens=tokens,
            detail=note,
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
            ttft_ms=max(0.0, started_ms + ttft_ms),
            total_ms=total_ms,
            usage=usage,
            finish_reason=finish_reason,
            usd=end.usd,
        )
        records.decisions.add(
            DecisionRecord(
                id=arrival.id,
                created=end.unix,
                request=plan.features,
                estimates=_NO_ESTIMATES,
                unrecorded=concerned(LISTED_UNRECORDED, plan.features.modalities),
                snapshot=plan.snapshot,
                decision=plan.decision,
                outcome=outcome,
            )
        )
        records.metrics.passed_on(arrival.request, target, usage, attempt, usd=end.usd, total_s=total_ms / 1000.0)


class DirectStream(DirectAnswer):
    """A streamed answer. Text alone goes from the cloud's connection to the client's through the exchange; context,
    reply and attempt of the general path are made when that must go on.
    """

    __slots__ = (
        *("_beat", "_beat_s", "_encoder", "_finish", "_first", "_info", "_note", "_opening", "_sent", "_stream"),
        *("_tokens", "_usage", "_whole"),
    )

    def __init__(
        self, service: Service, arrival: Arrival, plan: Plan, http: PlainRequest, connection: DirectConnection
    ) -> None:
        super().__init__(service, arrival, plan, http, connection)
        self._reader: StreamReader | None = None
        self._stream: EventStream | None = None
        self._encoder: AnswerEncoder | MessageEncoder | None = None  # of a stream that has begun
        self._exchange: TextExchange | None = None  # has the chunks that fit the template first
        self._info = NO_INFO
        self._opening = b""  # the first event, sent together with the first content
        self._note = ""
        self._first: float | None = None  # when the first token came, the loop's clock
        self._tokens = 0
        self._finish: FinishReason | None = None
        self._whole = False  # whether the choice has ended
        self._usage: Usage | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._beat_s = 0.0
        self._sent = 0  # the number of tokens at the last heartbeat

    def changed(self) -> None:
        self._settle()
        super().changed()
        if self._exchange is not None and self._reader is not None:
            self._exchange.left_bytes = self._reader.left_bytes

    def _advance(self, response: HttpResponse) -> bool:
        """Pass on what has arrived; return False if the general path must go on."""
        reader, cloud = self._reader, self._plan.cloud
        if response.error is not None or not self._takes_bytes:
            return False
        if reader is None:
            if response.status != 200 or response.is_encoded:
                return False
            cloud.answered(response)
            self._info = upstream_info(response)
            reader = self._reader = cloud.reader(self._call, response)
        if (exchange := self._exchange) is not None and self._stream is not None and (texts := reader.take_texts()):
            self._stream.send_now(exchange.events(texts))
            return not self._connection.writing_paused
        try:
            if self._send(reader.feed(), is_end=reader.done):
                self._end(response, reader)
                return True
        except Exception as failure:
            reader.fail(failure)  # not all of them were sent
            raise
        self._offer(response, reader)
        ends = reader.done or response.complete
        return reader.is_usual and not ends and not self._connection.writing_paused

    def _send(self, chunks: Sequence[Chunk], *, is_end: bool) -> bool:
        """Pass chunks on as `AttemptRunner` does; return whether the whole answer is sent. Raises ClientGone."""
        if not chunks:
            return False
        now = asyncio.get_running_loop().time()
        encoder, stream = self._encoder or self._begin(), self._stream
        assert stream is not None
        events = [self._opening]
        for chunk in chunks:
            if self._first is None and (chunk.text or chunk.tokens or chunk.tool_calls):
                self._first = now
            if chunk.finish_reason is not None:
                self._finish = self._finish or chunk.finish_reason
                self._whole = self._whole or not chunk.index
            self._tokens += chunk.tokens
            self._note = chunk.note or self._note
            self._usage = chunk.usage or self._usage
            events.append(encoder.chunk(chunk))
        if is_end and self._whole:
            stream.end(b"".join((*events, encoder.end())))
            return True
        if any(events[1:]):
            self._opening = b""
            stream.send_now(b"".join(events))
        return False

    def _begin(self) -> AnswerEncoder | MessageEncoder:
        """Begin the answer, whose head leaves with the first content. Return its encoder."""
        arrival, plan, info = self.arrival, self._plan, self._info
        if arrival.terms is None:
            encoder: AnswerEncoder | MessageEncoder = AnswerEncoder(
                arrival.request, f"chatcmpl-{arrival.id}", plan.target.model, int(arrival.unix)
            )
        else:
            encoder = MessageEncoder(arrival.request, arrival.terms, f"msg_{arrival.id}", plan.target.model)
        self._encoder, self._opening = encoder, encoder.start()
        if self._stream is None:
            lines = plan.event_lines if info is NO_INFO else shared_header_lines(plan.head(info), EVENTS)
            self._stream = self._new_stream(lines + id_lines(arrival.id))
        return encoder

    def _new_stream(self, lines: str) -> EventStream:
        return EventStream(self._http, lines + request_id_line(self.arrival.id, self.arrival.terms))

    def _offer(self, response: HttpResponse, reader: StreamReader) -> None:
        """Let the exchange have the chunks that fit the template of text alone, as long as there is one."""
        template, encoder, known = reader.text_template, self._encoder, self._exchange
        around = None if template is None or encoder is None else encoder.around.get(template.index)
        if known is not None and known.template is template and known.around is around:
            return
        if template is None or around is None:
            self._exchange = None
        else:
            self._exchange = TextExchange(template, around, self._http.protocol)
        response.offer_chunks(None if self._exchange is None else self._exchange.take)

    def _settle(self) -> None:
        """Count what the exchange has passed on."""
        exchange, reader, encoder = self._exchange, self._reader, self._encoder
        if exchange is not None and exchange.tokens and reader is not None and encoder is not None:
            self._tokens += exchange.tokens
            encoder.tokens += exchange.tokens
            reader.left_bytes = exchange.left_bytes
            exchange.tokens = 0

    def _end(self, response: HttpResponse, reader: StreamReader) -> None:
        """Record the answer, whose end was sent."""
        service, loop = self._service, asyncio.get_running_loop()
        self._disown()
        response.offer_chunks(None)  # the connection may bring more, and its client may have the next answer by then
        reader.close()
        self._stop_heartbeat()
        now, usage, first = loop.time(), self._usage or _NO_USAGE, self._first
        service.admission.release(now - self.started)
        self._plan.cloud.succeeded(self._call)
        counted = usage.prompt_tokens or usage.completion_tokens
        is_known = counted or (self._plan.target.price is FREE and service.admission.budgets is None)
        if is_known and first is not None and not self._info.degraded:
            told = self._tokens, self._note, self._finish or ""
            service.records.decisions.later(partial(self._record, told, usage, first, now, self._ended(usage)))
        else:  # its tokens are estimated, or its record says more
            context, _, attempt = self._general()
            attempt.finish(now)
            service.end_generation(context.generation)
            service.end(context)
        self._connection.answered(self._http)

    # --- heartbeat ---------------------------------------------------------------------------------------------------

    def begin_heartbeat(self, interval_s: float) -> None:
        """Send comments, as `HttpReplyWriter` does."""
        self._beat_s = interval_s
        self._beat = asyncio.get_running_loop().call_later(interval_s / 2, self._look)

    def _look(self) -> None:
        self._settle()
        if self._tokens == self._sent and self._takes_bytes:
            if self._stream is None:
                self._stream = self._new_stream(waiting_lines(ID_HEADERS, self.arrival.id))
            self._stream.send_now(COMMENT)
        self._sent = self._tokens
        self.begin_heartbeat(self._beat_s)

    def _stop_heartbeat(self) -> None:
        if self._beat is not None:
            self._beat.cancel()

    # --- the general path --------------------------------------------------------------------------------------------

    def _hand_over(self) -> asyncio.Task[None]:
        self._stop_heartbeat()
        return super()._hand_over()

    def context(self) -> Context:
        self._settle()
        context, reply, attempt = self._general()
        relay, generation = ChunkRelay(attempt, context), context.generation
        if self._stream is not None:
            reply.adopt(context.head, self._stream, self._encoder, self._opening)
        if self._tokens:
            relay.sent(0)
        if self._reader is not None:
            self._reader.relay_to(relay)
        if self._beat_s:
            reply.heartbeat_s = self._beat_s
            reply.begin_heartbeat()
        generation.begun, generation.relay = BegunCall(self._response, self.started, self._reader), relay
        return context, reply

    def _general(self) -> tuple[RequestContext, HttpReplyWriter[AnswerHead], Attempt]:
        """Return context, reply and attempt as the general path would have them now."""
        context, reply = self._new_context()
        generation = context.generation
        attempt = None if generation.sequence is None else generation.sequence.next_attempt()
        assert attempt is not None  # a plan has at least one
        attempt.start(self.started)
        if self._reader is not None:
            generation.set_upstream(self._info)
        if self._encoder is not None:
            end = self._finish if self._whole else None
            attempt.receive(Chunk(tokens=self._tokens, finish_reason=end, note=self._note), self._first or self.started)
            generation.committed = True
            generation.usage = self._usage or generation.usage
            context.resume(generation.head(), self._finish or "", generation.usage)
        return context, reply, attempt


class DirectAnswers:
    """Begins the answers of the plain case. `heartbeat_s`: as of `HttpReplyWriter`."""

    def __init__(self, service: Service, clouds: Clouds, heartbeat_s: float = 0.0) -> None:
        self._service = service
        self._clouds = clouds
        self._heartbeat_s = heartbeat_s
        self._policy: Policy | None = None
        self._snapshot: Snapshot | None = None
        # By the identity of features, which equal requests share; under that policy, for that snapshot:
        self._plans: dict[int, tuple[RequestFeatures, Plan | None]] = {}

    def begin(self, arrival: Arrival, http: PlainRequest, connection: DirectConnection) -> DirectAnswer | None:
        """Send a request to its cloud. Returns None, and does nothing, if it is not a plain case."""
        service, request, admission = self._service, arrival.request, self._service.admission
        policy = service.direct_policy
        if policy is None or request.kind != "chat" or not admission.has_room:  # (1) (4)
            return None
        plan = self._plan(policy, request, arrival.memo, is_text=bool(arrival.encoded))
        if plan is None or connection.writing_paused or not plan.cloud.is_ready:  # (4)
            return None
        try:
            admission.admit(request.hints.client, arrival.arrived)
        except CausewayError:
            return None  # the general path meets it again: a refusal costs the client nothing
        admission.try_acquire()
        answer, is_sent = None, False
        try:
            answer = (DirectStream if request.stream else DirectAnswer)(service, arrival, plan, http, connection)
            is_sent = answer.send()
        finally:
            if not is_sent:
                admission.release(0.0)
        if is_sent and self._heartbeat_s and isinstance(answer, DirectStream):
            answer.begin_heartbeat(self._heartbeat_s)
        return answer if is_sent else None

    def _plan(self, policy: Policy, request: Request, memo: RequestMemo, *, is_text: bool) -> Plan | None:
        """Return the plan for a request; None if it is not a plain case."""
        snapshot = self._service.signals.recent_snapshot(policy)
        if snapshot is not self._snapshot or policy is not self._policy or len(self._plans) > _MAX_PLANS:
            self._policy, self._snapshot = policy, snapshot
            self._plans.clear()
        features = memo.features
        if features is None:
            features = memo.features = features_of(request, is_text=is_text)
        known = self._plans.get(id(features))
        if known is None:
            known = self._plans[id(features)] = (features, self._new_plan(policy, snapshot, request, features))
        return known[1]

    def _new_plan(self, policy: Policy, snapshot: Snapshot, request: Request, features: RequestFeatures) -> Plan | None:
        bypass = early_bypass(policy, request)
        if not bypass or request.n != 1 or len(features.modalities) > 1:  # (2)
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
        plan = Plan(features, snapshot, decision, first.target, cloud, policy, policy_label(policy), bypass, "", "")
        lines, event_lines = (shared_header_lines(plan.head(NO_INFO), media_type) for media_type in (JSON, EVENTS))
        return msgspec.structs.replace(plan, lines=lines, event_lines=event_lines)


def _answer_of(body: bytes, answer_id: str) -> Chunk | None:
    """Return the only choice of a whole answer, with its end and its usage; None for any other answer."""
    try:
        chunks = decode_answer(body, answer_id)
    except CausewayError:
        return None
    chunk = chunks[0]
    is_usual = len(chunks) == 1 and not chunk.index and chunk.finish_reason is not None
    return chunk if is_usual and (chunk.text or chunk.tokens) else None
