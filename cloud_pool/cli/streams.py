"""`causeway-cloud stream`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from router.errors import ConfigError

from ..accounts.identity.principal import ClaimName
from ..brokers.address import parse_topic
from ..config.loader import Flags, load_config
from ..observability.logs import log_crashes, start_log
from .process import LogLevel, poll_grpc_in_one_thread, refuse, run_fast, until_stopped

_PATH = click.Path(path_type=Path)
_DEAD = ".dead"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--in", "source", required=True, help="Topic of messages: nats://host:4222/SUBJECT, wildcards allowed.")
@click.option("--out", "sink", required=True, help="Topic of answers, and of messages that expired.")
@click.option("--dead", help="Topic of dead letters; default: --out with `.dead` behind it.")
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
    sink: str,
    dead: str | None,
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
    from ..streams.app import StreamTopics, run  # on demand: gRPC takes half a second to import

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
        out = parse_topic(sink, "--out")
        topics = StreamTopics(
            name=_checked_name(name),
            source=parse_topic(source, "--in"),
            sink=out,
            dead=parse_topic(dead, "--dead") if dead else out.sibling(_DEAD),
        )
        start_log(config.log, config.log_format)
        log_crashes()
        serves = operator_port is not None
        until_stopped(
            lambda stop: run(config, topics, stop, lambda: load_config(path, flags), serves_operators=serves), run_fast
        )
    except ConfigError as error:
        refuse(error.message)


def _checked_name(name: str) -> str:
    """Raises ConfigError."""
    try:
        return msgspec.convert(name, ClaimName)
    except msgspec.ValidationError:
        raise ConfigError("a name has letters, digits, `.`, `_` and `-`, at most 64", where="--name") from None
