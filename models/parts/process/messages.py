"""Messages between the daemon and a worker child: msgpack, each behind its length (4 bytes, little endian).

A worker takes one job at a time and answers each with one result. Samples and pixels travel as raw bytes.
"""

from __future__ import annotations

import msgspec

from causeway_server.router.types import Fact, Modality

from ...llama_cpp.protocol import SoftRun

MAX_BYTES = 128 * 1024 * 1024  # the pixels of the largest image
SAMPLE_RATE = 16_000  # Hz, of all `AudioSamples`
SPEECH_RATE = 24_000  # Hz, of audio that is looked through for speech while it comes
SPEECH_WINDOW = 768  # samples of it that get one probability: 32 ms


class PartLimits(msgspec.Struct, frozen=True):
    """The limits of one decoded part."""

    audio_s: float = 120.0
    pixels: int = 24_000_000  # maximum pixels that the file may declare, before scaling
    text_bytes: int = 256 * 1024  # maximum size of a text file
    side: int = 2048  # maximum side of the decoded image; larger images are scaled down


class WorkerSpec(msgspec.Struct, frozen=True):
    """The worker of a child: the class `worker` (``module:Class``), constructed with these `limits` and `options`."""

    worker: str
    limits: PartLimits = PartLimits()
    options: dict[str, str] = {}
    memory_bytes: int = 512 * 1024 * 1024  # maximum private memory of the child (RLIMIT_DATA)


# --- daemon → child --------------------------------------------------------------------------------------------------


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Asks to turn a part into `AudioSamples` or `ImagePixels`; a text file becomes `Found` at once."""

    kind: Modality  # kind of part that reads it
    data: bytes


class MeasureImage(msgspec.Struct, frozen=True, tag="measure_image"):
    """Asks for the size that an image file declares; no pixel is decoded."""

    data: bytes


class DetectSpeech(msgspec.Struct, frozen=True, tag="detect_speech"):
    """Asks for the probability of speech in each window of an audio clip.

    `pcm`: int16 little endian, one channel at `SPEECH_RATE`, whole windows of `SPEECH_WINDOW` samples. `state`:
    `SpeechProbabilities.state` of the windows before; empty for the first ones.
    """

    pcm: bytes
    state: bytes = b""


class Synthesize(msgspec.Struct, frozen=True, tag="synthesize"):
    """Asks to speak a sentence.

    `ids`: the voice's numbers of its phonemes. `noise`, `length`, `noise_w`: the scales of VITS; a `length` of 2 is
    half as fast. `speaker`: number of the speaker, for a voice that has several.
    """

    ids: tuple[int, ...]
    noise: float
    length: float
    noise_w: float
    speaker: int = 0


class CancelJob(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancels the job in progress; its result is not needed any more."""


# --- both ways -------------------------------------------------------------------------------------------------------


class AudioSamples(msgspec.Struct, frozen=True, tag="audio"):
    """Decoded audio. `samples`: float32 little endian in [-1, 1], one channel, `SAMPLE_RATE`."""

    samples: bytes

    @property
    def seconds(self) -> float:
        return len(self.samples) / 4 / SAMPLE_RATE


class ImagePixels(msgspec.Struct, frozen=True, tag="image"):
    """A decoded image. `pixels`: uint8 [height, width, 3], red, green and blue; upright, without metadata."""

    pixels: bytes
    width: int
    height: int


class AudioTerms(msgspec.Struct, frozen=True):
    """The settings of a transcription.

    `language`: ISO 639-1, "" to detect it. `prompt`: text before the audio, whose style and spelling of names the
    transcript follows. `words`: whether to find the time of each word.
    """

    language: str = ""
    prompt: str = ""
    temperature: float = 0.0
    words: bool = False


class Transcribe(msgspec.Struct, frozen=True, tag="transcribe"):
    """Asks for the words of an audio clip. `tell`: send each `SegmentFound` as soon as it is transcribed."""

    audio: AudioSamples
    terms: AudioTerms = AudioTerms()
    tell: bool = False


class ImageSize(msgspec.Struct, frozen=True, tag="image_size"):
    width: int
    height: int


class ProjectImage(msgspec.Struct, frozen=True, tag="project_image"):
    """Asks to turn an image into soft tokens."""

    image: ImagePixels


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The first message of a child: the worker is constructed and its model is loaded."""


class Word(msgspec.Struct, frozen=True):
    """A word of a transcript, without the space before it, and its time in seconds."""

    text: str
    start_s: float
    end_s: float


class Segment(msgspec.Struct, frozen=True):
    """A part of a transcript, or a line of an image's text. Times are seconds; 0.0 in an image.

    `words`: the words of the text with their times, if they were requested and the model gives times.
    """

    text: str
    confidence: float
    start_s: float = 0.0
    end_s: float = 0.0
    no_speech: float = 0.0  # probability that the segment is not speech
    words: tuple[Word, ...] = ()


# --- child → daemon --------------------------------------------------------------------------------------------------


class Found(msgspec.Struct, frozen=True, tag="found"):
    """The result of an encoder for an audio clip or an image, or of a decoder for a text file."""

    fact: Fact
    segments: tuple[Segment, ...] = ()


class SegmentFound(msgspec.Struct, frozen=True, tag="segment_found"):
    """A segment of the coming result, which will not change any more."""

    segment: Segment


class SpeechProbabilities(msgspec.Struct, frozen=True, tag="speech_probabilities"):
    """The probability of speech in each window. `state`: the state that the next `DetectSpeech` passes back."""

    windows: tuple[float, ...]
    state: bytes


class Projected(msgspec.Struct, frozen=True, tag="projected"):
    """Soft tokens of an image: float32 little endian, [tokens, dimensions of the model], and their runs."""

    vectors: bytes
    runs: tuple[SoftRun, ...] = ()


class Synthesized(msgspec.Struct, frozen=True, tag="synthesized"):
    """Spoken audio. `samples`: int16 little endian, one channel, at the voice's rate."""

    samples: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The worker's answer that the part, or its field `param`, is invalid. `reason`: a clause for the client."""

    reason: str
    param: str = ""  # name of the invalid field; "" for the part itself


WorkerJob = Decode | MeasureImage | Transcribe | DetectSpeech | ImagePixels | ProjectImage | Synthesize | CancelJob
WorkerResult = AudioSamples | ImagePixels | ImageSize | Found | SpeechProbabilities | Projected | Synthesized | Refused
ChildReply = WorkerResult | SegmentFound | WorkerReady


class Refusal(Exception):
    """A worker cannot use this part or its field `param`: it becomes a `Refused` message."""

    def __init__(self, reason: str, param: str = "") -> None:
        super().__init__(reason)
        self.param = param
