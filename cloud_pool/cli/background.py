"""What `causeway-cloud worker` and `causeway-cloud stream` share: options, configuration and log."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import click

from router.errors import ConfigError
from router.serving.logs import log_crashes, start_log

from ..config.loader import Flags, load_config
from ..config.schema import Config
from .process import LogLevel, keep_files_private, refuse

_PATH = click.Path(path_type=Path)
_OPTIONS = (
    click.option("--config", "path", type=_PATH, help="The gateways' YAML file; flags win over it."),
    click.option("--redis", envvar="CAUSEWAY_REDIS", help="URL of the Redis that gateways and workers share."),
    click.option("--triton", help="host:port of Triton's gRPC, for every tier."),
    click.option("--tier", "tiers", multiple=True, help="A tier to work for; repeatable."),
    click.option(
        "--model-dir", "model_dirs", multiple=True, type=_PATH, help="Searched for artifacts first; repeatable."
    ),
    click.option(
        "--operator-port",
        type=click.IntRange(0, 65535),
        help="Serve metrics and operators on this port of operator.host; 0: any free one; without it: not at all.",
    ),
    click.option("--log", type=click.Choice(["debug", "info", "warning", "error"]), help="Log level."),
)


class BackgroundProcess(NamedTuple):
    """What such a command starts with. `reread` reads the configuration again."""

    config: Config
    reread: Callable[[], Config]
    serves_operators: bool


def background_command(command: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options to a command, which gets a BackgroundProcess first. Its ConfigError ends the process."""

    @wraps(command)
    def start(
        *,
        path: Path | None,
        redis: str | None,
        triton: str | None,
        tiers: tuple[str, ...],
        model_dirs: tuple[Path, ...],
        operator_port: int | None,
        log: LogLevel | None,
        **own: Any,
    ) -> None:
        flags = Flags(
            redis=redis,
            operator_port=operator_port,
            triton=triton,
            tiers=tiers,
            model_dirs=tuple(str(folder.absolute()) for folder in model_dirs),
            log=log,
        )
        keep_files_private()
        try:
            config = load_config(path, flags)
            start_log(config.log, config.log_format)
            log_crashes()
            command(BackgroundProcess(config, lambda: load_config(path, flags), operator_port is not None), **own)
        except ConfigError as error:
            refuse(error.message)

    for option in reversed(_OPTIONS):
        start = option(start)
    return start
