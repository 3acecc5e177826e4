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
    "Port on operator.host for metrics and the operators' API; 0: any free port. Default: neither is served.",
    click.IntRange(0, 65535),
)


@click.command(context_settings=_HELP)
@_OPERATOR_PORT
@configured_command
def worker(process: ConfiguredProcess) -> None:
    """Run a worker, which runs jobs from Redis on the tiers. After SIGTERM it only finishes its running jobs.

    When it is ready, it prints `ready worker=…` on stdout.
    """
    begin_imports()
    from ..background import run_worker

    config, reread, flags = process
    serves_operators = flags.operator_port is not None
    until_stopped(lambda stop: run_worker(config, stop, reread, serves_operators=serves_operators))


@click.command(context_settings=_HELP)
@option(
    "--in",
    "Topic with the messages to answer: nats://host:4222/SUBJECT (wildcards are allowed) or kafka://host:9092/TOPIC.",
    to="source",
    required=True,
)
@option("--out", "Topic on which answers, and notices of expired messages, are published.", to="sink", required=True)
@option("--dead", "Topic on which dead letters are published; default: the topic of --out with `.dead` appended.")
@option("--name", "Name of the pipeline. Processes with the same name share their progress.", default="stream")
@_OPERATOR_PORT
@configured_command
def stream(process: ConfiguredProcess, source: str, sink: str, dead: str | None, name: str) -> None:
    """Read messages from a topic of a broker, and let the models of the tiers answer them. After SIGTERM the command
    only finishes the messages in progress.

    When it is ready, it prints `ready stream=…` on stdout.
    """
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
        raise ConfigError(
            "The name may have at most 64 characters: letters, digits, `.`, `_` and `-`.", where="--name"
        ) from None
