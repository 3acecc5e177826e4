"""An answer in progress: its state (`Generation`), and the run of the decision's attempts (`AttemptRunner`).

The order, the hold-back for a handoff and the rule for the next attempt are pure (`router.decision.attempts`); this
module awaits, and limits every wait:

1. first token and complete answer each have the target's own timeout; after it the next target may answer
2. everything ends at the request's deadline; after it no target is tried
3. closing an abandoned backend stream takes at most `_CLOSE_S`

A request, or a part of one, that is bound to the device never reaches a cloud backend, whatever the decision says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.abc
import msgspec

from causeway_server.router.bundle.settings import CloudSettings
from causeway_server.router.decision.abilities import no_route, pinned_error
from causeway_server.router.decision.attempts import Attempt, AttemptSequence, AttemptState, final_error
from causeway_server.router.decision.candidates import MOST_TOKENS
from causeway_server.router.decision.sessions import SessionTurn
from causeway_server.router.errors import (
    BackendError,
    BreakerOpen,
    CausewayError,
    ClientGone,
    CloudFailed,
    CloudRefused,
    CloudTimeout,
    DeadlineExceeded,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    NoRoute,
    TargetNotConfigured,
)
from causeway_server.router.guard.mask import Restorer, restored_whole, restorer_of
from causeway_server.router.openai.tokens import TokenizeRequest, TokenList
from causeway_server.router.parts.reading import Form, first_part, has_parts
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.signals import LISTED_UNRECORDED, modalities
from causeway_server.router.prices import FREE, PICO_USD
from causeway_server.router.serving.guard.runner import GuardRunner, restored
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.reply import AnswerHead, Piece, Reply, TextSink, text_sink_of
from causeway_server.router.types import (
    AttemptPlan,
    AttemptRecord,
    AudioPart,
    CachePlan,
    Chunk,
    Confidence,
    Decision,
    Estimates,
    Location,
    Message,
    PartRecord,
    Request,
    RequestFeatures,
    Snapshot,
    Target,
    TextPart,
    Usage,
)

from ..backends.backend import Backend, BackendRequest, BegunCall, JobTerms, UpstreamInfo
from ..storage.cache import CacheHit

if TYPE_CHECKING:
    from causeway_server.models.chat.overflow import TrimmedRequest
    from causeway_server.models.constraints.grammars import EnforceableRequest
    from causeway_server.models.llama_cpp.protocol import SoftTokens
    from causeway_server.models.parts.graph.graph import RequestFacts, RequestSoftTokens
    from causeway_server.models.semantic.judge import ComparedText

    from ..observability.tracing import RequestTrace

log = logging.getLogger(__name__)

_CHARACTERS_PER_TOKEN = 4  # characters of English text per token, if no model has counted
_FALLBACK = "fallback"
_HANDOFF = "handoff"
_CHECK_SHARE = 0.9  # share of a request's time; the rest is reserved for the cached answer
# The initial state of every request; never modified.
_NOT_ASKED = CachePlan(bypass="refused before the cache was asked")
_NO_ESTIMATES, _NO_USAGE = Estimates(), Usage()
_CLOSE_S = 2.0
_GRACE_S = 0.05  # grace period: backends enforce their own timeouts and report the phase; this is the backstop
_TIMER_STEP_S = 0.005  # timers may fire this much early
# Arguments: a backend request, a chunk of its answer, `edge.quality` if known, and the confidence of the transcript
# if the request was spoken. Returns the chunk with its confidence as a probability.
ConfidenceCalibrator = Callable[[BackendRequest, Chunk, float | None, float | None], Chunk]


class SemanticCheck(msgspec.Struct, frozen=True):
    """A cached answer to a question with the same meaning, which waits for the new answer."""

    log_odds: float
    hit: CacheHit


class Generation(msgspec.Struct, eq=False):
    """State of an answer in progress; written only by the task that runs it. Times are monotonic seconds."""

    id: str  # the decision's
    request: Request
    policy: Policy
    snapshot: Snapshot
    arrived: float
    deadline: float
    job: JobTerms | None = None
    features: RequestFeatures | None = None  # None: not computed
    estimated: bool = False  # whether `usd` has an estimate for an attempt that reported no usage
    traceparent: str = ""  # the client's request
    trace: RequestTrace | None = None
    cache_plan: CachePlan = _NOT_ASKED
    cache_key: bytes | None = None  # None: the policy keeps this request out of the cache
    begun: BegunCall | None = None  # the first attempt's, if it was made in callbacks; with decision and sequence
    relay: ChunkRelay | None = None  # the one that has begun, if the call streams
    semantic_question: ComparedText | None = None  # set if the semantic cache was searched
    semantic_scope: bytes = b""
    # set if the answer is generated again, to be compared with a cached one
    semantic_check: SemanticCheck | None = None
    estimates: Estimates = _NO_ESTIMATES
    unrecorded: tuple[str, ...] = LISTED_UNRECORDED  # on-demand signals that were not computed
    decision: Decision | None = None
    sequence: AttemptSequence | None = None
    upstream: UpstreamInfo | None = None  # reported by the current attempt's cloud
    trimmed: TrimmedRequest | None = None  # set if the chat exceeds the context of the current target
    reserved_usd: float = 0.0  # of the policy's budget
    enforceable: EnforceableRequest | None = None  # set if the current target loosens offered tools
    facts: RequestFacts | None = None  # set when an encoder was asked about the request's parts
    soft: RequestSoftTokens | None = None  # set when a projector was asked for the parts' soft tokens
    usage: Usage = _NO_USAGE
    raw_confidence: Confidence | None = None  # the engine's last report, before calibration
    session: SessionTurn | None = None  # None: the policy has no `session`
    shadow: str = ""  # the target that a shadow request asks after the answer
    committed: bool = False  # whether a byte of the answer has been sent
    finished: bool = False  # whether no further attempt will start
    _records: tuple[AttemptRecord, ...] | None = None
    _usd: float | None = None

    def __repr__(self) -> str:
        return f"Generation({self.id!r})"  # without the request's content

    @property
    def on_device(self) -> bool:
        """Whether a preference or a constraint binds this request to the device: its content is not written to disk."""
        preferred = self.request.hints.prefer == "only_on_device"
        return preferred or self.cache_plan.private or (self.decision is not None and self.decision.on_device)

    @property
    def regions(self) -> tuple[str, ...] | None:
        """The regions to which this request is bound, as decided, or as planned for an answer of the cache."""
        return self.cache_plan.regions if self.decision is None else self.decision.regions

    @property
    def first_byte_by(self) -> float:
        """Time by which the first byte must be sent: the deadline, or earlier if a cached answer waits to be sent."""
        if self.semantic_check is None:
            return self.deadline
        return self.arrived + _CHECK_SHARE * (self.deadline - self.arrived)

    @property
    def target(self) -> Target | None:
        """The target of the current, or last, attempt."""
        return self.sequence.attempts[-1].plan.target if self.sequence is not None and self.sequence.attempts else None

    @property
    def degraded(self) -> bool:
        if self.sequence is None:
            return False
        if self.sequence.degraded or (self.upstream is not None and self.upstream.degraded):
            return True
        asked = self.facts is not None or self.soft is not None
        return asked and any(record.status != "ok" for record in self.used_parts)

    @property
    def parts(self) -> tuple[PartRecord, ...]:
        """The parts about which encoders were asked."""
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
        """Confidence of the transcript, if the last message is one audio clip; None if it was typed."""
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
        own_reason = self.decision.rule or "model_named"
        if len(self.sequence.attempts) == 1:
            return own_reason
        before = [attempt for attempt in self.sequence.attempts[:-1] if attempt.error is not None]
        failed = [attempt for attempt in before if attempt.state.value != "handed_off"]
        for attempts, kind in ((failed, _FALLBACK), (before, _HANDOFF)):
            if attempts and attempts[-1].error is not None:
                return f"{kind}: {attempts[-1].error.code}"
        return own_reason

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
            trimmed=self._trimmed(),
            variant=target.variant,
            temperature=target.temperature,
            modalities=self._modalities(),
        )

    def _trimmed(self) -> str:
        if self.trimmed is not None:
            return str(self.trimmed.left_out)
        return "" if self.upstream is None else self.upstream.trimmed

    def _loosened(self) -> str:
        if self.enforceable is not None:
            return self.enforceable.names
        return "" if self.upstream is None else self.upstream.loosened

    def _modalities(self) -> str:
        elsewhere = "" if self.upstream is None else self.upstream.modalities
        if not (used := self.used_parts):
            return elsewhere
        from causeway_server.models.parts.graph.graph import summary  # imported when there was such a part

        return ",".join(filter(None, (summary(used), elsewhere)))

    def set_upstream(self, info: UpstreamInfo) -> None:
        self.upstream = info

    def set_enforceable(self, request: EnforceableRequest) -> None:
        self.enforceable = request

    def records(self, now: float) -> tuple[AttemptRecord, ...]:
        """Return one record per attempt, without text from the target's errors, which may quote the request."""
        if self._records is not None:
            return self._records
        if self.sequence is None:
            return ()
        records = self.sequence.records(now)
        if (setup := self.snapshot.setup) is not None and setup.regions:
            records = tuple(
                msgspec.structs.replace(record, region=setup.region_of(attempt.plan.target))
                if record.at == "cloud"
                else record
                for attempt, record in zip(self.sequence.attempts, records, strict=True)
            )
        if any(attempt.error is not None for attempt in self.sequence.attempts):
            records = tuple(
                msgspec.structs.replace(record, detail="") if _quotes_target(attempt.error) else record
                for attempt, record in zip(self.sequence.attempts, records, strict=True)
            )
        if records and self.upstream is not None and self.upstream.degraded and not records[-1].error:
            records = (*records[:-1], msgspec.structs.replace(records[-1], detail=str(self.upstream)))
        if records and (self.enforceable is not None or self.trimmed is not None):
            changes = (None if one is None else one.detail for one in (self.enforceable, self.trimmed))
            details = filter(None, (records[-1].detail, *changes))
            records = (*records[:-1], msgspec.structs.replace(records[-1], detail="; ".join(details)))
        if self.finished:
            self._records = records  # final from here on
        return records

    def usd(self) -> float:
        """Cost of all attempts, including abandoned ones, in US dollars: a whole number of 1e-12."""
        if self.sequence is None:
            return 0.0
        if self._usd is not None:
            return self._usd
        last = self.sequence.attempts[-1] if self.sequence.attempts else None
        usd = sum(self._pico_usd(one, is_last=one is last) for one in self.sequence.attempts) / PICO_USD
        if self.finished:
            self._usd = usd  # final from here on
        return usd

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer: as the target reported, or of abandoned attempts by this device's count."""
        told = self.usage.prompt_tokens + self.usage.completion_tokens
        attempts = () if self.sequence is None else self.sequence.attempts
        if told or not any(attempt.tokens or attempt.abandoned for attempt in attempts):
            return told
        return self._prompt_tokens() + sum(attempt.tokens for attempt in attempts)

    def _pico_usd(self, attempt: Attempt, *, is_last: bool) -> int:
        """Return the cost of an attempt by its target's usage. Without one, as of an abandoned attempt, it costs the
        prompt, by this device's count, and the received tokens.
        """
        price, usage = attempt.plan.target.price, self.usage if is_last else _NO_USAGE
        if price is FREE or not (usage.prompt_tokens or usage.completion_tokens or attempt.tokens or attempt.abandoned):
            return 0
        if not usage.prompt_tokens and not usage.completion_tokens:
            self.estimated = True
            usage = Usage(self._prompt_tokens(), attempt.tokens, audio_ms=self.audio_ms(attempt.plan))
        return usage.pico_usd(price)

    def audio_ms(self, plan: AttemptPlan) -> int:
        """Return the length of the audio that a target hears itself, if that has a price."""
        if not plan.target.price.audio_second or "audio" in plan.facts or not has_parts(self.request, ("audio",)):
            return 0
        self.estimated = self.estimated or self.estimates.audio_s is None
        return round((self.estimates.audio_s or 0.0) * 1000.0)

    def _prompt_tokens(self) -> int:
        """Return the prompt's tokens as counted by the device's model, or estimated from its text."""
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
    """Return whether the message contains text of the target (`router.openai.upstream` puts it after "reported:")."""
    if isinstance(error, InvalidRequest | CloudRefused):
        return True
    return isinstance(error, CloudFailed) and "reported:" in error.message


def policy_label(policy: Policy) -> str:
    return f"{policy.name}@{policy.revision}"


class Tokenizer(Protocol):
    """The tokenizers of the device's models. Each method raises CausewayError."""

    async def tokenize(self, request: Request, model: str, *, adds_special: bool = True) -> TokenList: ...

    async def detokenize(self, tokens: tuple[int, ...], model: str) -> str: ...


class PartPreparation(Protocol):
    """Turns parts of a request into the form that the target of an attempt takes; see `PartEncoders.prepare`."""

    async def prepare(
        self, generation: Generation, plan: AttemptPlan, form: Form | None = None
    ) -> tuple[Request, tuple[SoftTokens, ...]]: ...


@dataclass(eq=False, repr=False)
class AttemptRunner:
    """Runs attempts on backends. Without `calibrate` a handoff compares the engine's own confidence; `encoders` turn
    parts into text or soft tokens for targets that cannot take them; by `tokenizer`, of the device's models, chats are
    trimmed.
    """

    backends: Mapping[Location, Backend]
    cloud: CloudSettings  # timeouts of cloud targets for which the policy sets none; others have the request's time
    calibrate: ConfidenceCalibrator | None = None
    encoders: PartPreparation | None = None
    tokenizer: Tokenizer | None = None
    guard: GuardRunner = field(default_factory=GuardRunner)  # masks requests to clouds, where the policy asks for it

    async def run(self, generation: Generation, reply: Reply[AnswerHead]) -> None:
        """Run attempts until `reply` has the complete answer. Raises CausewayError, the error for the client."""
        assert generation.sequence is not None
        assert generation.decision is not None
        if generation.semantic_check is not None:
            _refuse_skipped(generation)
        while (attempt := generation.sequence.next_attempt()) is not None:
            try:
                await self._run_attempt(generation, attempt, reply)
                return
            except asyncio.CancelledError:
                _fail(attempt, ClientGone("The client disconnected."))
                raise
            except Exception as failure:
                error = _as_causeway_error(failure, attempt.plan.target)
                _fail(attempt, error)
                gives_up = generation.semantic_check is not None and attempt.failed
                if gives_up or generation.sequence.next_step(error) == "raise":
                    if not gives_up and await self._trim(generation, error):
                        continue
                    final = final_error(generation.sequence.attempts, error)
                    raise pinned_error(generation.decision, final) from failure
        raise no_route(generation.decision)

    async def _trim(self, generation: Generation, error: CausewayError) -> bool:
        """Plan a last attempt with a chat that fits the device, if the policy trims. Return whether there is one."""
        assert generation.sequence is not None
        request, tokenizer = generation.request, self.tokenizer
        if generation.policy.overflow == "refuse" or generation.trimmed is not None or tokenizer is None:
            return False
        plan = generation.sequence.too_long_for(error)
        if plan is None or request.kind != "chat" or first_part(request)[0]:
            return False
        from causeway_server.models.chat.overflow import trim_middle  # imported with the first such chat

        async def tokenize(asked: TokenizeRequest) -> TokenList:
            return await tokenizer.tokenize(asked.request, plan.target.model)

        try:
            async with asyncio.timeout_at(generation.first_byte_by):
                generation.trimmed = await trim_middle(request, 0, tokenize)
        except (CausewayError, TimeoutError) as failure:
            log.warning("A chat could not be trimmed: %s", redacted(failure))
        if generation.trimmed is None:
            return False
        generation.sequence.repeat(plan)
        return True

    async def _run_attempt(self, generation: Generation, attempt: Attempt, reply: Reply[AnswerHead]) -> None:
        target = attempt.plan.target
        assert generation.decision is not None
        assert generation.sequence is not None
        if generation.decision.on_device and target.at != "edge":
            raise NoRoute(f"This request may not leave the device, and {target.name} is in the cloud.")
        backend = self.backends.get(target.at)
        if backend is None:
            raise _no_backend(target)
        request = generation.request if generation.trimmed is None else generation.trimmed.request
        soft: tuple[SoftTokens, ...] = ()
        mask = () if target.at == "edge" else generation.decision.mask
        if (attempt.plan.facts or attempt.plan.soft) and self.encoders is not None:
            request, soft = await self.encoders.prepare(generation, attempt.plan, "written" if mask else None)
        if generation.decision.parts_on_device and target.at != "edge" and modalities(request) != ["text"]:
            raise NoRoute(f"Parts of this request may not leave the device, and {target.name} is in the cloud.")
        begun, generation.begun = generation.begun, None
        now = _now() if begun is None else begun.started
        if attempt.state is AttemptState.PENDING:
            attempt.start(now)
            generation.upstream = generation.enforceable = None
        deadline, first_token_by = self.deadlines(generation, attempt, now)
        relay = (generation.relay or ChunkRelay(attempt, reply)) if generation.request.stream else None
        generation.relay = None
        restorer: Restorer | None = None
        if mask:
            settings = generation.policy.guard_settings
            masked = await self.guard.masked(request, mask, settings)
            if not masked.values and attempt.plan.facts and self.encoders is not None:
                other, _ = await self.encoders.prepare(generation, attempt.plan, "digits")
                in_digits = await self.guard.masked(other, mask, settings)
                masked = in_digits if in_digits.values else masked
            request, restorer = masked.request, restorer_of(masked) if masked.values else None
        call = BackendRequest(
            id=generation.id,
            request=bounded(with_temperature(request, target), target, generation.policy),
            target=target,
            deadline=deadline,
            first_token_by=first_token_by,
            choices=generation.sequence.choices,
            confidence_tokens=attempt.plan.handoff.after_tokens if attempt.plan.handoff is not None else 0,
            traceparent=generation.outgoing_traceparent,
            policy=policy_label(generation.policy),
            cacheable=generation.cache_key is not None,
            durable=not generation.on_device,
            report_upstream=generation.set_upstream,
            report_loosened=generation.set_enforceable,
            job=generation.job,
            soft=soft,
            relay=relay if restorer is None else None,
            regions=None if generation.decision.regions is None else frozenset(generation.decision.regions),
            begun=begun,
        )
        try:
            if generation.request.kind == "embedding":
                await _embed(generation, attempt, backend, call, reply)
            elif (answer := backend.complete(call)) is not None:
                chunks = await answer
                whole = chunks if restorer is None else restored_whole(chunks, restorer)
                await _deliver_whole(generation, attempt, whole, reply)
            else:
                parts = backend.generate(call)
                source = parts if restorer is None else restored(parts, restorer)
                stream = self._stream(generation, attempt, source, call, relay or ChunkRelay(attempt, reply))
                # In a task of its own a token resumes 5 coroutines, not the 17 from the connection down to here. But
                # a task that is cancelled before its first step would leave behind what was begun.
                await (asyncio.create_task(stream) if generation.request.stream and begun is None else stream)
        except (TimeoutError, DeadlineExceeded, CloudTimeout) as error:
            raise _timeout_error(generation, attempt, error) from error

    async def _stream(
        self,
        generation: Generation,
        attempt: Attempt,
        chunks: AsyncIterator[Chunk],
        call: BackendRequest,
        relay: ChunkRelay,
    ) -> None:
        """Pass the chunks of one attempt to the reply. Raises TimeoutError in cases (1) and (2), or the error of the
        backend, the attempt or the reply.
        """
        reply = relay.reply
        first, ended = not attempt.committed, False
        now = asyncio.get_running_loop().time
        try:
            until = min(call.first_token_by, call.deadline) if first else call.deadline
            async with asyncio.timeout_at(until + _GRACE_S) as timeout:
                async for chunk in chunks:
                    await relay.settle()
                    if first:
                        first = False
                        _begin_answer(generation, call, timeout)
                    if chunk.confidence is not None and self.calibrate is not None:
                        generation.raw_confidence = chunk.confidence
                        quality, spoken = generation.estimates.quality, generation.transcript_confidence
                        chunk = self.calibrate(call, chunk, quality, spoken)  # noqa: PLW2901
                    for piece in attempt.receive(chunk, now()):
                        if not generation.committed:
                            await _commit(generation, reply)
                        if (slow := _send(generation, piece, reply)) is not None:
                            await slow
                        else:
                            relay.sent(piece.index)
                await relay.settle()
                ended = True
        except ClientGone:
            raise
        except Exception as failure:
            if not attempt.whole:
                raise
            # A fault of the target's connection must not turn a finished answer into an error.
            log.info(
                "The target %s failed after the end of its answer: %s", attempt.plan.target.name, redacted(failure)
            )
        finally:
            relay.close()
            if not ended:
                await close_chunks(chunks)
        await _deliver(generation, attempt.finish(now()), reply)

    def deadlines(self, generation: Generation, attempt: Attempt, now: float) -> tuple[float, float]:
        """Return the deadlines of the complete answer and of its first token."""
        target = attempt.plan.target
        if generation.job is not None and target.at == "cloud":
            return generation.deadline, generation.deadline  # it waits in the cloud's queue
        last = generation.deadline if generation.request.stream else generation.first_byte_by
        streams = _streams_from_target(generation, attempt)
        return self.until(target, last, generation.first_byte_by, now, streams=streams)

    def until(
        self, target: Target, last: float, first_byte_by: float, now: float, *, streams: bool
    ) -> tuple[float, float]:
        """Return what `deadlines` does. `streams`: whether the first token comes before the whole answer."""
        whole_s, first_s = target.timeout_s, target.first_token_timeout_s
        if target.at == "cloud":
            whole_s = self.cloud.timeout_s if whole_s is None else whole_s
            first_s = self.cloud.first_token_timeout_s if first_s is None else first_s
        deadline = last if whole_s is None else min(last, now + whole_s)
        if first_s is None or not streams:
            return deadline, min(deadline, first_byte_by)
        return deadline, min(deadline, first_byte_by, now + first_s)


class ChunkRelay:
    """Passes text on to a client that reads, as it arrives (`TextRelay`), without waking a task."""

    def __init__(self, attempt: Attempt, reply: Reply[AnswerHead]) -> None:
        self.reply = reply
        self._attempt = attempt
        self._texts: Reply[AnswerHead] | None = reply
        self._sink: TextSink | None = None
        self._index = 0
        self._slow: Awaitable[None] | None = None  # awaited before the next chunk
        self._gone: ClientGone | None = None

    def sent(self, index: int) -> None:
        """Note that a chunk of this choice has gone to the client at once."""
        if self._texts is not None:
            self._sink, self._index = text_sink_of(self._texts, index), index

    def take(self, texts: Sequence[bytes], index: int) -> bool:
        if self._sink is None or index != self._index:
            return False
        try:
            self._slow = self._sink.send(texts)
        except ClientGone as gone:  # the task, which gets the chunk again, reports the error
            self._sink, self._gone = None, gone
            return False
        self._attempt.tokens += len(texts)
        if self._slow is not None:
            self._sink = None
        return True

    def hold(self, slow: Awaitable[None]) -> None:
        """Note that the client is slow: the task waits for it."""
        self._drop()
        self._sink, self._slow = None, slow

    async def settle(self) -> None:
        """Wait for a client that has become slow. Raises ClientGone."""
        if self._gone is not None:
            raise self._gone
        if self._slow is not None:
            slow, self._slow = self._slow, None
            await slow

    def close(self) -> None:
        """Accept no more chunks."""
        self._sink = self._texts = None
        self._drop()

    def _drop(self) -> None:
        if isinstance(self._slow, Coroutine):
            self._slow.close()


def _begin_answer(generation: Generation, call: BackendRequest, timeout: asyncio.Timeout) -> None:
    """Allow an answer that has begun the time of a complete one. Raises BackendError if it may not be sent."""
    if generation.semantic_check is not None:
        _refuse_degraded(generation)
    if call.first_token_by < call.deadline:  # a timer costs as much as the decision
        timeout.reschedule(call.deadline + _GRACE_S)


async def _embed(
    generation: Generation, attempt: Attempt, backend: Backend, call: BackendRequest, reply: Reply[AnswerHead]
) -> None:
    async with asyncio.timeout_at(call.deadline + _GRACE_S):
        embeddings = await backend.embed(call)
        attempt.complete(_now())
        await _deliver(generation, (embeddings,), reply)


async def _deliver_whole(
    generation: Generation, attempt: Attempt, chunks: Sequence[Chunk], reply: Reply[AnswerHead]
) -> None:
    """Pass a whole answer to the reply. Raises the error of the attempt or the reply."""
    now = _now()
    if generation.semantic_check is not None:
        _refuse_degraded(generation)
    pieces = [piece for chunk in chunks for piece in attempt.receive(chunk, now)]
    await _deliver(generation, (*pieces, *attempt.finish(now)), reply)


async def _deliver(generation: Generation, pieces: tuple[Piece, ...], reply: Reply[AnswerHead]) -> None:
    for piece in pieces:
        if not generation.committed:
            await _commit(generation, reply)
        if (slow := _send(generation, piece, reply)) is not None:
            await slow


async def _commit(generation: Generation, reply: Reply[AnswerHead]) -> None:
    generation.committed = True
    await reply.commit(generation.head())


def _send(generation: Generation, piece: Piece, reply: Reply[AnswerHead]) -> Awaitable[None] | None:
    if piece.usage is not None:
        if generation.policy.priced and generation.sequence is not None:
            audio_ms = generation.audio_ms(generation.sequence.attempts[-1].plan)
            piece = msgspec.structs.replace(piece, usage=msgspec.structs.replace(piece.usage, audio_ms=audio_ms))
        generation.usage = piece.usage or _NO_USAGE
    return reply.send(piece)


async def close_chunks(chunks: AsyncIterator[Chunk]) -> None:
    """Stop the target's work. (3)"""
    close = getattr(chunks, "aclose", None)
    if close is None:
        return
    with anyio.CancelScope(deadline=_now() + _CLOSE_S, shield=True):
        await close()


def bounded(request: Request, target: Target, policy: Policy) -> Request:
    """Return the request with the limit that a budget counts with, if the client sets none."""
    if policy.budget_usd is None or request.max_tokens or not target.price.costs or request.kind == "embedding":
        return request
    return msgspec.structs.replace(request, max_tokens=MOST_TOKENS)


def with_temperature(request: Request, target: Target) -> Request:
    """Return the request with the target's temperature, if the client sets none."""
    sampling = request.sampling
    if sampling.temperature is not None or target.temperature is None or request.kind == "embedding":
        return request
    sampling = msgspec.structs.replace(sampling, temperature=target.temperature)
    return msgspec.structs.replace(request, sampling=sampling)


def _streams_from_target(generation: Generation, attempt: Attempt) -> bool:
    """Return whether the first token arrives before the complete answer."""
    return generation.request.stream or attempt.plan.handoff is not None or attempt.plan.target.at == "edge"


def _timeout_error(generation: Generation, attempt: Attempt, error: Exception) -> CausewayError:
    """Return the error of a timeout: (2) precedes (1), as another target is pointless with no time left."""
    target = attempt.plan.target
    if _now() >= generation.deadline - _TIMER_STEP_S:
        return DeadlineExceeded(f"The deadline passed while {target.name} was answering.")
    if isinstance(error, CloudTimeout):
        return error
    timeout = EngineTimeout if target.at == "edge" else CloudTimeout
    if attempt.tokens == 0:
        return timeout(f"{target.name} sent no first token before its timeout", phase="first_token")
    return timeout(f"{target.name} did not finish before its timeout", phase="stream")


def _no_backend(target: Target) -> BackendError:
    key = "engine.enabled is false" if target.at == "edge" else "`clouds` is empty"
    return TargetNotConfigured(f"{target.name}: {key} on this device.", phase="connect")


def _as_causeway_error(failure: Exception, target: Target) -> CausewayError:
    """Return the error itself, or a backend failure for any other exception, whose message may quote the request."""
    if isinstance(failure, CausewayError):
        return failure
    log.error("The target %s failed unexpectedly: %s", target.name, redacted(failure))
    return BackendError(f"{target.name} failed unexpectedly ({type(failure).__name__}).")


def _fail(attempt: Attempt, error: CausewayError) -> None:
    # The attempt may be done already: the client can disconnect while its last piece is being sent.
    if attempt.state is not AttemptState.DONE:
        attempt.fail(error, _now())


def _refuse_skipped(generation: Generation) -> None:
    """Raise BackendError if a check's first choice is down and was skipped: the new answer could only be degraded."""
    decision = generation.decision
    if decision is None or not decision.skipped_target:
        return
    target = next(plan.target for plan in decision.attempts if plan.target.name == decision.skipped_target)
    down = EngineUnavailable if target.at == "edge" else BreakerOpen
    raise down(
        f"{target.name} is down, and the answer of the target that replaces it cannot check the cached answer.",
        phase="connect",
    )


def _refuse_degraded(generation: Generation) -> None:
    """Raise BackendError if a check's unsent new answer is degraded, and the cached one is not."""
    if generation.degraded:
        raise BackendError("The new answer is degraded, so it cannot check the cached answer.")


def _now() -> float:
    return asyncio.get_running_loop().time()
