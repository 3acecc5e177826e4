"""Adding of a user's own files: a model, a LoRA adapter or an mmproj file of a model, or a Piper voice. Each is
checked, then installed.

Nothing in a file is executed or unpickled. A voice's network runs in a child process with bounded memory and time, and
speaks one sentence there: a file that crashes ONNX Runtime, exhausts memory or never ends ends only the child, and the
caller gets an ArtifactError.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import re
import shutil
from pathlib import Path

import msgspec

from ..catalog.artifact import (
    NAME,
    SHIPPED,
    AdapterEntry,
    Answers,
    Artifact,
    ArtifactError,
    Manifest,
    adapter_file,
    list_artifacts,
    save_manifest,
    sha256_of,
)
from ..catalog.fit import Device, estimate_memory
from ..catalog.gguf import GgufFile
from ..catalog.projector import read_mmproj
from ..parts.process.messages import Refusal, Synthesize, Synthesized
from ..parts.process.parent import WorkerFailed, WorkerProcess
from ..parts.voices import (
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
from .check import check_beside, check_gguf
from .publish import PlaceMode, PublishGate, place, place_mmproj, publish_gguf

_NO_LICENCE = "the file does not name a licence: make sure that you may use it"


class Origin(msgspec.Struct, frozen=True):
    """The origin of a file, for the manifest."""

    note: str
    command: str
    licence: str | None = None  # licence of the file; None: the one that the file names


class AddResult(msgspec.Struct, frozen=True):
    """The added artifact, and remarks for its owner."""

    artifact: Artifact
    notes: tuple[str, ...]


def add_model(
    file: Path,
    root: Path,
    *,
    name: str | None,
    device: Device,
    context: int,
    batch: int,
    force: bool = False,
    answers: Answers = "text",
    mode: PlaceMode = "copy",
    origin: Origin | None = None,
    mmproj: Path | None = None,
    gate: PublishGate | None = None,
) -> AddResult:
    """Check a GGUF or ONNX file and put it into `root/name` as an artifact.

    Args:
        name: The model's name in policies; defaults to the file's name.
        device: The device whose memory a GGUF must fit, with `batch` sequences of `context` tokens.
        force: Add a GGUF that does not fit, with a note.
        answers: The form of a GGUF's answers; `calls` constrains its answers to the call grammar.
        mode: Copy the file, link it, or move it.
        origin: The origin of the file; None: the owner's own.
        mmproj: The mmproj file of a vision model, which is installed in the same way.
        gate: The comparison that a GGUF must pass; its figures go into the manifest.

    Raises:
        ArtifactError: A file is unusable or not for the model, does not fit `device`, or is refused by the gate; or the
            name is taken or not valid in a policy.
    """
    chosen = check_name(name or model_name(file.stem), root)
    try:
        with file.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise ArtifactError(f"{file}: {error.strerror}") from error
    origin = origin or Origin(f"added from {file.name}", "causeway-models add")
    if magic == b"GGUF":
        gguf = check_gguf(file, context)
        vision_bytes = 0
        if mmproj is not None:
            check_beside("mmproj", mmproj, file)
            vision_bytes = read_mmproj(mmproj).memory_bytes
        need = estimate_memory(gguf, context=context, batch=batch).total_bytes + vision_bytes
        notes = (
            *_gguf_notes(gguf, context, origin.licence),
            *_mmproj_notes(file, mmproj),
            *check_memory(file.name, need, device, f" (context {context}, batch {batch}); lower these", force=force),
        )
        added = publish_gguf(
            file,
            chosen,
            root,
            gate=gate,
            command=origin.command,
            note=origin.note,
            licence=origin.licence,
            answers=answers,
            mode=mode,
        )
        return AddResult(added if mmproj is None else place_mmproj(added, mmproj, mode), notes)
    for given, what in ((mmproj, "an mmproj file"), (gate, "a comparison")):
        if given is not None:
            raise ArtifactError(f"{file}: {what} belongs to a language model in a GGUF")
    if file.suffix == ".onnx":
        return _add_onnx(file, root, chosen)
    found = f"it starts with {magic!r}" if magic else "it is empty"
    raise ArtifactError(f"{file} is neither a GGUF ({found}) nor an .onnx file")


def check_name(name: str, root: Path) -> str:
    """Return `name` if a new model may have it. Raises ArtifactError: it is not valid in a policy, or taken."""
    if not NAME.fullmatch(name):
        raise ArtifactError(
            f"{name!r} is not a valid model name: use a-z, 0-9, '.', '_' and '-', at most 64 characters; see --name"
        )
    if any(artifact.name == name for artifact in list_artifacts((root,))):
        raise ArtifactError(
            f"a model named {name!r} exists already; choose another name with --name, or delete its folder"
        )
    return name


def model_name(stem: str) -> str:
    """Return a valid model name derived from a file's name."""
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-.")


def check_memory(what: str, need_bytes: int, device: Device, advice: str, *, force: bool) -> tuple[str, ...]:
    """Return a remark if a model needs more memory than the device has but `force` is set, else raise ArtifactError.

    `what` names the model in messages; `advice`: besides `--force`.
    """
    if need_bytes <= device.usable_bytes:
        return ()
    usable = f"{device.name} has {device.usable_bytes / 2**20:.0f} MiB of usable memory"
    shortage = f"{what}: needs {need_bytes / 2**20:.0f} MiB, {usable}"
    if not force:
        raise ArtifactError(f"{shortage}{advice} or use --force")
    return (shortage,)


def _gguf_notes(gguf: GgufFile, context: int, licence: str | None) -> list[str]:
    notes = []
    if gguf.licence is None and licence is None:
        notes.append(_NO_LICENCE)
    if gguf.chat_template is None:
        notes.append("no chat template: the engine uses a plain one")
    if gguf.context_length and gguf.context_length < context:
        notes.append(f"trained for a context of {gguf.context_length} tokens, fewer than the {context} requested")
    if gguf.refuse_token is None:
        notes.append("no refusal token: confidence is computed from token probabilities alone")
    return notes


def _mmproj_notes(file: Path, mmproj: Path | None) -> list[str]:
    beside = [] if mmproj is not None else sorted(file.parent.glob("mmproj*.gguf"))
    return [f"{one.name} is in the same folder: with --mmproj the model accepts images" for one in beside]


def _add_onnx(file: Path, root: Path, name: str) -> AddResult:
    import onnxruntime

    from ..signals.encoder import PIECES_KEY

    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exception classes have no common base
        raise ArtifactError(f"{file}: ONNX Runtime cannot load the file ({error})") from error
    inputs = ", ".join(f"{tensor.name} {tensor.type}" for tensor in session.get_inputs())
    outputs = ", ".join(f"{tensor.name} {tensor.type}" for tensor in session.get_outputs())
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "model.onnx"
    shutil.copyfile(file, target)
    manifest = Manifest(
        name=name,
        file=target.name,
        sha256=sha256_of(target),
        size_bytes=target.stat().st_size,
        format="onnx",
        architecture=session.get_modelmeta().graph_name or "onnx",
        quantisation="as given",
        context_length=0,
        licence="unknown",
        signal="embedding" if PIECES_KEY in session.get_modelmeta().custom_metadata_map else "",
        command="causeway-models add",
        note=f"added from {file.name}: inputs {inputs}; outputs {outputs}",
    )
    return AddResult(save_manifest(manifest, folder), (_NO_LICENCE,))


def add_adapter(
    model: Artifact,
    file: Path,
    *,
    name: str | None = None,
    scale: float = 1.0,
    mode: PlaceMode = "copy",
    replace: bool = False,
    answers: Answers | None = None,
) -> str:
    """Add the adapter in `file` to `model`, its base; return its name for requests, `MODEL+NAME`.

    `name` defaults to the file's; `mode`: copy, link or move; `replace`: an adapter of this name; `answers`: their form
    with the adapter, by default the model's; `calls` constrains them to the call grammar. Raises ArtifactError if the
    model cannot have adapters, the name is taken or not valid, or llama.cpp cannot use it here.
    """
    chosen = name or model_name(file.stem)
    check_extensible(model, "adapters")
    if not NAME.fullmatch(chosen):
        raise ArtifactError(
            f"{chosen!r} is not a valid name: use a-z, 0-9, '.', '_' and '-', at most 64 characters; see --name"
        )
    if chosen in model.manifest.adapters and not replace:
        raise ArtifactError(f"{model.name} has an adapter {chosen!r} already; choose another --name, or use --replace")
    if not math.isfinite(scale) or not scale:
        raise ArtifactError(f"the scale {scale:g} is not valid: use a finite number other than 0")
    check_beside("adapter", file, model.path)
    target = model.folder / adapter_file(chosen)
    partial = place(file, target.with_name(target.name + ".partial"), mode)
    partial.replace(target)
    note = f"added from {file.name}"
    entry = AdapterEntry(target.name, sha256_of(target), target.stat().st_size, scale, note, answers)
    adapters = {**model.manifest.adapters, chosen: entry}
    save_manifest(msgspec.structs.replace(model.manifest, adapters=adapters), model.folder)
    return f"{model.name}+{chosen}"


def add_mmproj(model: Artifact, file: Path, mode: PlaceMode = "copy") -> Artifact:
    """Add (or replace) a vision model's mmproj file. Raises ArtifactError if it cannot be used or copied."""
    check_extensible(model, "an mmproj file")
    check_beside("mmproj", file, model.path)
    return place_mmproj(model, file, mode)


def check_extensible(model: Artifact, what: str) -> None:
    """Check that a model's folder can be added to. Raises ArtifactError if it is shipped or not a language model."""
    if model.manifest.format != "gguf" or model.manifest.signal:
        raise ArtifactError(f"{model.name} is not a language model in a GGUF: only such a model can have {what}")
    if model.folder.is_relative_to(SHIPPED):
        raise ArtifactError(
            f"{model.name} ships with Causeway and cannot be changed: `causeway-models add {model.path} --name MINE` "
            f"makes a copy that can have {what}"
        )


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
    mode: PlaceMode = "copy",
    check_s: float = _CHECK_S,
) -> AddResult:
    """Check a Piper voice and put it into `root/name` as an artifact. Raises ArtifactError.

    Args:
        settings_file: The voice's JSON; None: it lies beside `file`, with `.json` after its name.
        name: The voice's name in requests; defaults to the file's name.
        licence, licence_file: Its name, such as `CC-BY-4.0`, and its text, which is kept beside the voice.
        device: The device whose memory it must fit.
        force: Add a voice that does not fit, with a note.
        check_s: Time to load it and speak one sentence.
    """
    chosen = check_name(name or model_name(file.stem), root)
    if chosen == DEFAULT:
        raise ArtifactError(f"{chosen!r} is the device's own voice; choose another name with --name")
    if importlib.util.find_spec("onnxruntime") is None:
        raise ArtifactError("onnxruntime, which runs voices, is not installed: pip install 'causeway-router[voice]'")
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
        notes += ("no licence was named: make sure that you may use the voice, and see --licence",)
    speakers = f"{settings.num_speakers} {'speaker' if settings.num_speakers == 1 else 'speakers'}"
    manifest = Manifest(
        name=chosen,
        file=WEIGHTS,
        sha256=sha256,
        size_bytes=size_bytes,
        format="onnx",
        architecture=ARCHITECTURE,
        quantisation="as given",
        context_length=0,
        licence=licence or (f"see {LICENCE}" if licence_text else "unknown"),
        command="causeway-models add-voice",
        note=f"added from {file.name}: {settings.espeak.voice}, {settings.audio.sample_rate} Hz, {speakers}",
    )
    return AddResult(_publish(manifest, file, settings_file, root / chosen, licence_text, mode), notes)


def _licence(file: Path) -> bytes:
    if file.stat().st_size > _MAX_LICENCE_BYTES:
        raise ArtifactError(f"{file} is larger than 1 MiB, so it is not the text of a licence")
    return file.read_bytes()


async def _try(file: Path, sha256: str, settings: VoiceSettings, memory_bytes: int, check_s: float) -> None:
    """Speak one sentence with the first and the last speaker in a child process. Raises ArtifactError."""
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
        raise ArtifactError(f"{file}: ONNX Runtime cannot run the file {limits}: {error}") from None
    finally:
        await worker.close()


def _publish(
    manifest: Manifest, file: Path, settings_file: Path, folder: Path, licence_text: bytes, mode: PlaceMode
) -> Artifact:
    """Install the files of a voice; the manifest is written last. On an error, remove them and raise ArtifactError."""
    is_new = not folder.exists()
    try:
        place(file, folder / WEIGHTS, mode)
        place(settings_file, folder / SETTINGS, "copy")
        files = {SETTINGS: sha256_of(folder / SETTINGS)}
        if licence_text:
            (folder / LICENCE).write_bytes(licence_text)
            files[LICENCE] = sha256_of(folder / LICENCE)
        if sha256_of(folder / WEIGHTS) != manifest.sha256:
            raise ArtifactError(f"{file} changed while it was being added. Add the file again")
        return save_manifest(msgspec.structs.replace(manifest, files=files), folder)
    except (OSError, ArtifactError) as error:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{folder}: the voice cannot be written: {error.strerror}") from error
