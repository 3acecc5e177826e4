"""The command `causeway-cloud triton`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from causeway_server.models.catalog.artifact import ArtifactError, find_artifact, list_artifacts, search_path
from causeway_server.models.llama_cpp.native.resources import probe_gpus
from causeway_server.models.llama_cpp.protocol import EngineOptions, adapter_files
from causeway_server.models.parts.installed import ENCODERS, EXTRAS, encoder_spec, is_installed, is_installed_in
from causeway_server.models.parts.process.messages import PartLimits
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.process import option
from causeway_server.router.types import Modality

from ..tiers.config import DEFAULT_TIER
from ..triton_server.encoder_runtime import EncoderOptions
from ..triton_server.server_process import ServedModel, find_environment, write_repository
from ..upstreams.triton.model_control import default_key_file, ensure_key
from .process import PATH, refuse, until_stopped

ENVIRONMENT = Path(__file__).parents[2] / ".venv-triton"
_PORT = click.IntRange(0, 65535)


def _gpu_layers(ctx: click.Context, param: click.Parameter, value: Any) -> int | Literal["auto"]:
    """Read a number of layers from -1 on, or `auto`."""
    return "auto" if value == "auto" else click.IntRange(min=-1).convert(value, param, ctx)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@option("--host", "Address on which Triton serves gRPC.", default="127.0.0.1")
@option("--grpc-port", "Port on which Triton serves gRPC; 0: any free port.", _PORT, 8001)
@option("--metrics-port", "Port on which Triton serves metrics over HTTP; 0: any free port.", _PORT, 8002)
@option("--metrics-host", "Address on which Triton serves metrics over HTTP.", default="127.0.0.1")
@click.option(
    "--key-file",
    type=PATH,
    default=default_key_file,
    show_default="~/.local/state/causeway-triton/key",
    help=(
        "File with the key for Triton's model control. A missing file is created. Gateways and workers "
        "need the same file as `triton_key_file`."
    ),
)
@option(
    "--model",
    "Model to serve: NAME, or NAME=ARTIFACT to serve an artifact under another name; may be repeated. "
    "The names `speech`, `images` and `files` stand for encoders, which read audio, images and files.",
    default=(DEFAULT_TIER,),
    to="models",
    multiple=True,
)
@option(
    "--model-dir",
    "Folder in which artifacts are looked for first; may be repeated.",
    PATH,
    to="model_dirs",
    multiple=True,
)
@option(
    "--environment",
    "Folder of Triton's Python environment.",
    PATH,
    ENVIRONMENT,
    show_default=False,
    envvar="CAUSEWAY_TRITON_ENV",
)
@option("--sequences", "Number of sequences that a model decodes together.", click.IntRange(1, 256), 16)
@option(
    "--context-tokens",
    "Context length of one sequence, in tokens; 0: the model's own context length.",
    click.IntRange(min=0),
    0,
    show_default=False,
)
@option(
    "--threads",
    "Number of CPU threads of a model. 0: the server tries several numbers and uses the fastest.",
    click.IntRange(min=0),
    0,
    show_default=False,
)
@option(
    "--gpu-layers", "Number of layers on the GPU; -1: all; auto: as many as fit.", default="auto", callback=_gpu_layers
)
@option(
    "--encoder-python",
    "Python program for encoders, with the extras `voice` and `images`; default: the one that runs this command.",
    default=sys.executable,
    show_default=False,
)
@option("--max-audio-s", "Maximum length of an audio clip, in seconds.", click.FloatRange(min=1), PartLimits().audio_s)
@option("--max-pixels", "Maximum number of pixels of an image.", click.IntRange(min=1), PartLimits().pixels)
@option("--max-text-bytes", "Maximum size of a text file, in bytes.", click.IntRange(min=1), PartLimits().text_bytes)
@option(
    "--drain-s",
    "Maximum time after SIGTERM in which running requests may finish, in seconds.",
    click.FloatRange(min=0),
    10.0,
)
@option(
    "--trace-endpoint",
    "URL of an OpenTelemetry collector (OTLP over HTTP), such as http://host:4318; empty: no traces.",
    default="",
)
@option(
    "--restart/--no-restart",
    "--restart: start the Triton server again after a crash. --no-restart: do not start it again.",
    default=True,
)
def triton(
    host: str,
    grpc_port: int,
    metrics_port: int,
    metrics_host: str,
    key_file: Path,
    models: tuple[str, ...],
    model_dirs: tuple[Path, ...],
    environment: Path,
    sequences: int,
    context_tokens: int,
    threads: int,
    gpu_layers: int | Literal["auto"],
    encoder_python: str,
    max_audio_s: float,
    max_pixels: int,
    max_text_bytes: int,
    drain_s: float,
    trace_endpoint: str,
    restart: bool,
) -> None:
    """Run a Triton server. When the models are loaded, the command prints `ready grpc=… metrics=…` on stdout."""
    try:
        triton_environment = find_environment(environment)
        key = ensure_key(key_file)
        options = EngineOptions(
            model_path="", sequences=sequences, context_tokens=context_tokens, threads=threads, gpu_layers=gpu_layers
        )
        limits = PartLimits(max_audio_s, max_pixels, max_text_bytes)
        served = tuple(
            _served_encoder(text, limits, encoder_python, model_dirs) or _served(text, options, model_dirs)
            for text in models
        )
        if twice := [name for name, count in Counter(model.name for model in served).items() if count > 1]:
            raise ConfigError(
                f"Two models have the same name {twice[0]!r}. Rename one of them with NAME=ARTIFACT.", where="--model"
            )
    except (ConfigError, ArtifactError) as error:
        refuse(str(error))
    # They import gRPC, which `poll_grpc_in_one_thread` of the other commands must precede.
    from ..triton_server.launcher import Launcher, ServerCommand
    from ..triton_server.server_process import Ports, choose_ports, clear_orphans, command, memory_prefix

    ports = choose_ports(Ports(host, grpc_port, metrics_port, metrics_host))
    clear_orphans()
    prefix = memory_prefix(os.getpid())
    with tempfile.TemporaryDirectory(prefix="causeway-triton-") as folder:
        write_repository(Path(folder), served, has_gpu=gpu_layers != 0 and bool(probe_gpus().gpus))
        names = tuple(model.name for model in served)
        launcher = Launcher(
            ServerCommand(
                argv=command(
                    triton_environment,
                    Path(folder),
                    names,
                    ports,
                    drain_s=drain_s,
                    prefix=prefix,
                    key=key,
                    trace_endpoint=trace_endpoint,
                ),
                environ=triton_environment.environ(os.environ),
                ports=ports,
                memory_prefix=prefix,
                expected_children=len(names),
                secret=key,
            ),
            drain_s=drain_s,
            restart=restart,
            print_ready=lambda line: print(line, flush=True),
            log=lambda line: print(f"triton: {line}", file=sys.stderr, flush=True),
        )
        status = until_stopped(launcher.run)
    sys.exit(status)


def _served_encoder(text: str, limits: PartLimits, python: str, model_dirs: tuple[Path, ...]) -> ServedModel | None:
    """Return the encoder's model; None for a language model. Raises ConfigError if packages or model are missing."""
    name, _, artifact = text.partition("=")
    encoder = artifact or name
    kind = ENCODERS.get(encoder)
    if kind is None:
        return None
    if kind in EXTRAS and python == sys.executable and not is_installed(kind):
        extra = EXTRAS[kind]
        raise ConfigError(
            f"{encoder} needs packages that are missing. Run `pip install 'causeway-router[{extra}]'`, or name a "
            "Python that has them with --encoder-python."
        )
    try:
        spec = encoder_spec(kind, model_dirs)
    except ArtifactError as error:
        raise ConfigError(f"{error} Run `causeway-models pull {encoder}`.") from error
    if python != sys.executable:
        _check_python(python, encoder, kind)
    return ServedModel(name, EncoderOptions(kind, spec, python, limits))


def _check_python(python: str, encoder: str, kind: Modality) -> None:
    """Check that `python` has the encoder's packages. Raises ConfigError."""
    try:
        has_packages = is_installed_in(python, kind)
    except OSError as error:
        raise ConfigError(f"{python}: {error.strerror}.", where="--encoder-python") from error
    if not has_packages:
        extra = f"causeway-router[{EXTRAS[kind]}]" if kind in EXTRAS else "causeway-router"
        raise ConfigError(
            f"{python} lacks packages that {encoder} needs. Run `pip install '{extra}'` for this Python.",
            where="--encoder-python",
        )


def _served(text: str, options: EngineOptions, model_dirs: tuple[Path, ...]) -> ServedModel:
    """Return the model to serve. Raises ArtifactError or ConfigError."""
    name, _, artifact_name = text.partition("=")
    wanted = artifact_name or name
    models = {
        one.name for one in list_artifacts(model_dirs) if one.manifest.format == "gguf" and not one.manifest.signal
    }
    if wanted not in models:
        folders = ", ".join(map(str, search_path(model_dirs)))
        names = ", ".join(sorted(models)) or "(none)"
        raise ConfigError(
            f"No model is named {wanted!r}. The language models are {names} (searched in {folders}); the encoders are "
            f"{', '.join(ENCODERS)}. `causeway-models pull` or `causeway-models add` installs other models.",
            where="--model",
        )
    artifact = find_artifact(wanted, model_dirs)
    model_options = msgspec.structs.replace(
        options,
        model_path=str(artifact.path.absolute()),
        refuse_token=artifact.manifest.refuse_token or "",
        adapters=adapter_files(artifact),
    )
    return ServedModel(name, model_options)
