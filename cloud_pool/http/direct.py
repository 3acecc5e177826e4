"""Chats of tiers over HTTP in callbacks, without a task: the hops of `RequestRunner.run` as one straight line.

`DirectChats.begin` does what the general path does until it would wait: it authenticates, parses and admits the
request, takes a permit, leases an endpoint and sends the request on an idle connection. The answer then goes from that
connection to the client's, and is settled in the same callback.

What is not this simple is handed over to a task of the general path, which goes on from there: the answers of other
kinds of tiers, a queue, no idle connection, and later any error, timeout or other end, a revoked permit, a client that
leaves or reads slowly, and the end of the gateway. So retries, fallbacks, bills and the client's error have one place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar, cast

from causeway_server.router.errors import CausewayError
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.serving.http_client import ChunkTaker, HttpResponse
from causeway_server.router.serving.logs import redacted
from causeway_server.router.serving.request import PlainRequest, read_request_id
from causeway_server.router.serving.responses import HttpReplyWriter, TextExchange
from causeway_server.router.serving.upstream.direct import DirectConnection, DirectStreaming
from causeway_server.router.serving.upstream.server import StreamReader
from causeway_server.router.types import Chunk

from ..accounts.ledger import LedgerEntry
from ..cache.caching_service import Billing
from ..core.request_context import AnswerHead, RequestContext
from ..dispatch.dispatcher import EndpointAttempt
from ..serving.service import AnswerBuilder
from ..upstreams.inference import Delta
from ..upstreams.openai_http import HttpCall, OpenAIUpstream
from .request_admission import RequestAdmission
from .request_runner import BegunRun, RequestRunner

log = logging.getLogger(__name__)
T = TypeVar("T")


class ReplyingRoutes(Protocol):
    """The routes that generate: `server.GenerationRoutes`."""

    @property
    def admission(self) -> RequestAdmission: ...

    @property
    def runner(self) -> RequestRunner: ...

    def new_reply(self, http: PlainRequest, context: RequestContext, /) -> HttpReplyWriter[AnswerHead]: ...


class DirectChat(DirectStreaming):
    """An admitted request. `run`: what was begun of its answer; None: nothing."""

    __slots__ = (
        *("_attempt", "_builder", "_call", "_routes", "_run", "_runner", "_timer", "_took_s", "_upstream"),
        *("arrived_at", "context", "entry", "run"),
    )
    _attempt: EndpointAttempt
    _call: HttpCall
    _run: BegunRun
    _upstream: OpenAIUpstream
    _took_s: float | None  # until the first token, which is yet to be reported

    def __init__(
        self,
        http: PlainRequest,
        connection: DirectConnection,
        routes: ReplyingRoutes,
        entry: LedgerEntry,
        context: RequestContext,
        arrived_at: float,
    ) -> None:
        super().__init__(http, connection)
        self._routes, self._runner = routes, routes.runner
        self.entry, self.context, self.arrived_at = entry, context, arrived_at
        self._reader = self._exchange = self._took_s = None
        self._builder: AnswerBuilder | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.run: BegunRun | None = None

    @property
    def reply(self) -> HttpReplyWriter[AnswerHead]:
        return self._reply

    def begin(self) -> bool:
        """Begin the answer. Returns whether its request was sent, and goes on in callbacks."""
        context, runner = self.context, self._runner
        self._reply = self._routes.new_reply(self._http, context)  # before anything that a task would have to end
        answer = runner.service.begin(context)
        if answer is None:
            return False
        measured = runner.measure(context, self.arrived_at)
        self.run = self._run = BegunRun(measured, Billing(measured.first_token, ""), answer)
        attempt = answer.attempt.call
        sent = None if attempt is None else attempt.send()
        if attempt is None or sent is None:
            return False
        permit, (self._upstream, self._call) = answer.attempt.permit, sent
        assert permit is not None
        assert self._call.response is not None
        permit.report_wait()
        permit.on_revoked = self._hand_over
        left_s = context.deadline - runner.clock()
        if (timeout_s := answer.attempt.timeout_s(context, left_s)) < left_s:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._hand_over)
        self._attempt = attempt
        self._own(self._call.response)
        return True

    # --- callbacks (`DirectStreaming`) --------------------------------------------------------------------------------

    def changed(self) -> None:
        super().changed()
        if self._took_s is not None:
            self._report_first_token()

    def _hand_over(self) -> asyncio.Task[None]:
        if self._took_s is not None:
            self._report_first_token()
        self._end_wait()
        self._settle()
        return super()._hand_over()

    def _end_wait(self) -> None:
        """Watch no longer for what may end the wait for the first token."""
        if self._timer is not None:
            self._timer.cancel()
        if (permit := self._run.answer.attempt.permit) is not None:
            permit.on_revoked = None

    def _new_reader(self, response: HttpResponse) -> StreamReader:
        return self._upstream.new_reader(self._call)

    def _send(self, chunks: Sequence[Chunk]) -> None:
        for delta in self._upstream.received(self._call, chunks):
            builder = self._builder or self._begin_reply()
            for chunk in builder.add(0, self._call.count(delta)):
                self._pass_on(chunk)

    def _begin_reply(self) -> AnswerBuilder:
        """Begin the reply with the first token, which is reported when it is sent."""
        run = self._run
        self._took_s = self._runner.clock() - self._attempt.began_at
        builder = self._builder = self._runner.service.first_token(self.context, run.answer)
        run.measured.tier = run.answer.head.model
        self._reply.begin(run.answer.head)
        return builder

    def _report_first_token(self) -> None:
        run, took_s, self._took_s = self._run, self._took_s, None
        assert took_s is not None
        self._end_wait()
        self._attempt.first_token(took_s)
        run.answer.attempt.got_first_token(took_s)
        self._runner.on_head(self.entry, run.measured, self.context, run.answer.head)

    def _pass_on(self, chunk: Chunk) -> None:
        """Send a chunk. Raises ClientGone; AuthenticationFailed once the caller's token is revoked."""
        run = self._run
        self._runner.on_chunk(self.entry, run.measured, run.billing, chunk, self.context)
        if (slow := self._reply.send(chunk)) is not None:
            cast("Coroutine[Any, Any, None]", slow).close()  # a task waits for the client, from the next chunk on

    def _taker(self, exchange: TextExchange) -> ChunkTaker:
        take = self._upstream.noting(self._call, self._response, exchange.take)
        callers, principal = self._runner.callers, self.entry.principal
        if callers is None or principal is None or not principal.token_id:
            return take

        def checked(data: bytes, /) -> bool:
            try:
                callers.check_again(principal)
            except CausewayError:
                return False  # `_pass_on` meets it again
            return take(data)

        return checked

    def _count(self, tokens: int) -> None:
        run, builder = self._run, self._builder
        assert builder is not None
        chunk = Chunk(tokens=tokens)
        builder.add(0, self._call.count(Delta(new_tokens=tokens, chunk=chunk)))
        run.measured.on_chunk(run.billing, chunk)

    def _end(self, reader: StreamReader) -> bool:
        run, builder, entry, runner = self._run, self._builder, self.entry, self._runner
        if builder is None or not builder.ended:
            return False
        self._pass_on(builder.end())
        if self.context.request.stream:
            self._reply.end_stream()
        else:
            completed(self._reply.end())
        self._response.offer_chunks(None)  # the connection may bring more, and its client may have the next answer
        self._disown()
        try:
            if self._took_s is not None:
                self._report_first_token()
            self._attempt.succeeded()
            self._attempt.end()
            run.answer.attempt.report_tokens(builder.tokens)
            run.answer.attempt.leave()
            entry.admitted = True
            runner.settle(entry, run.billing, run.measured, "ok", self.context)
            if not entry.closes_later:
                runner.ledger.close(entry)
        finally:  # the client has its answer, whatever the books say
            self._routes.admission.bodies.release(self._http)
            self._connection.answered(self._http)
        return True


class DirectChats:
    """Begins answers in callbacks, for routes without cache, guard, sessions, traces and egress ledger."""

    def __init__(self, routes: ReplyingRoutes) -> None:
        self._routes = routes

    def begin(self, http: PlainRequest, connection: DirectConnection) -> DirectChat | None:
        """Begin the answer to a chat; None if a task must answer. `http.begun` keeps what was done."""
        try:
            return self._begin(http, connection) if http.path == "/v1/chat/completions" else None
        except CausewayError:
            return None  # the general path refuses it
        except Exception as failure:  # the general path meets it again, and can answer
            log.error("A chat could not begin on the fast path, so the general path answers: %s", redacted(failure))
            return None

    def _begin(self, http: PlainRequest, connection: DirectConnection) -> DirectChat | None:
        admission, runner = self._routes.admission, self._routes.runner
        arrived_at = runner.clock()
        entry = runner.ledger.open("chat", http.headers, read_request_id(http.headers))
        principal, inbound = admission.identify(http, entry)
        if connection.writing_paused or not admission.admits_now(http, principal):
            return None
        context = completed(admission.admit_caller(http, parse_chat, arrived_at, entry, principal, inbound))
        answer = http.begun = DirectChat(http, connection, self._routes, entry, context, arrived_at)
        return answer if answer.begin() else None


def completed(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("The coroutine waits.")
