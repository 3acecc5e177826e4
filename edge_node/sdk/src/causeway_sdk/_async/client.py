"""The client of a Causeway device. `_sync/client.py` is generated from `_async/client.py`; edit only the latter."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Literal, overload
from urllib.parse import urlencode

import httpx

from ..answers import Answer, AsyncChunks, Chunk, Decision, Embeddings, Job, Model
from ..connection import (
    HTTP_ERRORS,
    Address,
    AsyncSleep,
    Deadline,
    async_sleep,
    is_away,
    resolve_address,
    retry_pause_s,
)
from ..decoding import (
    StreamDecoder,
    decode_answer,
    decode_document,
    decode_embeddings,
    decode_error,
    decode_job,
    decode_jobs,
    decode_models,
)
from ..errors import CausewayAPIError, CausewayConnectionBroken, CausewayError, CausewayTimeout
from ..request import (
    JSON,
    Messages,
    Request,
    RequestOptions,
    build_chat_request,
    build_job_request,
    build_request,
    build_transcription_request,
    build_upload_request,
    item_path,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class AsyncStream:
    """The chunks of one answer as they arrive. Leaving its ``with`` block, or `close`, cancels the request.

    Iterating raises CausewayAPIError (the device ended the answer with an error), CausewayTimeout, or
    CausewayConnectionBroken (the answer is incomplete).
    """

    def __init__(self, response: httpx.Response, decoder: StreamDecoder, deadline: Deadline, address: Address) -> None:
        self._response = response
        self._decoder = decoder
        self._deadline = deadline
        self._address = address
        self._chunks = self._read()

    @property
    def decision(self) -> Decision:
        """The target that answers and the reason; known before the first chunk. `first_token_ms` is set at the first
        token.
        """
        return self._decoder.decision

    async def answer(self) -> Answer:
        """Read to the end.

        Returns:
            All chunks as one answer, including those that were iterated over before.
        """
        async for _ in self:
            pass
        return self._decoder.answer()

    async def close(self) -> None:
        """Close the connection; the device and the cloud stop generating."""
        await self._chunks.aclose()
        await self._response.aclose()

    async def _read(self) -> AsyncChunks:
        try:
            async for received in self._response.aiter_bytes():
                for chunk in self._decoder.feed(received):
                    yield chunk
                self._deadline.check()
        except HTTP_ERRORS as error:
            raise self._address.translate(error) from error
        finally:
            await self._response.aclose()
        if not self._decoder.done:
            raise CausewayConnectionBroken("The stream ended before the answer was complete.")

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class AsyncCauseway:
    """A client of one Causeway device. Tasks and threads may share it.

    Every method raises CausewayAPIError (the device refused or failed), CausewayUnreachable (nothing was sent),
    CausewayTimeout, or CausewayConnectionBroken.
    """

    def __init__(
        self,
        url: str = "",
        *,
        api_key: str = "",
        timeout_s: float = 120.0,
        connect_timeout_s: float = 5.0,
        retries: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: AsyncSleep = async_sleep,
    ) -> None:
        """Prepare a connection; none is opened before the first request.

        Args:
            url: ``http://host:port`` or ``unix:///path/to.sock``. Default: $CAUSEWAY_URL, else http://127.0.0.1:8080.
            api_key: Bearer key of the device. Default: $CAUSEWAY_API_KEY, else none.
            timeout_s: Seconds to wait for an answer, or for the next chunk, if a request has no `deadline_s`.
            connect_timeout_s: Seconds to wait for the connection.
            retries: Maximum number of repetitions of a request after a 429 or 503 with Retry-After, within its
                deadline.
            clock: Function that returns monotonic seconds; for tests.
            sleep: Function that waits for a number of seconds; for tests.

        Raises:
            CausewayError: The URL or the key is malformed.
        """
        self._address = resolve_address(url, api_key, connect_timeout_s, timeout_s)
        self._retries = retries
        self._clock = clock
        self._sleep = sleep
        # Ignore proxies of the environment: requests for this device go to this device.
        self._client = httpx.AsyncClient(
            base_url=self._address.url,
            headers=dict(self._address.headers),
            transport=httpx.AsyncHTTPTransport(uds=self._address.uds, verify=self._address.certificates()),
            trust_env=False,
        )

    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[False] = ..., **options: Unpack[RequestOptions]
    ) -> Answer: ...
    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[RequestOptions]
    ) -> AsyncStream: ...
    async def chat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[RequestOptions]
    ) -> Answer | AsyncStream:
        """Answer a text or a conversation (``POST /v1/chat/completions``).

        Args:
            messages: A text, or OpenAI's list of messages.
            stream: Return the chunks as they arrive instead of the complete answer.
            **options: See `RequestOptions`.

        Returns:
            The answer, or with `stream` an open stream, to be used as a context manager.
        """
        return await self._generate(
            build_chat_request("/v1/chat/completions", messages, options, stream=stream), stream=stream
        )

    @overload
    async def complete(
        self, prompt: str, *, stream: Literal[False] = ..., **options: Unpack[RequestOptions]
    ) -> Answer: ...
    @overload
    async def complete(
        self, prompt: str, *, stream: Literal[True], **options: Unpack[RequestOptions]
    ) -> AsyncStream: ...
    async def complete(
        self, prompt: str, *, stream: bool = False, **options: Unpack[RequestOptions]
    ) -> Answer | AsyncStream:
        """Continue a text (``POST /v1/completions``).

        Args:
            prompt: The text to continue.
            stream: Return the chunks as they arrive instead of the complete answer.
            **options: See `RequestOptions`.

        Returns:
            The answer, or with `stream` an open stream, to be used as a context manager.
        """
        return await self._generate(
            build_request("/v1/completions", {"prompt": prompt}, options, stream=stream), stream=stream
        )

    async def embed(self, texts: str | Sequence[str], **options: Unpack[RequestOptions]) -> Embeddings:
        """Compute embedding vectors (``POST /v1/embeddings``).

        Args:
            texts: One text or several.
            **options: See `RequestOptions`.

        Returns:
            One vector per text, in the order of the texts.
        """
        content = texts if isinstance(texts, str) else list(texts)
        return decode_embeddings(await self._fetch(build_request("/v1/embeddings", {"input": content}, options)))

    async def transcribe(self, audio: bytes, *, language: str = "") -> str:
        """Transcribe audio (``POST /v1/audio/transcriptions``); all of it stays on the device.

        Args:
            audio: The bytes of a WAV file, or of another format that the device decodes.
            language: ISO 639-1, such as ``en``. Default: detected.

        Returns:
            The transcript; "" without speech.
        """
        return (await self._fetch(build_transcription_request(audio, language))).text.rstrip("\n")

    async def upload(self, content: bytes, filename: str = "file", *, expires_after_s: int | None = None) -> str:
        """Upload a file, so that later requests can name it instead of sending it again (``POST /v1/files``).

        The device keeps it on its disk, if its owner allows that (``files.accept``), until it expires or is deleted.

        Args:
            content: The bytes of a text, an image or audio.
            filename: Its name, which is shown to models; its extension gives the format if the bytes do not.
            expires_after_s: Whole seconds until the device deletes it. Default: the device's maximum.

        Returns:
            The file's id, for a part such as ``{"type": "file", "file": {"file_id": id}}``.
        """
        request = build_upload_request(content, filename, expires_after_s)
        return str(decode_document(await self._fetch(request)).get("id", ""))

    async def delete_file(self, file_id: str) -> None:
        """Delete an uploaded file (``DELETE /v1/files/{id}``). Running answers and jobs keep it."""
        await self._fetch(Request(item_path("/v1/files", file_id), verb="DELETE"))

    async def route(self, messages: Messages, **options: Unpack[RequestOptions]) -> JSON:
        """Explain the routing of a chat request, without running it (``POST /v1/route``).

        Args:
            messages: A text, or OpenAI's list of messages.
            **options: See `RequestOptions`.

        Returns:
            The device's explanation: cache plan, decision with reasons, estimates and the snapshot of signals.
        """
        return decode_document(await self._fetch(build_chat_request("/v1/route", messages, options)))

    async def decision(self, decision_id: str) -> JSON:
        """Read the record of a past answer, attempt by attempt (``GET /v1/decisions/{id}``).

        Args:
            decision_id: `Decision.id` of an answer.

        Returns:
            The record, without the request's and the answer's content.
        """
        return decode_document(await self._fetch(Request(item_path("/v1/decisions", decision_id))))

    async def models(self) -> list[Model]:
        """List the names that `model=` accepts (``GET /v1/models``).

        Returns:
            ``auto`` first, then the policy's targets.
        """
        return decode_models(await self._fetch(Request("/v1/models")))

    # --- jobs --------------------------------------------------------------------------------------------------------

    async def submit(
        self,
        messages: Messages,
        *,
        priority: Literal["interactive", "standard", "bulk"] = "standard",
        not_before_s: float = 0.0,
        webhook: str = "",
        key: str = "",
        **options: Unpack[RequestOptions],
    ) -> Job:
        """Submit a chat request that may be answered later (``POST /v1/jobs``).

        When this returns, the job is on the device's disk, also without a network.

        Args:
            messages: A text, or OpenAI's list of messages.
            priority: ``interactive`` jobs run first, ``bulk`` jobs last.
            not_before_s: Minimum number of seconds that the job waits.
            webhook: URL that receives a signed POST when the job has ended. The daemon's
                configuration limits the allowed URLs. Default: none.
            key: Idempotency key: the same submission with the same key is the same job. Default: a new one.
            **options: See `RequestOptions`; `deadline_s` is the job's.

        Returns:
            The job, to be passed to `wait` or `results`.
        """
        request = build_job_request(messages, options, priority, not_before_s, webhook, key or uuid.uuid4().hex)
        return decode_job(decode_document(await self._fetch(request)))

    async def job(self, job_id: str) -> Job:
        """Read a job, with its answer if it has one (``GET /v1/jobs/{id}``)."""
        return decode_job(decode_document(await self._fetch(Request(item_path("/v1/jobs", job_id)))))

    async def jobs(self, *, limit: int = 20, after: str = "") -> list[Job]:
        """List this client's jobs, newest first (``GET /v1/jobs``).

        Args:
            limit: Maximum number of jobs, up to 100.
            after: The id of the last job of the previous page.
        """
        page = {"limit": str(limit), **({"after": after} if after else {})}
        return decode_jobs(await self._fetch(Request(f"/v1/jobs?{urlencode(page)}")))

    async def wait(self, job: Job | str, *, timeout_s: float | None = None) -> Job:
        """Wait until a job has ended, also while the device restarts.

        Args:
            job: The job or its id.
            timeout_s: Seconds to wait; None for no limit.

        Returns:
            The ended job: check `status` before `answer`.

        Raises:
            CausewayTimeout: The job has not ended within `timeout_s`.
        """
        async for ended in self.results([job], timeout_s=timeout_s):
            return ended
        raise CausewayTimeout("The job has not ended in time.")

    async def results(self, jobs: Sequence[Job | str], *, timeout_s: float | None = None) -> AsyncIterator[Job]:
        """Yield each of the jobs when it has ended, in the order in which they end.

        Args:
            jobs: The jobs or their ids.
            timeout_s: Seconds to wait for all of them together; None for no limit.

        Raises:
            CausewayTimeout: Some jobs have not ended within `timeout_s`.
        """
        left = [job if isinstance(job, str) else job.id for job in jobs]
        deadline = Deadline(timeout_s, self._clock)
        while left:
            for job_id in list(left):
                try:
                    job = await self.job(job_id)
                except CausewayError as error:
                    if not is_away(error):
                        raise
                    break
                if job.ended:
                    left.remove(job_id)
                    deadline.restart()
                    yield job
            if left:
                await self._sleep(deadline.pause_s(f"{len(left)} jobs"))

    async def cancel(self, job: Job | str) -> Job:
        """Cancel a job that has not ended (``DELETE /v1/jobs/{id}``)."""
        return await self._change_job("", "DELETE", job)

    async def retry(self, job: Job | str) -> Job:
        """Queue a dead letter of a device again (``POST /v1/jobs/{id}/retry``)."""
        return await self._change_job("/retry", "POST", job)

    async def purge(self, job: Job | str) -> Job:
        """Delete a job of a device that has ended, with its answer (``POST /v1/jobs/{id}/purge``)."""
        return await self._change_job("/purge", "POST", job)

    async def erase(self, client: str = "") -> JSON:
        """Erase what a device stores of this client, or of another, with the right to (``DELETE /v1/me/data``).

        Returns:
            The signed receipt.
        """
        path = f"/v1/me/data?{urlencode({'client': client})}" if client else "/v1/me/data"
        return decode_document(await self._fetch(Request(path, verb="DELETE")))

    async def _change_job(self, part: str, verb: str, job: Job | str) -> Job:
        job_id = job if isinstance(job, str) else job.id
        request = Request(item_path("/v1/jobs", job_id) + part, verb=verb)
        return decode_job(decode_document(await self._fetch(request)))

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _generate(self, request: Request, *, stream: bool) -> Answer | AsyncStream:
        if stream:
            response, deadline = await self._open(request)
            decoder = StreamDecoder(response, deadline.started, self._clock)
            return AsyncStream(response, decoder, deadline, self._address)
        started = self._clock()
        return decode_answer(await self._fetch(request), self._clock() - started)

    async def _fetch(self, request: Request) -> httpx.Response:
        """Return the response, its body read."""
        response, _ = await self._open(request)
        try:
            await response.aread()
        except HTTP_ERRORS as error:
            raise self._address.translate(error) from error
        finally:
            await response.aclose()
        return response

    async def _open(self, request: Request) -> tuple[httpx.Response, Deadline]:
        """Return a successful response, its body not yet read; retries if the device asks for that."""
        deadline = Deadline(request.deadline_s, self._clock)
        attempts = 0
        while True:
            try:
                return await self._send(request, deadline.left_s()), deadline
            except CausewayAPIError as error:
                pause_s = retry_pause_s(error, attempts, self._retries, deadline.left_s())
                if pause_s is None:
                    raise
            await self._sleep(pause_s)
            attempts += 1

    async def _send(self, request: Request, left_s: float | None) -> httpx.Response:
        timeout = self._address.timeout(left_s)
        wire = self._client.build_request(request.method, request.path, timeout=timeout, **request.encoded(left_s))
        try:
            response = await self._client.send(wire, stream=True)
            if response.is_success:
                return response
            try:
                await response.aread()
            finally:
                await response.aclose()
        except HTTP_ERRORS as error:
            raise self._address.translate(error) from error
        raise decode_error(response)
