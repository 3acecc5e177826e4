"""The making of one answer (`Generation`), one client's request for it, and its sharing between identical requests.

The `RequestContext` passes every piece on to the reply and notes numbers and names as they pass, never content. When
the request ends, `finish` turns them into the one Outcome.

A shared generation runs in a task of its own, which belongs to no request: every subscriber, the one that started it
included, reads the pieces as they arrive, and the task is cancelled when the last subscriber leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.abc
import msgspec

from router.decision.attempts import AttemptSequence
from router.decision.decide import RequestMemo, features_of
from router.errors import (
    CausewayError,
    ClientGone,
    CloudFailed,
    CloudRefused,
    Draining,
    InvalidRequest,
)
from router.openai.cached_answer import CachedAnswer
from router.policy.compiled import Policy
from router.policy.signals import COSTLY, concerned
from router.serving.logs import redacted
from router.serving.reply import AnswerHead, AnswerReader, Piece, ReplayingReply, SharedAnswer
from router.tool_calls.schema import with_own_ids
from router.types import (
    AttemptRecord,
    AudioPart,
    CachePlan,
    CacheStatus,
    Chunk,
    Confidence,
    Decision,
    DecisionRecord,
    Estimates,
    Message,
    Outcome,
    PartRecord,
    Request,
    Snapshot,
    Target,
    TextPart,
    Usage,
)

from ..backends.backend import JobTerms, UpstreamInfo
from ..clock import Clock
from ..observability.metrics import Metrics
from ..storage.cache import CacheHit
from ..storage.decisions import DecisionStore
from ..storage.spend import SpendStore

if TYPE_CHECKING:
    from models.constraints.json_schema import HeldRequest
    from models.modalities.graph.facts import RequestFacts, RequestSoftTokens
    from models.semantic.judge import ComparedText

    from ..observability.tracing import RequestTrace

log = logging.getLogger(__name__)

Status = Literal["ok", "error", "cancelled", "rejected"]
BUFFER_BYTES = 1 << 20
_CHARACTERS_PER_TOKEN = 4  # of English text, where no model has counted
_FALLBACK = "fallback"
_HANDOFF = "handoff"
_CHECK_SHARE = 0.9  # of a request's time; what is left is for the cached answer
# Of every request at first; they never change.
_NOT_ASKED = CachePlan(bypass="refused before the cache was asked")
_NO_ESTIMATES, _NO_USAGE = Estimates(), Usage()


class SemanticCheck(msgspec.Struct, frozen=True):
    """A cached answer to a question that means the same, which waits for the new one."""

    log_odds: float
    hit: CacheHit


class Generation:
    """State of one answer in the making; written only by the task that runs it. Times are monotonic seconds."""

    def __init__(
        self,
        id: str,  # noqa: A002 -- of the decision
        request: Request,
        policy: Policy,
        snapshot: Snapshot,
        *,
        arrived: float,
        deadline: float,
        job: JobTerms | None = None,
    ) -> None:
        self.id = id
        self.job = job
        self.estimated = False  # `usd` has counted what an attempt has not reported
        self.request = request
        self.policy = policy
        self.snapshot = snapshot
        self.arrived = arrived
        self.deadline = deadline
        self.traceparent = ""  # of the client's request
        self.trace: RequestTrace | None = None
        self.cache_plan = _NOT_ASKED
        self.cache_key: bytes | None = None  # None: the policy keeps this request out of the cache
        self.semantic_question: ComparedText | None = None  # set if the semantic cache was searched
        self.semantic_scope = b""
        self.semantic_check: SemanticCheck | None = None  # the answer is made anew, to be compared with a cached one
        self.estimates = _NO_ESTIMATES
        self.unrecorded = COSTLY  # those of the costly signals that were not computed
        self.decision: Decision | None = None
        self.sequence: AttemptSequence | None = None
        self.upstream: UpstreamInfo | None = None  # reported by the current attempt's cloud
        self.held: HeldRequest | None = None  # set where the current attempt's target loosens offered tools
        self.facts: RequestFacts | None = None  # set when an encoder was asked about the request's parts
        self.soft: RequestSoftTokens | None = None  # set when one was asked for their soft tokens
        self.usage = _NO_USAGE
        self.raw_confidence: Confidence | None = None  # as the engine reported it last, before it was calibrated
        self.shadow = ""  # the target that a shadow request asks after the answer
        self.committed = False  # a byte of the answer has been sent
        self.finished = False  # no further attempt will start
        self._records: tuple[AttemptRecord, ...] | None = None

    @property
    def on_device(self) -> bool:
        """Whether a preference or a constraint binds this request to the device: its content is not written to disk."""
        preferred = self.request.hints.prefer == "only_on_device"
        return preferred or self.cache_plan.private or (self.decision is not None and self.decision.on_device)

    @property
    def first_byte_by(self) -> float:
        """When the first byte must be sent: at the deadline, or earlier where a cached answer waits to be sent."""
        if self.semantic_check is None:
            return self.deadline
        return self.arrived + _CHECK_SHARE * (self.deadline - self.arrived)

    @property
    def target(self) -> Target | None:
        """The target of the current, or last, attempt."""
        return self.sequence.attempts[-1].plan.target if self.sequence is not None and self.sequence.attempts else None

    @property
    def degraded(self) -> bool:
        upstream_degraded = self.upstream is not None and self.upstream.degraded
        incomplete = any(record.status != "ok" for record in self.used_parts)
        return self.sequence is not None and (self.sequence.degraded or upstream_degraded or incomplete)

    @property
    def parts(self) -> tuple[PartRecord, ...]:
        """Those that encoders were asked about."""
        facts = () if self.facts is None else self.facts.records
        return facts if self.soft is None else (*facts, *self.soft.records)

    @property
    def used_parts(self) -> tuple[PartRecord, ...]:
        """The parts that the target of the current, or last, attempt gets as text or as soft tokens."""
        if (self.facts is None and self.soft is None) or self.sequence is None or not self.sequence.attempts:
            return ()
        plan = self.sequence.attempts[-1].plan
        return tuple(one for one in self.parts if one.modality in (plan.soft if one.soft else plan.facts))

    @property
    def transcript_confidence(self) -> float | None:
        """Confidence of the transcript, if the last message is one sound; None: it was typed."""
        if self.facts is None:
            return None
        last = len(self.request.messages) - 1
        content = self.request.messages[last].content
        if type(content) is not tuple or len(content) != 1 or not isinstance(content[0], AudioPart):
            return None
        fact = self.facts.facts.get((last, 0))
        return None if fact is None else fact.confidence

    @property
    def reason(self) -> str:
        """The rule that chose the target, or why a later attempt answered: a failure precedes a handoff."""
        if self.decision is None or self.sequence is None:
            return ""
        before = [attempt for attempt in self.sequence.attempts[:-1] if attempt.error is not None]
        failed = [attempt for attempt in before if attempt.state.value != "handed_off"]
        for attempts, kind in ((failed, _FALLBACK), (before, _HANDOFF)):
            if attempts and attempts[-1].error is not None:
                return f"{kind}: {attempts[-1].error.code}"
        return self.decision.rule or ("continued" if self.request.resume else "model_named")

    @property
    def outgoing_traceparent(self) -> str:
        """The trace context that the current attempt sends upstream."""
        if self.trace is None or self.sequence is None:
            return self.traceparent
        return self.trace.attempt(len(self.sequence.attempts) - 1)

    def head(self) -> AnswerHead:
        target = self.target
        assert target is not None
        return AnswerHead(
            id=self.id,
            policy=policy_label(self.policy),
            route=target.at,
            target=target.name,
            model=target.model,
            reason=self.reason,
            cache="bypass" if self.cache_key is None else "miss",
            cache_reason=self.cache_plan.bypass,
            degraded=self.degraded,
            loosened=self._loosened(),
            modalities=self._modalities(),
        )

    def _loosened(self) -> str:
        if self.held is not None:
            return self.held.names
        return "" if self.upstream is None else self.upstream.loosened

    def _modalities(self) -> str:
        elsewhere = "" if self.upstream is None else self.upstream.modalities
        if not (used := self.used_parts):
            return elsewhere
        from models.modalities.graph.facts import summary  # imported when there was such a part

        return ",".join(filter(None, (summary(used), elsewhere)))

    def set_upstream(self, info: UpstreamInfo) -> None:
        self.upstream = info

    def set_held(self, held: HeldRequest) -> None:
        self.held = held

    def records(self, now: float) -> tuple[AttemptRecord, ...]:
        """One record per attempt, without text from the target's errors, which may quote the request."""
        if self.sequence is None:
            return ()
        if self._records is not None:
            return self._records
        records = tuple(
            msgspec.structs.replace(record, detail="") if _quotes_target(attempt.error) else record
            for attempt, record in zip(self.sequence.attempts, self.sequence.records(now), strict=True)
        )
        if records and self.upstream is not None and self.upstream.degraded and not records[-1].error:
            records = (*records[:-1], msgspec.structs.replace(records[-1], detail=str(self.upstream)))
        if records and self.held is not None:
            details = filter(None, (records[-1].detail, self.held.detail))
            records = (*records[:-1], msgspec.structs.replace(records[-1], detail="; ".join(details)))
        if self.finished:
            self._records = records  # final from here on
        return records

    def usd(self) -> float:
        """Cost of all attempts, abandoned ones included; from the answer's own usage where the target reported it.

        An attempt that was abandoned reports none: it costs the prompt, by this device's count, and what was received.
        """
        if self.sequence is None:
            return 0.0
        cost = 0.0
        for attempt in self.sequence.attempts:
            tokens = attempt.tokens
            if attempt is self.sequence.attempts[-1]:
                tokens = max(tokens, self.usage.prompt_tokens + self.usage.completion_tokens)
            if attempt.abandoned and tokens == attempt.tokens:
                tokens += self._prompt_tokens()
                self.estimated = True
            cost += tokens / 1000.0 * attempt.plan.target.usd_per_1k_tokens
        return cost

    def _prompt_tokens(self) -> int:
        """Return the prompt's tokens as the device's model counts them, or estimated from its text."""
        if self.estimates.prompt_tokens is not None:
            return self.estimates.prompt_tokens
        texts = [part.text for message in self.request.messages for part in _text_parts(message)]
        texts += [prompt for prompt in self.request.prompts if isinstance(prompt, str)]
        ids = sum(len(prompt) for prompt in self.request.prompts if not isinstance(prompt, str))
        return ids + sum(map(len, texts)) // _CHARACTERS_PER_TOKEN


def _text_parts(message: Message) -> tuple[TextPart, ...]:
    if message.content is None or isinstance(message.content, str):
        return (TextPart(message.content or ""),)
    return tuple([part for part in message.content if isinstance(part, TextPart)])


def _quotes_target(error: CausewayError | None) -> bool:
    """Whether the message contains text of the target (`router.openai.upstream` puts it after "reported:")."""
    if isinstance(error, InvalidRequest | CloudRefused):
        return True
    return isinstance(error, CloudFailed) and "reported:" in error.message


def policy_label(policy: Policy) -> str:
    return f"{policy.name}@{policy.revision}"


# --- one client's request ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """Where the outcomes of requests go, and the clock that dates them."""

    decisions: DecisionStore
    spend: SpendStore
    metrics: Metrics
    clock: Clock


class RequestContext:
    """Created by the HTTP API for each request; `generation` is set by the service.

    Args:
        request: the parsed request.
        reply: the response to the client.
        id: of the decision, also the `x-request-id`.
        arrived: monotonic seconds.
        traceparent: W3C trace context of the client, "" for none.
        trace: the spans of this request, None when tracing is off.
        memo: what was derived from an equal request.
        job: set if the request is a job, which may wait and is not answered by a lesser target.
    """

    generation: Generation  # this request's own, until the request joins a shared one

    def __init__(
        self,
        request: Request,
        reply: ReplayingReply,
        *,
        id: str,  # noqa: A002
        arrived: float,
        traceparent: str = "",
        trace: RequestTrace | None = None,
        memo: RequestMemo | None = None,
        job: JobTerms | None = None,
    ) -> None:
        self.request = request
        self.job = job
        self.reply = reply
        self.id = id
        self.arrived = arrived
        self.traceparent = traceparent
        self.trace = trace
        self.memo = memo or RequestMemo()
        self.deadline = arrived
        self.head: AnswerHead | None = None
        self.error: CausewayError | None = None
        self.shared = False  # another request's generation answers
        self._usage = _NO_USAGE
        self._finish_reason = ""
        self._hit: CacheHit | None = None  # what was replayed

    @property
    def committed(self) -> bool:
        return self.head is not None

    @property
    def cache(self) -> CacheStatus:
        if self.head is not None:
            return self.head.cache
        if self.shared:
            return "coalesced"
        return "bypass" if self.generation.cache_key is None else "miss"

    def follow(self, generation: Generation, *, shared: bool = False) -> None:
        """Take the answer from `generation`. `shared`: another request started it."""
        self.generation = generation
        self.shared = shared

    # --- Reply -------------------------------------------------------------------------------------------------------

    async def commit(self, head: AnswerHead) -> None:
        own_head = head.id == self.id and head.cache == self.cache
        self.head = head if own_head else msgspec.structs.replace(head, id=self.id, cache=self.cache)
        await self.reply.commit(self.head)

    def send(self, piece: Piece) -> Awaitable[None] | None:
        if piece.usage is not None:
            self._usage = piece.usage
        if isinstance(piece, Chunk) and piece.finish_reason is not None and not self._finish_reason:
            self._finish_reason = piece.finish_reason
        if self.shared and isinstance(piece, Chunk):
            piece = with_own_ids(piece, self.id)
        return self.reply.send(piece)

    async def replay(
        self, hit: CacheHit, *, stale: CausewayError | None = None, check: CausewayError | None = None
    ) -> None:
        """Answer from the cache.

        Args:
            stale: the error because of which an expired answer is served.
            check: the error because of which an answer is served that should have been made anew.
        """
        answer, self._hit = hit.answer, hit
        fresh: CacheStatus = "hit" if hit.similarity is None else "semantic"
        reason = "cache"
        for kind, error in (("stale", stale), ("check", check)):
            reason = reason if error is None else f"{kind}: {error.code}"
        self.head = AnswerHead(
            id=self.id,
            policy=policy_label(self.generation.policy),
            route="cache",
            target=answer.target,
            model=answer.model,
            reason=reason,
            cache=fresh if stale is None else "stale",
            degraded=stale is not None,
        )
        body = answer.body
        self._usage = body.usage
        if isinstance(body, CachedAnswer):
            self._finish_reason = body.choices[0].finish_reason or ""
            body = body.with_own_ids(self.id)
        await self.reply.replay(self.head, body)

    # --- outcome -----------------------------------------------------------------------------------------------------

    def finish(self, now: float, unix_s: float) -> DecisionRecord:
        """The record of this request with its one Outcome. `now`: when it ended, monotonic seconds."""
        generation, memo = self.generation, self.memo
        if memo.features is None:
            memo.features = features_of(self.request)
        return DecisionRecord(
            id=self.id,
            created=unix_s,
            request=memo.features,
            estimates=generation.estimates,
            unrecorded=concerned(generation.unrecorded, memo.features.modalities),
            snapshot=generation.snapshot,
            decision=generation.decision,
            outcome=self._outcome(now),
            parts=generation.parts,
            shadow="" if self.shared else generation.shadow,
        )

    def _outcome(self, now: float) -> Outcome:
        head, error = self.head, self.error
        total_ms = (now - self.arrived) * 1000.0
        return Outcome(
            status=self._status(),
            http_status=200 if head is not None and error is None else self._http_status(),
            route="none" if head is None else head.route,
            target="" if head is None else head.target,
            model="" if head is None else head.model,
            reason=self.generation.reason if head is None else head.reason,
            cache=self.cache,
            cache_reason=self.generation.cache_plan.bypass if self.cache == "bypass" else "",
            cache_age_s=None if self._hit is None else self._hit.age_s,
            similarity=None if self._hit is None else self._hit.similarity,
            degraded=head is not None and head.degraded,
            attempts=self.generation.records(now),
            ttft_ms=self._ttft_ms(total_ms),
            total_ms=total_ms,
            usage=self._usage,
            finish_reason=self._finish_reason if error is None else "",
            usd=0.0 if self.shared else self.generation.usd(),
            estimated=not self.shared and self.generation.estimated,
            error="" if error is None else error.code,
        )

    def _status(self) -> Status:
        if self.error is None:
            return "ok"
        if isinstance(self.error, ClientGone):
            return "cancelled"
        attempted = self.generation.sequence is not None and self.generation.sequence.attempts
        refused = self.error.status < 500 or isinstance(self.error, Draining)
        return "rejected" if refused and not attempted else "error"

    def _http_status(self) -> int:
        assert self.error is not None
        return 200 if self.head is not None and self.request.stream else self.error.status

    def _ttft_ms(self, total_ms: float) -> float | None:
        """From arrival to the first token; for a cached answer, which arrives all at once, to its end."""
        if self.head is None:
            return None
        if self.head.route == "cache" or self.generation.sequence is None:
            return total_ms
        last = self.generation.records(self.arrived)[-1]
        if last.ttft_ms is None:
            return None
        earlier_ms = (self.generation.arrived - self.arrived) * 1000.0  # < 0: the generation was already running
        return max(0.0, earlier_ms + last.started_ms + last.ttft_ms)


# --- single-flight ---------------------------------------------------------------------------------------------------


class Subscriber(AnswerReader):
    """One reader's position in a shared generation."""

    def __init__(self, shared: SharedGeneration) -> None:
        super().__init__(joined=shared.was_joined)
        self.shared = shared

    async def next(self, deadline: float) -> Piece | None:
        """Return the next piece, None after the last.

        Raises:
            CausewayError: the generation failed; DeadlineExceeded may also be this subscriber's own deadline
                (monotonic seconds).
        """
        return await self.shared.read(self, deadline)


class SharedGeneration(SharedAnswer[Piece, Subscriber]):
    """A generation with its buffered answer: the `Reply` of the attempts, and the source of all subscribers."""

    def __init__(self, generation: Generation, buffer_bytes: int = BUFFER_BYTES) -> None:
        super().__init__(buffer_bytes)
        self.generation = generation
        self.head: AnswerHead | None = None
        self.scope = anyio.CancelScope()

    @property
    def joinable(self) -> bool:
        return self.whole and not self.finished and not self.abandoned

    async def commit(self, head: AnswerHead) -> None:
        self.head = head

    def join(self) -> Subscriber:
        return self.add(Subscriber(self))

    def leave(self, subscriber: Subscriber) -> None:
        super().leave(subscriber)
        if not self.subscribers:
            self.abandoned = True
            self.scope.cancel()


Produce = Callable[[SharedGeneration], Awaitable[None]]


class SharedGenerations:
    """The shared generations in progress, by key."""

    def __init__(self) -> None:
        self._tasks: anyio.abc.TaskGroup | None = None
        self._by_key: dict[bytes, SharedGeneration] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def subscribers(self) -> int:
        """Of all generations together."""
        return sum(len(shared.subscribers) for shared in self._by_key.values())

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Run generations as children of `tasks`."""
        self._tasks = tasks

    @contextmanager
    def join(self, key: bytes, generation: Generation, produce: Produce) -> Iterator[tuple[Subscriber, bool]]:
        """Subscribe to the generation of `key`; start it with `produce` unless one can be joined.

        Yields the subscriber, and whether it started the generation. An error that `produce` raises reaches every
        subscriber. The generation is cancelled when its last subscriber leaves.
        """
        if self._tasks is None:
            raise Draining("this server has not started")
        shared = self._by_key.get(key)
        started = shared is None or not shared.joinable
        if shared is None or started:
            shared = self._by_key[key] = SharedGeneration(generation)
            self._tasks.start_soon(self._run, key, shared, produce)
        subscriber = shared.join()
        try:
            yield subscriber, started
        finally:
            shared.leave(subscriber)

    async def _run(self, key: bytes, shared: SharedGeneration, produce: Produce) -> None:
        error: CausewayError | None = None
        ended = False
        try:
            with shared.scope:
                error = await _outcome(shared, produce)
                ended = True
        finally:
            if self._by_key.get(key) is shared:
                del self._by_key[key]
            shared.finish(error if ended else Draining("this server stopped while the answer was being generated"))


async def _outcome(shared: SharedGeneration, produce: Produce) -> CausewayError | None:
    try:
        await produce(shared)
    except CausewayError as error:
        return error
    except Exception as error:
        log.error("a generation failed unexpectedly: %s", redacted(error))
        return CausewayError("internal error")
    return None
