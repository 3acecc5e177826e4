"""The commands `causeway-cloud worker` and `causeway-cloud stream`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.issuers.config import ClaimName
from causeway_server.router.serving.process import begin_imports, option, run_fast

from ..brokers.port import parse_topic
from .process import ConfiguredProcess, configured_command, until_stopped

if TYPE_CHECKING:
    from ..streams.config import StreamTopics

_HELP = {"help_option_names": ["-h", "--help"]}
_DEAD = ".dead"
_OPERATOR_PORT = option(
    "--operator-port",
    "Serve metrics and operators on this port of operator.host; 0: any free port. Without it they are not served.",
    click.IntRange(0, 65535),
)


@click.command(context_settings=_HELP)
@_OPERATOR_PORT
@configured_command
def worker(process: ConfiguredProcess) -> None:
    """Run jobs from Redis on the tiers. Prints `ready worker=…` on stdout; SIGTERM drains."""
    begin_imports()
    from ..background import run_worker

    config, reread, flags = process
    serves_operators = flags.operator_port is not None
    until_stopped(lambda stop: run_worker(config, stop, reread, serves_operators=serves_operators))


@click.command(context_settings=_HELP)
@option(
    "--in",
    "Topic of messages: nats://host:4222/SUBJECT (wildcards allowed) or kafka://host:9092/TOPIC.",
    to="source",
    required=True,
)
@option("--out", "Topic of answers, and of expiry notices for expired messages.", to="sink", required=True)
@option("--dead", "Topic of dead letters; default: the topic of --out with `.dead` appended.")
@option("--name", "Name of the pipeline. Its processes share their progress.", default="stream")
@_OPERATOR_PORT
@configured_command
def stream(process: ConfiguredProcess, source: str, sink: str, dead: str | None, name: str) -> None:
    """Answer the messages of a topic with the tiers. Prints `ready stream=…` on stdout; SIGTERM drains."""
    config, reread, flags = process
    topics, serves_operators = _topics(name, source, sink, dead), flags.operator_port is not None
    from ..background import run_pipeline  # on demand: gRPC takes half a second to import

    until_stopped(lambda stop: run_pipeline(config, topics, stop, reread, serves_operators=serves_operators), run_fast)


def _topics(name: str, source: str, sink: str, dead: str | None) -> StreamTopics:
    """Parse the topics of a pipeline. Raises ConfigError."""
    from ..streams.config import StreamTopics

    out = parse_topic(sink, "--out")
    return StreamTopics(
        name=_checked_name(name),
        source=parse_topic(source, "--in"),
        sink=out,
        dead=parse_topic(dead, "--dead") if dead else out.sibling(_DEAD),
    )


def _checked_name(name: str) -> str:
    """Return the name if it is valid. Raises ConfigError."""
    try:
        return msgspec.convert(name, ClaimName)
    except msgspec.ValidationError:
        raise ConfigError("Use at most 64 letters, digits, `.`, `_` and `-`.", where="--name") from None
