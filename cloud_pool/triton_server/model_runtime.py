"""The model in the Python backend, without Triton's own types: it converts requests to the engine's sequences and back.

    execute()      Triton's thread    ModelRuntime.submit: n jobs in the engine, returns at once
    engine step    engine's thread    only _steps.put
    responses      sender's thread    one response per request and step, with the deltas of all its sequences

A response costs about 0.1 ms and a check for cancellation 0.03 ms (both go to the server's process), so neither happens
in the engine's thread, and each request is checked at most every POLL_S.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from causeway_server.models.llama_cpp.protocol import Emission, Emit, EngineStats, OnFailure, Prompt, SequenceRequest
from causeway_server.router.errors import CausewayError, ClientGone, DeadlineExceeded, InvalidRequest
from causeway_server.router.types import TokenLogprob

from ..upstreams.triton.errors import error_of
from ..upstreams.triton.messages import SamplingParameters

POLL_S = 0.01
STATS_S = 0.1
_EARLY = 1024  # names that are remembered
R_contra = TypeVar("R_contra", contravariant=True)


class RequestedOutputs(msgspec.Struct, frozen=True):
    """Optional output tensors that the request wants."""

    finish_reason: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    logprobs: bool = False
    cumulative_logprob: bool = False


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str = ""
    token_ids: tuple[int, ...] = ()  # token ids, instead of `prompt`
    parameters: SamplingParameters
    stream: bool = False
    with_input: bool = False  # whether the answer begins with the prompt (only without streaming)
    outputs: RequestedOutputs = RequestedOutputs()
    embed: bool = False
    deadline_s: float | None = None  # seconds until the deadline
    call_name: str = ""  # name by which the request can be cancelled
    caller: str = ""  # see `SequenceRequest.caller`


class ModelResponse(msgspec.Struct, frozen=True):
    """A response; each tuple has one element per sequence."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str | None, ...]
    new_tokens: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    cumulative_logprobs: tuple[float, ...]
    input_tokens: int = 0  # set in the last response
    embedding: tuple[float, ...] = ()


def jobs_of(request: ModelRequest, ids: itertools.count[int]) -> list[SequenceRequest]:
    """Translate a request into one engine sequence for each answer. Raises InvalidRequest."""
    parameters = request.parameters
    if request.stream and request.with_input:
        raise InvalidRequest("`exclude_input_in_output` cannot be false while streaming.")
    guided = parameters.guided
    return [
        SequenceRequest(
            id=next(ids),
            # The gateway rendered the prompt and broke up special tokens in the user's text: those left are intended.
            # What is to be embedded is the user's text alone.
            prompt=Prompt(tokens=request.token_ids)
            if request.token_ids
            else Prompt(text=request.prompt, parse_special=not request.embed),
            adapter=parameters.lora_name,
            max_tokens=parameters.max_tokens,
            sampling=parameters.sampling(index),
            stop=parameters.stops,
            grammar=guided.grammar,
            json_schema=guided.schema,
            call_frame=guided.call_frame,
            thinking=guided.thinking,
            thinking_tokens=guided.thinking_tokens,
            copy_source=guided.copy_source,
            logprobs=_logprobs(request),
            ignore_eos=parameters.ignore_eos,
            deadline_s=request.deadline_s,
            embed=request.embed,
            caller=request.caller,
            refusal="skip",  # the request cannot be deferred to a stronger model
        )
        for index in range(parameters.n)
    ]


def _logprobs(request: ModelRequest) -> int | None:
    outputs, count = request.outputs, request.parameters.logprobs
    if outputs.cumulative_logprob and count is None:
        return 0
    return count if outputs.logprobs or outputs.cumulative_logprob else None


class Responder(Protocol[R_contra]):
    """The interface of Triton's response sender. No response may follow `last` or `fail`."""

    def send(self, response: R_contra, *, last: bool) -> None: ...

    def fail(self, error: CausewayError) -> None: ...

    def is_cancelled(self) -> bool: ...


class ModelEngine(Protocol):
    """The part of `models.llama_cpp.engine.Engine` that the runtime uses."""

    def submit(self, job: SequenceRequest) -> None: ...

    def cancel(self, job_id: int) -> None: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class _Sequence:
    """The output of one sequence since the last response."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens = 0
        self.logprobs: list[TokenLogprob] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None

    def add(self, emission: Emission) -> None:
        self.text += emission.text
        self.tokens += emission.tokens
        self.logprobs.extend(emission.logprobs)
        self.cumulative_logprob += sum(token.logprob for token in emission.logprobs)
        self.finish_reason = emission.finish_reason or self.finish_reason

    def clear(self) -> None:
        self.text, self.tokens = "", 0
        self.logprobs.clear()


class _RunningRequest:
    """A request in progress: its sequences by job id, in the order of the answer."""

    def __init__(
        self, request: ModelRequest, responder: Responder[ModelResponse], job_ids: list[int], now: float
    ) -> None:
        self.request = request
        self.responder = responder
        self.sequences = {job_id: _Sequence() for job_id in job_ids}
        self.running = set(job_ids)
        self.cancelled = False
        self.responded = False
        self.input_tokens = 0
        self.embedding: tuple[float, ...] = ()
        self.checked_at = now

    def add(self, emission: Emission) -> None:
        self.sequences[emission.job].add(emission)
        self.input_tokens = max(self.input_tokens, emission.prompt_tokens)
        self.embedding = emission.embedding or self.embedding
        if emission.finish_reason is not None or emission.error:
            self.running.discard(emission.job)

    def next_response(self) -> ModelResponse:
        """Return the output since the last response."""
        sequences = self.sequences.values()
        start = self.request.prompt if self.request.with_input else ""
        response = ModelResponse(
            texts=tuple(start + sequence.text for sequence in sequences),
            finish_reasons=tuple(sequence.finish_reason for sequence in sequences),
            new_tokens=tuple(sequence.tokens for sequence in sequences),
            logprobs=tuple(tuple(sequence.logprobs) for sequence in sequences),
            cumulative_logprobs=tuple(sequence.cumulative_logprob for sequence in sequences),
            input_tokens=self.input_tokens,
            embedding=self.embedding,
        )
        for sequence in sequences:
            sequence.clear()
        return response


class ModelRuntime:
    """The engine of one model instance, and every request in it.

    `make_engine` starts the engine, which calls both callbacks in its own thread. `broken` is called after the last
    responses when the engine cannot continue.
    """

    def __init__(
        self,
        make_engine: Callable[[Emit, OnFailure], ModelEngine],
        *,
        report: Callable[[EngineStats], None],
        broken: Callable[[], None],
    ) -> None:
        self._steps: queue.SimpleQueue[list[Emission] | str | Exception | None] = queue.SimpleQueue()
        self._running: dict[int, _RunningRequest] = {}  # by job id; n entries for one request
        self._by_call_name: dict[str, _RunningRequest] = {}
        self._cancelled_names: dict[str, None] = {}  # cancelled before they came, oldest first
        self._ids = itertools.count(1)
        self._report = report
        self._broken = broken
        self._engine = make_engine(self._steps.put, self._steps.put)
        self._sender = threading.Thread(target=self._send_all, name="causeway-sender", daemon=True)
        self._sender.start()

    def submit(self, request: ModelRequest, responder: Responder[ModelResponse]) -> None:
        """Start a request; every outcome, including a refusal, goes to `responder`."""
        try:
            jobs = jobs_of(request, self._ids)
        except CausewayError as error:
            responder.fail(error)
            return
        running = _RunningRequest(request, responder, [job.id for job in jobs], time.monotonic())
        # Registered before the engine has the jobs: its first step may be faster than this thread.
        self._running.update(dict.fromkeys(running.sequences, running))
        if request.call_name:
            self._by_call_name[request.call_name] = running
        try:
            for job in jobs:
                self._engine.submit(job)
        except CausewayError as error:
            # Some jobs may have responses already: only the sender's thread may end the request.
            self._steps.put([Emission(job=jobs[0].id, error=error.code, detail=error.message)])
            return
        if request.call_name in self._cancelled_names:  # The cancel came first.
            self._steps.put(request.call_name)
        if jobs[-1].id not in self._running or running.cancelled:
            # The request ended before the engine had all of its jobs: their cancels came before them.
            for job in jobs:
                self._engine.cancel(job.id)
        self._steps.put([])  # Wake the sender: from now on it checks for cancellation.

    def cancel(self, call_name: str) -> None:
        """End the request with this name, running or not yet submitted, with a response that counts its tokens."""
        self._steps.put(call_name)

    @property
    def call_names(self) -> tuple[str, ...]:
        """Names of the requests in progress that have one."""
        return tuple(self._by_call_name)

    def close(self) -> None:
        self._engine.close()
        self._steps.put(None)
        self._sender.join(timeout=5.0)

    def _send_all(self) -> None:
        reported_at, busy = 0.0, False
        while True:
            try:
                emissions = self._steps.get(timeout=POLL_S if busy else None)
            except queue.Empty:
                emissions = []
            if emissions is None:
                return
            if isinstance(emissions, Exception):
                self._broken()
                return
            if isinstance(emissions, str):  # a call name
                self._cancel(emissions)
            else:
                self._deliver(emissions)
            now = time.monotonic()
            self._check_cancelled(now)
            busy = bool(self._running)
            if now - reported_at >= STATS_S or not busy:
                reported_at = now
                stats = self._engine.stats()
                self._report(stats)
                # A cancelled job leaves the engine a step later: stay awake until the figures show it.
                busy = busy or stats.running > 0 or stats.waiting > 0

    def _deliver(self, emissions: list[Emission]) -> None:
        touched: dict[int, _RunningRequest] = {}
        for emission in emissions:
            request = self._running.get(emission.job)
            if request is None:  # cancelled in this very step
                continue
            if emission.error and not request.cancelled:
                self._report_tokens(request, emission)
                self._end(request)
                touched.pop(id(request), None)
                request.responder.fail(error_of(emission.error, emission.detail))
                continue
            request.add(emission)
            touched[id(request)] = request
        for request in touched.values():
            self._respond(request)

    def _respond(self, running: _RunningRequest) -> None:
        last = not running.running
        if last:
            self._end(running)
        if last or (running.request.stream and not running.cancelled):
            running.responded = True
            running.responder.send(running.next_response(), last=last)

    def _report_tokens(self, running: _RunningRequest, emission: Emission) -> None:
        """Send the token count of a stream that ends at its deadline, before the error, which cannot carry one.

        Not before the first response: it would begin the answer.
        """
        if running.responded and running.request.stream and emission.error == DeadlineExceeded.code:
            running.add(emission)
            running.responder.send(running.next_response(), last=False)

    def _check_cancelled(self, now: float) -> None:
        for running in {id(entry): entry for entry in list(self._running.values())}.values():
            if now - running.checked_at < POLL_S:
                continue
            running.checked_at = now
            if running.responder.is_cancelled():
                self._end(running)
                running.responder.fail(ClientGone("The request was cancelled."))

    def _cancel(self, call_name: str) -> None:
        """Stop a request's sequences. Its last response counts the tokens generated until then."""
        self._cancelled_names[call_name] = None
        running = self._by_call_name.get(call_name)
        if running is None:
            if len(self._cancelled_names) > _EARLY:
                del self._cancelled_names[next(iter(self._cancelled_names))]
            return
        self._cancelled_names.pop(call_name, None)
        running.cancelled = True
        for job_id in running.running:
            self._engine.cancel(job_id)

    def _end(self, running: _RunningRequest) -> None:
        call_name = running.request.call_name
        if self._by_call_name.get(call_name) is running:
            del self._by_call_name[call_name]
        for job_id in running.sequences:
            self._running.pop(job_id, None)
        for job_id in running.running:
            self._engine.cancel(job_id)
