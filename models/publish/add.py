"""Add a user's own model file: check it, then copy it as a named artifact.

Nothing in the file is executed or unpickled.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec

from ..catalog.artifact import Answers, Artifact, ArtifactError, Manifest, list_artifacts, save_manifest, sha256_of
from ..catalog.fit import Device, estimate_memory
from ..catalog.gguf import GgufFile, read_gguf
from ..chat.template import PromptRenderer
from .publish import publish_gguf

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_NO_LICENCE = "the file names no licence: make sure that you may use it"


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
) -> AddResult:
    """Check a GGUF or ONNX file and copy it to `root/name` as an artifact.

    Args:
        name: how policies name the model; defaults to the file's name.
        device: the device whose memory a GGUF must fit, with `batch` sequences of `context` tokens.
        force: add a GGUF that does not fit, with a note.
        answers: what a GGUF answers with; `calls` constrains its answers to the call grammar.

    Raises:
        ArtifactError: the file is neither a complete GGUF nor ONNX, cannot be loaded or does not fit `device`; or the
            name is taken or not valid in a policy.
    """
    chosen = name or _model_name(file.stem)
    if not NAME.fullmatch(chosen):
        raise ArtifactError(
            f"{chosen!r} is not a valid model name: use a-z, 0-9, '.', '_' and '-', at most 64 characters; see --name"
        )
    if any(artifact.name == chosen for artifact in list_artifacts((root,))):
        raise ArtifactError(
            f"a model named {chosen!r} exists already; choose another name with --name, or delete its folder"
        )
    with file.open("rb") as opened:
        magic = opened.read(4)
    if magic == b"GGUF":
        notes = _check_gguf(file, device, context, batch, force)
        note = f"added from {file.name}"
        added = publish_gguf(file, chosen, root, command="causeway-models add", note=note, answers=answers)
        return AddResult(added, notes)
    if file.suffix == ".onnx":
        return _add_onnx(file, root, chosen)
    raise ArtifactError(f"{file}: neither a GGUF (it starts with {magic!r}) nor an .onnx file")


def _check_gguf(file: Path, device: Device, context: int, batch: int, force: bool) -> tuple[str, ...]:
    """Return remarks for the owner. Raises ArtifactError."""
    gguf = read_gguf(file)
    notes = _gguf_notes(gguf, context)
    need = estimate_memory(gguf, context=context, batch=batch).total_bytes
    if need > device.usable_bytes:
        usable = f"{device.name} has {device.usable_bytes / 2**20:.0f} MiB of usable memory"
        shortage = f"{file}: needs {need / 2**20:.0f} MiB, {usable}"
        if not force:
            raise ArtifactError(f"{shortage} (context {context}, batch {batch}); lower these or use --force")
        notes.append(shortage)
    _load_check(file, context)
    return tuple(notes)


def _gguf_notes(gguf: GgufFile, context: int) -> list[str]:
    notes = []
    if gguf.licence is None:
        notes.append(_NO_LICENCE)
    if gguf.chat_template is None:
        notes.append("no chat template: the engine uses a plain one")
    else:
        PromptRenderer(gguf.chat_template)
    if gguf.context_length and gguf.context_length < context:
        notes.append(f"trained for a context of {gguf.context_length} tokens, fewer than the {context} requested")
    if gguf.refuse_token is None:
        notes.append("no refusal token: confidence is computed from token probabilities alone")
    return notes


def _load_check(file: Path, context: int) -> None:
    """Load the file with llama.cpp and decode one step."""
    from ..evaluate.greedy import GreedyModel

    with GreedyModel(file, slots=1, context=min(context, 512)) as model:
        model.logits(model.tokenize("hello") or [0])


def _add_onnx(file: Path, root: Path, name: str) -> AddResult:
    import onnxruntime

    from ..signals.encoder import PIECES_KEY

    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exception classes have no common base
        raise ArtifactError(f"{file}: ONNX Runtime cannot load it ({error})") from error
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


def _model_name(stem: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-.")
