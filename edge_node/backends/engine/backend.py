"""A model on this device as a Backend: it sends requests to its engine child and makes Chunks of the output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Self

import msgspec

from causeway_server.models.catalog.artifact import Answers
from causeway_server.models.constraints.grammars import ANSWER_TOKENS, check_schemas
from causeway_server.models.llama_cpp.process.parent import EngineProcess
from causeway_server.models.llama_cpp.protocol import AdapterFile, Emission, EngineOptions, Prompt, SequenceRequest
from causeway_server.router import errors
from causeway_server.router.errors import (
    CausewayError,
    DeadlineExceeded,
    EngineCrashed,
    EngineUnavailable,
    UnsupportedFeature,
)
from causeway_server.router.openai.tokens import TokenList
from causeway_server.router.reasoning import ReasoningParser, Thinking, closed_thought, thinking_limit, thinks
from causeway_server.router.tool_calls.parser import ToolCallParser
from causeway_server.router.tool_calls.schema import NO_FRAME, PLAIN, answer_schema, call_frame
from causeway_server.router.types import Chunk, EdgeSignals, Embeddings, Request, Sampling, ToolCallDelta, Usage

from ...config.schema import EngineConfig
from ..backend import BackendRequest
from .supervisor import RestartBackoff, Supervisor

DECLINED = "The model on this device declined to answer: the question is outside the scope it was trained for."
_SEEDS = 2**31
_TEXTS_AT_ONCE = 32  # maximum number of one request's texts in the child, where they share its batches
_LOAD_S = 60.0  # timeout of counting a prompt's tokens; the caller waits for less


class EngineModel(msgspec.Struct, frozen=True):
    """The manifest's facts about a model. `name`: for messages; `adapters`: the adapters that requests may name."""

    name: str = ""
    weights_sha256: str = ""
    refuse_token: str = ""
    temperature: float | None = None
    answer_tokens: int = 0
    answers: Answers = "text"
    adapters: tuple[AdapterFile, ...] = ()


class EngineBackend(Supervisor):
    """A model in a supervised child process."""

    def __init__(
        self,
        model_path: Path,
        config: EngineConfig,
        model: EngineModel | None = None,
        *,
        prompt_folder: Path | None = None,
        prompt_key: bytes = b"",
        stuck_s: float = 30.0,
        backoff: RestartBackoff | None = None,
    ) -> None:
        """Create an engine, without starting it.

        Args:
            model_path: The GGUF file.
            model: Facts from the model's manifest; None if it has no manifest.
            prompt_folder: Folder for stored system prompts, encrypted with `prompt_key`, if the configuration allows
                any.
            stuck_s: Seconds without a step after which a child with sequences is restarted.
        """
        model = model or EngineModel()
        options = EngineOptions(
            model_path=str(model_path.resolve()),
            context_tokens=config.context_tokens,
            sequences=config.sequences,
            batch_tokens=config.batch_tokens,
            threads=config.threads,
            gpu_layers=config.gpu_layers,
            kv_type=config.kv_type,
            prompt_lookup=config.prompt_lookup,
            prompt_folder="" if prompt_folder is None else str(prompt_folder.absolute()),
            prompt_key=prompt_key,
            prompt_bytes=config.stored_prompts_bytes,
            weights_sha256=model.weights_sha256,
            adapters=model.adapters,
            refuse_token=model.refuse_token,
            temperature=model.temperature,
            answer_tokens=model.answer_tokens,
        )
        # by adapter; "": the model without one
        self._answers = {"": model.answers} | {one.name: one.answers or model.answers for one in model.adapters}
        self._restricts_arguments = config.restrict_tool_arguments
        self._sequences = options.sequences
        # maximum number of one request's sequences in the child: some run, and some wait for a slot
        self._at_once = 2 * options.sequences
        super().__init__(
            options,
            model.name or model_path.stem,
            stuck_s=stuck_s,
            backoff=backoff or RestartBackoff(),
            unload_after_s=config.unload_after_s or math.inf,
        )
        self._ids = itertools.count(1)

    @property
    def jobs(self) -> int:
        """Number of unfinished sequences in the child."""
        process = self._alive
        return process.jobs if process is not None else 0

    def signals(self) -> EdgeSignals:
        process = self._alive
        if process is None:
            return EdgeSignals(queue=0, tokens_per_s=None, loaded=self.loads_on_demand)
        queue = max(process.waiting, process.jobs - self._sequences) if process.jobs else 0
        return EdgeSignals(queue=queue, tokens_per_s=process.tokens_per_s, loaded=True)

    async def count(self, request: Request) -> int | None:
        """Return the tokens of all prompts together; None while the child is not ready. Loads an unloaded model."""
        try:
            process = await self._counting()
        except EngineUnavailable:
            return None
        total = 0
        for prompt in self._prompts(request):
            tokens = await process.count(prompt)
            if tokens is None:
                return None
            total += tokens
        return total

    async def tokenize(self, request: Request, *, adds_special: bool = True) -> TokenList:
        """Return the tokens of a chat's or completion's only prompt, with a beginning-of-sequence token for a
        completion if `adds_special`. Loads an unloaded model. Raises InvalidRequest if the model cannot take the
        prompt; EngineUnavailable.
        """
        process = await self._counting()
        (prompt,) = self._prompts(request)
        ids = await process.tokenize(prompt if adds_special else msgspec.structs.replace(prompt, add_bos=False))
        info = await process.ready
        return TokenList(len(ids), info.context_tokens, ids)

    async def detokenize(self, tokens: tuple[int, ...]) -> str:
        """Return the text of tokens. Raises as `tokenize`."""
        return await (await self._counting()).detokenize(tokens)

    async def _counting(self) -> EngineProcess:
        """Return the child, for its tokenizer. Raises EngineUnavailable."""
        if self.loads_on_demand:
            with contextlib.suppress(EngineUnavailable):
                await self.ready(asyncio.get_running_loop().time() + _LOAD_S)
        if (process := self._alive) is None:
            raise EngineUnavailable(f"{self.name} cannot count tokens. Try again.", phase="connect", retry_after_s=1.0)
        return process

    async def generate(self, call: BackendRequest) -> AsyncGenerator[Chunk]:
        """Generate the answer, see `Backend`. Prompt p's choice c has the index p·n + c."""
        request = call.request
        _check_supported(request)
        enforceable = request
        if request.tools or request.response_format is not None:
            enforceable = await self._enforceable(call)
        process = self._alive or await self.ready(min(call.deadline, call.first_token_by))
        choices = {choice.job.id: choice for choice in self._choices(call, enforceable)}
        prompt_tokens = completion_tokens = cached_tokens = reasoning_tokens = 0
        with _EmissionQueue(
            process, [choice.job for choice in choices.values()], call.deadline, self._at_once
        ) as queue:
            while choices:
                emissions = await queue.get()
                # The tokens of reasoning are counted one by one.
                for emission in emissions if self._thinking else _merged(emissions):
                    choice = choices[emission.job]
                    if emission.error:
                        raise _error(emission, choice.has_tokens)
                    if (chunk := choice.chunk(emission)) is not None:
                        yield chunk
                    if emission.finish_reason is not None:
                        del choices[emission.job]
                        completion_tokens += emission.completion_tokens
                        reasoning_tokens += choice.reasoning_tokens
                        if choice.index % request.n == 0:
                            prompt_tokens += emission.prompt_tokens
                            cached_tokens += emission.cached_tokens
        yield Chunk(usage=Usage(prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens))

    async def _enforceable(self, call: BackendRequest) -> Request:
        """Return the request with the schemas that the engine can enforce. Raises InvalidGrammar."""
        found = await check_schemas(call.request, calls_only=self._calls_only(call))
        if found.loosened:
            call.report_loosened(found)
        return found.request

    def complete(self, call: BackendRequest) -> None:
        return None

    async def embed(self, call: BackendRequest) -> Embeddings:
        process = self._alive or await self.ready(call.deadline)
        info = self.info
        if call.request.dimensions is not None and info and call.request.dimensions != info.embedding_dimensions:
            raise UnsupportedFeature(
                f"This model's embeddings have {info.embedding_dimensions} dimensions. Remove `dimensions`, or set it "
                "to this number.",
                param="dimensions",
            )
        deadline_s = _time_left_s(call)
        adapter = call.target.adapter
        jobs = [
            SequenceRequest(
                id=next(self._ids),
                prompt=prompt,
                adapter=adapter,
                embed=True,
                deadline_s=deadline_s,
                caller=call.request.hints.client,
            )
            for prompt in self._prompts(call.request)
        ]
        vectors: dict[int, tuple[float, ...]] = {}
        tokens = 0
        with _EmissionQueue(process, jobs, call.deadline, _TEXTS_AT_ONCE) as queue:
            while len(vectors) < len(jobs):
                for emission in await queue.get():
                    if emission.error:
                        raise _error(emission, has_tokens=False)
                    vectors[emission.job] = emission.embedding
                    tokens += emission.prompt_tokens
        return Embeddings(tuple(vectors[job.id] for job in jobs), Usage(prompt_tokens=tokens))

    @property
    def _alive(self) -> EngineProcess | None:
        """Return the child if it can take a sequence now."""
        process = self.serving
        return process if process is not None and process.alive else None

    def _calls_only(self, call: BackendRequest) -> bool:
        return self._answers.get(call.target.adapter) == "calls"

    @property
    def _thinking(self) -> Thinking:
        return info.thinking if (info := self.info) is not None else ""

    def _prompts(self, request: Request) -> list[Prompt]:
        return _prompts(request, self._thinking)

    def _choices(self, call: BackendRequest, enforceable: Request) -> Iterator[_ChoiceStream]:
        """Yield a stream for each choice. `enforceable`: the request with the schemas that the engine can enforce."""
        request, calls_only = call.request, self._calls_only(call)
        max_tokens = request.max_tokens
        if calls_only and self._answers[""] != "calls":  # the manifest's default is for the model's own answers
            max_tokens = max_tokens or ANSWER_TOKENS
        schema, frame = "", NO_FRAME
        if request.tools or request.response_format is not None:
            form = info.tool_format if (info := self.info) is not None else PLAIN
            schema = answer_schema(enforceable, calls_only=calls_only, form=form)
            frame = call_frame(request, form)
        may_refuse = calls_only and request.tool_choice.mode == "auto" and request.response_format is None
        copies = calls_only and self._restricts_arguments
        copy_from_prompt = copies and request.kind == "chat" and request.response_format is None
        thinking = self._thinking
        if thinking and not thinks(request, thinking):
            thinking = ""
        deadline_s = _time_left_s(call)
        prompts = self._prompts(request)
        if call.soft:
            prompts = [msgspec.structs.replace(prompt, soft=call.soft) for prompt in prompts]
        numbered = ((prompt, choice) for prompt in prompts for choice in range(request.n))
        for index, (prompt, choice) in enumerate(numbered):
            job = SequenceRequest(
                id=next(self._ids),
                prompt=prompt,
                adapter=call.target.adapter,
                max_tokens=max_tokens,
                sampling=_seeded(request.sampling, choice),
                stop=request.stop,
                json_schema=schema,
                call_frame=frame,
                may_refuse=may_refuse,
                copy_from_prompt=copy_from_prompt,
                thinking_tokens=thinking_limit(request) if thinking else None,
                thinking=thinking,
                logprobs=request.logprobs,
                confidence_tokens=call.confidence_tokens if index == 0 else 0,
                deadline_s=deadline_s,
                echo=request.echo,
                store_prompt=call.durable,
                # With a handoff possible, a refusal ends the answer and the next target takes over; otherwise the
                # model's best guess is the only answer.
                refusal="end" if call.confidence_tokens > 0 else "skip",
            )
            yield _ChoiceStream(job, index, request, call.id)


class _ChoiceStream:
    """A choice of an answer: turns its sequence's emissions into Chunks."""

    def __init__(self, job: SequenceRequest, index: int, request: Request, answer_id: str) -> None:
        self.job = job
        self.index = index
        self.has_tokens = False  # at least one token was generated
        self._tools = ToolCallParser(request, index, answer_id) if request.tools else None
        self._reasoning = ReasoningParser(inside=job.thinking == "open") if job.thinking else None

    def chunk(self, emission: Emission) -> Chunk | None:
        """Return the chunk of an emission; None if it has no content for the client yet."""
        self.has_tokens = self.has_tokens or emission.tokens > 0
        text, calls, reason = emission.text, tuple[ToolCallDelta, ...](), emission.finish_reason
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text, emission.tokens)
            if reason is not None:
                more_thought, more_text = self._reasoning.finish()
                thought, text = thought + more_thought, text + more_text
        if self._tools is not None:
            text, calls = self._tools.feed(text)
            if reason is not None:
                rest, more = self._tools.finish(cut=reason == "length")
                text, calls = text + rest, calls + more
                reason = "tool_calls" if self._tools.called and reason == "stop" else reason
        refused = emission.refused and self.job.refusal == "end"
        if not (text or thought or calls or reason or emission.tokens or emission.logprobs or emission.confidence):
            return None
        return Chunk(
            text=text,
            index=self.index,
            tokens=emission.tokens,
            tool_calls=calls,
            logprobs=emission.logprobs,
            finish_reason=reason,
            confidence=emission.confidence,
            refusal=DECLINED if refused else None,
            reasoning=thought,
            stop=emission.stop,
        )

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.tokens


class _EmissionQueue:
    """Submits the sequences on enter, cancels the unfinished ones on exit. At most `at_once` are in the child, so that
    a long list of prompts neither overflows its queue nor keeps others waiting. `deadline`: the loop's clock.
    """

    def __init__(self, process: EngineProcess, jobs: list[SequenceRequest], deadline: float, at_once: int) -> None:
        self._process = process
        self._jobs = jobs
        self._first = jobs[:at_once]
        self._later = deque(jobs[at_once:])
        self._deadline = deadline
        self._items: list[Emission] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: CausewayError | None = None
        self._has_emissions = False

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        # The engine enforces the deadline too; this timer is the backstop if the engine does not answer.
        self._timer = self._loop.call_at(self._deadline, self._expire)
        self._process.submit(self._first, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._process.cancel(job.id for job in self._jobs)

    async def get(self) -> list[Emission]:
        """Return all emissions since the last call, at least one. Raises the error that ended the sequences."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items

    def put(self, emissions: list[Emission]) -> None:
        self._has_emissions = True
        self._items += emissions
        if self._later:
            self._submit_more(emissions)
        self._wake()

    def engine_lost(self, reason: str) -> None:
        self._error = EngineCrashed(reason, phase="stream" if self._has_emissions else "first_token")
        self._wake()

    def _submit_more(self, emissions: list[Emission]) -> None:
        """Submit one sequence for each that has ended."""
        ended = sum(emission.finish_reason is not None for emission in emissions)
        jobs = [self._later.popleft() for _ in range(min(ended, len(self._later)))]
        if jobs:
            self._process.submit(jobs, self)

    def _expire(self) -> None:
        self._error = DeadlineExceeded("The deadline passed before the answer was complete.")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _check_supported(request: Request) -> None:
    """Raise UnsupportedFeature if this model cannot answer such a request."""
    if request.echo and request.suffix is not None:
        raise UnsupportedFeature(
            "`echo` does not work with `suffix`, because an answer that fills in the middle does not begin with its "
            "prompt. Remove one of them.",
            param="echo",
        )
    if request.echo and request.logprobs is not None:
        raise UnsupportedFeature(
            "`echo` does not work with `logprobs`, because this model gives no logprobs for the prompt. Remove one "
            "of them.",
            param="echo",
        )


def _prompts(request: Request, thinking: Thinking) -> list[Prompt]:
    if request.kind == "chat":
        tools = () if request.tool_choice.mode == "none" else request.tools
        answer_start = closed_thought(thinking) if thinking and not thinks(request, thinking) else ""
        return [Prompt(messages=request.messages, tools=tools, answer_start=answer_start)]
    return [
        Prompt(text=prompt, suffix=request.suffix)
        if isinstance(prompt, str)
        else Prompt(tokens=prompt, suffix=request.suffix)
        for prompt in request.prompts
    ]


def _seeded(sampling: Sampling, choice: int) -> Sampling:
    """Derive each choice's seed from the request's: choices differ, and are reproducible."""
    if sampling.seed is None or choice == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) % _SEEDS)


def _merged(emissions: list[Emission]) -> list[Emission]:
    """Merge consecutive plain emissions of one sequence, so that a reader slower than the model catches up."""
    merged: list[Emission] = []
    for emission in emissions:
        last = merged[-1] if merged else None
        if last is not None and last.job == emission.job and _is_plain(last) and _is_plain(emission):
            merged[-1] = Emission(last.job, last.text + emission.text, last.tokens + emission.tokens)
        else:
            merged.append(emission)
    return merged


def _is_plain(emission: Emission) -> bool:
    ended = emission.finish_reason or emission.error
    return not (ended or emission.logprobs or emission.confidence)


def _time_left_s(call: BackendRequest) -> float:
    return max(0.0, call.deadline - asyncio.get_running_loop().time())


_CODES = errors.error_classes()


def _error(emission: Emission, has_tokens: bool) -> CausewayError:
    """Return the exception whose `code` the engine reported."""
    kind = _CODES.get(emission.error, errors.BackendError)
    if issubclass(kind, errors.BackendError):
        return kind(emission.detail, phase="stream" if has_tokens else "first_token")
    return kind(emission.detail, param=emission.param or None)
