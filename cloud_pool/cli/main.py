"""`causeway-cloud`: gateway (serve), triton, worker, stream, dlq, jobs, keys, usage, erase, plan, openapi."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from models.catalog.artifact import ArtifactError, find_artifact
from models.llama_cpp.gpus import probe_gpus
from models.llama_cpp.protocol import EngineOptions, adapter_files
from router.errors import ConfigError

from ..config.loader import Flags, load_config
from ..config.schema import DEFAULT_TIER
from ..observability.logs import log_crashes, start_log
from ..triton_server.environment import find_environment
from ..triton_server.launcher import Launcher
from ..triton_server.repository import ServedModel, write_repository
from ..triton_server.server_process import Ports, choose_ports, clear_orphans, command, memory_prefix
from .process import LogLevel, poll_grpc_in_one_thread, refuse, run_fast, until_stopped

ENVIRONMENT = Path(__file__).parents[2] / ".venv-triton"
_PORT = click.IntRange(0, 65535)
_PATH = click.Path(path_type=Path)


def _gpu_layers(ctx: click.Context, param: click.Parameter, value: Any) -> int | Literal["auto"]:
    """Read a number of layers from -1 on, or `auto`."""
    return "auto" if value == "auto" else click.IntRange(min=-1).convert(value, param, ctx)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("causeway"), prog_name="causeway-cloud")
def main() -> None:
    """The cloud side of Causeway: a gateway for OpenAI requests, and the Triton servers that answer them."""


@main.command()
@click.option("--config", "path", type=_PATH, help="YAML file; flags override it.")
@click.option("--host", help="Address to listen on; any other than loopback needs --token-file.")
@click.option("--port", type=_PORT, help="0: any free port; the ready line names it.")
@click.option("--token-file", type=_PATH, help="Bearer tokens: lines of `<device> <token>` or `<device> sha256:<hex>`.")
@click.option("--operator-port", type=_PORT, help="For metrics and operators; 0: any free port; default: --port + 100.")
@click.option("--triton", help="host:port of Triton's gRPC, used for every tier.")
@click.option(
    "--tier", "tiers", multiple=True, help="A tier, named like its artifact and its Triton model; repeatable."
)
@click.option(
    "--model-dir", "model_dirs", multiple=True, type=_PATH, help="Folder searched for artifacts first; repeatable."
)
@click.option("--redis", envvar="CAUSEWAY_REDIS", help="URL of the Redis that gateways and workers share.")
@click.option("--log", type=click.Choice(["debug", "info", "warning", "error"]))
def serve(
    path: Path | None,
    host: str | None,
    port: int | None,
    token_file: Path | None,
    operator_port: int | None,
    triton: str | None,
    tiers: tuple[str, ...],
    model_dirs: tuple[Path, ...],
    redis: str | None,
    log: LogLevel | None,
) -> None:
    """Serve OpenAI requests from Triton. Prints `ready url=… operator=…` on stdout. SIGHUP reads endpoints again."""
    poll_grpc_in_one_thread()
    from ..app import run  # on demand: gRPC and aiohttp take half a second to import

    flags = Flags(
        host=host,
        port=port,
        token_file=None if token_file is None else str(token_file.absolute()),
        operator_port=operator_port,
        triton=triton,
        tiers=tiers,
        model_dirs=tuple(str(folder.absolute()) for folder in model_dirs),
        redis=redis,
        log=log,
    )
    try:
        config = load_config(path, flags)
        start_log(config.log, config.log_format)
        log_crashes()
        until_stopped(lambda stop: run(config, stop, lambda: load_config(path, flags)), run_fast)
    except ConfigError as error:
        refuse(error.message)


@main.command()
def openapi() -> None:
    """Print the OpenAPI document of a gateway with jobs; each serves its own as /openapi.json."""
    from ..openapi import gateway_document

    click.echo(msgspec.json.format(msgspec.json.encode(gateway_document())))


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--grpc-port", type=_PORT, default=8001, show_default=True, help="0: any free port.")
@click.option("--http-port", type=_PORT, default=8000, show_default=True, help="0: any free port.")
@click.option("--metrics-port", type=_PORT, default=8002, show_default=True, help="0: any free port.")
@click.option(
    "--model",
    "models",
    multiple=True,
    default=(DEFAULT_TIER,),
    show_default=True,
    help="NAME, or NAME=ARTIFACT to serve an artifact under another name; repeatable.",
)
@click.option(
    "--model-dir", "model_dirs", multiple=True, type=_PATH, help="Folder searched for artifacts first; repeatable."
)
@click.option(
    "--environment",
    type=_PATH,
    default=ENVIRONMENT,
    envvar="CAUSEWAY_TRITON_ENV",
    help="Folder of Triton's Python environment.",
)
@click.option(
    "--sequences",
    type=click.IntRange(1, 256),
    default=16,
    show_default=True,
    help="Sequences that a model decodes together.",
)
@click.option(
    "--context-tokens", type=click.IntRange(min=0), default=0, help="Context of one sequence; 0: the model's."
)
@click.option(
    "--threads", type=click.IntRange(min=0), default=0, help="Threads of a model; 0: found by trying, as many as help."
)
@click.option(
    "--gpu-layers",
    callback=_gpu_layers,
    default="auto",
    show_default=True,
    help="Layers on the GPU; -1: all; auto: as fit.",
)
@click.option(
    "--drain-s",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="On SIGTERM, how long running requests may take.",
)
@click.option(
    "--trace-endpoint",
    default="",
    help="OpenTelemetry collector (OTLP over HTTP), as http://host:4318; empty: no traces.",
)
@click.option("--restart/--no-restart", default=True, help="Start the server again after a crash.", show_default=True)
def triton(
    host: str,
    grpc_port: int,
    http_port: int,
    metrics_port: int,
    models: tuple[str, ...],
    model_dirs: tuple[Path, ...],
    environment: Path,
    sequences: int,
    context_tokens: int,
    threads: int,
    gpu_layers: int | Literal["auto"],
    drain_s: float,
    trace_endpoint: str,
    restart: bool,
) -> None:
    """Keep a Triton server running. Prints `ready grpc=… http=… metrics=…` on stdout when its models are loaded."""
    try:
        triton_environment = find_environment(environment)
        options = EngineOptions(
            model_path="", sequences=sequences, context_tokens=context_tokens, threads=threads, gpu_layers=gpu_layers
        )
        served = tuple(_served(text, options, model_dirs) for text in models)
    except (ConfigError, ArtifactError) as error:
        refuse(str(error))
    ports = choose_ports(Ports(host, grpc_port, http_port, metrics_port))
    clear_orphans()
    prefix = memory_prefix(os.getpid())
    with tempfile.TemporaryDirectory(prefix="causeway-triton-") as folder:
        write_repository(Path(folder), served, has_gpu=gpu_layers != 0 and bool(probe_gpus().gpus))
        names = tuple(model.name for model in served)
        launcher = Launcher(
            command(
                triton_environment,
                Path(folder),
                names,
                ports,
                drain_s=drain_s,
                prefix=prefix,
                trace_endpoint=trace_endpoint,
            ),
            triton_environment.environ(os.environ),
            ports,
            memory_prefix=prefix,
            drain_s=drain_s,
            restart=restart,
            print_ready=lambda line: print(line, flush=True),
            log=lambda line: print(f"triton: {line}", file=sys.stderr, flush=True),
            expected_children=len(names),
        )
        status = until_stopped(launcher.run)
    sys.exit(status)


# These commands are imported on demand: their imports take half a second, which --help need not wait for.
_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@main.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def keys(arguments: tuple[str, ...]) -> None:
    """Manage device tokens (`keys new`, `issue`, `show`, `revoke`) and the keys that encrypt jobs (`rotate`)."""
    from .keys import keys as group

    group.main(list(arguments), prog_name="causeway-cloud keys")


@main.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Run jobs from Redis on the tiers."""
    from .jobs import worker as command

    command.main(list(arguments), prog_name="causeway-cloud worker")


@main.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def stream(arguments: tuple[str, ...]) -> None:
    """Answer the messages of a broker's topic on the tiers."""
    from .streams import stream as command

    command.main(list(arguments), prog_name="causeway-cloud stream")


@main.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def dlq(arguments: tuple[str, ...]) -> None:
    """List, retry or purge dead letters: jobs that have used up their attempts (`dlq list`, `retry`, `purge`)."""
    from .jobs import dlq as group

    group.main(list(arguments), prog_name="causeway-cloud dlq")


@main.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def jobs(arguments: tuple[str, ...]) -> None:
    """Name accepted jobs and batches that Redis has lost (`jobs reconcile`)."""
    from .jobs import jobs as group

    group.main(list(arguments), prog_name="causeway-cloud jobs")


@main.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def erase(arguments: tuple[str, ...]) -> None:
    """Erase what is stored of a tenant, a device or a user, with a signed receipt."""
    from .erase import erase as command

    command.main(list(arguments), prog_name="causeway-cloud erase")


@main.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(arguments: tuple[str, ...]) -> None:
    """Compute how many replicas a load needs, and what they cost."""
    from .plan import plan_command

    plan_command.main(list(arguments), prog_name="causeway-cloud plan")


@main.command(context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def usage(arguments: tuple[str, ...]) -> None:
    """Show a tenant's usage and cost on a day."""
    from .usage import usage_command

    usage_command.main(list(arguments), prog_name="causeway-cloud usage")


def _served(text: str, options: EngineOptions, model_dirs: tuple[Path, ...]) -> ServedModel:
    """Raises ArtifactError."""
    name, _, artifact_name = text.partition("=")
    artifact = find_artifact(artifact_name or name, model_dirs)
    model_options = msgspec.structs.replace(
        options,
        model_path=str(artifact.path.absolute()),
        refuse_token=artifact.manifest.refuse_token or "",
        adapters=adapter_files(artifact),
    )
    return ServedModel(name, model_options)
