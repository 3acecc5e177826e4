"""The commands of `causeway-edge`. Heavy modules are imported inside a command, so that usage errors appear at once."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from router.errors import ConfigError, PolicyError
from router.policy.file import seconds

from .. import daemon_version
from ..config.loader import config_variable, meanings_of
from ..config.schema import Config
from .fleet import fleet
from .jobs import jobs
from .options import (
    PATH,
    check_policy_or_exit,
    command_line,
    config_options,
    connect,
    load_config_or_exit,
    read_prompt,
    request_arguments,
    request_options,
    usage_error,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(daemon_version(), prog_name="causeway-edge")
def main() -> None:
    """Run and query the edge daemon, which answers on this box or hands off to the cloud."""


main.add_command(fleet)
main.add_command(jobs)


@main.command()
@config_options
def serve(config_path: Path | None, settings: tuple[str, ...], **flags: str | None) -> None:
    """Run the daemon. Prints `ready url=…` once it accepts requests; SIGTERM or Ctrl-C drains it."""
    config = load_config_or_exit(config_path, settings, flags)
    from .serve import run

    try:
        sys.exit(run(config))
    except ConfigError as error:
        usage_error(str(error))


@main.command()
@click.argument("text")
@request_options
@click.option("--no-stream", is_flag=True, help="Wait for the whole answer.")
def ask(text: str, url: str, api_key: str, as_json: bool, no_stream: bool, **flags: Any) -> None:
    """Send a prompt to the running daemon; TEXT `-` reads stdin.

    The answer goes to stdout, its route and reason to stderr. Exit codes: 0 answered, 1 rejected or failed, 2 usage
    error, 3 daemon unreachable, 4 timed out, 5 the connection broke during the answer, 130 Ctrl-C.
    """
    from rich.console import Console

    from .ask import ask as run_ask

    prompt = read_prompt(text)
    with connect(url, api_key) as causeway:
        output = {"stream": not no_stream, "as_json": as_json}
        console = Console(stderr=True)
        sys.exit(run_ask(causeway, prompt, request_arguments(flags), **output, out=sys.stdout, console=console))


@main.command()
@click.argument("text")
@request_options
@click.option("--policy", "policy_path", type=PATH, help="Try this policy file instead of asking the daemon.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SIGNAL=VALUE",
    help="With --policy: a signal, such as device.temperature_c=90, or down=TARGET; repeatable. Others are absent.",
)
def route(
    text: str,
    url: str,
    api_key: str,
    as_json: bool,
    policy_path: Path | None,
    settings: tuple[str, ...],
    **flags: Any,
) -> None:
    """Show how a prompt would be routed, and why, without running it; TEXT `-` reads stdin. Exit codes as for ask."""
    from rich.console import Console

    prompt, out, console = read_prompt(text), Console(), Console(stderr=True)
    if policy_path is not None:
        from .ask import request_settings, route_draft

        draft = (*request_settings(flags), *settings)
        sys.exit(route_draft(policy_path, prompt, draft, as_json=as_json, out=out, console=console))
    if settings:
        usage_error("--set needs --policy: the signals of a running daemon are its own")
    from .ask import route as run_route

    with connect(url, api_key) as causeway:
        sys.exit(run_route(causeway, prompt, request_arguments(flags), as_json=as_json, out=out, console=console))


@main.command()
@click.argument("sound", default="")
@request_options
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=120.0),
    default=5.0,
    show_default=True,
    help="Length of the recording, without SOUND.",
)
def listen(sound: str, url: str, api_key: str, as_json: bool, seconds: float, **flags: Any) -> None:
    """Send a spoken request to the running daemon: the file SOUND, stdin for `-`, else the microphone.

    The answer goes to stdout; its transcript, route and times to stderr. Exit codes as for ask.
    """
    from rich.console import Console

    from .ask import listen as run_listen
    from .ask import read_sound

    data = read_sound(sound, seconds)
    with connect(url, api_key) as causeway:
        console = Console(stderr=True)
        arguments = request_arguments(flags)
        sys.exit(run_listen(causeway, data, arguments, as_json=as_json, out=sys.stdout, console=console))


@main.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(config_path: Path | None, settings: tuple[str, ...], as_json: bool, **flags: str | None) -> None:
    """Check everything that the daemon needs and say how to fix it. Exit code 1 if a check fails."""
    config = load_config_or_exit(config_path, settings, flags)
    from .doctor.report import run

    sys.exit(run(config, as_json=as_json))


@main.command()
@config_options
@click.option("--keys", "only_keys", is_flag=True, help="List every key, its variable and its meaning.")
def config(config_path: Path | None, settings: tuple[str, ...], only_keys: bool, **flags: str | None) -> None:
    """Print the effective configuration as a file that --config accepts, or list every key. Secrets are hidden."""
    if only_keys:
        for key, meaning in meanings_of(Config).items():
            click.echo(f"{key:31} {config_variable(key):43} {meaning}")
        return
    loaded = load_config_or_exit(config_path, settings, flags)
    import yaml

    document = msgspec.to_builtins(_without_secret(loaded))
    click.echo(yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120), nl=False)


def _without_secret(config: Config) -> Config:
    hidden = "(set)" if config.cloud.api_key and not config.cloud.api_key_file else ""
    return msgspec.structs.replace(config, cloud=msgspec.structs.replace(config.cloud, api_key=hidden))


@main.command()
def openapi() -> None:
    """Print the OpenAPI document of the daemon, which it serves as /openapi.json."""
    from ..openapi import edge_document

    click.echo(msgspec.json.format(msgspec.json.encode(edge_document())))


@main.group()
def decisions() -> None:
    """Decision records of past requests, without their content."""


@decisions.command()
@config_options
@click.option("--since", default="", metavar="DURATION", help="Only records of the last, for example, 24h or 7d.")
def export(config_path: Path | None, settings: tuple[str, ...], since: str, **flags: str | None) -> None:
    """Print the records on disk as JSON lines, oldest first, for `causeway-fleet replay`. The daemon may be running.

    Exit code: 0 printed, 1 the records cannot be read, 2 usage error.
    """
    config = load_config_or_exit(config_path, settings, flags)
    from ..storage.decisions import read_stored

    try:
        oldest = time.time() - (seconds(since) or 0.0) if since else 0.0
    except ValueError:
        usage_error(f"--since must be a duration such as 30m, 24h or 7d, not {since[:32]!r}")
    try:
        stored = read_stored(Path(config.state_dir), since=oldest)
        sys.stdout.buffer.writelines(msgspec.json.encode(record) + b"\n" for record in stored.records)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        sys.exit(1)
    except FileNotFoundError as error:
        advice = "give the daemon's own --config or --state-dir"
        click.echo(f"causeway-edge: no decision records at {error.filename}: {advice}", err=True)
        sys.exit(1)
    except OSError as error:
        click.echo(f"causeway-edge: the decision records cannot be read: {error}", err=True)
        sys.exit(1)
    if unreadable := stored.unreadable():
        click.echo(f"causeway-edge: {unreadable} records of another version were left out", err=True)


@main.command()
@config_options
@click.option("--small", metavar="MODEL", help="Model for the device; the policy is written for it.")
@click.option("--large", metavar="MODEL", help="Model for the cloud, served by Triton; the policy is written for it.")
@click.option("--no-cloud", is_flag=True, help="Start the daemon alone: no Triton, no gateway.")
@click.option("--once", is_flag=True, help="Ask the demo questions, print the table, and stop.")
@click.option("--run-dir", type=PATH, help="Folder of logs and state.")
def up(
    config_path: Path | None,
    settings: tuple[str, ...],
    small: str | None,
    large: str | None,
    no_cloud: bool,
    once: bool,
    run_dir: Path | None,
    **flags: str | None,
) -> None:
    """Start Triton, the gateway and the daemon on this machine, ask demo questions, then serve until Ctrl-C.

    Triton serves every cloud model that the policy names, from this machine's models. With --small or --large the
    policy is written for that pair.
    """
    if flags["policy"] is not None and (small is not None or large is not None):
        usage_error("--policy names its models itself: leave out --small and --large")
    config = load_config_or_exit(config_path, settings, flags)
    check_policy_or_exit(config)
    from models.catalog.artifact import ArtifactError

    from .up.models import choose_models
    from .up.session import UpOptions, default_runs_dir, find_programs, run

    try:
        models = choose_models(config, small, large, with_cloud=not no_cloud)
    except (ArtifactError, PolicyError) as error:
        usage_error(str(error))
    serve_flags = tuple(command_line(config_path, settings, flags))
    runs_dir = run_dir or default_runs_dir(config)
    sys.exit(run(UpOptions(config, serve_flags, runs_dir, find_programs(), models, cloud=not no_cloud, once=once)))
