"""Add an owner's Piper voice: check its two files, then copy or link them as a named artifact.

The network runs in a child process with bounded memory and time, and speaks one sentence there: a file that crashes
ONNX Runtime, exhausts memory or never ends takes the child, and the caller gets an ArtifactError.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from pathlib import Path

from ..catalog.artifact import Artifact, ArtifactError, Manifest, save_manifest, sha256_of
from ..catalog.fit import Device
from ..modalities.process.messages import Refusal, Synthesize, Synthesized
from ..modalities.process.parent import WorkerFailed, WorkerProcess
from ..modalities.voices import (
    ARCHITECTURE,
    DEFAULT,
    END,
    LICENCE,
    PAD,
    SETTINGS,
    START,
    WEIGHTS,
    VoiceSettings,
    read_settings,
    voice_memory_bytes,
    worker_spec,
)
from .add import AddResult, check_memory, check_name, model_name
from .publish import Placing, place

_TRIED_SYMBOLS = 40  # a short sentence
_CHECK_S = 90.0
_MAX_LICENCE_BYTES = 1024 * 1024
_MIB = 2**20


def add_voice(
    file: Path,
    root: Path,
    *,
    device: Device,
    settings_file: Path | None = None,
    name: str | None = None,
    licence: str = "",
    licence_file: Path | None = None,
    force: bool = False,
    placing: Placing = "copy",
    check_s: float = _CHECK_S,
) -> AddResult:
    """Check a Piper voice and put it into `root/name` as an artifact.

    Args:
        settings_file: the voice's JSON; None: it lies beside `file`, with `.json` after its name.
        name: how requests name the voice; defaults to the file's name.
        licence: its name, such as `CC-BY-4.0`.
        licence_file: its text, which is kept beside the voice.
        device: the device whose memory it must fit.
        force: add a voice that does not fit, with a note.
        check_s: time to load it and speak one sentence.

    Raises:
        ArtifactError: the files are no Piper voice, cannot be run, or do not fit `device`; or the name is taken.
    """
    chosen = check_name(name or model_name(file.stem), root)
    if chosen == DEFAULT:
        raise ArtifactError(f"{chosen!r} is the box's own voice; choose another name with --name")
    if importlib.util.find_spec("onnxruntime") is None:
        raise ArtifactError("onnxruntime is not installed, which runs voices: pip install 'causeway[voice]'")
    settings_file = settings_file or file.with_name(file.name + ".json")
    settings = read_settings(settings_file)
    try:
        size_bytes = file.stat().st_size
        sha256 = sha256_of(file)
        licence_text = b"" if licence_file is None else _licence(licence_file)
    except OSError as error:
        raise ArtifactError(f"{error.filename}: {error.strerror}") from error
    need = voice_memory_bytes(size_bytes)
    notes = check_memory(file.name, need, device, "; choose a smaller voice,", force=force)
    asyncio.run(_try(file.absolute(), sha256, settings, need, check_s))
    if not (licence or licence_text):
        notes += ("no licence was named: make sure that you may use it; see --licence",)
    return AddResult(
        _publish(file, settings_file, root / chosen, sha256, settings, licence, licence_text, placing), notes
    )


def _licence(file: Path) -> bytes:
    if file.stat().st_size > _MAX_LICENCE_BYTES:
        raise ArtifactError(f"{file}: larger than 1 MiB: this is no licence's text")
    return file.read_bytes()


async def _try(file: Path, sha256: str, settings: VoiceSettings, memory_bytes: int, check_s: float) -> None:
    """Speak one sentence with the first and the last speaker. Raises ArtifactError."""
    worker = WorkerProcess(worker_spec(file, sha256, settings, memory_bytes))
    known = [ids for symbol, ids in settings.phoneme_id_map.items() if symbol not in (PAD, START, END)]
    pad = settings.phoneme_id_map[PAD]
    middle = [number for ids in known[:_TRIED_SYMBOLS] for number in (*ids, *pad)]
    ids = (*settings.phoneme_id_map[START], *pad, *middle, *settings.phoneme_id_map[END])
    scales = settings.inference
    deadline = asyncio.get_running_loop().time() + check_s
    try:
        for speaker in sorted({0, settings.num_speakers - 1}):
            job = Synthesize(ids, scales.noise_scale, scales.length_scale, scales.noise_w, speaker)
            assert isinstance(await worker.run(job, deadline), Synthesized)
    except Refusal as refusal:
        raise ArtifactError(f"{file}: {refusal}") from None
    except WorkerFailed as error:
        limits = f"within {memory_bytes / _MIB:.0f} MiB and {check_s:g} s"
        raise ArtifactError(f"{file}: ONNX Runtime cannot run it {limits}: {error}") from None
    finally:
        await worker.close()


def _publish(
    file: Path,
    settings_file: Path,
    folder: Path,
    sha256: str,
    settings: VoiceSettings,
    licence: str,
    licence_text: bytes,
    placing: Placing,
) -> Artifact:
    """Place the files; the manifest is written last. Raises ArtifactError, and leaves nothing behind then."""
    is_new = not folder.exists()
    try:
        place(file, folder / WEIGHTS, placing)
        place(settings_file, folder / SETTINGS, "copy")
        files = {SETTINGS: sha256_of(folder / SETTINGS)}
        if licence_text:
            (folder / LICENCE).write_bytes(licence_text)
            files[LICENCE] = sha256_of(folder / LICENCE)
        if sha256_of(folder / WEIGHTS) != sha256:
            raise ArtifactError(f"{file}: it changed while it was added; add it again")
        manifest = Manifest(
            name=folder.name,
            file=WEIGHTS,
            sha256=sha256,
            size_bytes=(folder / WEIGHTS).stat().st_size,
            format="onnx",
            architecture=ARCHITECTURE,
            quantisation="as given",
            context_length=0,
            licence=licence or (f"see {LICENCE}" if licence_text else "unknown"),
            files=files,
            command="causeway-models add-voice",
            note=f"added from {file.name}: {settings.espeak.voice}, {settings.audio.sample_rate} Hz, "
            f"{settings.num_speakers} {'speaker' if settings.num_speakers == 1 else 'speakers'}",
        )
        return save_manifest(manifest, folder)
    except (OSError, ArtifactError) as error:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{folder}: the voice cannot be written: {error.strerror}") from error
