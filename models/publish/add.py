"""Take in a model file that an owner brings: check it, then make it usable by name. Nothing in it is executed or
unpickled.
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


class AddResult(msgspec.Struct, frozen=True):
    """What was taken in, and what its owner should know about it."""

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
    """Copy `file` under `root` as an artifact, a GGUF's manifest with `answers`.

    Raises ArtifactError when it is no whole GGUF or ONNX, when it cannot be loaded, when the name is taken or does not
    suit a policy, and (unless `force`) when it does not fit `device`.
    """
    chosen = name or _plain(file.stem)
    if not NAME.fullmatch(chosen):
        raise ArtifactError(
            f"{chosen!r} cannot name a model: lower case, digits, '.', '_' and '-', at most 64 characters"
        )
    if any(artifact.name == chosen for artifact in list_artifacts((root,))):
        raise ArtifactError(f"there is already a model named {chosen!r}; choose another with --name")
    head = file.open("rb").read(4)
    if head == b"GGUF":
        notes = _checked(file, device, context, batch, force)
        note = f"added from {file.name}"
        added = publish_gguf(file, chosen, root, command="causeway-models add", note=note, answers=answers)
        return AddResult(added, notes)
    if file.suffix == ".onnx":
        return _add_onnx(file, root, chosen)
    raise ArtifactError(f"{file}: neither a GGUF (it starts with {head!r}) nor an .onnx file")


def _checked(file: Path, device: Device, context: int, batch: int, force: bool) -> tuple[str, ...]:
    """What its owner should know. Raises ArtifactError."""
    about = read_gguf(file)
    notes = _gguf_notes(about, context)
    need = estimate_memory(about, context=context, batch=batch).total_bytes
    if need > device.usable_bytes:
        told = f"{file}: needs {need / 2**20:.0f} MiB, {device.name} has {device.usable_bytes / 2**20:.0f} MiB for it"
        if not force:
            raise ArtifactError(f"{told} (context {context}, batch {batch})")
        notes.append(told)
    _load_check(file, context)
    return tuple(notes)


def _gguf_notes(about: GgufFile, context: int) -> list[str]:
    notes = []
    if about.licence is None:
        notes.append("the file names no licence: make sure that you may use it")
    if about.chat_template is None:
        notes.append("no chat template: a plain one will be used")
    else:
        PromptRenderer(about.chat_template)
    if about.context_length and about.context_length < context:
        notes.append(f"trained for {about.context_length} tokens of context, fewer than the {context} asked for")
    if about.refuse_token is None:
        notes.append("no refusal token: confidence comes from its probabilities alone")
    return notes


def _load_check(file: Path, context: int) -> None:
    """llama.cpp itself must be able to load it and take a step."""
    from ..evaluate.greedy import GreedyModel

    with GreedyModel(file, slots=1, context=min(context, 512)) as model:
        model.logits(model.tokenize("hello") or [0])


def _add_onnx(file: Path, root: Path, name: str) -> AddResult:
    import onnxruntime

    from ..signals.encoder import PIECES_KEY

    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises classes of its own without a common base
        raise ArtifactError(f"{file}: ONNX Runtime cannot load it ({error})") from error
    takes = ", ".join(f"{tensor.name} {tensor.type}" for tensor in session.get_inputs())
    gives = ", ".join(f"{tensor.name} {tensor.type}" for tensor in session.get_outputs())
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
        note=f"added from {file.name}: takes {takes}; gives {gives}",
    )
    return AddResult(save_manifest(manifest, folder), ("the file names no licence: make sure that you may use it",))


def _plain(stem: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-.")
