"""The messages to and from the engine, the same in-process and as msgpack frames over a socketpair.

Frames between daemon and engine child are messages behind their length (4 bytes, little endian).
"""

from __future__ import annotations

import hashlib
import struct
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from causeway_server.router.reasoning import Thinking
from causeway_server.router.tool_calls.schema import NO_FRAME, PLAIN, CallFrame, ToolFormat
from causeway_server.router.types import Confidence, FinishReason, Message, Sampling, TokenLogprob, Tool

from ..catalog.artifact import Artifact

KVType = Literal["f16", "q8_0"]  # how keys and values are kept
_EDGE = "\ufdd1"  # of a marker: no character of a text
LENGTH = struct.Struct("<I")
_MAX_BYTES = 64 * 1024 * 1024  # a prompt is at most a request body
M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


class AdapterFile(msgspec.Struct, frozen=True):
    """A LoRA adapter of the model: a GGUF of its own."""

    name: str
    path: str
    scale: float = 1.0


def adapter_files(artifact: Artifact) -> tuple[AdapterFile, ...]:
    """Return the adapters of a model as the engine loads them: links, whose folder may go, are resolved."""
    return tuple(
        AdapterFile(name, str((artifact.folder / one.file).resolve()), one.scale)
        for name, one in artifact.manifest.adapters.items()
    )


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings to load and run a model."""

    model_path: str
    context_tokens: int = 0  # limit of one sequence; 0: the model's own context, bounded by memory
    kv_tokens: int = 0  # KV cells of all sequences together; 0: from `sequences`, the context and memory
    sequences: int = 16  # decoded together; more jobs wait
    batch_tokens: int = 512  # limit of one llama_decode, prefill chunks included
    threads: int = 0  # 0: from the idle cores at start, then found by trying
    gpu_layers: int | Literal["auto"] = "auto"  # offloaded; -1: all; "auto": as many as fit
    kv_type: KVType = "f16"
    prefix_cache_bytes: int = 64 * 1024 * 1024  # KV kept for shared prefixes; least recently used evicted first
    prompt_lookup: bool = True  # draft tokens from text that repeats, where it pays
    prompt_folder: str = ""  # for files of system prompts; "": none
    prompt_bytes: int = 0  # limit of these files
    adapters: tuple[AdapterFile, ...] = ()  # loaded with the model; a job names one
    weights_sha256: str = ""  # from the model's manifest; files of other weights are not used
    refuse_token: str = ""  # from the model's manifest; its probability at the first position lowers confidence
    temperature: float | None = None  # of a job that names none; None: 1
    answer_tokens: int = 0  # token limit of a job that names none; 0: the rest of the context
    queue: int = 256  # limit of waiting jobs; beyond it: QueueFull


class ModelInfo(msgspec.Struct, frozen=True):
    """The properties of a loaded model, and the limits chosen for it."""

    context_tokens: int
    threads: int
    embedding_dimensions: int
    tool_format: ToolFormat = PLAIN
    thinking: Thinking = ""


class SoftRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """Vectors in a row, behind tokens of text that belong to them (a vision model's begin and end of an image).

    The model's positions of the vectors follow each other, unless `positions` has those of a model whose positions
    have parts (M-RoPE): int32 [3, vectors], time, row and column, from the run's first one on; `span` is how many the
    run takes of the model's.
    """

    tokens: tuple[int, ...] = ()
    vectors: int = 0
    positions: bytes = b""
    span: int = 0
    whole: bool = False  # each of its vectors sees all the others, so they are decoded in one batch


class SoftTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """Vectors that stand in a prompt in the place of tokens, as a projector makes them of an image.

    `vectors`: float32 little endian, [tokens, embedding dimensions of the model]. `runs`: of a vision model, how they
    stand; empty: in one row.
    """

    vectors: bytes
    runs: tuple[SoftRun, ...] = ()

    @property
    def marker(self) -> str:
        """The marker of the vectors in the prompt's text, which depends only on them. If a client writes a marker in
        its text, it means vectors of its own request, or is plain text.
        """
        digest = hashlib.blake2b(self.vectors, digest_size=16)
        if self.runs:
            digest.update(msgspec.msgpack.encode(self.runs))
        return f"{_EDGE}{digest.hexdigest()}{_EDGE}"

    @property
    def text(self) -> str:
        """The placeholder of the image in a message, around which a vision model's template adds its own text."""
        return self.marker if self.runs else f"[An image:{self.marker}]"


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of `messages` (rendered by the model's chat template), `text` or `tokens`.

    Control tokens in `text` are recognised only with `parse_special`: for prompts that a gateway rendered already.
    Each of `soft` has its marker in `messages` or `text`.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    text: str | None = None
    parse_special: bool = False
    suffix: str | None = None  # of `text` or `tokens`: the answer fills in what stands between them and this text
    answer_start: str = ""  # of `messages`: the beginning of the answer, which the model continues
    tokens: tuple[int, ...] = ()
    soft: tuple[SoftTokens, ...] = ()


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sequence to generate. A request with n > 1 is n jobs with the same prompt, which share the prefix."""

    id: int  # unique in this engine
    prompt: Prompt
    adapter: str = ""  # one of `EngineOptions.adapters`; "": the model as it is
    max_tokens: int | None = None  # None: to the end of the context
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    grammar: str = ""  # Lark, as llguidance reads it; "" for none
    json_schema: str = ""  # canonical JSON schema; the engine turns it into a grammar; "{}": any JSON object
    call_frame: CallFrame = NO_FRAME  # what stands around the objects of `json_schema`, and whether several may come
    may_refuse: bool = False  # the refusal token may come before what `grammar` or `json_schema` requires
    # Without `grammar` and `json_schema`: constrain the answer to a function call whose arguments are copied from this
    # text (`call_grammar`); the refusal token may come first. None: unconstrained, and so is a job with `ignore_eos`.
    copy_source: str | None = None
    copy_from_prompt: bool = False  # `copy_source` is the last user message of the prompt
    store_prompt: bool = False  # the system prompt may be kept as a file
    answer_prefix: str = ""  # the answer so far, where a truncated answer continues: the prompt ends in it
    thinking: Thinking = ""  # how the model thinks before its answer to this prompt
    thinking_tokens: int | None = None  # after so many a thought is ended; None: the model ends it
    logprobs: int | None = None
    confidence_tokens: int = 0  # report Confidence for this many first tokens; 0: never
    ignore_eos: bool = False
    deadline_s: float | None = None  # time left at submission
    embed: bool = False  # return the pooled embedding instead of text
    caller: str = ""  # callers get equal shares of the time that embeddings take
    echo: bool = False
    # The model's refusal token, which is never text: `end` ends the answer (another target will answer), `skip` lets
    # the model continue after it with its best guess (there is no other target).
    refusal: Literal["end", "skip"] = "skip"


class Emission(msgspec.Struct, frozen=True, omit_defaults=True):
    """The output of one step for one job. A job ends with exactly one emission with `finish_reason` or `error`.

    `tokens` without text (part of a character, a possible stop string) are counted in the next emission with text.
    """

    job: int
    text: str = ""
    tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    confidence: Confidence | None = None
    finish_reason: FinishReason | None = None
    error: str = ""  # a code of router.errors, e.g. context_length_exceeded
    detail: str = ""
    param: str = ""  # the request parameter that `error` is about
    prompt_tokens: int = 0  # this and the following: in the last emission only
    completion_tokens: int = 0
    cached_tokens: int = 0
    embedding: tuple[float, ...] = ()
    refused: bool = False  # the model generated its refusal token


class Emit(Protocol):
    """Takes what one step adds to the answers of all jobs; called from the engine's thread."""

    def __call__(self, emissions: list[Emission], /) -> None: ...


class OnFailure(Protocol):
    """Learns that the engine cannot continue; called from its thread, when every job has ended."""

    def __call__(self, error: Exception, /) -> None: ...


class EngineStats(msgspec.Struct, frozen=True):
    """The engine's load and speed."""

    running: int
    waiting: int
    tokens_per_s: float  # all sequences, over the last second of work
    kv_used: int  # tokens
    kv_total: int
    steps: int  # batches decoded so far, those of embeddings among them
    rss_bytes: int
    generated: int = 0  # tokens of the sequences that have ended


class FrameError(Exception):
    """The bytes are not a frame, or the frame is not a message. The next frame cannot be found: the link is lost."""


# --- daemon → child --------------------------------------------------------------------------------------------------


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """The first message, sent once."""

    options: EngineOptions


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    jobs: tuple[SequenceRequest, ...]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    jobs: tuple[int, ...]


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    request_id: int
    prompt: Prompt


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Asks for the statistics; there is one `Pong` for each."""


DaemonMessage = Load | Submit | Cancel | Count | Ping
DAEMON_MESSAGES: msgspec.msgpack.Decoder[DaemonMessage] = msgspec.msgpack.Decoder(DaemonMessage)

# --- child → daemon --------------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    info: ModelInfo


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The model cannot be loaded, or the engine cannot continue; the child exits after it."""

    code: str  # of router.errors
    detail: str


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The emissions of one step, and the engine's load after it."""

    emissions: tuple[Emission, ...]
    waiting: int
    tokens_per_s: float  # of one sequence


class Counted(msgspec.Struct, frozen=True, array_like=True, tag="counted"):
    request_id: int
    tokens: int  # -1: this prompt cannot be counted; submitting it returns the reason


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    stats: EngineStats


ChildMessage = Ready | Failed | Step | Counted | Pong
CHILD_MESSAGES: msgspec.msgpack.Decoder[ChildMessage] = msgspec.msgpack.Decoder(ChildMessage)


def encode(message: msgspec.Struct) -> bytearray:
    """Encode a message as a whole frame: msgpack behind its length."""
    frame = bytearray(LENGTH.size)
    _encoder.encode_into(message, frame, LENGTH.size)
    LENGTH.pack_into(frame, 0, len(frame) - LENGTH.size)
    return frame


class FrameReader(Generic[M]):
    """Decodes messages from bytes that arrive in arbitrary pieces. It cannot be used after a FrameError."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[M]:
        """Add bytes; return the messages that are complete.

        Raises:
            FrameError: The bytes are not a frame, or the frame is not a message.
        """
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        start = 0
        with memoryview(buffer) as view:
            while len(buffer) - start >= LENGTH.size:
                (length,) = LENGTH.unpack_from(buffer, start)
                if length > _MAX_BYTES:
                    raise FrameError(f"a frame of {length} bytes; the longest is {_MAX_BYTES}")
                end = start + LENGTH.size + length
                if len(buffer) < end:
                    break
                try:
                    messages.append(self._decoder.decode(view[start + LENGTH.size : end]))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise FrameError(f"not a message: {error}") from error
                start = end
        del buffer[:start]
        return messages
