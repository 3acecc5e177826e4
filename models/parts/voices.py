"""Piper voices: a VITS network in ONNX, its settings in JSON beside it, and the conversion of text to phoneme ids.

The form is that of Piper's `VOICE.onnx.json` (github.com/OHF-Voice/piper1-gpl, src/piper/config.py). Text is divided
into sentences and clauses, and phonemes become ids, as Piper does it (src/piper/phonemize_espeak.py and
phoneme_ids.py): espeak-ng writes a clause in IPA, the clause's punctuation follows, each code point of the decomposed
form is a symbol, and a pad stands after every symbol.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ..catalog.artifact import (
    NAME,
    Artifact,
    ArtifactCorrupt,
    ArtifactError,
    ArtifactNotFound,
    list_artifacts,
    load_artifact,
    search_path,
    sha256_of,
)
from .process.messages import WorkerSpec

ARCHITECTURE = "piper"
"""The format of a voice's manifest."""
DEFAULT = "auto"
"""The name by which a request selects the configured voice."""
WEIGHTS, SETTINGS, LICENCE = "model.onnx", "model.onnx.json", "LICENCE.txt"
"""The names of the voice's files in its folder."""
PAD, START, END = "_", "^", "$"
WORKER = "causeway_server.models.parts.synthesizer:VoiceSynthesizer"
_MAX_SETTINGS_BYTES = 1024 * 1024
_MIB = 2**20
_PROCESS_BYTES = 512 * _MIB  # interpreter, ONNX Runtime, threads, and what the layers of a long sentence hold

_Scale = Annotated[float, Meta(ge=0.0, le=10.0)]
_Id = Annotated[int, Meta(ge=0, lt=65536)]
_Symbol = Annotated[str, Meta(min_length=1, max_length=8)]
MAX_SENTENCE = 300
"""Maximum characters of one job. It bounds a voice's memory, and the time until a cancelled job ends."""
_SENTENCE_END = re.compile(r"""[.!?…]+["')\]»”’]*\s+|[。！？]+["')\]»”’]*|\n+|$""")
_CLAUSE_END = re.compile(r"(?<=[,;:])\s+|(?<=[，、；：])")
_MARKS = {mark: mark for mark in ".?!,;:"} | dict(zip("。？！，、；：…", ".?!,,;:.", strict=True))
_PAUSES = (",", ";", ":")
_CLOSING = "\"')]»”’ "
_LANGUAGE = re.compile(r"\([^)]*\)")  # espeak-ng tells where it changes to another language


class _Audio(msgspec.Struct, frozen=True):
    sample_rate: Annotated[int, Meta(ge=8000, le=48_000)]


class _Espeak(msgspec.Struct, frozen=True):
    voice: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_+-]{1,64}$")]


class _Inference(msgspec.Struct, frozen=True):
    noise_scale: _Scale = 0.667
    length_scale: Annotated[float, Meta(ge=0.1, le=10.0)] = 1.0
    noise_w: _Scale = 0.8


class VoiceSettings(msgspec.Struct, frozen=True):
    """The content of `VOICE.onnx.json`. `phoneme_id_map`: ids by code point of IPA or `vowel_clusters`."""

    audio: _Audio
    espeak: _Espeak
    phoneme_id_map: dict[_Symbol, Annotated[tuple[_Id, ...], Meta(min_length=1, max_length=4)]]
    num_symbols: Annotated[int, Meta(ge=3, le=65536)]
    num_speakers: Annotated[int, Meta(ge=1, le=65536)] = 1
    phoneme_type: str = "espeak"
    inference: _Inference = _Inference()
    speaker_id_map: dict[Annotated[str, Meta(min_length=1, max_length=64)], _Id] = {}
    vowel_clusters: Sequence[Sequence[str]] | None = None

    @property
    def speakers(self) -> Mapping[str, int]:
        """The speakers of a voice that has several, by name; unnamed ones have their number as name."""
        if self.num_speakers == 1:
            return {}
        named = self.speaker_id_map
        known = set(named.values())
        return named | {str(at): at for at in range(self.num_speakers) if at not in known}


class Voice(msgspec.Struct, frozen=True):
    """A voice of this machine, with the settings that a request needs."""

    name: str
    path: Path
    sha256: str
    size_bytes: int
    settings: VoiceSettings

    @property
    def memory_bytes(self) -> int:
        """The memory limit of the voice's process."""
        return voice_memory_bytes(self.size_bytes)


def voice_memory_bytes(size_bytes: int) -> int:
    """Estimate the memory of a voice's process, from the size of its ONNX file.

    The process holds the file four times: as read, parsed, as weights, and as weights reordered for the processor. The
    last layers of a sentence of 20 s hold a few times 32 channels of 441,000 floats.
    """
    return _PROCESS_BYTES + 4 * size_bytes


def read_settings(file: Path) -> VoiceSettings:
    """Read a voice's JSON file. Raises ArtifactNotFound, or ArtifactError, with the path, for another kind."""
    try:
        if file.stat().st_size > _MAX_SETTINGS_BYTES:
            raise ArtifactError(
                f"{file} is larger than {_MAX_SETTINGS_BYTES // _MIB} MiB, so it is not a voice's .onnx.json"
            )
        content = file.read_bytes()
    except OSError as error:
        raise ArtifactNotFound(f"{file}: {error.strerror}; a voice has this file beside its .onnx") from error
    try:
        settings = msgspec.json.decode(content, type=VoiceSettings)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"{file} is not a Piper voice's .onnx.json: {error}") from error
    _check(file, settings)
    return settings


def _check(file: Path, settings: VoiceSettings) -> None:
    if settings.phoneme_type != "espeak":
        raise ArtifactError(
            f"{file}: `phoneme_type` is {settings.phoneme_type!r:.40}; only voices with espeak's phonemes are supported"
        )
    for symbol in (PAD, START, END):
        if symbol not in settings.phoneme_id_map:
            raise ArtifactError(f"{file}: `phoneme_id_map` has no {symbol!r}, which every sentence needs")
    for symbol, ids in settings.phoneme_id_map.items():
        if max(ids) >= settings.num_symbols:
            raise ArtifactError(
                f"{file}: `phoneme_id_map`: {symbol!r} has the id {max(ids)}, but `num_symbols` is "
                f"{settings.num_symbols}"
            )
    for name, at in settings.speaker_id_map.items():
        if at >= settings.num_speakers:
            raise ArtifactError(
                f"{file}: `speaker_id_map`: {name!r} has the id {at}, but `num_speakers` is {settings.num_speakers}"
            )


def worker_spec(path: Path, sha256: str, settings: VoiceSettings, memory_bytes: int) -> WorkerSpec:
    """Return the worker that runs a voice in a child. The worker checks that the file at `path` has this hash."""
    options = {
        "model": str(path),
        "sha256": sha256,
        "rate": str(settings.audio.sample_rate),
        "speakers": str(settings.num_speakers),
    }
    return WorkerSpec(WORKER, options=options, memory_bytes=memory_bytes)


def find_voice(name: str, model_dirs: Sequence[Path] = ()) -> Voice | None:
    """Return the voice called `name`; None if there is none. Raises ArtifactError if it is malformed or altered."""
    if not NAME.fullmatch(name):
        return None
    for root in search_path(model_dirs):
        try:
            artifact = load_artifact(root / name)
        except ArtifactNotFound:
            continue
        return voice_of(artifact) if artifact.manifest.architecture == ARCHITECTURE else None
    return None


def list_voices(model_dirs: Sequence[Path] = ()) -> tuple[Artifact, ...]:
    """Return the voices of `search_path`, sorted by name."""
    return tuple(one for one in list_artifacts(model_dirs) if one.manifest.architecture == ARCHITECTURE)


def voice_of(artifact: Artifact) -> Voice:
    """Return the voice of an artifact, whose weights are checked when loaded. Raises ArtifactError."""
    manifest = artifact.manifest
    path = artifact.folder / SETTINGS
    try:
        found = path.stat()
        sha256, settings = _known(path, found.st_mtime_ns, found.st_size, found.st_ino)
    except OSError as error:
        raise ArtifactNotFound(f"{path}: {error.strerror}; add the voice again") from error
    if sha256 != manifest.files.get(SETTINGS):
        raise ArtifactCorrupt(f"{path}: the file was altered after the voice was added; add the voice again")
    return Voice(manifest.name, artifact.path, manifest.sha256, manifest.size_bytes, settings)


@functools.lru_cache(maxsize=16)
def _known(path: Path, *_: int) -> tuple[str, VoiceSettings]:
    """Read and hash a settings file. The result is cached until the file is written again."""
    return sha256_of(path), read_settings(path)


class Clause(msgspec.Struct, frozen=True):
    """Words, and the punctuation after them: one of ``. ? ! , ; :``, or none."""

    words: str
    mark: str


def split_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. A sentence longer than `MAX_SENTENCE` is cut at a pause."""
    start = 0
    for end in _SENTENCE_END.finditer(text):
        rest = " ".join(text[start : end.end()].split())
        start = end.end()
        while len(rest) > MAX_SENTENCE:
            head = rest[:MAX_SENTENCE]
            at = max(head.rfind(mark) for mark in (", ", "; ", ": ")) + 1
            at = at or head.rfind(" ") + 1 or MAX_SENTENCE
            yield rest[:at].strip()
            rest = rest[at:].strip()
        if rest:
            yield rest


def split_clauses(sentence: str) -> Iterator[Clause]:
    """Yield the clauses of a sentence, without those that have nothing to pronounce."""
    for piece in _CLAUSE_END.split(sentence):
        words = piece.strip().rstrip(_CLOSING)
        if any(unicodedata.category(character)[0] in "LNS" for character in words):
            yield Clause(words, _MARKS.get(words[-1], ""))


def phoneme_ids(spoken: Sequence[tuple[str, str]], settings: VoiceSettings) -> tuple[int, ...]:
    """Return the ids of a sentence: a start symbol, each symbol and a pad, an end symbol; () if no symbol is known.

    `spoken`: each clause in IPA as espeak-ng writes it, and its punctuation.
    """
    known = settings.phoneme_id_map
    pad = known[PAD]
    ids = [*known[START], *pad]
    has_audio = False
    for ipa, mark in spoken:
        text = " ".join(_LANGUAGE.sub("", ipa).split()) + mark + (" " if mark in _PAUSES else "")
        for symbol in _symbols(unicodedata.normalize("NFD", text), settings):
            if symbol in known and symbol not in (PAD, START, END):
                ids += [*known[symbol], *pad]
                has_audio = has_audio or symbol.isalpha()
    return (*ids, *known[END]) if has_audio else ()


def _symbols(text: str, settings: VoiceSettings) -> Iterator[str]:
    """Yield the symbols of a text: its code points, or groups of code points that the voice has as one symbol."""
    groups = sorted(("".join(one) for one in settings.vowel_clusters or ()), key=len, reverse=True)
    at = 0
    while at < len(text):
        symbol = next((group for group in groups if group and text.startswith(group, at)), text[at])
        yield symbol
        at += len(symbol)
