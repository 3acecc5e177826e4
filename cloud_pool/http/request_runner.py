"""Running a request from its admission to its outcome, for an HTTP response or a live session."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import cast

import anyio
import msgspec

from causeway_server.router.errors import (
    CausewayError,
    ClientGone,
    ContextLengthExceeded,
    Draining,
    InvalidGrammar,
    InvalidRequest,
    ModelNotFound,
    UnsupportedFeature,
)
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.reply import ClientReply
from causeway_server.router.serving.responses import STOPPED
from causeway_server.router.types import Chunk, Kind, Usage

from ..accounts.identity.authenticator import Authenticator
from ..accounts.ledger import Ledger, LedgerEntry
from ..cache.caching_service import Billing, CachingService
from ..core.request_context import VARIANT_HEADER, AnswerHead, RequestContext
from ..degradation.tier_sessions import TierSessions
from ..observability.metrics import Metrics
from ..serving.service import BegunAnswer, Service
from ..tiers.variants import MAX_ANSWERS, ScorableAnswer, TierVariants
from ..upstreams.inference import Consumption

log = logging.getLogger(__name__)
# A request that the model's server refused is free, whatever was read before it knew.
_REFUSED = frozenset(
    kind.code for kind in (InvalidRequest, UnsupportedFeature, ContextLengthExceeded, InvalidGrammar, ModelNotFound)
)


class BegunRun(msgspec.Struct, frozen=True):
    """A request that is answered alone, whose answer was begun in callbacks."""

    measured: RequestMetrics
    billing: Billing
    answer: BegunAnswer


class RequestRunner(msgspec.Struct):
    """Runner of requests on the service, with exactly one outcome for each."""

    service: Service  # makes embeddings
    caching_service: CachingService  # answers everything else
    ledger: Ledger  # usage and audit records
    metrics: Metrics  # of the process
    callers: Authenticator | None = None  # ends the answers of those whose tokens are revoked; None: none are
    clock: Callable[[], float] = time.monotonic  # s
    variants: TierVariants = msgspec.field(default_factory=TierVariants)  # knows the answers that may be scored
    sessions: TierSessions | None = None  # None: sessions are off
    cancelled_outcome: str = ClientGone.code  # of requests that are cancelled from now on

    def stop(self) -> None:
        """Record requests cancelled from now on as cut off by the drain, because their clients are still connected."""
        self.cancelled_outcome = Draining.code

    @contextmanager
    def ledger_entry(
        self, route: str, request_id: str, headers: Mapping[str, str], begun: LedgerEntry | None = None
    ) -> Iterator[LedgerEntry]:
        """Open a request's entry in the ledger; close it at the end, or with the shared generation that answers it.

        An error before the answer is a rejection. `begun`: the entry, if it is open already.
        """
        entry = begun or self.ledger.open(route, headers, request_id)
        try:
            yield entry
        except asyncio.CancelledError:
            if entry.outcome == ClientGone.code:
                entry.outcome = self.cancelled_outcome
            raise
        except CausewayError as error:
            if not entry.admitted:
                entry.outcome = error.code
                self.metrics.count_rejected(error.code)
            raise
        finally:
            if not entry.closes_later:
                self.ledger.close(entry)

    async def run(
        self,
        entry: LedgerEntry,
        context: RequestContext,
        arrived_at: float,
        reply: ClientReply[AnswerHead],
        begun: BegunRun | None = None,
    ) -> None:
        """Answer an admitted request; `begun` in callbacks goes on. Raises CausewayError unless it is whole."""
        if begun is None:
            measured = self.measure(context, arrived_at)
            billing, answer = self.caching_service.reply(context, measured.first_token)
        else:
            measured, billing = begun.measured, begun.billing
            answer = self.service.answer(context, begun.answer)
        with self._settled(entry, context, measured, billing, reply):
            async with aclosing(answer) as pieces:
                chunks = cast("AsyncGenerator[Chunk, None]", pieces)  # only the first piece is a head
                if begun is None or begun.answer.builder is None:
                    head = await anext(pieces)
                    assert isinstance(head, AnswerHead)
                    if context.session is not None and self.sessions is not None:
                        head = self.sessions.decided(context.session, head)
                    self.on_head(entry, measured, context, head)
                    first = await anext(chunks)  # until it is there, an error is a status
                    self.on_chunk(entry, measured, billing, first, context)
                    await reply.commit(head)
                    if (slow := reply.send(first)) is not None:
                        await slow
                else:
                    head = begun.answer.head
                try:
                    async for chunk in chunks:
                        self.on_chunk(entry, measured, billing, chunk, context)
                        if (slow := reply.send(chunk)) is not None:
                            await slow
                    await self._keep(context, head)
                except Exception as fault:
                    if isinstance(fault, ClientGone) or not reply.finished:
                        raise
                    log.info("A fault occurred after the end of an answer: %s", redacted(fault))
                    await self._keep(context, head)
                except asyncio.CancelledError:
                    if reply.finished:  # the client has the whole answer, and may go on at another gateway
                        with anyio.CancelScope(shield=True):
                            await self._keep(context, head)
                    raise
                await reply.end()

    async def _keep(self, context: RequestContext, head: AnswerHead) -> None:
        if context.session is not None and self.sessions is not None:
            await self.sessions.keep(context.session, head, context.request)

    def measure(self, context: RequestContext, arrived_at: float) -> RequestMetrics:
        """Return the measurements of a request of `arrived_at` (monotonic s)."""
        return RequestMetrics(self.metrics, context.request.kind, context.tier.config.name, arrived_at, self.clock)

    def on_head(self, entry: LedgerEntry, measured: RequestMetrics, context: RequestContext, head: AnswerHead) -> None:
        """Take note of the tier that answers, and of an answer that its client may score."""
        entry.tier = measured.tier = head.model
        entry.response_headers = dict(head.headers)
        variants, tier = self.variants, head.model
        group = variants.group(tier, context.request) if variants.active else None
        client = context.tenant, context.request.hints.client
        variants.answers[context.id] = ScorableAnswer(client, tier, head.header(VARIANT_HEADER), group)
        if len(variants.answers) > MAX_ANSWERS:
            variants.answers.popitem(last=False)

    def on_chunk(
        self, entry: LedgerEntry, measured: RequestMetrics, billing: Billing, chunk: Chunk, context: RequestContext
    ) -> None:
        """Count a chunk. Raises AuthenticationFailed once the caller's token is revoked."""
        if context.session is not None:
            context.session.turn.add(chunk)
        if self.callers is not None and (principal := entry.principal) is not None and principal.token_id:
            self.callers.check_again(principal)
        measured.on_chunk(billing, chunk)

    async def embed(
        self, entry: LedgerEntry, context: RequestContext, arrived_at: float, reply: ClientReply[AnswerHead]
    ) -> None:
        """Answer an admitted request for embeddings. Raises CausewayError."""
        with self.responding(entry, context, arrived_at) as on_chunk:
            head, embeddings = await self.service.embed(context)
            on_chunk(Chunk(usage=embeddings.usage))
            entry.response_headers = dict(head.headers)
            await reply.commit(head)
            if (slow := reply.send(embeddings)) is not None:
                await slow
            await reply.end()

    @contextmanager
    def responding(
        self, entry: LedgerEntry, context: RequestContext, arrived_at: float
    ) -> Iterator[Callable[[Chunk], None]]:
        """Answer an admitted request in the block, for answers that are never shared or cached. Raises CausewayError.

        Yields the callback for each chunk before it is sent; an answer without tokens has none.
        """
        measured = self.measure(context, arrived_at)
        billing = Billing(measured.first_token, "")
        with self._settled(entry, context, measured, billing):
            yield partial(measured.on_chunk, billing)

    @contextmanager
    def _settled(
        self,
        entry: LedgerEntry,
        context: RequestContext,
        measured: RequestMetrics,
        billing: Billing,
        reply: ClientReply[AnswerHead] | None = None,
    ) -> Iterator[None]:
        """Determine and settle a request's one outcome from how the block ends. Raises CausewayError.

        `reply` tells whether the client has the whole answer; None: not before the end of the block.
        """
        outcome, entry.admitted = ClientGone.code, True
        try:
            yield
            outcome = "ok"
        except asyncio.CancelledError:
            # A client that left without waiting for the stream's end has its answer.
            outcome = "ok" if reply is not None and reply.finished else self.cancelled_outcome
            if outcome == Draining.code:  # its client is there
                raise Draining(STOPPED) from None
            raise
        except CausewayError as error:
            outcome = error.code
            if error.status >= 500:
                log.warning("%s: %s: %s", context.id, measured.tier, error.code)
            raise
        except Exception as fault:
            outcome = CausewayError.code
            log.error("Request %s: the answer failed unexpectedly: %s", context.id, redacted(fault))
            raise CausewayError("The gateway failed.") from fault
        finally:
            self.settle(entry, billing, measured, outcome, context)

    def settle(
        self, entry: LedgerEntry, billing: Billing, measured: RequestMetrics, outcome: str, context: RequestContext
    ) -> None:
        """Bill and measure a request with its outcome: "ok" or an error's code."""
        entry.outcome, entry.cache, entry.billable = outcome, billing.status, billing.billable
        measured.stop()
        closed = False

        def close(consumption: Consumption) -> None:
            nonlocal closed
            closed = True
            heard = billing.billable and outcome not in _REFUSED
            usage = entry.usage = context.meter.heard(consumption.usage) if heard else consumption.usage
            entry.estimated = consumption.estimated
            entry.first_token_s = measured.first_token_s
            measured.record(outcome, usage)
            if context.trace is not None:
                context.trace.end(tier=measured.tier, outcome=outcome, usage=usage, headers=entry.response_headers)
            if entry.closes_later:
                self.ledger.close(entry)

        def on_usage(usage: Usage) -> None:
            if usage.prompt_tokens or not billing.billable or outcome in _REFUSED:
                close(Consumption(usage))
                return
            # The answer did not come to its end: count what the model generates until it has stopped.
            abandoned = outcome in (ClientGone.code, Draining.code)
            context.meter.on_settled(lambda: close(_more(usage, context.meter.consumption(abandoned=abandoned))))

        billing.settle(measured.usage, on_usage)
        entry.closes_later = not closed


def _more(received: Usage, counted: Consumption) -> Consumption:
    """Return the consumption counted upstream, but at least what the client received."""
    usage = counted.usage
    tokens = max(usage.completion_tokens, received.completion_tokens)
    return msgspec.structs.replace(counted, usage=Usage(usage.prompt_tokens, tokens, received.cached_tokens))


class RequestMetrics:
    """Measurements of a request, recorded exactly once: `on_chunk` for each chunk, `stop` at the end, then `record`."""

    def __init__(self, metrics: Metrics, kind: Kind, tier: str, arrived_at: float, clock: Callable[[], float]) -> None:
        self.tier = tier  # the requested tier, until the answering one is known
        self._kind = kind
        self._requested = tier
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._clock = clock
        self._stopped_at: float | None = None
        self._reported = Usage()
        self._tokens = 0
        self._first_token_at: float | None = None

    def first_token(self, tier: str) -> None:
        """Record the time to first token; only the first call counts."""
        if self._first_token_at is None:
            self.tier, self._first_token_at = tier or self.tier, self._clock()

    def on_chunk(self, billing: Billing, chunk: Chunk) -> None:
        if chunk.tokens:
            if self._first_token_at is None and billing.billable:
                self.first_token(self.tier)
            self._tokens += chunk.tokens
        if chunk.usage is not None:
            self._reported = chunk.usage

    def stop(self) -> None:
        self._stopped_at = self._clock()

    @property
    def usage(self) -> Usage:
        """Usage reported by the model; if it reported none, the counted completion tokens."""
        completion_tokens = self._reported.completion_tokens or self._tokens
        return Usage(self._reported.prompt_tokens, completion_tokens, self._reported.cached_tokens)

    @property
    def first_token_s(self) -> float | None:
        """Time from the arrival to the first token; None if there was none."""
        return None if self._first_token_at is None else self._first_token_at - self._arrived_at

    def record(self, outcome: str, billed: Usage) -> None:
        """Record the outcome, exactly once. `billed`: usage of the tier that is billed to this request."""
        ended_at = self._clock() if self._stopped_at is None else self._stopped_at
        duration_s = ended_at - self._arrived_at
        self._metrics.observe(self.tier, outcome, billed, duration_s)
        self._metrics.models.observe(
            self._kind,
            (self._requested, self.tier),
            billed,
            duration_s,
            error="" if outcome == "ok" else outcome,
            ttft_s=self.first_token_s,
            tokens=self._tokens,
        )
