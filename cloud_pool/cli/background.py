"""`causeway-cloud worker` and `causeway-cloud stream`, which share options, configuration and log."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from router.errors import ConfigError
from router.serving.commands import run_fast
from router.serving.logs import log_crashes, start_log

from ..brokers.address import parse_range, parse_topic
from ..config import Config, Flags, load_config
from ..core.principal import ClaimName
from .process import LogLevel, keep_files_private, poll_grpc_in_one_thread, refuse, until_stopped

if TYPE_CHECKING:
    from ..streams.config import StreamTopics

_PATH = click.Path(path_type=Path)
_HELP = {"help_option_names": ["-h", "--help"]}
_DEAD = ".dead"
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


@click.command(context_settings=_HELP)
@background_command
def worker(process: BackgroundProcess) -> None:
    """Run jobs from Redis on the tiers. Prints `ready worker=…` on stdout; SIGTERM drains."""
    from ..app import run_worker

    config, reread, serves_operators = process
    until_stopped(lambda stop: run_worker(config, stop, reread, serves_operators=serves_operators))


@click.command(context_settings=_HELP)
@click.option(
    "--in",
    "source",
    required=True,
    help="Topic of messages: nats://host:4222/SUBJECT (wildcards allowed) or kafka://host:9092/TOPIC.",
)
@click.option("--out", "sink", help="Topic of answers, and of messages that expired.")
@click.option("--dead", help="Topic of dead letters; default: --out with `.dead` behind it.")
@click.option(
    "--replay",
    metavar="FROM..TO",
    help="Instead of --out: answer a range again, to stdout, and end. By time, sequence, or PARTITION-OFFSET of Kafka.",
)
@click.option("--audit", help="Topic of a replay's outcomes, in place of stdout.")
@click.option("--name", default="stream", show_default=True, help="Of the pipeline: its processes share its progress.")
@background_command
def stream(
    process: BackgroundProcess,
    source: str,
    sink: str | None,
    dead: str | None,
    replay: str | None,
    audit: str | None,
    name: str,
) -> None:
    """Answer the messages of a topic on the tiers. Prints `ready stream=…` on stdout; SIGTERM drains."""
    poll_grpc_in_one_thread()
    if replay is None:
        _work(process, _topics(name, source, sink, dead, audit))
    else:
        _replay(process.config, name, source, sink or dead, replay, audit)


def _topics(name: str, source: str, sink: str | None, dead: str | None, audit: str | None) -> StreamTopics:
    """Raises ConfigError."""
    from ..streams.config import StreamTopics

    if sink is None:
        raise ConfigError("name the topic of answers", where="--out")
    if audit is not None:
        raise ConfigError("it is for --replay", where="--audit")
    out = parse_topic(sink, "--out")
    return StreamTopics(
        name=_checked_name(name),
        source=parse_topic(source, "--in"),
        sink=out,
        dead=parse_topic(dead, "--dead") if dead else out.sibling(_DEAD),
    )


def _work(process: BackgroundProcess, topics: StreamTopics) -> None:
    """Raises ConfigError."""

    from ..app import run_pipeline  # on demand: gRPC takes half a second to import

    config, reread, serves_operators = process
    until_stopped(lambda stop: run_pipeline(config, topics, stop, reread, serves_operators=serves_operators), run_fast)


def _replay(config: Config, name: str, source: str, published: str | None, wanted: str, audit: str | None) -> None:
    """Raises ConfigError."""
    from ..app import run_replay
    from ..streams.replay import ReplayTopics

    if published is not None:
        raise ConfigError("a replay publishes no outcomes: give --audit in place of --out and --dead", where="--replay")
    address = parse_topic(source, "--in")
    topics = ReplayTopics(
        name=_checked_name(name),
        source=address,
        wanted=parse_range(wanted, address.kind),
        audit=parse_topic(audit, "--audit") if audit else None,
    )
    until_stopped(lambda stop: run_replay(config, topics, stop), run_fast)


def _checked_name(name: str) -> str:
    """Raises ConfigError."""
    try:
        return msgspec.convert(name, ClaimName)
    except msgspec.ValidationError:
        raise ConfigError("a name has letters, digits, `.`, `_` and `-`, at most 64", where="--name") from None
