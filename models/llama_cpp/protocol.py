"""What goes into the engine and what comes out, the same in-process and as msgpack frames over a socketpair."""

from __future__ import annotations

from typing import Literal

import msgspec

from router.types import Confidence, FinishReason, Message, Sampling, TokenLogprob, Tool


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    context_tokens: int = 0  # one sequence's limit; 0: the model's own, bounded by memory
    kv_tokens: int = 0  # of all sequences together; 0: from `sequences`, the context and memory
    sequences: int = 16  # decoded together; more wait
    batch_tokens: int = 512  # of one llama_decode, prefill chunks included
    threads: int = 0  # 0: from the cores that are free at start
    gpu_layers: int = 0
    prefix_cache_bytes: int = 64 * 1024 * 1024  # KV kept for shared prefixes; idle ones are evicted first
    refuse_token: str = ""  # of the model's manifest; p(it) at the first position lowers confidence
    temperature: float | None = None  # of a job that names none; None: 1
    answer_tokens: int = 0  # the most of a job that names no limit; 0: the rest of the context
    queue: int = 256  # waiting jobs; beyond: QueueFull


class ModelInfo(msgspec.Struct, frozen=True):
    name: str
    architecture: str
    quantisation: str
    parameters: int
    context_tokens: int
    vocabulary: int
    bytes: int
    threads: int
    sequences: int
    embedding_dimensions: int
    has_chat_template: bool


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of `messages` (rendered by the model's chat template), `text` (special tokens parsed only when
    `parse_special`: prompts that a gateway rendered already) or `tokens`."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    text: str | None = None
    parse_special: bool = False
    tokens: tuple[int, ...] = ()


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. n > 1 is n jobs with the same prompt (the prefix is shared)."""

    id: int  # unique in this engine
    prompt: Prompt
    max_tokens: int | None = None  # None: to the end of the context
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    grammar: str = ""  # GBNF (root rule `root`), "" for none
    json_schema: str = ""  # canonical JSON schema; turned into a grammar by the engine; "{}" any JSON object
    # Where neither says what the answer is: a call whose arguments hold only words of this text (`call_grammar`), or a
    # refusal first. None: the answer is free; so is one that `ignore_eos` keeps from ending.
    copy_source: str | None = None
    answer_prefix: str = ""  # the answer so far, where a truncated answer continues: the prompt ends in it
    logprobs: int | None = None
    confidence_tokens: int = 0  # report Confidence while fewer tokens than this were made; 0: never
    ignore_eos: bool = False
    deadline_s: float | None = None  # time left at submission
    embed: bool = False  # return the pooled embedding instead of text
    echo: bool = False
    # The model's refusal token: `end` ends the answer (somebody else will give it), `skip` lets the model go on after
    # it with its best guess (nobody else will). It is never text.
    refusal: Literal["end", "skip"] = "skip"


class Emission(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step made for one job. A job ends with exactly one emission that has `finish_reason` or `error`.

    `tokens` made without text (half a character, a possible stop string) are told with the next emission that has some.
    """

    job: int
    text: str = ""
    tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    confidence: Confidence | None = None
    finish_reason: FinishReason | None = None
    error: str = ""  # a code of router.errors, e.g. context_length_exceeded
    detail: str = ""
    param: str = ""  # of the error: what in the request is wrong
    prompt_tokens: int = 0  # with the end
    completion_tokens: int = 0
    cached_tokens: int = 0
    embedding: tuple[float, ...] = ()
    refused: bool = False  # with the end: the model's refusal token came up


class EngineStats(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    tokens_per_s: float  # aggregate over the last second of work
    tokens_per_s_stream: float  # of one stream
    kv_used: int  # tokens
    kv_total: int
    steps: int
    rss_bytes: int
