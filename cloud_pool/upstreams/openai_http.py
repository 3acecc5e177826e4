"""A server with OpenAI's HTTP API, such as vLLM, SGLang, NIM, llama-server or a vendor's.

Each sequence is one streamed request, which the server renders with its own template and whose tool calls it parses
itself. Closing the connection stops its work. What the server says about its load, 429 or 503 with Retry-After, is
respected: until then its model is not asked again. Timeouts:

1. before the first token   the request's deadline               DeadlineExceeded
2. between two tokens       `token_timeout_s`, or the deadline   StreamBroken, DeadlineExceeded
3. after the last token     a second for the usage (`router/serving/upstream/server.py`); the answer is whole
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from yarl import URL

from causeway_server.router.errors import (
    CausewayError,
    CloudNotFound,
    CloudSaturated,
    CloudTimeout,
    CloudUnavailable,
    CloudUnprocessable,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    StreamBroken,
    UnsupportedFeature,
)
from causeway_server.router.openai.embeddings import decode_embeddings
from causeway_server.router.openai.tokens import DetokenizedText, TokenizeRequest, TokenList
from causeway_server.router.openai.upstream.wire import encode_request
from causeway_server.router.serving.http_client import ChunkTaker, HttpResponse, field_lines
from causeway_server.router.serving.tls.contexts import TlsFiles, client_tls
from causeway_server.router.serving.upstream.responses import UpstreamCall, read_error, read_whole
from causeway_server.router.serving.upstream.server import (
    Credentials,
    FixedToken,
    KeyFile,
    OpenAIServer,
    ServerAddress,
    StreamReader,
)
from causeway_server.router.types import Chunk, Message, Request, ResponseFormat, Tool

from .config import Feature, UpstreamConfig
from .inference import PROBE_S, CallMeter, Delta, InferenceRequest
from .triton.messages import SamplingParameters

_JSON_LINES = field_lines({"Content-Type": "application/json"})
_MAX_AWAY_S = 60.0  # upper bound of a server's Retry-After
_PROBE_CHAT = Request(kind="chat", model="", messages=(Message("user", "a"),), max_tokens=1, stream=True)
_FEATURE_CHATS: Mapping[Feature, Request] = {
    "tools": msgspec.structs.replace(_PROBE_CHAT, tools=(Tool("noop"),)),
    "logprobs": msgspec.structs.replace(_PROBE_CHAT, logprobs=1),
    "schemas": msgspec.structs.replace(_PROBE_CHAT, response_format=ResponseFormat("json_object")),
}
_PROBE_EMBEDDING = Request(kind="embedding", model="", prompts=("a",))


def upstream_tls(config: UpstreamConfig, where: str = "upstream") -> TlsFiles:
    """Return the files for TLS with the servers. `where`: path of the section."""
    return TlsFiles(
        where=where,
        ca_file=config.ca_file,
        cert_file=config.client_cert_file,
        key_file=config.client_key_file,
        cert_key="client_cert_file",
        key_key="client_key_file",
    )


def read_credentials(config: UpstreamConfig, where: str = "") -> Credentials:
    """Return the servers' token, and check the certificates. Raises ConfigError; `where` is the path of the section."""
    if (files := upstream_tls(config, where)).paths:
        client_tls(files)
    if not config.key_file:
        return FixedToken()
    try:
        return KeyFile(Path(config.key_file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"The token in `key_file` cannot be read: {error}", where=f"{where}.key_file") from error


class HttpCall(msgspec.Struct, eq=False):
    """A call in progress. `OpenAIUpstream.generate` owns it, or what has begun it; others may only `fail` it."""

    request: InferenceRequest
    terms: UpstreamCall
    meter: CallMeter | None
    task: asyncio.Task[Any] | None = None  # that waits for the response's head
    response: HttpResponse | None = None
    reader: StreamReader | None = None  # once the head of a stream is here
    counted: int = 0  # tokens
    ended_by: CausewayError | None = None

    def count(self, delta: Delta) -> Delta:
        self.counted += delta.new_tokens
        if self.meter is not None:
            self.meter.output_tokens += delta.new_tokens
            self.meter.input_tokens = max(self.meter.input_tokens, delta.input_tokens)
        return delta

    def fail(self, error: CausewayError) -> None:
        """End the call with an error. The first error counts."""
        if self.response is not None:
            self.response.bound(asyncio.get_running_loop().time())
        elif self.ended_by is None and self.task is not None:
            self.task.cancel()
        self.ended_by = self.ended_by or error


T = TypeVar("T")


class _Count(msgspec.Struct):
    count: int | None = None
    input_tokens: int | None = None


class OpenAIUpstream:
    """A client of one server (`inference.Upstream`). `clock`: the event loop's, monotonic seconds."""

    def __init__(
        self, url: str, config: UpstreamConfig, credentials: Credentials, clock: Callable[[], float] = time.monotonic
    ) -> None:
        address = ServerAddress(
            url=url,
            tls=upstream_tls(config),
            max_connections=config.max_connections,
            connect_timeout_s=config.connect_timeout_s,
            user_agent="causeway-gateway",
        )
        self._server = OpenAIServer(address, credentials, self)
        self._server.start()
        self._base = URL(url).raw_path.rstrip("/")
        self._pause_s = config.token_timeout_s
        self._clock = clock
        self._calls: set[HttpCall] = set()
        self._received_at: dict[str, float] = {}
        self._skip_until: dict[str, float] = {}  # time until which a model is skipped, from Retry-After

    async def generate(self, request: InferenceRequest, call: HttpCall | None = None) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one sequence; `call` of `begin` goes on. Closing stops it. Raises CausewayError."""
        if call is None:
            if request.deadline - self._clock() <= 0.0:
                raise DeadlineExceeded("The request's deadline has passed.")
            self._refuse_skipped(request.model)
            call = self._new_call(request)
        task = asyncio.current_task()
        assert task is not None
        call.task, cancelling = task, task.cancelling()
        try:
            if call.reader is None:
                begun, call.response = call.response, None
                call.response = await self._post(call, begun)
                if request.embed:
                    yield call.count(await self._vector(call.response, call.terms, request.model))
                    return
                self.new_reader(call)
            assert call.reader is not None
            while chunks := await call.reader.next():
                for delta in self.received(call, chunks):
                    yield call.count(delta)
        except CausewayError as error:
            raise self._translated(error, request, call) from error
        except asyncio.CancelledError:
            if call.response is None and call.ended_by is not None and task.uncancel() <= cancelling:
                raise call.ended_by from None  # `fail` ended the wait for the response's head
            raise
        finally:
            self.end(call)

    # --- a call in callbacks, which `generate` can go on with at any time ---------------------------------------------

    def begin(self, request: InferenceRequest) -> HttpCall | None:
        """Send a request for a stream on an idle connection, and return the call; None if it would have to wait."""
        asked = request.openai
        if asked is None or request.model in self._skip_until:
            return None
        response = self._server.begin_request(asked, request.model, request.deadline, self._lines(request))
        if response is None:
            return None
        call = self._new_call(request)
        call.response = response
        return call

    def new_reader(self, call: HttpCall) -> StreamReader:
        """Return the reader of a good response, whose head is here."""
        assert call.response is not None
        call.reader = StreamReader(call.response, call.terms, call.request.deadline, pause_s=self._pause_s)
        return call.reader

    def received(self, call: HttpCall, chunks: Sequence[Chunk]) -> list[Delta]:
        """Return the deltas of chunks, for `HttpCall.count`."""
        self._received_at[call.request.model] = self._clock()
        return _deltas_of(chunks, call.counted)

    def noting(self, call: HttpCall, response: HttpResponse, take: ChunkTaker) -> ChunkTaker:
        """Return `take` with the note that what it takes, without its being read, was received."""
        received_at, clock, pause_s = self._received_at, self._clock, self._pause_s
        model, deadline = call.request.model, call.request.deadline

        def noted(data: bytes, /) -> bool:
            if not take(data):
                return False
            now = received_at[model] = clock()
            response.extend(min(deadline, now + pause_s))
            return True

        return noted

    def end(self, call: HttpCall) -> None:
        """End a call. Closes the connection unless the answer is complete, which stops the server's work."""
        if call.reader is not None:
            call.reader.close()
        elif call.response is not None:
            call.response.release()
        self._calls.discard(call)
        if call.meter is not None:
            call.meter.end()

    def _new_call(self, request: InferenceRequest) -> HttpCall:
        meter = None if request.meter is None else request.meter.begin(request.estimated_tokens)
        call = HttpCall(request, UpstreamCall(request.request_id, request.model, request.deadline), meter)
        self._calls.add(call)
        return call

    async def probe(self, model: str, timeout_s: float = PROBE_S, *, embed: bool = False) -> None:
        """Run a tiny inference, because only that proves that the model works. Raises CausewayError."""
        request = InferenceRequest(
            model=model,
            prompt="",
            parameters=SamplingParameters(),
            openai=_PROBE_EMBEDDING if embed else _PROBE_CHAT,
            embed=embed,
            deadline=self._clock() + timeout_s,
            request_id="probe",
        )
        async with aclosing(self.generate(request)) as deltas:
            async for _ in deltas:
                pass

    async def refusal_of(self, model: str, feature: Feature, timeout_s: float) -> str:
        """Return why the server refuses a request with this feature; "" if it takes it, or gives no answer now."""
        request = InferenceRequest(
            model=model,
            prompt="",
            parameters=SamplingParameters(),
            openai=_FEATURE_CHATS[feature],
            deadline=self._clock() + timeout_s,
            request_id=f"{feature}-check",
        )
        try:
            async with aclosing(self.generate(request)) as deltas:
                found = [delta.chunk async for delta in deltas if delta.chunk is not None]
        except (InvalidRequest, CloudUnprocessable) as error:
            return error.message
        except CausewayError:
            return ""
        is_missing = feature == "logprobs" and not any(chunk.logprobs for chunk in found)
        return "The server's answer has no logprobs." if is_missing else ""

    async def count(self, model: str, request: Request, body: bytes, deadline: float) -> int:
        """Return the number of tokens of a chat's prompt, which the server renders and counts without running it.

        1. `/tokenize` of vLLM, or `/v1/tokenize` as here, with the chat as `generate` would send it
        2. `/v1/messages/count_tokens`, with the `body` as it came

        Raises UnsupportedFeature if the server has neither, CausewayError if it refuses or does not answer.
        """
        call = UpstreamCall("", model, deadline)
        asked = _chat_fields(request, model)
        counted = await self._tokenized(call, "tokenize", asked, _Count)  # (1)
        if isinstance(counted, CausewayError) or counted.count is None:
            named = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            named["model"] = asked["model"]
            named.pop("causeway", None)
            path = f"{self._base}/messages/count_tokens"
            counted = await self._counted(call, path, msgspec.json.encode(named), _Count)  # (2)
        found = _found(counted, call)
        tokens = found.count if found.count is not None else found.input_tokens
        return _found(_uncounted(call) if tokens is None else tokens, call)

    async def tokenize(self, model: str, asked: TokenizeRequest, deadline: float) -> TokenList:
        """Return the tokens of a prompt by vLLM's `/tokenize`. Raises as `count`."""
        fields: dict[str, object]
        if asked.request.kind == "chat":
            fields = {**_chat_fields(asked.request, model)}
        else:
            fields = {"model": model, "prompt": asked.request.prompts[0], "add_special_tokens": asked.adds_special}
        call = UpstreamCall("", model, deadline)
        return _found(await self._tokenized(call, "tokenize", fields, TokenList), call)

    async def detokenize(self, model: str, tokens: tuple[int, ...], deadline: float) -> str:
        """Return the text of tokens by vLLM's `/detokenize`. Raises as `count`."""
        call, fields = UpstreamCall("", model, deadline), {"model": model, "tokens": tokens}
        return _found(await self._tokenized(call, "detokenize", fields, DetokenizedText), call).prompt

    async def _tokenized(
        self, call: UpstreamCall, name: str, fields: Mapping[str, object], kind: type[T]
    ) -> T | CausewayError:
        """Return the answer of vLLM's path, or of ours below `/v1`, as `_counted`."""
        body = msgspec.json.encode(fields)
        found = await self._counted(call, f"{self._base.removesuffix('/v1')}/{name}", body, kind)
        return (
            await self._counted(call, f"{self._base}/{name}", body, kind) if isinstance(found, CloudNotFound) else found
        )

    async def _counted(self, call: UpstreamCall, path: str, body: bytes, kind: type[T]) -> T | CausewayError:
        """Return a server's answer, or the error instead of it. Raises BackendError if it does not answer."""
        response = await self._server.send(call, "POST", path, call.deadline, body=body, lines=_JSON_LINES)
        if response.status != 200:
            return await read_error(response, call, call.deadline)
        try:
            return msgspec.json.decode(await read_whole(response, call), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _uncounted(call)
        finally:
            response.release()

    def last_received_at(self, model: str) -> float:
        return self._received_at.get(model, -math.inf)

    def fail_calls(self, model: str, error: CausewayError, *, begun: bool = True) -> None:
        for call in [one for one in self._calls if one.request.model == model and (begun or not one.counted)]:
            call.fail(error)

    def renew(self) -> None:
        """Use new connections for new calls; calls in progress stay on theirs."""
        self._server.start()

    async def close(self) -> None:
        await self._server.close()

    # --- for the server's connections (`ServerObserver`) ------------------------------------------------------------

    def answered(self, response: HttpResponse) -> None:
        """Do nothing: calls record what they receive for their models."""

    def lost(self, error: Exception) -> None:
        """Do nothing: the pool judges the call's error."""

    # --- one call ----------------------------------------------------------------------------------------------------

    async def _post(self, call: HttpCall, begun: HttpResponse | None) -> HttpResponse:
        request, terms = call.request, call.terms
        asked, lines = request.openai, self._lines(request)
        assert asked is not None, "The tier builds requests of its own kind."
        if not request.embed:
            return await self._server.post_stream(terms, asked, request.model, request.deadline, lines, begun=begun)
        body = encode_request(asked, request.model, stream=False)
        return await self._server.post(terms, "embedding", body, request.deadline, lines)

    def _lines(self, request: InferenceRequest) -> str:
        # No x-request-id: llama_cpp.server answers 400 to one that is not a UUID.
        return _JSON_LINES + (field_lines({"traceparent": request.traceparent}) if request.traceparent else "")

    async def _vector(self, response: HttpResponse, terms: UpstreamCall, model: str) -> Delta:
        try:
            answer = decode_embeddings(await read_whole(response, terms))
        finally:
            response.release()
        self._received_at[model] = self._clock()
        vector = msgspec.json.encode(answer.vectors[0] if answer.vectors else ()).decode()
        return Delta(vector, input_tokens=answer.usage.prompt_tokens, final=True)

    def _refuse_skipped(self, model: str) -> None:
        """Raise CloudSaturated until the server's Retry-After has passed."""
        left_s = self._skip_until.get(model, -math.inf) - self._clock()
        if left_s > 0.0:
            raise CloudSaturated(
                f"The server of {model} has asked the gateway to send requests later.",
                phase="connect",
                retry_after_s=left_s,
            )
        self._skip_until.pop(model, None)

    def _translated(self, error: CausewayError, request: InferenceRequest, call: HttpCall) -> CausewayError:
        """Return the error of a call as the pool and the client should see it."""
        if call.ended_by is not None:
            return call.ended_by
        if isinstance(error, CloudSaturated | CloudUnavailable) and error.retry_after_s is not None:
            self._skip_until[request.model] = self._clock() + min(error.retry_after_s, _MAX_AWAY_S)
        if isinstance(error, CloudTimeout) and error.phase != "first_token":
            if request.deadline - self._clock() > 0.0:
                return StreamBroken(f"{request.model} sent nothing for {self._pause_s:g} s.", phase="stream")
        elif not isinstance(error, CloudTimeout) or request.deadline - self._clock() > 0.0:
            return error
        return DeadlineExceeded("The request's deadline has passed.")


def _chat_fields(request: Request, model: str) -> dict[str, msgspec.Raw]:
    """Return the fields of a chat that determine its prompt, as `generate` would send them."""
    chat = msgspec.json.decode(encode_request(request, model, stream=False), type=dict[str, msgspec.Raw])
    return {name: chat[name] for name in ("model", "messages", "tools") if name in chat}


def _uncounted(call: UpstreamCall) -> CloudNotFound:
    return CloudNotFound(f"{call.name} does not count tokens.", phase="first_token")


def _found(counted: T | CausewayError, call: UpstreamCall) -> T:
    """Return an answer. Raises the error instead of it, UnsupportedFeature if the server has no tokenizer."""
    if isinstance(counted, CloudNotFound):
        raise UnsupportedFeature(f"The server of {call.name} does not count tokens.", param="model")
    if isinstance(counted, CausewayError):
        raise counted
    return counted


def _deltas_of(chunks: Sequence[Chunk], counted: int) -> list[Delta]:
    """Return the deltas of chunks. `counted`: tokens of the sequence before them, which the usage corrects."""
    deltas: list[Delta] = []
    for chunk in chunks:
        usage = chunk.usage
        if usage is None or chunk.finish_reason is not None:
            counted += chunk.tokens
            # The usage is that of all sequences for the client.
            shown = chunk if usage is None else msgspec.structs.replace(chunk, usage=None)
            deltas.append(Delta(finish_reason=chunk.finish_reason, new_tokens=chunk.tokens, chunk=shown))
        if usage is not None:
            more = usage.completion_tokens - counted if usage.completion_tokens else 0
            counted += more
            deltas.append(Delta(new_tokens=more, input_tokens=usage.prompt_tokens, final=True, usage=usage))
    return deltas
