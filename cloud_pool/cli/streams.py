"""`causeway-cloud stream`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from router.errors import ConfigError

from ..accounts.identity.principal import ClaimName
from ..brokers.address import parse_topic
from ..brokers.ranges import parse_range
from ..config.loader import Flags, load_config
from ..config.schema import Config
from ..observability.logs import log_crashes, start_log
from .process import LogLevel, poll_grpc_in_one_thread, refuse, run_fast, until_stopped

if TYPE_CHECKING:
    from ..streams.app import StreamTopics

_PATH = click.Path(path_type=Path)
_DEAD = ".dead"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
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
@click.option("--config", "path", type=_PATH, help="The gateways' YAML file; flags win over it.")
@click.option("--redis", envvar="CAUSEWAY_REDIS", help="URL of the Redis that gateways and workers share.")
@click.option("--triton", help="host:port of Triton's gRPC, for every tier.")
@click.option("--tier", "tiers", multiple=True, help="A tier to work for; repeatable.")
@click.option("--model-dir", "model_dirs", multiple=True, type=_PATH, help="Searched for artifacts first; repeatable.")
@click.option(
    "--operator-port",
    type=click.IntRange(0, 65535),
    help="Serve metrics and operators on this port of operator.host; 0: any free one; without it: not at all.",
)
@click.option("--log", type=click.Choice(["debug", "info", "warning", "error"]), help="Log level.")
def stream(
    source: str,
    sink: str | None,
    dead: str | None,
    replay: str | None,
    audit: str | None,
    name: str,
    path: Path | None,
    redis: str | None,
    triton: str | None,
    tiers: tuple[str, ...],
    model_dirs: tuple[Path, ...],
    operator_port: int | None,
    log: LogLevel | None,
) -> None:
    """Answer the messages of a topic on the tiers. Prints `ready stream=…` on stdout; SIGTERM drains."""
    poll_grpc_in_one_thread()
    flags = Flags(
        redis=redis,
        operator_port=operator_port,
        triton=triton,
        tiers=tiers,
        model_dirs=tuple(str(folder.absolute()) for folder in model_dirs),
        log=log,
    )
    try:
        config = load_config(path, flags)
        start_log(config.log, config.log_format)
        log_crashes()
        if replay is None:
            topics = _topics(name, source, sink, dead, audit)
            _work(config, topics, lambda: load_config(path, flags), serves_operators=operator_port is not None)
        else:
            _replay(config, name, source, sink or dead, replay, audit)
    except ConfigError as error:
        refuse(error.message)


def _topics(name: str, source: str, sink: str | None, dead: str | None, audit: str | None) -> StreamTopics:
    """Raises ConfigError."""
    from ..streams.app import StreamTopics  # on demand: gRPC takes half a second to import

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


def _work(config: Config, topics: StreamTopics, reread: Callable[[], Config], *, serves_operators: bool) -> None:
    """Raises ConfigError."""
    from ..streams.app import run

    until_stopped(lambda stop: run(config, topics, stop, reread, serves_operators=serves_operators), run_fast)


def _replay(config: Config, name: str, source: str, published: str | None, wanted: str, audit: str | None) -> None:
    """Raises ConfigError."""
    from ..streams.replay import ReplayTopics, run_replay

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
