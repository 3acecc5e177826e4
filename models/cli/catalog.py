"""Commands for the models on this machine: list, verify, add, add-adapter, add-mmproj, add-voice and fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column, Table

from causeway_server.router.serving.process import option

from ..catalog import fit
from ..catalog.artifact import (
    Answers,
    ArtifactError,
    Manifest,
    find_artifact,
    list_artifacts,
    search_path,
    user_models,
    verify_artifact,
)
from ..catalog.gguf import read_gguf
from ..catalog.projector import vision_bytes
from ..parts.voices import ARCHITECTURE, voice_memory_bytes
from ..publish.add import AddResult, add_adapter, add_mmproj, add_model, add_voice
from ..publish.publish import PlaceMode
from ..pull.demo import packaged_models
from .compare import gate_options, make_gate
from .options import existing_file, folder, mebibytes, models_option

console = Console()

name_option = option("--name", "Name of the model, by which policies refer to it. Default: the file's name.")
user_models_option = click.option(
    "--to",
    type=folder,
    default=user_models,
    show_default="~/.local/share/causeway/models",
    help="Folder of models to which the model is added. All commands and the daemon search the default "
    "folder for models.",
)
context_option = option("--context", "Context length of each sequence, in tokens.", click.IntRange(1), 2048)
device_option = option(
    "--device", "Device into whose memory the model must fit.", click.Choice(sorted(fit.DEVICES)), "this-machine"
)
batch_option = option("--batch", "Number of sequences that are decoded at the same time.", click.IntRange(1), 4)


@click.command("list")
@models_option
def list_command(extra_dirs: Sequence[Path]) -> None:
    """List the models and the router signals on this machine that a policy or the daemon can use."""
    columns = ("name", "kind", "bits", "weights", "size", "licence")
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None)
    for artifact in list_artifacts(extra_dirs):
        manifest = artifact.manifest
        table.add_row(
            artifact.name,
            _kind(manifest),
            manifest.quantisation,
            f"{manifest.parameters / 1e6:.1f} M" if manifest.parameters else "",
            mebibytes(manifest.size_bytes),
            manifest.licence,
        )
        for name, adapter in manifest.adapters.items():
            table.add_row(f"{artifact.name}+{name}", "adapter", "", "", mebibytes(adapter.size_bytes), "")
        if manifest.projector is not None:
            table.add_row(f"{artifact.name}: images", "projector", "", "", mebibytes(manifest.projector.size_bytes), "")
    console.print(table)
    searched = ", ".join(map(str, search_path(extra_dirs)))
    console.print(f"searched: {searched}", soft_wrap=True, style="dim")


@click.command()
@click.argument("names", nargs=-1)
@models_option
def verify(names: Sequence[str], extra_dirs: Sequence[Path]) -> None:
    """Check the weights of all models, or only of the models NAMES, against the models' manifests.

    Exits with 1 if a file is altered or missing.
    """
    chosen = [find_artifact(name, extra_dirs) for name in names] if names else list_artifacts(extra_dirs)
    broken = 0
    for artifact in chosen:
        try:
            verify_artifact(artifact)
            console.print(f"[green]ok[/]      {artifact.name}  {artifact.manifest.sha256[:16]}")
        except ArtifactError as error:
            broken += 1
            console.print(f"[red]broken[/]  {artifact.name}  {error}", soft_wrap=True)
    if broken:
        raise SystemExit(1)


@click.command()
@click.argument("file", type=existing_file)
@name_option
@user_models_option
@device_option
@context_option
@batch_option
@option("--force", "Add the model even if it does not fit into the device's memory.", is_flag=True)
@option(
    "--calls",
    "Let the model generate only answers in the form of function calls. Use this option for a model that "
    "answers with function calls, as the shipped models do.",
    is_flag=True,
)
@option(
    "--link",
    "Link the GGUF file instead of copying it. A link takes no disk space, but the original file must stay.",
    is_flag=True,
)
@option("--mmproj", "The mmproj file of a vision model. With this file the model accepts images.", existing_file)
@gate_options
def add(
    file: Path,
    name: str | None,
    to: Path,
    device: str,
    context: int,
    batch: int,
    force: bool,
    calls: bool,
    link: bool,
    mmproj: Path | None,
    against: str | None,
    prompt_files: Sequence[Path],
    limits: Sequence[str],
) -> None:
    """Check FILE, a model of your own in the format GGUF or ONNX, and add it under a name."""
    added = add_model(
        file,
        to,
        name=name,
        device=fit.DEVICES[device],
        context=context,
        batch=batch,
        force=force,
        answers="calls" if calls else "text",
        mode="link" if link else "copy",
        mmproj=mmproj,
        gate=make_gate(against, prompt_files, limits, (to,), context),
    )
    print_added(added)


@click.command("add-adapter")
@click.argument("model")
@click.argument("file", type=existing_file)
@option("--name", "Name of the adapter. Requests select it as MODEL+NAME. Default: the file's name.")
@option("--scale", "Factor for the strength of the adapter's effect.", float, 1.0)
@option("--link", "Link FILE instead of copying it.", is_flag=True)
@option("--replace", "Replace the adapter of this name if the model already has one.", is_flag=True)
@option(
    "--calls",
    "With this adapter, let the model generate only answers in the form of function calls. Use this option "
    "if the model with this adapter answers with function calls.",
    is_flag=True,
)
@models_option
def add_adapter_command(
    model: str,
    file: Path,
    name: str | None,
    scale: float,
    link: bool,
    replace: bool,
    calls: bool,
    extra_dirs: Sequence[Path],
) -> None:
    """Add a LoRA adapter to the model MODEL. FILE is a GGUF file made by convert_lora_to_gguf.py."""
    mode: PlaceMode = "link" if link else "copy"
    artifact = find_artifact(model, extra_dirs)
    answers: Answers | None = "calls" if calls else None
    added = add_adapter(artifact, file, name=name, scale=scale, mode=mode, replace=replace, answers=answers)
    console.print(f"added {added}; a running daemon offers the adapter after SIGHUP", soft_wrap=True)


@click.command("add-mmproj")
@click.argument("model")
@click.argument("file", type=existing_file)
@option("--link", "Link FILE instead of copying it.", is_flag=True)
@models_option
def add_mmproj_command(model: str, file: Path, link: bool, extra_dirs: Sequence[Path]) -> None:
    """Add FILE, the mmproj file of the vision model MODEL, so that the model accepts images. It replaces an earlier
    mmproj file.
    """
    artifact = add_mmproj(find_artifact(model, extra_dirs), file, "link" if link else "copy")
    entry = artifact.manifest.projector
    assert entry is not None
    console.print(f"added {entry.file} to {artifact.name} ({entry.note})", soft_wrap=True)


def _kind(manifest: Manifest) -> str:
    if manifest.architecture == ARCHITECTURE:
        return "voice"
    return manifest.architecture if manifest.format == "gguf" else manifest.format


def print_added(added: AddResult) -> None:
    """Print an added model and the remarks for its owner."""
    for note in added.notes:
        console.print(f"[yellow]note[/]  {note}", soft_wrap=True)
    if (compared := added.artifact.manifest.metrics).get("compared/prompts"):
        console.print(
            "compared by {compared/prompts:.0f} prompts, {compared/answered:.0f} of them answered".format_map(compared)
        )
    console.print(f"added {added.artifact.name}: {added.artifact.path}", soft_wrap=True)


@click.command("add-voice")
@click.argument("file", type=existing_file)
@option("--config", "JSON file of the voice. Default: FILE.json.", existing_file, to="settings_file")
@option("--name", "Name of the voice, by which requests select it. Default: the file's name.")
@user_models_option
@device_option
@option("--licence", "Name of the voice's licence, such as CC-BY-4.0.", default="")
@option(
    "--licence-file", "File with the text of the voice's licence. This file is stored beside the voice.", existing_file
)
@option("--force", "Add the voice even if it does not fit into the device's memory.", is_flag=True)
@option("--link", "Link the voice's ONNX file instead of copying it.", is_flag=True)
def add_voice_command(
    file: Path,
    settings_file: Path | None,
    name: str | None,
    to: Path,
    device: str,
    licence: str,
    licence_file: Path | None,
    force: bool,
    link: bool,
) -> None:
    """Check and add a Piper voice. FILE is the voice's ONNX file; its JSON file lies beside it as FILE.json."""
    added = add_voice(
        file,
        to,
        device=fit.DEVICES[device],
        settings_file=settings_file,
        name=name,
        licence=licence,
        licence_file=licence_file,
        force=force,
        mode="link" if link else "copy",
    )
    print_added(added)


@click.command("fit")
@click.argument("model")
@context_option
@batch_option
@models_option
def fit_command(model: str, context: int, batch: int, extra_dirs: Sequence[Path]) -> None:
    """Estimate how much memory MODEL needs, and on which devices it fits. MODEL is a model's name, a GGUF file,
    `speech` or `images`.
    """
    if model in packaged_models():
        packaged = packaged_models()[model]
        _print_fit(f"{packaged.name}: {packaged.title}", packaged.memory_bytes)
        return
    path, beside_bytes = Path(model), 0
    if not path.is_file():
        artifact = find_artifact(model, extra_dirs)
        if artifact.manifest.architecture == ARCHITECTURE:
            _print_fit(f"{artifact.name}: a Piper voice", voice_memory_bytes(artifact.manifest.size_bytes))
            return
        path, beside_bytes = artifact.path, vision_bytes(artifact)
    gguf = read_gguf(path)
    need = fit.estimate_memory(gguf, context=context, batch=batch)
    console.print(
        f"{model}: weights {mebibytes(need.weights_bytes)}, KV cache {mebibytes(need.cache_bytes)}, "
        f"buffers {mebibytes(need.buffers_bytes)}, process {mebibytes(need.process_bytes)}, "
        f"total {mebibytes(need.total_bytes)}",
        soft_wrap=True,
    )
    if beside_bytes:
        console.print(f"images: {mebibytes(beside_bytes)} in a separate process, which begins with the first image")
    table = Table("device", "usable memory", "fits", "largest batch at this context")
    for device in fit.DEVICES.values():
        largest = fit.largest_batch(gguf, device, context, vision_bytes=beside_bytes)
        fits = "yes" if largest >= batch else "no"
        table.add_row(device.name, mebibytes(device.usable_bytes), fits, str(largest))
    console.print(table)


def _print_fit(title: str, memory_bytes: int) -> None:
    """Print the memory need of an encoder or a voice. Its one process handles one part after the other."""
    console.print(f"{title}: its process needs {mebibytes(memory_bytes)}")
    table = Table("device", "usable memory", "fits")
    for device in fit.DEVICES.values():
        fits = "yes" if memory_bytes <= device.usable_bytes else "no"
        table.add_row(device.name, mebibytes(device.usable_bytes), fits)
    console.print(table)


COMMANDS: tuple[click.Command, ...] = (
    list_command,
    verify,
    add,
    add_adapter_command,
    add_mmproj_command,
    add_voice_command,
    fit_command,
)
