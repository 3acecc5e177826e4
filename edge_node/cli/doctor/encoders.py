"""Check what turns sound and pictures into text or soft tokens. That a box has none is no finding."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from models.catalog.artifact import ArtifactError, ArtifactNotFound, find_artifact, list_artifacts, verify_artifact
from models.catalog.projector import find_projector
from models.modalities.installed import PICTURES_MODEL, SPEECH_MODEL, is_installed
from models.modalities.voices.files import list_voices, voice_of
from router.types import Modality

from ...config.schema import Config
from ...modalities.sound import PROGRAM, find_program, is_onnxruntime_installed
from ...modalities.voices import SEPARATOR
from . import Finding, fail, ok, warn

_INSTALL_VOICE = "`pip install 'causeway[voice]'`"


def check_encoders(
    config: Config,
    installed: Callable[[Modality], bool] = is_installed,
    environ: Mapping[str, str] = os.environ,
    has_onnxruntime: Callable[[], bool] = is_onnxruntime_installed,
) -> Iterator[Finding]:
    """Check the model of each installed package, and the voices.

    Args:
        installed: whether the packages for this kind of part are there.
        environ: where `PATH` says whether espeak-ng is.
        has_onnxruntime: whether the package that runs voices is there.
    """
    if not config.modalities.enabled:
        return
    if installed("audio"):
        yield _check_speech([Path(folder) for folder in config.engine.model_dirs])
    if installed("image"):
        yield _check_pictures([Path(folder) for folder in config.engine.model_dirs])
    yield from _check_projectors([Path(folder) for folder in config.engine.model_dirs])
    yield from _check_voices([Path(folder) for folder in config.engine.model_dirs], environ, has_onnxruntime)


def _check_speech(folders: list[Path]) -> Finding:
    pull = f"`causeway-models pull {SPEECH_MODEL}`"
    try:
        speech = find_artifact(SPEECH_MODEL, folders)
        verify_artifact(speech)
    except ArtifactNotFound:
        return warn("speech", "the extra `voice` is installed, its model is not: sound is refused", pull)
    except ArtifactError as error:
        return fail("speech", str(error), f"delete the folder, then {pull}")
    return ok("speech", f"{speech.manifest.note}, SHA-256 matches ({speech.path})")


def _check_pictures(folders: list[Path]) -> Finding:
    pull = f"`causeway-models pull {PICTURES_MODEL}`"
    try:
        pictures = find_artifact(PICTURES_MODEL, folders)
        verify_artifact(pictures)
    except ArtifactNotFound:
        return warn("pictures", "text in pictures is read; the model that tells what they show is not here", pull)
    except ArtifactError as error:
        return fail("pictures", str(error), f"delete the folder, then {pull}")
    return ok("pictures", f"text is read; {pictures.manifest.note}, SHA-256 matches ({pictures.path})")


def _check_projectors(folders: list[Path]) -> Iterator[Finding]:
    for artifact in list_artifacts(folders):
        if artifact.manifest.projector is None:
            continue
        try:
            projector = find_projector(artifact.name, folders)
        except ArtifactError as error:
            yield fail("projector", str(error), "until then `fusion: early` leaves this model out")
        else:
            assert projector is not None
            tokens = f"{projector.tokens} soft tokens" if projector.tokens else "soft tokens, by its mmproj file"
            yield ok("projector", f"{artifact.name} takes a picture as {tokens} ({projector.path})")


def _check_voices(
    folders: list[Path], environ: Mapping[str, str], has_onnxruntime: Callable[[], bool]
) -> Iterator[Finding]:
    voices = list_voices(folders)
    if voices and find_program(environ) is None:
        missing = f"voices were added, and {PROGRAM}, which turns text into their phonemes, is not here"
        yield warn("voice", missing, f"`apt install {PROGRAM}`")
    if voices and not has_onnxruntime():
        yield warn("voice", "voices were added, and onnxruntime, which runs them, is not here", _INSTALL_VOICE)
    for artifact in voices:
        again = f"delete {artifact.folder}, then `causeway-models add-voice`"
        try:
            verify_artifact(artifact)
            speakers = list(voice_of(artifact).settings.speakers)
        except ArtifactError as error:
            yield fail("voice", str(error), again)
        else:
            several = f", {len(speakers)} speakers such as {artifact.name}{SEPARATOR}{speakers[0]}" if speakers else ""
            yield ok("voice", f"{artifact.name}{several}, SHA-256 matches ({artifact.path})")
