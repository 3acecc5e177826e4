"""Model artifacts: a folder with one weights file and a `manifest.json` that describes it and its origin.

    models/artifacts/<name>/model.gguf      the weights (GGUF, or ONNX for the small signals)
    models/artifacts/<name>/manifest.json   a `Manifest`
    models/artifacts/<name>/README.md       the model card

Nothing is unpickled: an artifact is JSON, Markdown and a weights file with a verified hash.

A signal about a model's answers belongs to exactly one version of its weights (`judges_sha256` in the manifest); for
any other version it is not used.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from causeway_server.router.types import Transcripts

SHIPPED = Path(__file__).parents[1] / "artifacts"
MANIFEST = "manifest.json"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # of models and adapters

Answers = Literal["text", "calls"]
MMPROJ_FILE = "mmproj.gguf"
"""File name, beside the weights, of a vision model's mmproj file."""
_NO_ONNX = "Projectors in ONNX are no longer read: add the mmproj file of a vision model (`causeway-models add-mmproj`)"
SignalKind = Literal["embedding", "edge.quality", "confidence", "pair", "candidates", "same-answer", "heard-words"]


class ArtifactError(ValueError):
    """An artifact is missing, malformed or altered; the message has the path."""


class ArtifactNotFound(ArtifactError):
    """No such artifact in the folders that were searched."""


class ArtifactUnreadable(ArtifactError):
    """The file is damaged, or in a format that this version does not know."""


class ArtifactCorrupt(ArtifactError):
    """The weights differ from the ones that the manifest describes."""


class DataSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Training data whose licence requires attribution."""

    name: str
    licence: str
    attribution: str


class AdapterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A LoRA adapter of a model: a GGUF beside its weights. `answers`: their form with it; None: the model's own."""

    file: str
    sha256: str
    size_bytes: int
    scale: float = 1.0
    note: str = ""
    answers: Answers | None = None


class ProjectorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `mmproj` file of a vision model, for one version of its weights: it turns images into soft tokens."""

    file: str
    sha256: str
    size_bytes: int
    model_sha256: str
    note: str = ""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The description of one artifact.

    `metrics`: measured on held-out rows, as shares of 1 unless the key (`student/snips/exact_match`) says otherwise.
    `refuse_token`: the special token whose probability at the first position is that of a refusal. `answers`: `calls`
    is one function call as compact JSON with arguments copied from the user's message, held by `call_grammar` unless
    the request constrains it; `text` is unconstrained. `transcripts`: the form that the model expects: `spoken` is
    lower case without punctuation (router/parts/reading.py), `written` as the speech model writes.
    """

    name: str
    file: str
    sha256: str
    size_bytes: int
    format: str  # gguf | onnx | json
    architecture: str
    quantisation: str
    context_length: int  # maximum context in tokens
    licence: str
    data: tuple[DataSource, ...] = ()
    metrics: dict[str, float] = {}
    parameters: int = 0
    refuse_token: str | None = None
    temperature: float | None = None  # default temperature; None: OpenAI's 1
    answer_tokens: int = 0  # default limit of an answer; 0: the rest of the context
    answers: Answers = "text"
    transcripts: Transcripts = "written"
    adapters: dict[str, AdapterEntry] = {}  # adapters by name; requests ask for MODEL+NAME
    projector: ProjectorEntry | None = None  # projector of images, for `fusion: early`
    files: dict[str, str] = {}  # further files of the model: their SHA-256 by name
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    catalog_sha256: str | None = None
    # the router signal that the artifact computes (kinds: models/catalog/artifact.py); "" for a model that
    # answers
    signal: str = ""
    judges_sha256: str | None = None  # SHA-256 of the weights whose answers this signal was trained on
    seed: int | None = None
    command: str = ""
    note: str = ""

    @property
    def has_calls(self) -> bool:
        """Whether the answers of the model, or of one of its adapters, are calls."""
        return "calls" in (self.answers, *(one.answers for one in self.adapters.values()))


class Artifact(msgspec.Struct, frozen=True):
    """A manifest, and the path of its weights on this machine."""

    path: Path  # the weights file
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def version(self) -> str:
        """A text that changes with everything that answers depend on: hashes of weights, adapters, projector."""
        entries = self.manifest.adapters.items()
        adapters = (f" {name} {one.sha256} {one.scale:g} {one.answers or ''}".rstrip() for name, one in entries)
        projector = f" projector {entry.sha256}" if (entry := self.manifest.projector) else ""
        return self.manifest.sha256 + "".join(adapters) + projector

    def path_for(self, model: Artifact) -> Path:
        """Return this signal's file. Raises ArtifactError if it was made for other weights than those of `model`."""
        if self.manifest.judges_sha256 != model.manifest.sha256:
            made_for = self.manifest.judges_sha256
            raise ArtifactError(
                f"{self.path}: the signal was made for another version of {model.name} (sha256 {made_for})"
            )
        return self.path


def load_artifact(folder: Path) -> Artifact:
    """Read the artifact in `folder`.

    Raises ArtifactNotFound without a readable manifest, ArtifactError if it is malformed or names a file elsewhere.
    """
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise ArtifactNotFound(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        advice = f". {_NO_ONNX}" if "`$.projector`" in str(error) else ""
        raise ArtifactError(f"{path}: {error}{advice}") from error
    if Path(manifest.file).name != manifest.file:
        raise ArtifactError(f"{path}: `file` must name a file in the same folder, not {manifest.file!r}")
    if any(Path(name).name != name for name in manifest.files):
        raise ArtifactError(f"{path}: `files` must name files in the same folder")
    if manifest.projector is not None and Path(manifest.projector.file).name != manifest.projector.file:
        raise ArtifactError(f"{path}: `projector` must name a file in the same folder")
    for name, adapter in manifest.adapters.items():
        if not NAME.fullmatch(name) or Path(adapter.file).name != adapter.file:
            raise ArtifactError(
                f"{path}: `adapters`: {name!r} is not a valid name, or its file is not in the same folder"
            )
    return Artifact(path=folder / manifest.file, manifest=manifest)


def save_manifest(manifest: Manifest, folder: Path) -> Artifact:
    """Write `manifest.json` atomically, by rename."""
    partial = folder / f"{MANIFEST}.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    partial.replace(folder / MANIFEST)
    return Artifact(path=folder / manifest.file, manifest=manifest)


def adapter_file(name: str) -> str:
    """Return the name of an adapter's file beside the weights."""
    return f"adapter-{name}.gguf"


def user_models() -> Path:
    """Return the folder of the account's own models: ``~/.local/share/causeway/models``, or below $XDG_DATA_HOME."""
    share = os.environ.get("XDG_DATA_HOME") or Path(os.environ.get("HOME", "/"), ".local", "share")
    return Path(share) / "causeway" / "models"


def search_path(extra_dirs: Sequence[Path] = ()) -> tuple[Path, ...]:
    """Return the folders in which models are searched, in order; the first match hides others of the same name."""
    return (*extra_dirs, user_models(), SHIPPED)


def list_artifacts(extra_dirs: Sequence[Path] = ()) -> tuple[Artifact, ...]:
    """Return every known artifact of `search_path`, sorted by name."""
    found: dict[str, Artifact] = {}
    for root in search_path(extra_dirs):
        for manifest in sorted(root.glob(f"*/{MANIFEST}")):
            artifact = load_artifact(manifest.parent)
            found.setdefault(artifact.name, artifact)
    return tuple(found[name] for name in sorted(found))


def find_artifact(name: str, extra_dirs: Sequence[Path] = ()) -> Artifact:
    """Find the artifact called `name` in the folders of `search_path`.

    Raises ArtifactNotFound without it or its weights, naming known artifacts and folders.
    """
    known = list_artifacts(extra_dirs)
    for artifact in known:
        if artifact.name == name:
            if not artifact.path.is_file():
                raise ArtifactNotFound(f"{artifact.path}: the manifest names this file, but the file does not exist")
            return artifact
    roots = ", ".join(map(str, search_path(extra_dirs)))
    names = ", ".join(artifact.name for artifact in known) or "none"
    raise ArtifactNotFound(f"there is no model named {name!r} (models: {names}; searched in {roots})")


def sha256_of(path: Path) -> str:
    """Hash a file; return hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_artifact(artifact: Artifact) -> None:
    """Hash the weights again. Raises ArtifactCorrupt if size or sha256 differ, ArtifactNotFound without them."""
    expected = artifact.manifest
    try:
        size_bytes = artifact.path.stat().st_size
    except OSError as error:
        raise ArtifactNotFound(f"{artifact.path}: {error.strerror}") from error
    if size_bytes != expected.size_bytes:
        raise ArtifactCorrupt(
            f"{artifact.path}: the file has {size_bytes} bytes, but the manifest says {expected.size_bytes}"
        )
    actual = sha256_of(artifact.path)
    if actual != expected.sha256:
        raise ArtifactCorrupt(
            f"{artifact.path}: the sha256 of the file is {actual}, but the manifest says {expected.sha256}"
        )
    adapters = {one.file: one.sha256 for one in expected.adapters.values()}
    projector = {} if expected.projector is None else {expected.projector.file: expected.projector.sha256}
    for name, sha256 in (expected.files | adapters | projector).items():
        path = artifact.folder / name
        if not path.is_file():
            raise ArtifactNotFound(f"{path}: the manifest names this file, but the file does not exist")
        if sha256_of(path) != sha256:
            raise ArtifactCorrupt(f"{path}: the sha256 of the file is not the one in the manifest")


def find_signal(kind: SignalKind, model: Artifact | None = None, extra_dirs: Sequence[Path] = ()) -> Artifact:
    """Find the artifact that computes `kind`, for exactly the weights of `model`; in `extra_dirs` first.

    Raises ArtifactNotFound, which names those that exist.
    """
    candidates = [artifact for artifact in list_artifacts(extra_dirs) if artifact.manifest.signal == kind]
    candidates.sort(key=lambda artifact: artifact.folder.parent == SHIPPED)
    for artifact in candidates:
        if model is None or artifact.manifest.judges_sha256 == model.manifest.sha256:
            return artifact
    if model is None or not candidates:
        raise ArtifactNotFound(f"no artifact computes the signal {kind}")
    names = ", ".join(artifact.name for artifact in candidates)
    raise ArtifactNotFound(
        f"{names}: the signal was made for another version of {model.name} than the installed version "
        f"{model.manifest.sha256[:12]}"
    )


def find_judged_artifact(signal: Artifact, extra_dirs: Sequence[Path] = ()) -> Artifact:
    """Find the artifact whose weights `signal` was trained on. Raises ArtifactNotFound."""
    for artifact in list_artifacts(extra_dirs):
        if artifact.manifest.sha256 == signal.manifest.judges_sha256:
            return artifact
    raise ArtifactNotFound(
        f"{signal.name} was made for weights with sha256 {signal.manifest.judges_sha256}, which are not on this machine"
    )
