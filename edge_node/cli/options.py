"""Flags that several commands share, and their conversion to a `Config` or to the arguments of a request."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, get_args

import click

from causeway_server.router.config import keys_of
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.process import format_option, option, refuse
from causeway_server.router.types import Prefer

from ..config.loader import load_config, schema_key
from ..config.schema import Config

if TYPE_CHECKING:
    from causeway_sdk import Causeway, RequestOptions

F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
CONFIG_VARIABLE = "CAUSEWAY_CONFIG"
_CONFIG_FLAGS = {
    "host": "server.host",
    "port": "server.port",
    "socket": "server.socket",
    "policy": "policy",
    "state_dir": "state_dir",
    "cloud_url": "clouds.main.url",
    "cloud_key_file": "clouds.main.key_file",
    "log": "log",
    "log_format": "log_format",
}
"""The configuration key that each flag sets."""


class _KeyOption(click.Option):
    """A flag that sets the configuration key named in `help`. The key's description is read only for `--help`."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record, key = super().get_help_record(ctx), self.help or ""
        return record and (record[0], f"{keys_of(Config)[schema_key(key)].description} [{key}]")


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags of every command that loads the configuration, which it gets as `config`. For an error in it the
    process prints the error and exits with status 2.
    """

    @wraps(command)
    def run(*, config_path: Path | None, settings: tuple[str, ...], **rest: Any) -> None:
        by_key: dict[str, object] = {}
        for setting in settings:
            key, separator, value = setting.partition("=")
            if not separator:
                usage_error(f"--set {setting}: Write KEY=VALUE.")
            by_key[key.strip()] = value
        flags = {key: rest.pop(name) for name, key in _CONFIG_FLAGS.items()}
        by_key |= {key: value for key, value in flags.items() if value is not None}
        try:
            config = load_config(config_path, os.environ, by_key)
        except ConfigError as error:
            usage_error(str(error))
        command(config=config, **rest)

    options = [
        option(
            "--config",
            f"Configuration file in YAML. [${CONFIG_VARIABLE}]",
            PATH,
            to="config_path",
            envvar=CONFIG_VARIABLE,
        ),
        *(click.option(f"--{name.replace('_', '-')}", cls=_KeyOption, help=key) for name, key in _CONFIG_FLAGS.items()),
        option("--set", "Set the configuration key KEY to VALUE.", to="settings", multiple=True, metavar="KEY=VALUE"),
    ]
    return _with_options(run, options)


def command_line(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parsed flags of `config_options` as arguments for another `causeway-edge` command."""
    pairs = [(f"--{name.replace('_', '-')}", flags[name]) for name in _CONFIG_FLAGS]
    pairs += [("--set", setting) for setting in flags["settings"]] + [("--config", flags["config_path"])]
    return tuple(part for name, value in pairs if value is not None for part in (name, str(value)))


def request_options(command: F) -> F:
    """Add the flags of the commands that send one request to a running daemon."""
    options = [
        option("--model", "Name of the target that must answer, or `auto`: the policy decides.", default="auto"),
        option(
            "--prefer",
            "Routing preference. The preference can only narrow the policy's choice of targets, never widen it.",
            click.Choice(get_args(Prefer)),
        ),
        option(
            "--tag",
            "Tag of the request, such as `private`, which the policy's rules can test. May be repeated.",
            to="tags",
            multiple=True,
        ),
        option("--temperature", "Sampling temperature. Default: the temperature of the target.", float),
        option("--max-tokens", "Maximum number of tokens in the answer.", click.IntRange(min=1)),
        option(
            "--deadline-s",
            "Time, in seconds, after which the request is given up.",
            click.FloatRange(min=0, min_open=True),
        ),
    ]
    return _with_options(daemon_options(command), options)


def daemon_options(command: F) -> F:
    """Add the flags of commands that talk to a running daemon: those of `connect`, and `--format`."""
    options = [
        option("--url", "URL of the daemon, or unix:///path for a Unix socket. [$CAUSEWAY_URL]", default=""),
        option("--api-key", "API key. Needed only if the daemon requires API keys. [$CAUSEWAY_API_KEY]", default=""),
        format_option,
    ]
    return _with_options(command, options)


def request_arguments(flags: Mapping[str, Any]) -> RequestOptions:
    """Return the SDK's arguments for the `request_options` flags that are set."""
    return cast("RequestOptions", {name: value for name, value in flags.items() if value is not None})


def connect(url: str, api_key: str) -> Causeway:
    """Return a client of the running daemon. Exits with status 2 if the URL or the key is malformed."""
    from causeway_sdk import Causeway, CausewayError  # the daemon has these flags, too, and does not need the SDK

    try:
        return Causeway(url, api_key=api_key)
    except CausewayError as error:
        usage_error(str(error))


def read_prompt(text: str, what: str = "prompt") -> str:
    """Return the prompt, or the text named by `what`; `-` is stdin. Exits with 2 if it is blank, or not UTF-8."""
    try:
        text = sys.stdin.read() if text == "-" else text
        text.encode()  # Python passes bytes that are not UTF-8 as lone surrogates
    except UnicodeError:
        usage_error(f"The {what} is not UTF-8 text.")
    if not text.strip():
        usage_error(f"The {what} is empty.")
    return text


def usage_error(message: str) -> NoReturn:
    """Print the message and exit with status 2."""
    refuse("causeway-edge", message)


def _with_options(command: F, options: Sequence[Callable[[F], F]]) -> F:
    for add in reversed(options):
        command = add(command)
    return command
