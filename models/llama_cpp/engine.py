"""The engine: one thread that owns the llama.cpp context and advances all jobs by one token each in every step.

    submit ─▶ inbox ─▶ waiting ─▶ prefilling ─▶ decoding ─▶ emissions, once per step

The caller's thread tokenises prompts; a thread of its own compiles grammars, so that a large schema delays no other
request; the engine's thread does everything that touches the context. A cancel or a deadline takes effect between two
steps.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import psutil
from llguidance import LLMatcher

from causeway_server.router.errors import (
    CausewayError,
    ClientGone,
    ContextLengthExceeded,
    InvalidGrammar,
    InvalidRequest,
)
from causeway_server.router.tool_calls.schema import last_user_text

from ..constraints.grammars import call_grammar, fault_of, framed_grammar
from .core import EngineCore
from .native.vocabulary import Tokens
from .prompts import SHORTEN
from .protocol import Emission, Emit, EngineOptions, EngineStats, ModelInfo, OnFailure, Prompt, SequenceRequest
from .sampler import GrammarState, ThinkingBudget, TokenSampler, is_plain_greedy
from .scheduling.sequence import Sequence
from .scheduling.speculation import DraftPlanner

log = logging.getLogger(__name__)
_NEVER = float("inf")


class Engine:
    """Runs the jobs of one model. Any thread may call submit, cancel, count, tokenize, detokenize and stats."""

    def __init__(
        self,
        options: EngineOptions,
        emit: Emit,
        on_failure: OnFailure | None = None,
        planner: DraftPlanner | None = None,
    ) -> None:
        """Prepare an engine; `start` loads the model. `planner` chooses drafts; None: one that drafts if it pays."""
        self._options = options
        self._emit = emit
        self._on_failure = on_failure
        self._planner = planner
        self._inbox: deque[Sequence | Emission | int] = deque()  # new jobs, refusals, and ids of jobs to cancel
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._next_deadline = _NEVER
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._call_compiler = ThreadPoolExecutor(1, "call-grammars")  # no large schema stands before a small grammar
        self._compiling: set[int] = set()  # jobs whose grammar is being compiled
        self._core: EngineCore

    def start(self) -> None:
        """Load the model and start the engine's thread. Raises EngineUnavailable, which says what to do."""
        self._core = EngineCore(self._options, self._planner)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def core(self) -> EngineCore:
        """The loaded model; owned by the engine's thread."""
        return self._core

    @property
    def info(self) -> ModelInfo:
        return self._core.info

    def submit(self, job: SequenceRequest) -> None:
        """Queue a job. An invalid job ends with an emission that carries the error, like any other failure."""
        if job.json_schema or job.grammar:
            self._compiling.add(job.id)
            self._compiler.submit(self._submit_compiled, job)
        else:
            self._submit(job)

    def cancel(self, job_id: int) -> None:
        """End a job within one step, with the error `client_gone`; an unknown or finished job is ignored."""
        self._compiling.discard(job_id)
        self._inbox.append(job_id)
        self._wake.set()

    def count(self, prompt: Prompt) -> int:
        """Return a prompt's number of tokens, or a lower bound if far too long. Raises InvalidRequest."""
        return self._core.prompts.count(prompt)

    def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens of a prompt. Raises InvalidRequest."""
        return tuple(self._core.prompts.tokens(prompt).tolist())

    def detokenize(self, tokens: tuple[int, ...]) -> str:
        """Return the text of tokens. Raises InvalidRequest."""
        return self._core.vocabulary.detokenize(tokens)

    def stats(self) -> EngineStats:
        core = self._core
        return EngineStats(
            running=core.scheduler.running,
            waiting=self._waiting,
            tokens_per_s=core.throughput.tokens_per_s,
            kv_used=core.kv_cache.used,
            kv_total=core.kv_cache.total,
            steps=core.steps + core.embedder.steps,
            rss_bytes=int(psutil.Process().memory_info().rss),
            generated=core.scheduler.generated,
        )

    @property
    def load(self) -> tuple[int, float]:
        """Return the number of waiting jobs and the tokens per second of one sequence; cheap enough for every step."""
        return self._waiting, self._core.throughput.stream_tokens_per_s

    def flush(self) -> None:
        """Wait until all prompts stored so far are written to files."""
        if self._core.prompt_store is not None:
            self._core.prompt_store.flush()

    def close(self) -> None:
        """Stop after the current step; unfinished jobs end with an error."""
        self._closing = True
        self._compiler.shutdown(cancel_futures=True)
        self._call_compiler.shutdown()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # --- the caller's thread, or that of grammars --------------------------------------------------------------------

    def _submit(self, job: SequenceRequest) -> None:
        try:
            self._inbox.append(self._prepare(job))
        except CausewayError as error:
            self._inbox.append(Emission(job.id, error=error.code, detail=error.message, param=error.param or ""))
        self._wake.set()

    def _submit_compiled(self, job: SequenceRequest) -> None:
        if job.id in self._compiling:
            self._submit(job)
        if job.id not in self._compiling:  # cancelled meanwhile
            self._inbox.append(Emission(job.id, error=ClientGone.code, detail="cancelled"))
        self._compiling.discard(job.id)

    def _prepare(self, job: SequenceRequest) -> Sequence:
        core, context = self._core, self._core.info.context_tokens
        deadline = _NEVER if job.deadline_s is None else time.monotonic() + job.deadline_s
        adapter = core.adapters.find(job.adapter)
        prompt = core.prompts.encode(job.prompt)
        if job.embed and prompt.vectors:
            raise InvalidRequest("Embeddings take only text, without soft tokens.")
        room = context - len(prompt.tokens)
        if room < (0 if job.embed else 1):
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt.tokens)} tokens, this model's context is {context}"
                + (". " if room < 0 else ": no tokens are left for the answer. ")
                + SHORTEN,
                param="messages" if job.prompt.messages else "input" if job.embed else "prompt",
            )
        sampler = None if job.embed else self._make_sampler(job, prompt.text)
        wanted = (self._options.answer_tokens or room) if job.max_tokens is None else job.max_tokens
        # Files hold what the model as it is makes of a prompt.
        storable = job.store_prompt and adapter is None and core.prompt_store is not None
        if storable:
            prompt = msgspec.structs.replace(prompt, system_tokens=core.prompts.system_tokens(job.prompt))
        return Sequence(job, prompt, max(1, min(room, wanted)), sampler, core.vocabulary, deadline, adapter)

    def _make_sampler(self, job: SequenceRequest, prompt: Tokens) -> TokenSampler | None:
        sampling = job.sampling
        if sampling.temperature is None and self._options.temperature is not None:  # the model's own
            sampling = msgspec.structs.replace(sampling, temperature=self._options.temperature)
        thinking = None if job.thinking_tokens is None else ThinkingBudget(self._core.vocabulary, job)
        grammar, of_calls = self._grammar(job)
        if grammar is None and thinking is None and is_plain_greedy(sampling):
            return None
        return TokenSampler(
            self._core.vocabulary, sampling, prompt, grammar, may_refuse=of_calls or job.may_refuse, thinking=thinking
        )

    def _grammar(self, job: SequenceRequest) -> tuple[GrammarState | Future[GrammarState] | None, bool]:
        """Constrain the answer by (1) the job's grammar or schema, (2) the call grammar of its text, (3) nothing.

        A call grammar compiles in a millisecond, during the prefill. Returns the grammar, and whether it is (2).
        """
        compiler = self._core.grammars
        if job.json_schema:  # (1)
            grammar = framed_grammar(job.json_schema, job.call_frame, self._core.vocabulary.marks)
            try:
                return compiler.compile(grammar), False
            except InvalidGrammar as error:
                fault = fault_of(job.json_schema)
                raise InvalidGrammar(error.message if fault is None else fault.message) from error
        if job.grammar:
            return compiler.compile(LLMatcher.grammar_from_lark(job.grammar)), False
        copy_source = last_user_text(job.prompt.messages) if job.copy_from_prompt else job.copy_source
        if copy_source is None or job.ignore_eos:  # (3)
            return None, False
        for soft in job.prompt.soft:
            copy_source = copy_source.replace(soft.marker, " ")
        return self._call_compiler.submit(compiler.compile, call_grammar(copy_source), keep=False), True  # (2)

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
            self._end_all("engine_unavailable", "the engine was closed")
        except Exception as error:
            log.exception("The engine stopped.")
            self._end_all("engine_crashed", f"the engine stopped: {error}")
            if self._on_failure is not None:
                self._on_failure(error)
        finally:
            self._core.close()

    def _serve(self) -> None:
        core, scheduler, embedder = self._core, self._core.scheduler, self._core.embedder
        served = False
        while not self._closing:
            out: list[Emission] = []
            if self._inbox:
                self._read_inbox(out)
            if self._next_deadline < _NEVER and time.monotonic() >= self._next_deadline:
                self._expire(out)
            if scheduler.waiting:
                scheduler.admit()
            busy = scheduler.running > 0
            if busy:
                core.step(out)
            if embedder.waiting:
                embedder.step(out, scheduler.running)
                busy = True
            if out:
                self._emit(out)
                served = True
            elif not busy:
                if served:  # not before: llguidance holds the GIL for half a second, which the first answer would wait
                    core.grammars.prepare()
                self._wake.wait()
                self._wake.clear()

    def _read_inbox(self, out: list[Emission]) -> None:
        core = self._core
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, int):
                self._cancel(item, out)
            elif isinstance(item, Emission):
                out.append(item)
            elif self._waiting >= self._options.queue:
                item.close()
                out.append(item.fail("queue_full", f"{self._options.queue} jobs are waiting already"))
            else:
                queue = core.embedder.waiting if item.job.embed else core.scheduler.waiting
                queue.append(item)
                self._next_deadline = min(self._next_deadline, item.deadline)

    def _cancel(self, job_id: int, out: list[Emission]) -> None:
        for sequence in self._sequences():
            if sequence.id == job_id:
                self._remove(sequence)
                out.append(sequence.fail("client_gone", "cancelled"))

    def _expire(self, out: list[Emission]) -> None:
        now = time.monotonic()
        for sequence in self._sequences():
            if sequence.deadline <= now:
                self._remove(sequence)
                out.append(sequence.fail("deadline_exceeded", "the deadline passed before the end of the answer"))
        self._next_deadline = min((sequence.deadline for sequence in self._sequences()), default=_NEVER)

    @property
    def _waiting(self) -> int:
        return len(self._core.scheduler.waiting) + len(self._core.embedder.waiting)

    def _sequences(self) -> list[Sequence]:
        scheduler = self._core.scheduler
        return [*scheduler.running_sequences, *scheduler.waiting, *self._core.embedder.waiting]

    def _remove(self, sequence: Sequence) -> None:
        if sequence.job.embed:
            self._core.embedder.remove(sequence)
        else:
            self._core.scheduler.remove(sequence)

    def _end_all(self, code: str, detail: str) -> None:
        out: list[Emission] = []
        with contextlib.suppress(Exception):
            self._read_inbox(out)
        for sequence in self._sequences():
            sequence.close()
            out.append(sequence.fail(code, detail))
        if out:
            self._emit(out)
