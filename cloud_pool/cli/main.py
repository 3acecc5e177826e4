"""The program `causeway-cloud`, with the commands serve, triton, doctor, worker, stream, dlq, jobs, keys, usage, erase,
load, config and openapi.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import msgspec

from causeway_server.router.config import default_text, keys_of, schema_of
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.process import ProgramGroup, begin_imports, migrate_file, option, refuse, run_fast

from ..config import Config
from .process import PATH, ConfiguredProcess, configured_command, until_stopped
from .triton import triton

_PORT = click.IntRange(0, 65535)
ON_DEMAND = {
    "keys": (
        *(".keys", "keys"),
        "Manage device tokens and the keys that encrypt jobs. Commands: new, issue, rotate, revoke, show.",
    ),
    "worker": (".background", "worker", "Run jobs from Redis on the tiers."),
    "stream": (".background", "stream", "Answer messages from a topic of a broker with the models of the tiers."),
    "doctor": (".doctor", "doctor", "Check Redis, the store of jobs and the collector of traces."),
    "dlq": (
        *(".jobs", "dlq"),
        "Manage dead letters, the jobs that have used up their attempts. Commands: list, retry, purge.",
    ),
    "jobs": (".jobs", "jobs", "List accepted jobs and batches that Redis has lost. Command: reconcile."),
    "erase": (".erase", "erase", "Erase all data of a tenant, device or user. Prints a signed receipt."),
    "load": (".load", "load_command", "Send a load to a server, and print what its clients measured."),
    "usage": (".usage", "usage_command", "Show a tenant's usage and cost on a day."),
}
"""Commands imported on demand, as slow imports (half a second) would delay `--help`: module, command, help."""


@click.group("causeway-cloud", cls=ProgramGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("causeway-router"), prog_name="causeway-cloud")
def main() -> None:
    """The cloud side of Causeway: a gateway for OpenAI requests, and the Triton servers that answer them."""


@main.command()
@option("--host", "Address on which the gateway listens. Any address except loopback needs --token-file.")
@option("--port", "Port on which the gateway listens; 0: any free port, which the `ready` line names.", _PORT)
@option("--token-file", "File of bearer tokens. Each line is `<device> <token>` or `<device> sha256:<hex>`.", PATH)
@option(
    "--operator-port", "Port of the metrics and the operators' API; 0: any free port; default: --port + 100.", _PORT
)
@configured_command
def serve(process: ConfiguredProcess) -> None:
    """Run a gateway, which answers OpenAI requests with Triton's models. SIGHUP makes it read its endpoints again.

    When it is ready, it prints `ready url=… operator=…` on stdout.
    """
    begin_imports()
    from ..app import run  # on demand: its imports take half a second

    until_stopped(lambda stop: run(process.config, stop, process.reread), run_fast)


@main.command("config")
@option("--schema", "Print the JSON schema of the configuration file, which editors can use.", is_flag=True)
def list_config_keys(*, schema: bool) -> None:
    """List all keys of the configuration file with their defaults and meanings."""
    if schema:
        click.echo(schema_of(Config, "Causeway gateway"), nl=False)
        return
    for name, key in keys_of(Config).items():
        click.echo(f"{name:42} {default_text(name, key):22} {key.description}")


@main.command()
@click.argument("file", type=PATH)
def migrate(file: Path) -> None:
    """In the configuration file FILE, change the names of the previous version to the present names.

    Layout and comments are kept, and the original is saved as FILE.before.
    """
    try:
        for line in migrate_file(file, "gateway.yaml").report(str(file)):
            click.echo(line)
    except ConfigError as error:
        refuse("causeway-cloud", str(error))


@main.command()
def openapi() -> None:
    """Print the OpenAPI document of a gateway that accepts jobs. A running gateway serves its own OpenAPI document at
    /openapi.json.
    """
    from ..openapi import gateway_document

    click.echo(msgspec.json.format(msgspec.json.encode(gateway_document())))


def _on_demand(name: str, module: str, attribute: str, help_text: str) -> click.Command:
    """Return a command that imports the real command when it is called, and passes on all arguments."""

    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def run(arguments: tuple[str, ...]) -> None:
        command = getattr(import_module(module, __package__), attribute)
        status = command.main(list(arguments), prog_name=f"causeway-cloud {name}", standalone_mode=False)
        raise SystemExit(status if isinstance(status, int) else 0)

    settings: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return click.command(name, help=help_text, context_settings=settings)(run)


main.add_command(triton)
for _name, _command in ON_DEMAND.items():
    main.add_command(_on_demand(_name, *_command))
