"""The engine: one thread that owns the llama.cpp context and runs all jobs together, a token each per step.

    submit ─▶ inbox ─▶ waiting ─▶ filling ─▶ decoding ─▶ emissions, once per step

Tokenising and reading grammars happen in the caller's thread, everything that touches the context in the engine's. A
cancel or a deadline takes effect between two steps.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import psutil

from router.errors import CausewayError, ContextLengthExceeded, InvalidGrammar
from router.types import Sampling

from ..function_calls.grammar import ANY_CALL, call_grammar
from .loading import EngineParts, load
from .native.vocabulary import Tokens
from .prompts import SHORTEN
from .protocol import Emission, EngineOptions, EngineStats, Job, ModelInfo, Prompt
from .sampling.json_schema import schema_to_gbnf
from .sampling.sampler import TokenSampler, plain
from .scheduling.sequence import Sequence
from .step import StepRunner

_log = logging.getLogger(__name__)
_NEVER = float("inf")

Emit = Callable[[list[Emission]], None]


class Engine:
    """`emit` is called from the engine's thread, once per step, with what the step made for all jobs.

    Any thread may call submit, cancel, count and stats.
    """

    def __init__(
        self, options: EngineOptions, emit: Emit, on_failure: Callable[[Exception], None] | None = None
    ) -> None:
        """`on_failure`: called from the engine's thread when it cannot go on; every job has had its end by then."""
        self._options = options
        self._emit = emit
        self._on_failure = on_failure
        self._inbox: deque[Sequence | Emission | int] = deque()  # a number cancels that job
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._next_deadline = _NEVER
        self._parts: EngineParts
        self._stepper: StepRunner

    def start(self) -> None:
        """Load the model and begin. Raises EngineUnavailable saying what to do."""
        self._parts = load(self._options)
        self._stepper = StepRunner(self._parts)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> ModelInfo:
        return self._parts.info

    def submit(self, job: Job) -> None:
        """Queue a job. What is wrong with it comes as its emission, like everything else about it."""
        try:
            self._inbox.append(self._prepare(job))
        except CausewayError as error:
            self._inbox.append(Emission(job.id, error=error.code, detail=error.message, param=error.param or ""))
        self._wake.set()

    def cancel(self, job_id: int) -> None:
        """End a job within a step, with the error `client_gone`; a job that is not there any more is no error."""
        self._inbox.append(job_id)
        self._wake.set()

    def count(self, prompt: Prompt) -> int:
        """Tokens of a prompt; of one that is far too long, how many at least. Raises InvalidRequest or its kin."""
        return self._parts.prompts.count(prompt)

    def stats(self) -> EngineStats:
        schedule, cells, pace = self._parts.schedule, self._parts.cells, self._parts.pace
        return EngineStats(
            running=schedule.running,
            waiting=len(schedule.waiting) + len(self._parts.embedder.waiting),
            tokens_per_s=pace.tokens_per_s,
            tokens_per_s_stream=pace.stream_tokens_per_s,
            kv_used=cells.used,
            kv_total=cells.total,
            steps=self._stepper.steps,
            rss_bytes=int(psutil.Process().memory_info().rss),
        )

    @property
    def load(self) -> tuple[int, float]:
        """(jobs that wait, tokens/s of one stream): cheap, for every step."""
        parts = self._parts
        return len(parts.schedule.waiting) + len(parts.embedder.waiting), parts.pace.stream_tokens_per_s

    def close(self) -> None:
        """Stop after the step in progress; jobs that did not end get an error."""
        self._closing = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # --- the caller's thread ----------------------------------------------------------------------------------------

    def _prepare(self, job: Job) -> Sequence:
        parts, context = self._parts, self._parts.info.context_tokens
        deadline = _NEVER if job.deadline_s is None else time.monotonic() + job.deadline_s
        prompt = parts.prompts.tokens(job.prompt)
        room = context - len(prompt)
        if room < (0 if job.embed else 1):
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens, this model's context is {context}"
                + (". " if room < 0 else ": there is none left for the answer. ")
                + SHORTEN,
                param="messages" if job.prompt.messages else "prompt",
            )
        chooser = None if job.embed else self._chooser(job, prompt)
        wanted = (self._options.answer_tokens or room) if job.max_tokens is None else job.max_tokens
        limit = max(1, min(room, wanted))
        return Sequence(job, prompt, limit, chooser, parts.vocabulary, deadline)

    def _chooser(self, job: Job, prompt: Tokens) -> TokenSampler | None:
        """What holds the answer: (1) the caller's grammar or schema, (2) its utterance, (3) nothing."""
        sampling = self._sampling(job)
        held_to = partial(TokenSampler, self._parts.vocabulary, self._parts.candidates, sampling, prompt)
        gbnf = schema_to_gbnf(job.json_schema) if job.json_schema else job.grammar
        if gbnf or job.copy_source is None or job.ignore_eos:  # (1), (3)
            return held_to(gbnf) if gbnf or not plain(sampling) else None
        try:  # (2)
            return held_to(call_grammar(job.copy_source), refusable=True, answer_prefix=job.answer_prefix)
        except InvalidGrammar:
            _log.warning("llama.cpp cannot read the grammar of an utterance of %d characters", len(job.copy_source))
            return held_to(ANY_CALL, refusable=True, answer_prefix=job.answer_prefix)

    def _sampling(self, job: Job) -> Sampling:
        """The job's, with the model's own temperature where it names none."""
        if job.sampling.temperature is not None or self._options.temperature is None:
            return job.sampling
        return msgspec.structs.replace(job.sampling, temperature=self._options.temperature)

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
            self._end_all("engine_unavailable", "the engine was closed")
        except Exception as error:
            _log.exception("the engine stopped")
            self._end_all("engine_crashed", f"the engine stopped: {error}")
            if self._on_failure is not None:
                self._on_failure(error)
        finally:
            self._parts.close()

    def _serve(self) -> None:
        schedule, embedder = self._parts.schedule, self._parts.embedder
        while not self._closing:
            out: list[Emission] = []
            if self._inbox:
                self._take_inbox(out)
            if self._next_deadline < _NEVER and time.monotonic() >= self._next_deadline:
                self._expire(out)
            if schedule.waiting:
                schedule.admit()
            busy = schedule.running > 0
            if busy:
                self._stepper.step(out)
            if embedder.waiting:
                embedder.step(out)
                busy = True
            if out:
                self._emit(out)
            elif not busy:
                self._wake.wait()
                self._wake.clear()

    def _take_inbox(self, out: list[Emission]) -> None:
        waiting = self._parts.schedule.waiting
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, int):
                self._cancel(item, out)
            elif isinstance(item, Emission):
                out.append(item)
            elif len(waiting) + len(self._parts.embedder.waiting) >= self._options.queue:
                item.close()
                out.append(item.fail("queue_full", f"{self._options.queue} jobs are waiting already"))
            else:
                (self._parts.embedder.waiting if item.job.embed else waiting).append(item)
                self._next_deadline = min(self._next_deadline, item.deadline)

    def _cancel(self, job_id: int, out: list[Emission]) -> None:
        for sequence in self._jobs():
            if sequence.id == job_id:
                self._drop(sequence)
                out.append(sequence.fail("client_gone", "cancelled"))

    def _expire(self, out: list[Emission]) -> None:
        now = time.monotonic()
        for sequence in self._jobs():
            if sequence.deadline <= now:
                self._drop(sequence)
                out.append(sequence.fail("deadline_exceeded", "the deadline passed before the answer's end"))
        self._next_deadline = min((sequence.deadline for sequence in self._jobs()), default=_NEVER)

    def _jobs(self) -> list[Sequence]:
        schedule = self._parts.schedule
        return [*schedule.decoding, *schedule.prefilling, *schedule.waiting, *self._parts.embedder.waiting]

    def _drop(self, sequence: Sequence) -> None:
        if sequence.job.embed:
            self._parts.embedder.remove(sequence)
        else:
            self._parts.schedule.remove(sequence)

    def _end_all(self, code: str, detail: str) -> None:
        out: list[Emission] = []
        with contextlib.suppress(Exception):
            self._take_inbox(out)
        for sequence in self._jobs():
            sequence.close()
            out.append(sequence.fail(code, detail))
        if out:
            self._emit(out)
