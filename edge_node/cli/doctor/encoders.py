"""Check what turns sound and pictures into text or soft tokens. That a box has none is no finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from models.catalog.artifact import ArtifactError, ArtifactNotFound, find_artifact, list_artifacts, verify_artifact
from models.catalog.projector import find_projector
from models.modalities.installed import PICTURES_MODEL, SPEECH_MODEL, is_installed
from router.types import Modality

from ...config.schema import Config
from .finding import Finding, fail, ok, warn


def check_encoders(config: Config, installed: Callable[[Modality], bool] = is_installed) -> Iterator[Finding]:
    """Check the model of each installed package.

    Args:
        installed: whether the packages for this kind of part are there.
    """
    if not config.modalities.enabled:
        return
    if installed("audio"):
        yield _check_speech([Path(folder) for folder in config.engine.model_dirs])
    if installed("image"):
        yield _check_pictures([Path(folder) for folder in config.engine.model_dirs])
    yield from _check_projectors([Path(folder) for folder in config.engine.model_dirs])


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
