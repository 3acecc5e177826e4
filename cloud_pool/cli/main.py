"""`causeway-cloud`: gateway (serve), triton, doctor, worker, stream, dlq, jobs, keys, usage, erase, plan, openapi."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import msgspec

from router.errors import ConfigError
from router.serving.commands import run_fast
from router.serving.logs import log_crashes, start_log

from ..config import Flags, load_config
from .process import LogLevel, keep_files_private, poll_grpc_in_one_thread, refuse, until_stopped
from .triton import triton

_PORT = click.IntRange(0, 65535)
_PATH = click.Path(path_type=Path)
_ON_DEMAND = {
    "keys": (
        *(".keys", "keys"),
        "Manage device tokens (`keys new`, `issue`, `show`, `revoke`) and the keys that encrypt jobs (`rotate`).",
    ),
    "worker": (".background", "worker", "Run jobs from Redis on the tiers."),
    "stream": (".background", "stream", "Answer the messages of a broker's topic on the tiers."),
    "doctor": (".doctor", "doctor", "Check Redis, the store of jobs and the collector of traces."),
    "dlq": (
        *(".jobs", "dlq"),
        "List, retry or purge dead letters: jobs that have used up their attempts (`dlq list`, `retry`, `purge`).",
    ),
    "jobs": (".jobs", "jobs", "Name accepted jobs and batches that Redis has lost (`jobs reconcile`)."),
    "erase": (".erase", "erase", "Erase what is stored of a tenant, a device or a user, with a signed receipt."),
    "plan": (".plan", "plan_command", "Compute how many replicas a load needs, and what they cost."),
    "usage": (".usage", "usage_command", "Show a tenant's usage and cost on a day."),
}
"""Commands whose imports take half a second, which --help need not wait for: module, command and help."""


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
    keep_files_private()
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


def _on_demand(name: str, module: str, attribute: str, help_text: str) -> click.Command:
    """Return a command that imports the real one when it is called, and gives it all of its arguments."""

    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def run(arguments: tuple[str, ...]) -> None:
        command = getattr(import_module(module, __package__), attribute)
        command.main(list(arguments), prog_name=f"causeway-cloud {name}")

    settings: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return click.command(name, help=help_text, context_settings=settings)(run)


main.add_command(triton)
for _name, _command in _ON_DEMAND.items():
    main.add_command(_on_demand(_name, *_command))
