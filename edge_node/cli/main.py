"""`causeway-edge`: serve (the daemon), ask and route (one question to it), doctor, config, up (everything at once)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

import click

from router.errors import ConfigError

from ..config.schema import Config, load_config
from ..sdk.client import Asked, Prefer

F = TypeVar("F", bound=Callable[..., Any])
_PATH = click.Path(path_type=Path)
_DEFAULT_CONFIG = "CAUSEWAY_CONFIG"


def _version() -> str:
    try:
        return version("causeway")
    except PackageNotFoundError:
        return "from a source tree"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="causeway-edge")
def main() -> None:
    """The edge node of Causeway: answers on this box, or hands off to the cloud, and says why."""


# --- configuration ---------------------------------------------------------------------------------------------------


def _config_options(command: F) -> F:
    """The flags that every command has which needs the configuration."""
    options = [
        click.option("--config", "config_path", type=_PATH, envvar=_DEFAULT_CONFIG, help="YAML file."),
        click.option("--host", help="Address to listen on. [server.host]"),
        click.option("--port", help="0: any free one. [server.port]"),
        click.option("--socket", help="A Unix socket as well. [server.socket]"),
        click.option("--policy", help="Policy file. [policy]"),
        click.option("--state-dir", help="Folder of cache and decisions. [state_dir]"),
        click.option("--cloud-url", help="An OpenAI-compatible server, usually ending in /v1. [cloud.url]"),
        click.option("--cloud-key-file", help="File with its bearer token. [cloud.api_key_file]"),
        click.option("--log", help="debug, info, warning or error. [log]"),
        click.option("--log-format", help="text or json. [log_format]"),
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any key of the configuration."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


_FLAGS = {
    "host": "server.host",
    "port": "server.port",
    "socket": "server.socket",
    "policy": "policy",
    "state_dir": "state_dir",
    "cloud_url": "cloud.url",
    "cloud_key_file": "cloud.api_key_file",
    "log": "log",
    "log_format": "log_format",
}


def _load(config_path: Path | None, settings: tuple[str, ...], given: Mapping[str, str | None]) -> Config:
    """The configuration, or a message and exit code 2."""
    flags: dict[str, object] = {}
    for setting in settings:
        key, found, value = setting.partition("=")
        if not found:
            _refuse(f"--set {setting}: write KEY=VALUE")
        flags[key.strip()] = value
    flags |= {_FLAGS[name]: value for name, value in given.items() if value is not None}
    try:
        return load_config(config_path, os.environ, flags)
    except ConfigError as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    click.echo(f"causeway-edge: {message}", err=True)
    sys.exit(2)


# --- commands --------------------------------------------------------------------------------------------------------


@main.command()
@_config_options
def serve(config_path: Path | None, settings: tuple[str, ...], **given: str | None) -> None:
    """Run the daemon. Prints `ready url=…` when it takes requests; SIGTERM or Ctrl-C drains it."""
    config = _load(config_path, settings, given)
    from .serve import run  # takes what a command line that is wrong need not wait for

    try:
        sys.exit(run(config))
    except ConfigError as error:
        _refuse(str(error))


def _ask_options(command: F) -> F:
    options = [
        click.argument("text"),
        click.option(
            "--model", default="auto", show_default=True, help="auto: the policy decides; or a target's name."
        ),
        click.option("--prefer", type=click.Choice(get_args(Prefer)), help="Narrows the policy, never widens it."),
        click.option("--tag", "tags", multiple=True, help="For the policy's rules, such as `private`; repeatable."),
        click.option("--temperature", type=float, default=0.0, show_default=True),
        click.option("--max-tokens", type=click.IntRange(min=1)),
        click.option("--deadline", "deadline_s", type=click.FloatRange(min=0, min_open=True), help="Seconds."),
        click.option("--url", default="", help="The daemon; unix:///path for its socket. [$CAUSEWAY_URL]"),
        click.option("--api-key", default="", help="Where the daemon asks for one. [$CAUSEWAY_API_KEY]"),
        click.option("--json", "as_json", is_flag=True, help="For machines."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _asked(given: Mapping[str, Any]) -> Asked:
    asked = Asked(model=given["model"], prefer=given["prefer"], tags=given["tags"], temperature=given["temperature"])
    if given["max_tokens"] is not None:
        asked["max_tokens"] = given["max_tokens"]
    if given["deadline_s"] is not None:
        asked["deadline_s"] = given["deadline_s"]
    return asked


def _read(text: str) -> str:
    """The question; `-` reads it from stdin."""
    text = sys.stdin.read() if text == "-" else text
    if not text.strip():
        _refuse("there is no question")
    return text


@main.command()
@_ask_options
@click.option("--no-stream", is_flag=True, help="Wait for the whole answer.")
def ask(text: str, url: str, api_key: str, as_json: bool, no_stream: bool, **given: Any) -> None:
    """Ask the daemon that runs; TEXT `-` reads stdin.

    The answer goes to stdout, where it came from and why to stderr. Exit codes: 0 answered, 1 refused or failed,
    2 wrong command line, 3 no daemon there, 4 too late, 5 the connection broke in mid-answer.
    """
    from rich.console import Console

    from ..sdk.client import Causeway
    from .ask import ask as run_ask

    question = _read(text)
    with Causeway(url, api_key=api_key) as causeway:
        how = {"stream": not no_stream, "as_json": as_json}
        sys.exit(run_ask(causeway, question, _asked(given), **how, out=sys.stdout, console=Console(stderr=True)))


@main.command()
@_ask_options
def route(text: str, url: str, api_key: str, as_json: bool, **given: Any) -> None:
    """What would happen to this question, and why, without running it; TEXT `-` reads stdin. Exit codes as for ask."""
    from rich.console import Console

    from ..sdk.client import Causeway
    from .ask import route as run_route

    question = _read(text)
    with Causeway(url, api_key=api_key) as causeway:
        console = Console(stderr=True)
        sys.exit(run_route(causeway, question, _asked(given), as_json=as_json, out=Console(), console=console))


@main.command()
@_config_options
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def doctor(config_path: Path | None, settings: tuple[str, ...], as_json: bool, **given: str | None) -> None:
    """Look at everything the daemon needs and say what to do. Exit code 1 when something must be done."""
    config = _load(config_path, settings, given)
    from .doctor.report import run

    sys.exit(run(config, as_json=as_json))


@main.command()
@_config_options
@click.option("--keys", "only_keys", is_flag=True, help="What keys there are, not their values.")
def config(config_path: Path | None, settings: tuple[str, ...], only_keys: bool, **given: str | None) -> None:
    """The configuration as it would be in force, or every key, its variable and what it is for."""
    from .show_config import print_config, print_keys

    if only_keys:
        print_keys()
    else:
        print_config(_load(config_path, settings, given))


@main.command()
@_config_options
@click.option("--no-cloud", is_flag=True, help="The edge alone: no Triton, no gateway.")
@click.option("--once", is_flag=True, help="Ask the questions, print the table, and stop.")
@click.option("--run-dir", type=_PATH, help="Where logs and state go.")
def up(
    config_path: Path | None,
    settings: tuple[str, ...],
    no_cloud: bool,
    once: bool,
    run_dir: Path | None,
    **given: str | None,
) -> None:
    """Start Triton, the gateway and the edge on this machine, ask a few questions, then serve until Ctrl-C."""
    config = _load(config_path, settings, given)
    from .up import UpOptions, find_programs, run

    flags = [
        part for name, value in given.items() if value is not None for part in (f"--{name.replace('_', '-')}", value)
    ]
    flags += [part for setting in settings for part in ("--set", setting)]
    flags += ["--config", str(config_path)] if config_path else []
    sys.exit(run(UpOptions(config, tuple(flags), run_dir or _runs(config), find_programs(), not no_cloud, once)))


def _runs(config: Config) -> Path:
    """In a checkout `.run`, which git ignores; elsewhere in the state folder."""
    checkout = Path(__file__).parents[2]
    return checkout / ".run" if (checkout / "Makefile").is_file() else Path(config.state_dir) / "run"
