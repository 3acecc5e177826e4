"""The gateway over HTTP: its addresses, the routing of paths to handlers, and error responses."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Protocol, cast

import msgspec
from anyio import to_thread

from causeway_server.router.anthropic.replies import COUNT_TOKENS, MESSAGES, UNCOUNTED, TokenCount, check_version
from causeway_server.router.anthropic.request import parse_count, parse_messages
from causeway_server.router.api.document import OPENAPI_PATH
from causeway_server.router.errors import CausewayError, ClientGone, MethodNotAllowed, NotFound, UnsupportedFeature
from causeway_server.router.ledger.log import HEADER as EGRESS
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.openai.completions import parse_completion
from causeway_server.router.openai.embeddings import parse_embedding
from causeway_server.router.openai.responses.compaction import COMPACT_PATH
from causeway_server.router.openai.responses.request import parse_compaction, parse_response
from causeway_server.router.openai.tokens import DETOKENIZE, TOKENIZE, DetokenizedText, parse_detokenize, parse_tokenize
from causeway_server.router.parts.reading import first_part
from causeway_server.router.residency import region_tags, regions_of
from causeway_server.router.serving.listener import Address, ConnectionTable, DirectHandler, Listener
from causeway_server.router.serving.live.sessions import Sessions
from causeway_server.router.serving.logs import REQUEST, redacted
from causeway_server.router.serving.request import (
    PLAIN,
    AiohttpRequest,
    HttpExchange,
    PlainRequest,
    allowed_methods,
    read_credential,
    read_request_id,
    served_method,
)
from causeway_server.router.serving.responses import (
    EVENTS,
    STREAMED,
    Echo,
    ExchangeHandler,
    Handler,
    HttpReplyWriter,
    KeepResponse,
    ServerResponse,
    WholeResponse,
    body_response,
    header_lines,
    json_response,
    refusal,
)
from causeway_server.router.serving.stored.api import PATHS as STORED
from causeway_server.router.serving.tls.contexts import server_tls
from causeway_server.router.types import Request, RoutingHints
from causeway_server.router.variants.feedback import FeedbackReceipt, parse_feedback
from causeway_server.router.web_origins import WebOrigins

from ..accounts.ledger import LedgerEntry
from ..core.principal import Principal
from ..core.request_context import RECEIPT, AnswerHead, BodyMemory, RequestContext
from ..tiers.config import NO_AUDIO
from ..tiers.tier import Tier
from ..tiers.variants import MAX_ANSWERS
from .config import ServerConfig
from .direct import DirectChat
from .info_routes import MODELS, InfoRoutes
from .key_routes import PATHS as API_KEYS
from .key_routes import KeyRoutes
from .request_admission import Parse, RequestAdmission, read_headers
from .request_runner import BegunRun, RequestRunner
from .stored_responses import GatewayResponses

ERASURE: Final = "/v1/me/data"
NO_RECEIPTS: Final = (
    "This gateway signs no receipts of erasure. Its operator sets `identity.receipt_key_file` and a Redis of jobs, or "
    "erases with `causeway-cloud erase`."
)
log = logging.getLogger(__name__)


class JobRoutes(Protocol):
    """Interface of the jobs routes, `jobs.http.job_api.JobApi`."""

    @property
    def paths(self) -> Mapping[str, str]:
        """Methods by path; `{id}` stands for an identifier in the path."""
        ...

    def handler(self, request: AiohttpRequest, /) -> Handler | None:
        """Return the handler of a request; None for a path outside the jobs API. Raises MethodNotAllowed."""
        ...

    async def respond_async(self, request: AiohttpRequest, /) -> ServerResponse | None:
        """Accept a plain request with `Prefer: respond-async` as a job; None: the preference is ignored."""
        ...


class Server(msgspec.Struct):
    """The request handler."""

    admission: RequestAdmission
    generations: GenerationRoutes
    info: InfoRoutes
    bodies: BodyMemory  # bounds the bodies in memory
    sessions: Sessions[Any]
    transcription: Handler | None = None  # None: no tier understands audio clips
    jobs: JobRoutes | None = None  # None: this gateway has none
    on_drain: Callable[[], object] | None = None  # called when draining begins
    keys: KeyRoutes | None = None  # None: API keys are not accepted
    erasure: Handler | None = None  # None: no key signs receipts
    document: bytes = b""  # of OpenAPI, once it was asked for
    routes: Mapping[str, tuple[str, Handler]] = {}

    def __post_init__(self) -> None:
        generations, info = self.generations, self.info
        self.routes = {
            "/v1/chat/completions": ("POST", generations.chat),
            "/v1/completions": ("POST", generations.completion),
            "/v1/embeddings": ("POST", generations.embedding),
            "/v1/responses": ("POST", generations.response),
            COMPACT_PATH: ("POST", generations.response),
            MESSAGES: ("POST", generations.message),
            COUNT_TOKENS: ("POST", self._count_tokens),
            TOKENIZE: ("POST", self._tokenize),
            DETOKENIZE: ("POST", self._detokenize),
            "/v1/audio/transcriptions": ("POST", self.transcription or self._no_transcription),
            ERASURE: ("DELETE", self.erasure or self._no_erasure),
            "/v1/feedback": ("POST", generations.feedback),
            "/v1/models": ("GET", self._models),
            "/v1/realtime": ("GET", self.sessions.connect),
            "/healthz": ("GET", info.healthz),
            "/health": ("GET", info.healthz),  # vLLM's name
            "/readyz": ("GET", info.readyz),
            OPENAPI_PATH: ("GET", self._openapi),
        }

    @property
    def paths(self) -> Mapping[str, str]:
        """Methods by path; `{id}` stands for an identifier in the path."""
        plain = {path: method for path, (method, _) in self.routes.items()}
        stored = {} if self.generations.responses is None else STORED
        jobs, keys = {} if self.jobs is None else self.jobs.paths, {} if self.keys is None else API_KEYS
        return {**plain, f"{MODELS}{{id}}": "GET", **stored, **jobs, **keys}

    @property
    def draining(self) -> bool:
        return self.info.draining

    def begin_draining(self) -> None:
        """Accept no new requests, and end live sessions after their answers; /readyz reports it."""
        self.info.draining = self.admission.draining = True
        self.sessions.drain()
        if self.on_drain is not None:
            self.on_drain()

    async def handle(self, http: HttpExchange) -> ServerResponse:
        """Handle one request. Every error becomes its dialect's object, with its own status and the request's id."""
        begun = begun_of(http)
        request_id = read_request_id(http.headers) if begun is None else begun.context.id
        REQUEST.set(request_id)  # the requests of a connection share a task
        RECEIPT.set("")
        try:
            if self.admission.authenticator.issuers is not None:
                await self.admission.authenticator.ready(read_credential(http))
            if self.jobs is not None and not isinstance(http, PlainRequest) and "Prefer" in http.headers:
                response = await self.jobs.respond_async(http)
                if response is not None:
                    return _with_id(response, request_id)
            return _with_id(await self._answer(http), request_id)
        except CausewayError as error:
            return refusal(http, error, request_id, _id_fields(request_id))
        except Exception as error:
            log.error("A request failed unexpectedly: %s", redacted(error))
            return refusal(http, CausewayError("The gateway failed."), request_id, _id_fields(request_id))
        finally:
            self.bodies.release(http)

    def _answer(self, http: HttpExchange) -> Awaitable[ServerResponse]:
        """Answer a request. Raises NotFound or MethodNotAllowed."""
        if isinstance(http, PlainRequest):
            return cast("ExchangeHandler", self.routes[http.path][1])(http)  # its method and path are of `PLAIN`
        return self._handler(http)(http)

    def _handler(self, http: AiohttpRequest) -> Handler:
        """Return the handler. Raises NotFound or MethodNotAllowed."""
        method, handler = self.routes.get(http.path, ("", None))
        if handler is None and http.path.startswith(MODELS):
            method, handler = "GET", self._model
        if handler is None and self.jobs is not None and (job := self.jobs.handler(http)) is not None:
            return job
        if handler is None and self.keys is not None and (of_keys := self.keys.handler(http)) is not None:
            return of_keys
        if handler is None and (stored := self.generations.responses) is not None:
            handler = stored.handler(http)
            if handler is not None:
                return handler
        if handler is None:
            raise NotFound(f"There is nothing at {http.path[:128]}.{self._advice(http.path)}")
        if served_method(http.method, http.headers) != method:
            allowed = allowed_methods(method)
            raise MethodNotAllowed(f"{http.method[:20]} is not allowed here. Use {allowed}.", allow=allowed)
        return handler

    def _advice(self, path: str) -> str:
        """Return advice for a client whose base URL lacks `/v1`, or has it twice."""
        if path in ("/", "/v1"):
            return f" The API is under /v1: see {OPENAPI_PATH}."
        paths = self.paths
        near = next((candidate for candidate in (f"/v1{path}", path.removeprefix("/v1")) if candidate in paths), "")
        return f" Did you mean {near}?" if near else ""

    async def _no_transcription(self, http: AiohttpRequest) -> ServerResponse:
        self.admission.principal(http)
        raise UnsupportedFeature(NO_AUDIO)

    async def _no_erasure(self, http: AiohttpRequest) -> ServerResponse:
        self.admission.principal(http)
        raise UnsupportedFeature(NO_RECEIPTS)

    async def _models(self, http: AiohttpRequest) -> ServerResponse:
        return self.info.models(http, self.admission.allowed(self.admission.principal(http)))

    async def _model(self, http: AiohttpRequest) -> ServerResponse:
        return self.info.model(http, self.admission.allowed(self.admission.principal(http)))

    async def _count_tokens(self, http: AiohttpRequest) -> ServerResponse:
        check_version(http.headers)
        principal, hints, body = await self._counted_body(http)
        request = parse_count(body, hints)
        tier = self._counting(principal, request)
        return json_response(TokenCount(await self.info.tokenizers.count(tier, request, body, self._deadline(request))))

    async def _tokenize(self, http: AiohttpRequest) -> ServerResponse:
        principal, hints, body = await self._counted_body(http)
        asked = parse_tokenize(body, hints)
        tier = self._counting(principal, asked.request)
        return json_response(await self.info.tokenizers.tokenize(tier, asked, self._deadline(asked.request)))

    async def _detokenize(self, http: AiohttpRequest) -> ServerResponse:
        principal, hints, body = await self._counted_body(http)
        asked = parse_detokenize(body)
        request = asked.request(hints)
        tier = self._counting(principal, request)
        text = await self.info.tokenizers.detokenize(tier, tuple(asked.tokens), self._deadline(request))
        return json_response(DetokenizedText(text))

    async def _counted_body(self, http: AiohttpRequest) -> tuple[Principal, RoutingHints, bytes]:
        """Read a request whose tokens are counted: it counts as a read. Raises CausewayError."""
        principal = self.admission.principal(http)
        principal.require("chat")
        await self.admission.ledger.admit_reads(principal, 1)
        headers = read_headers(http.headers.items())
        body = await self.admission.read(http, principal)
        return (
            principal,
            RoutingHints(client=principal.device, deadline_ms=headers.deadline_ms, tags=headers.tags),
            body,
        )

    def _counting(self, principal: Principal, request: Request) -> Tier:
        """Return the tier whose model counts a request's tokens. Raises UnsupportedFeature, or as `tier_of`."""
        if path := first_part(request)[0]:
            raise UnsupportedFeature(UNCOUNTED.format(path), param=path)
        return self.admission.tier_of(request, principal)

    def _deadline(self, request: Request) -> float:
        return asyncio.get_running_loop().time() + self.admission.deadline_s(request)

    async def _openapi(self, _: AiohttpRequest) -> ServerResponse:
        if not self.document:
            self.document = await to_thread.run_sync(self.info.document, self.paths)
        return body_response(self.document)


def _with_id(response: ServerResponse, request_id: str) -> ServerResponse:
    """Add the request's id, unless the response has begun or has one."""
    if isinstance(response, WholeResponse):
        for name, value in _id_fields(request_id).items():
            response.headers.setdefault(name, value)
    return response


def _id_fields(request_id: str) -> dict[str, str]:
    """Return the headers that name a request, in the egress ledger, too."""
    receipt = RECEIPT.get()
    return {"x-request-id": request_id, EGRESS: receipt} if receipt else {"x-request-id": request_id}


class ParseEcho(Protocol):
    """A parser that also returns what the answer takes from the body."""

    def __call__(self, body: bytes, hints: RoutingHints, /) -> tuple[Request, Echo]: ...


class GenerationRoutes(msgspec.Struct, frozen=True):
    """The routes that generate, from chats to messages, each request with exactly one outcome."""

    admission: RequestAdmission
    runner: RequestRunner
    heartbeat_s: float = 0.0  # the longest silence of a stream; 0: no limit
    responses: GatewayResponses | None = None  # None: this gateway stores none
    wall_clock: Callable[[], float] = time.time  # unix, s

    async def chat(self, http: HttpExchange) -> ServerResponse:
        return await self._generate(http, parse_chat, "chat")

    async def completion(self, http: HttpExchange) -> ServerResponse:
        return await self._generate(http, parse_completion, "completion")

    async def embedding(self, http: HttpExchange) -> ServerResponse:
        return await self._generate(http, parse_embedding, "embedding")

    async def response(self, http: HttpExchange) -> ServerResponse:
        if self.responses is not None:
            return await self._stored_response(self.responses, http)
        parse = parse_compaction if http.path == COMPACT_PATH else parse_response
        return await self._echoing(http, parse, "response")

    async def message(self, http: HttpExchange) -> ServerResponse:
        check_version(http.headers)
        return await self._echoing(http, parse_messages, "message")

    async def _echoing(self, http: HttpExchange, parse_echo: ParseEcho, route: str) -> ServerResponse:
        echoes: list[Echo] = []

        def parse(body: bytes, hints: RoutingHints) -> Request:
            request, echo = parse_echo(body, hints)
            echoes.append(echo)
            return request

        return await self._generate(http, parse, route, echoes)

    async def _stored_response(self, responses: GatewayResponses, http: HttpExchange) -> ServerResponse:
        arrived_at = self.runner.clock()
        with self.runner.ledger_entry("response", REQUEST.get(), http.headers) as entry:
            parsed = await responses.parse(http, entry)
            if parsed.in_background:
                return await responses.accept(http, parsed, entry)
            context = await self.admission.admit_parsed(
                parsed.request, parsed.headers, parsed.size_bytes, parsed.principal, arrived_at, entry
            )
            reply = self.new_reply(http, context, parsed.echo, responses.keep(parsed))
            return await self._answer(entry, context, arrived_at, reply)

    async def feedback(self, http: HttpExchange) -> ServerResponse:
        """Score one of the caller's own answers."""
        principal = self.admission.principal(http)
        await self.admission.ledger.admit_reads(principal, 1)
        feedback = parse_feedback(await self.admission.read(http, principal))
        counted = await self.runner.variants.score(principal.tenant, principal.device, feedback)
        if counted is None:
            raise NotFound(
                f"The answer {feedback.id!r} was not found. A gateway keeps only its newest {MAX_ANSWERS} answers."
            )
        return json_response(FeedbackReceipt(feedback.id, counted))

    async def _generate(
        self, http: HttpExchange, parse: Parse, route: str, echoes: Sequence[Echo] = ()
    ) -> ServerResponse:
        """Answer a request. `echoes`: what a response or message takes from its body, filled by `parse`."""
        if (begun := begun_of(http)) is not None:
            http.begun = None  # type: ignore[union-attr]  # a cycle would keep the body
            with self.runner.ledger_entry(route, REQUEST.get(), http.headers, begun.entry) as entry:
                return await self._answer(entry, begun.context, begun.arrived_at, begun.reply, begun.run)
        arrived_at = self.runner.clock()
        with self.runner.ledger_entry(route, REQUEST.get(), http.headers) as entry:
            context = await self.admission.admit(http, parse, arrived_at, entry)
            reply = self.new_reply(http, context, next(iter(echoes), None))
            return await self._answer(entry, context, arrived_at, reply)

    def new_reply(
        self, http: HttpExchange, context: RequestContext, echo: Echo | None = None, keep: KeepResponse | None = None
    ) -> HttpReplyWriter[AnswerHead]:
        """Return the reply to an admitted request."""
        request = context.request
        return HttpReplyWriter(
            request,
            http,
            partial(_header_lines, context.id),
            id=context.id,
            created=int(self.wall_clock()),
            echo=echo,
            heartbeat_s=self.heartbeat_s,
            keep=keep,
            compacted=lambda: (False, region_tags(regions_of(request.hints.tags))),
            temperature=lambda _: context.tier.chat_format.temperature,
        )

    async def _answer(
        self,
        entry: LedgerEntry,
        context: RequestContext,
        arrived_at: float,
        reply: HttpReplyWriter[AnswerHead],
        begun: BegunRun | None = None,
    ) -> ServerResponse:
        if context.request.kind == "embedding":
            answer = self.runner.embed(entry, context, arrived_at, reply)
        else:
            answer = self.runner.run(entry, context, arrived_at, reply, begun)
        try:
            # In a task of its own a token resumes fewer coroutines: those from the connection to here stay asleep. What
            # was begun must be taken over at once.
            await (asyncio.create_task(answer) if context.request.stream and begun is None else answer)
        except ClientGone:
            raise
        except CausewayError as error:
            return await reply.fail(error, _id_fields(context.id))
        return reply.response


def begun_of(http: HttpExchange) -> DirectChat | None:
    """Return what was done in callbacks for a request that a task answers now."""
    begun = http.begun if isinstance(http, PlainRequest) else None
    return begun if isinstance(begun, DirectChat) else None


def _header_lines(request_id: str, head: AnswerHead, media_type: str) -> str:
    receipt = RECEIPT.get()
    ledger = f"{EGRESS}: {receipt}\r\n" if receipt else ""
    return f"{_shared_lines(head.headers, media_type)}x-request-id: {request_id}\r\n{ledger}"


@lru_cache(maxsize=256)
def _shared_lines(headers: tuple[tuple[str, str], ...], media_type: str) -> str:
    """Return the header lines of an answer but for its id; most answers of a tier have the same."""
    form = STREAMED if media_type is EVENTS else {"Content-Type": media_type}
    return header_lines({**form, **dict(headers)})


def gateway_listener(
    config: ServerConfig,
    handle: Handler,
    origins: WebOrigins,
    key: str = "server.port",
    plain: Collection[tuple[str, str]] = PLAIN,
    direct: DirectHandler | None = None,
) -> Listener:
    """Return the listener of one address; the caller starts and closes it. Raises ConfigError for bad certificates.

    Args:
        origins: Web origins whose pages may send requests.
        key: Configuration key of the address, for errors; `tls` is beside it.
        plain: Method and path of the requests of which `handle` takes a plain one.
        direct: Begins answers in callbacks.
    """
    connections = ConnectionTable("tcp", allowed_connections(config.max_connections), time.monotonic)
    tls = server_tls(config.tls, key.replace("port", "tls"))
    address = Address(connections, origins, key, config.host, config.port, tls=tls)
    return Listener(handle, (address,), config.read_timeout_s, plain, direct=direct)


def allowed_connections(most: int) -> int:
    """Raise the process's file limit; return the connections that half of its files allow, at most `most`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * most:
        log.warning("This process may open only %d files, so it accepts only %d connections.", hard, hard // 2)
    wanted = 2 * most if hard == resource.RLIM_INFINITY else min(2 * most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return min(most, wanted // 2)
