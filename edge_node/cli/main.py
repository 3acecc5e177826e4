"""The commands of `causeway-edge`. They import large modules late, so that usage errors come at once."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from pathlib import Path

import click
import msgspec

from causeway_server.router.config import default_text, keys_of, schema_of
from causeway_server.router.errors import ConfigError, PolicyError
from causeway_server.router.policy.file import seconds
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.serving.process import ProgramGroup, begin_imports, format_option, option

from ..config.loader import config_variable
from ..config.schema import Config
from .options import CONFIG_VARIABLE, PATH, command_line, config_options, usage_error

_CLIENTS = {"ask": "ask", "route": "ask", "listen": "ask", **{name: name for name in ("erase", "fleet", "jobs", "mcp")}}
"""The commands that talk to a running daemon, and their modules."""


class _Commands(ProgramGroup):
    """Imports the client commands on demand: the daemon needs neither the SDK nor its HTTP client."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_CLIENTS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _CLIENTS:
            command: click.Command = getattr(import_module(f".{_CLIENTS[cmd_name]}", __package__), cmd_name)
            return command
        return super().get_command(ctx, cmd_name)


@click.group("causeway-edge", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="causeway-router", prog_name="causeway-edge")
def main() -> None:
    """Run and query the edge daemon, which answers on this device or hands off to the cloud."""


@main.command()
@config_options
def serve(config: Config) -> None:
    """Run the daemon until SIGTERM or Ctrl-C. The daemon then finishes the requests in progress and stops.

    Prints `ready url=…` once it accepts requests.
    """
    begin_imports()
    from .serve import run

    try:
        sys.exit(run(config))
    except ConfigError as error:
        usage_error(str(error))


@main.command()
@config_options
@format_option
@option(
    "--drop-refits",
    "Before the checks, drop the corrections that the device itself made to calibrated signals "
    "(refits). A running daemon drops the refits at SIGHUP.",
    is_flag=True,
)
def doctor(config: Config, as_json: bool, drop_refits: bool) -> None:
    """Check everything that the daemon needs, and say how to correct each fault.

    Exit code 1 if a check fails.
    """
    from causeway_server.models.signals.calibration import REFITS_FILE

    from .doctor.report import run

    if drop_refits:
        try:
            (Path(config.state_dir) / REFITS_FILE).unlink(missing_ok=True)
        except OSError as error:
            usage_error(f"{error.filename}: {error.strerror}. Delete it yourself, or run this as the daemon's user.")
    sys.exit(run(config, as_json=as_json))


def _list_keys(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        for name, key in keys_of(Config).items():
            variable = "" if "[]" in name else config_variable(name)
            click.echo(f"{name:31} {variable:43} {default_text(name, key):14} {key.description}")
        context.exit()


def _print_schema(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(schema_of(Config, "Causeway edge daemon"), nl=False)
        context.exit()


@main.command("config")
@config_options
@option(
    "--keys",
    "List all configuration keys with their environment variables, defaults and meanings.",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_keys,
)
@option(
    "--schema",
    "Print the JSON schema of the configuration file, which editors can use.",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
)
def print_config(config: Config) -> None:
    """Print the configuration that the daemon would use, or list all configuration keys.

    The output is a file that --config accepts. Secrets are hidden.
    """
    import yaml

    document = msgspec.to_builtins(_without_secret(config))
    click.echo(yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120), nl=False)


def _without_secret(config: Config) -> Config:
    hidden = {
        name: msgspec.structs.replace(cloud, key="(set)" if cloud.key and not cloud.key_file else "")
        for name, cloud in config.clouds.items()
    }
    return msgspec.structs.replace(config, clouds=hidden)


@main.command()
@click.argument("file", type=PATH, envvar=CONFIG_VARIABLE)
def migrate(file: Path) -> None:
    """In the configuration file FILE, change the key names of the previous version to the present names.

    Its policy and the folders of pulled models are rewritten, too. FILE is by default $CAUSEWAY_CONFIG. Layout and
    comments are kept, and each original is saved as FILE.before.
    """
    from .migrate import run

    try:
        for line in run(file):
            click.echo(line)
    except ConfigError as error:
        usage_error(str(error))


@main.command()
def openapi() -> None:
    """Print the daemon's OpenAPI document.

    The daemon serves it as /openapi.json.
    """
    from ..openapi import edge_document

    click.echo(msgspec.json.format(msgspec.json.encode(edge_document())))


@main.group()
def decisions() -> None:
    """Export the decision records of past requests, without their content."""


@decisions.command()
@config_options
@option(
    "--since", "Print only the records of this most recent period, such as 24h or 7d.", default="", metavar="DURATION"
)
def export(config: Config, since: str) -> None:
    """Print the decision records on disk as JSON lines, oldest first.

    `causeway-fleet replay` reads them. The daemon may be running. Exit code: 0 printed, 1 the records cannot be read, 2
    usage error.
    """
    from ..storage.decisions import read_stored

    try:
        oldest = time.time() - (seconds(since) or 0.0) if since else 0.0
    except ValueError:
        usage_error(f"--since must be a duration such as 30m, 24h or 7d, not {since[:32]!r}.")
    try:
        folder = Path(config.state_dir)
        stored = read_stored(folder, since=oldest, keys=StateKeys(folder, config.encryption.key_file))
        sys.stdout.buffer.writelines(msgspec.json.encode(record) + b"\n" for record in stored.records)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        sys.exit(1)
    except FileNotFoundError as error:
        advice = "give the daemon's own --config or --state-dir"
        click.echo(f"causeway-edge: there are no decision records at {error.filename}: {advice}", err=True)
        sys.exit(1)
    except (ConfigError, OSError) as error:
        click.echo(f"causeway-edge: the decision records cannot be read: {error}", err=True)
        sys.exit(1)
    if unreadable := stored.unreadable():
        click.echo(f"causeway-edge: {unreadable} records of another version were left out", err=True)


@main.command("rotate-key")
@config_options
@option(
    "--new-key-file",
    "File with an additional key that can then open the state folder, too. If the file is missing, the "
    "command makes it with a new key.",
    PATH,
)
def rotate_key(config: Config, new_key_file: Path | None) -> None:
    """Replace the key with which the state folder is encrypted.

    The daemon may be running: within a minute it encrypts new content with the new key, and older content again in the
    background. With --new-key-file, set encryption.key_file to that file before the next start.
    """
    from ..agent.link.identity import as_owner

    with as_owner(Path(config.state_dir)) as folder:
        keys = StateKeys(folder, config.encryption.key_file)
        try:
            keys.check()
            if not keys.made:
                usage_error(f"{config.state_dir} holds no encrypted content yet.")
            keys.rotate()
            if new_key_file is not None:
                keys.change_owner(new_key_file)
        except (ConfigError, OSError) as error:
            click.echo(f"causeway-edge: {error}", err=True)
            sys.exit(1)
    click.echo(f"{config.state_dir} has a new key, and the content under older keys was encrypted again.")


@main.command()
@config_options
@option("--small", "Name of the model for the device. The command writes a policy for this model.", metavar="MODEL")
@option(
    "--large",
    "Name of the model for the cloud, which Triton serves. The command writes a policy for this model.",
    metavar="MODEL",
)
@option("--vllm", "Start vLLM instead of Triton. FILE describes the vLLM server.", PATH, metavar="FILE")
@option("--no-cloud", "Start only the daemon. Triton and the gateway are not started.", is_flag=True)
@option("--once", "Send the questions of the demonstration, print the table of answers, and stop.", is_flag=True)
@option("--run-dir", "Folder for the logs and the state of the started programs.", PATH)
def up(
    config: Config,
    small: str | None,
    large: str | None,
    vllm: Path | None,
    no_cloud: bool,
    once: bool,
    run_dir: Path | None,
) -> None:
    """Start Triton, the gateway and the daemon together on this machine.

    Then ask demo questions, and serve until Ctrl-C. Triton serves every cloud model that the policy names, from this
    machine's models. With --small or --large the policy is written for that pair; with --vllm the large model is
    vLLM's.
    """
    flags = click.get_current_context().params
    if flags["policy"] is not None and (small or large or vllm):
        usage_error("--policy already names the models: omit --small, --large and --vllm.")
    if vllm is not None and (large is not None or no_cloud):
        usage_error("--vllm is the cloud and names its model: omit --large and --no-cloud.")
    from causeway_server.models.catalog.artifact import ArtifactError

    from .up.models import choose_models, read_vllm
    from .up.session import UpOptions, default_runs_dir, find_programs, free_port, run

    try:
        server = None if vllm is None else read_vllm(vllm, free_port())
        models = choose_models(config, small, large, with_cloud=not no_cloud, vllm=server)
    except (ArtifactError, PolicyError, OSError) as error:
        usage_error(str(error))
    runs_dir = run_dir or default_runs_dir(config)
    sys.exit(
        run(UpOptions(config, command_line(flags), runs_dir, find_programs(), models, cloud=not no_cloud, once=once))
    )
