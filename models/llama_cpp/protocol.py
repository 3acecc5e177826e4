"""The messages to and from the engine. They are the same in-process and as msgpack frames over a socketpair.

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

from ..catalog.artifact import Answers, Artifact

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
    answers: Answers | None = None  # None: the model's own


def adapter_files(artifact: Artifact) -> tuple[AdapterFile, ...]:
    """Return the model's adapters as the engine loads them, with links resolved, as the folder may vanish."""
    return tuple(
        AdapterFile(name, str((artifact.folder / one.file).resolve()), one.scale, one.answers)
        for name, one in artifact.manifest.adapters.items()
    )


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings to load and run a model."""

    model_path: str
    context_tokens: int = 0  # tokens of one sequence; 0: the model's own context, bounded by memory
    kv_tokens: int = 0  # KV cells of all sequences together; 0: from `sequences`, the context and memory
    sequences: int = 16  # sequences that are decoded together; more jobs wait
    batch_tokens: int = 512  # tokens of one llama_decode, prefill chunks included
    threads: int = 0  # 0: from the idle cores at start, then found by trying
    gpu_layers: int | Literal["auto"] = "auto"  # layers to offload; -1: all; "auto": as many as fit
    kv_type: KVType = "f16"
    # size of the cache of shared prefixes; the least recently used are evicted first
    prefix_cache_bytes: int | None = None  # memory for prefixes of finished sequences; None: from the KV cache's size
    prompt_lookup: bool = True  # whether to draft tokens from text that repeats, if it pays
    prompt_folder: str = ""  # folder for files of system prompts; "": none
    prompt_key: bytes = b""  # key that encrypts these files, 32 bytes
    prompt_bytes: int = 0  # total size of these files
    adapters: tuple[AdapterFile, ...] = ()  # adapters that are loaded with the model; a job names one
    weights_sha256: str = ""  # hash from the model's manifest; stored prompts of other weights are not used
    # refusal token from the model's manifest; its probability at the first position lowers confidence
    refuse_token: str = ""
    temperature: float | None = None  # default temperature of jobs; None: 1
    answer_tokens: int = 0  # default token limit of answers; 0: the rest of the context
    queue: int = 256  # limit of waiting jobs; further ones fail with QueueFull


class ModelInfo(msgspec.Struct, frozen=True):
    """The properties of a loaded model, and the limits chosen for it."""

    context_tokens: int
    threads: int
    embedding_dimensions: int
    tool_format: ToolFormat = PLAIN
    thinking: Thinking = ""


class SoftRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """Consecutive vectors, after text tokens that belong to them (such as a vision model's begin-of-image token).

    Their positions follow each other, unless `positions` has those of a model whose positions have parts (M-RoPE):
    int32 [3, vectors], time, row and column, relative to the run's first. `span`: positions that the run takes.
    """

    tokens: tuple[int, ...] = ()
    vectors: int = 0
    positions: bytes = b""
    span: int = 0
    whole: bool = False  # whether each vector attends to all others, so that the run is decoded in one batch


class SoftTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """Vectors in place of tokens in a prompt, which a projector makes from an image.

    `vectors`: float32 little endian, [tokens, embedding dimensions of the model]. `runs`: their arrangement for a
    vision model; empty: consecutive positions.
    """

    vectors: bytes
    runs: tuple[SoftRun, ...] = ()

    @property
    def marker(self) -> str:
        """The marker that stands for the vectors in the prompt's text. It is derived from the vectors alone, so a
        marker that a client writes in its text is either one of its own request's or plain text.
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
    """A prompt, given as exactly one of `messages` (rendered by the model's chat template), `text` or `tokens`.

    Control tokens in `text` are recognised only with `parse_special`: for prompts that a gateway rendered already.
    Each of `soft` has its marker in `messages` or `text`.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    text: str | None = None
    parse_special: bool = False
    suffix: str | None = None  # text after the answer, for `text` or `tokens`: the answer fills in the middle
    answer_start: str = ""  # beginning of the answer, for `messages`; the model continues it
    tokens: tuple[int, ...] = ()
    soft: tuple[SoftTokens, ...] = ()
    add_bos: bool = True  # whether `text` begins with the beginning-of-sequence token, where the model wants one


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sequence to generate. A request with n > 1 is n jobs with the same prompt, which share the prefix."""

    id: int  # unique in this engine
    prompt: Prompt
    adapter: str = ""  # one of `EngineOptions.adapters`; "": the model without an adapter
    max_tokens: int | None = None  # token limit of the answer; None: to the end of the context
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    grammar: str = ""  # grammar in Lark, as llguidance reads it; "" for none
    json_schema: str = ""  # canonical JSON schema; the engine turns it into a grammar; "{}": any JSON object
    call_frame: CallFrame = NO_FRAME  # the text around the objects of `json_schema`, and whether several may follow
    # whether the refusal token may come before the text that `grammar` or `json_schema` requires
    may_refuse: bool = False
    # Without `grammar` and `json_schema`: constrain the answer to a function call whose arguments are copied from this
    # text (`call_grammar`); the refusal token may come first. None: unconstrained, and so is a job with `ignore_eos`.
    copy_source: str | None = None
    copy_from_prompt: bool = False  # whether `copy_source` is the last user message of the prompt
    store_prompt: bool = False  # whether the system prompt may be stored as a file
    thinking: Thinking = ""  # how the model thinks before its answer to this prompt
    thinking_tokens: int | None = None  # thinking budget in tokens; None: the model decides
    logprobs: int | None = None
    confidence_tokens: int = 0  # number of first tokens after which Confidence is reported; 0: never
    ignore_eos: bool = False
    deadline_s: float | None = None  # seconds left at submission
    embed: bool = False  # whether to return the pooled embedding instead of text
    caller: str = ""  # caller's name; callers get equal shares of the time that embeddings take
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
    error: str = ""  # code of router.errors, e.g. context_length_exceeded
    detail: str = ""
    param: str = ""  # the request parameter that `error` is about
    prompt_tokens: int = 0  # tokens of the prompt; this and the following fields are set only in the last emission
    completion_tokens: int = 0
    cached_tokens: int = 0
    embedding: tuple[float, ...] = ()
    refused: bool = False  # whether the model generated its refusal token
    stop: str = ""  # the stop string that ended the text


class Emit(Protocol):
    """Receives the emissions of one step for all jobs; called from the engine's thread."""

    def __call__(self, emissions: list[Emission], /) -> None: ...


class OnFailure(Protocol):
    """Learns that the engine cannot continue; called from its thread after every job has ended."""

    def __call__(self, error: Exception, /) -> None: ...


class EngineStats(msgspec.Struct, frozen=True):
    """The engine's load and speed."""

    running: int
    waiting: int
    tokens_per_s: float  # tokens per second of all sequences, over the last second of work
    kv_used: int  # used KV cells, in tokens
    kv_total: int
    steps: int  # batches decoded so far, including those of embeddings
    rss_bytes: int
    generated: int = 0  # tokens of the finished sequences


class FrameError(Exception):
    """The bytes are not a frame, or it is not a message. No next frame can be found: the link is lost."""


# --- daemon → child --------------------------------------------------------------------------------------------------


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """The first message, sent once."""

    options: EngineOptions


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    jobs: tuple[SequenceRequest, ...]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    jobs: tuple[int, ...]


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """Asks for the length of a prompt; with `ids` for its tokens, too, or for the reason why it has none."""

    request_id: int
    prompt: Prompt
    ids: bool = False


class Detokenize(msgspec.Struct, frozen=True, array_like=True, tag="detokenize"):
    request_id: int
    tokens: tuple[int, ...]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Asks for the statistics; there is one `Pong` for each."""


DaemonMessage = Load | Submit | Cancel | Count | Detokenize | Ping
DAEMON_MESSAGES: msgspec.msgpack.Decoder[DaemonMessage] = msgspec.msgpack.Decoder(DaemonMessage)

# --- child → daemon --------------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    info: ModelInfo


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The model cannot be loaded, or the engine cannot continue. The child exits after this message."""

    code: str  # code of router.errors
    detail: str


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The emissions of one step, and the engine's load after that step."""

    emissions: tuple[Emission, ...]
    waiting: int
    tokens_per_s: float  # tokens per second of one sequence


class Counted(msgspec.Struct, frozen=True, array_like=True, tag="counted"):
    request_id: int
    tokens: int  # number of tokens; -1: this prompt cannot be counted
    ids: tuple[int, ...] = ()
    text: str = ""  # of a Detokenize
    error: str = ""  # code of router.errors, with its message and the parameter that it is about
    detail: str = ""
    param: str = ""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    stats: EngineStats


ChildMessage = Ready | Failed | Step | Counted | Pong
CHILD_MESSAGES: msgspec.msgpack.Decoder[ChildMessage] = msgspec.msgpack.Decoder(ChildMessage)


def encode(message: msgspec.Struct) -> bytearray:
    """Encode a message as a whole frame: msgpack after its length."""
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
        """Add bytes; return the complete messages. Raises FrameError for other bytes."""
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        start = 0
        with memoryview(buffer) as view:
            while len(buffer) - start >= LENGTH.size:
                (length,) = LENGTH.unpack_from(buffer, start)
                if length > _MAX_BYTES:
                    raise FrameError(f"a frame has {length} bytes, but at most {_MAX_BYTES} are allowed")
                end = start + LENGTH.size + length
                if len(buffer) < end:
                    break
                try:
                    messages.append(self._decoder.decode(view[start + LENGTH.size : end]))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise FrameError(f"the frame does not contain a message: {error}") from error
                start = end
        del buffer[:start]
        return messages
