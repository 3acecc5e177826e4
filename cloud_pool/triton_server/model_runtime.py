"""One Triton request ↔ jobs of the engine: what the Python backend's model does, without Triton's own types.

    execute()      Triton's thread    Generator.submit: n jobs in the engine, returns at once
    engine step    engine's thread    _steps.put: nothing else happens there
    answers        sender's thread    one response per request and step, with the deltas of all its sequences

A response costs about 0.1 ms and a look for cancellation 0.03 ms (both go to the server's process), so neither is
done in the engine's thread, and a request is looked at every POLL_S at most.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from models.llama_cpp.protocol import Emission, EngineStats, Job, Prompt
from router.errors import CausewayError, ClientGone, InvalidRequest
from router.types import TokenLogprob

from ..upstreams.triton.errors import error_of
from ..upstreams.triton.sampling_parameters import SamplingParameters

Emit = Callable[[list[Emission]], None]
OnFailure = Callable[[Exception], None]
POLL_S = 0.01
STATS_S = 0.1


class RequestedOutputs(msgspec.Struct, frozen=True):
    """Which of the optional outputs the caller asked for."""

    finish_reason: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    logprobs: bool = False
    cumulative_logprob: bool = False


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
    parameters: SamplingParameters
    stream: bool = False
    with_input: bool = False  # the answer begins with the prompt (only when not streaming)
    wants: RequestedOutputs = RequestedOutputs()
    embed: bool = False
    deadline_s: float | None = None  # time left
    call: str = ""  # by this name it can be cancelled


class ModelResponse(msgspec.Struct, frozen=True):
    """One response; every tuple has one element for each of the n sequences."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str | None, ...]
    new_tokens: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    cumulative_logprobs: tuple[float, ...]
    input_tokens: int = 0  # known with the last response
    embedding: tuple[float, ...] = ()


class Responder(Protocol):
    """Triton's response sender. After `last` or `fail` nothing may be sent."""

    def send(self, outputs: ModelResponse, *, last: bool) -> None: ...

    def fail(self, error: CausewayError) -> None: ...

    def is_cancelled(self) -> bool: ...


class Engine(Protocol):
    """What is used of models.llama_cpp.engine.Engine."""

    def submit(self, job: Job) -> None: ...

    def cancel(self, job_id: int) -> None: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class _Sequence:
    """What one of the n sequences made since the last response."""

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
    """A request that runs: its sequences by job id, in the order of the answer."""

    def __init__(self, ask: ModelRequest, responder: Responder, job_ids: list[int], now: float) -> None:
        self.ask = ask
        self.responder = responder
        self.sequences = {job_id: _Sequence() for job_id in job_ids}
        self.running = set(job_ids)
        self.input_tokens = 0
        self.embedding: tuple[float, ...] = ()
        self.looked_at = now

    def add(self, emission: Emission) -> None:
        self.sequences[emission.job].add(emission)
        self.input_tokens = max(self.input_tokens, emission.prompt_tokens)
        self.embedding = emission.embedding or self.embedding
        if emission.finish_reason is not None:
            self.running.discard(emission.job)

    def take(self) -> ModelResponse:
        """What is new, and forget it."""
        made = self.sequences.values()
        start = self.ask.prompt if self.ask.with_input else ""
        outputs = ModelResponse(
            texts=tuple(start + one.text for one in made),
            finish_reasons=tuple(one.finish_reason for one in made),
            new_tokens=tuple(one.tokens for one in made),
            logprobs=tuple(tuple(one.logprobs) for one in made),
            cumulative_logprobs=tuple(one.cumulative_logprob for one in made),
            input_tokens=self.input_tokens,
            embedding=self.embedding,
        )
        for one in made:
            one.clear()
        return outputs


class ModelRuntime:
    """Owns the engine of one model instance and every request in it."""

    def __init__(
        self,
        make_engine: Callable[[Emit, OnFailure], Engine],
        *,
        report: Callable[[EngineStats], None],
        broken: Callable[[], None],
    ) -> None:
        """`report` gets the engine's figures; `broken` is called, after the last answers, when it cannot go on."""
        self._steps: queue.SimpleQueue[list[Emission] | str | Exception | None] = queue.SimpleQueue()
        self._live: dict[int, _RunningRequest] = {}  # by job id; n entries for one request
        self._calls: dict[str, _RunningRequest] = {}  # by name, of those that have one
        self._ids = itertools.count(1)
        self._report = report
        self._broken = broken
        self._engine = make_engine(self._steps.put, self._steps.put)
        self._sender = threading.Thread(target=self._send_all, name="causeway-sender", daemon=True)
        self._sender.start()

    def submit(self, ask: ModelRequest, responder: Responder) -> None:
        """Start; every outcome, a refusal too, goes to `responder`."""
        try:
            jobs = jobs_of(ask, self._ids)
        except CausewayError as error:
            responder.fail(error)
            return
        live = _RunningRequest(ask, responder, [job.id for job in jobs], time.monotonic())
        # Known before the engine is: its first step may be faster than this thread.
        self._live.update(dict.fromkeys(live.sequences, live))
        if ask.call:
            self._calls[ask.call] = live
        try:
            for job in jobs:
                self._engine.submit(job)
        except CausewayError as error:
            # Some jobs may be answering already: only the sender's thread may end what it sends for.
            self._steps.put([Emission(job=jobs[0].id, error=error.code, detail=error.message)])
            return
        self._steps.put([])  # Wake the sender: from now on it looks for cancellation.

    def cancel(self, call: str) -> None:
        """Ends the request with this name, if it still runs."""
        self._steps.put(call)

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
            if isinstance(emissions, str):
                self._leave(self._calls.get(emissions))
            else:
                self._deliver(emissions)
            now = time.monotonic()
            self._look_for_cancelled(now)
            busy = bool(self._live)
            if now - reported_at >= STATS_S or not busy:
                reported_at = now
                stats = self._engine.stats()
                self._report(stats)
                # A cancelled job leaves the engine a step later: stay awake until the figures say so.
                busy = busy or stats.running > 0 or stats.waiting > 0

    def _deliver(self, emissions: list[Emission]) -> None:
        touched: dict[int, _RunningRequest] = {}
        for emission in emissions:
            live = self._live.get(emission.job)
            if live is None:  # cancelled in this very step
                continue
            if emission.error:
                self._end(live)
                touched.pop(id(live), None)
                live.responder.fail(error_of(emission.error, emission.detail))
                continue
            live.add(emission)
            touched[id(live)] = live
        for live in touched.values():
            self._answer(live)

    def _answer(self, live: _RunningRequest) -> None:
        last = not live.running
        if last:
            self._end(live)
        if last or live.ask.stream:
            live.responder.send(live.take(), last=last)

    def _look_for_cancelled(self, now: float) -> None:
        for live in {id(live): live for live in list(self._live.values())}.values():
            if now - live.looked_at < POLL_S:
                continue
            live.looked_at = now
            if live.responder.is_cancelled():
                self._leave(live)

    def _leave(self, live: _RunningRequest | None) -> None:
        if live is not None:
            self._end(live)
            live.responder.fail(ClientGone("the request was cancelled"))

    def _end(self, live: _RunningRequest) -> None:
        if self._calls.get(live.ask.call) is live:
            del self._calls[live.ask.call]
        for job_id in live.sequences:
            self._live.pop(job_id, None)
        for job_id in live.running:
            self._engine.cancel(job_id)


def jobs_of(ask: ModelRequest, ids: itertools.count[int]) -> list[Job]:
    """Raises InvalidRequest."""
    parameters = ask.parameters
    if ask.stream and ask.with_input:
        raise InvalidRequest("exclude_input_in_output = false is not possible while streaming")
    guided = parameters.guided
    return [
        Job(
            id=next(ids),
            # The gateway rendered the prompt, so its special tokens are meant (it took those of the user's text apart).
            prompt=Prompt(text=ask.prompt, parse_special=True),
            max_tokens=parameters.max_tokens,
            sampling=parameters.sampling(index),
            stop=parameters.stops,
            grammar=guided.grammar,
            json_schema=guided.schema,
            copy_source=guided.copy_source,
            answer_prefix=guided.answer_prefix,
            logprobs=_logprobs(ask),
            ignore_eos=parameters.ignore_eos,
            deadline_s=ask.deadline_s,
            embed=ask.embed,
            refusal="skip",  # a tier is the end of the line: nobody else will answer
        )
        for index in range(parameters.n)
    ]


def _logprobs(ask: ModelRequest) -> int | None:
    if ask.wants.cumulative_logprob and ask.parameters.logprobs is None:
        return 0
    return ask.parameters.logprobs if ask.wants.logprobs or ask.wants.cumulative_logprob else None
