"""The command `causeway-cloud doctor`: checks what gateways and workers require; changes nothing."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

import click
import msgspec
from redis.exceptions import RedisError

from causeway_server.router.errors import CausewayError, ConfigError, JobStoreUnavailable
from causeway_server.router.serving.process import format_option
from causeway_server.router.serving.tls.contexts import server_tls

from ..config import Config
from ..redis.connect import client_fault, eviction_fault, open_redis
from ..storage.config import with_shared_redis
from .process import ConfigSource, redis_options


class CheckResult(msgspec.Struct, frozen=True):
    """The result of one check. `advice`: the problem and its fix; "" if there is none."""

    check: str
    level: Literal["ok", "fail"]
    advice: str = ""


@click.command()
@redis_options
@format_option
def doctor(source: ConfigSource, as_json: bool) -> None:
    """Check certificates, Redis, the store of jobs and the collector of traces. Exit with status 1 if a check fails."""
    findings = asyncio.run(examine(source.load()))
    if as_json:
        click.echo(msgspec.json.encode({"findings": findings}).decode())
    else:
        for finding in findings:
            click.echo(f"{finding.level:4}  {finding.check:8} {finding.advice}".rstrip())
    sys.exit(1 if any(finding.level == "fail" for finding in findings) else 0)


async def examine(config: Config) -> list[CheckResult]:
    """Return the check results of the configured services. Raises ConfigError for an unusable address."""
    faults = {}
    if config.server.tls.cert_file or config.operator.tls.cert_file:
        faults["tls"] = _tls_fault(config)
    if config.redis:
        faults["redis"] = await _redis_fault(config)
    if with_shared_redis(config.jobs, config.redis).redis:
        faults["jobs"] = await _jobs_fault(config)
    if config.tracing.endpoint:
        # On demand: OpenTelemetry costs a tenth of a second.
        from causeway_server.router.serving.otel import send_empty_export

        fault = await send_empty_export(config.tracing.endpoint)
        faults["tracing"] = fault and f"The collector at {config.tracing.endpoint} does not accept traces: {fault}"
    return [CheckResult(check, "fail" if fault else "ok", fault) for check, fault in faults.items()]


def _tls_fault(config: Config) -> str:
    try:
        server_tls(config.server.tls, "server.tls")
        server_tls(config.operator.tls, "operator.tls")
    except ConfigError as error:
        return error.message
    return ""


async def _redis_fault(config: Config) -> str:
    client = open_redis(config.redis)
    try:
        return await eviction_fault(client)
    except (RedisError, OSError) as error:
        return client_fault(error, client)
    finally:
        await client.aclose()


async def _jobs_fault(config: Config) -> str:
    from ..storage.stores import JobStores

    stores = JobStores.open(with_shared_redis(config.jobs, config.redis))
    try:
        await stores.durability.ensure()
    except JobStoreUnavailable as error:
        return stores.database.explain(error)
    except CausewayError as error:
        return error.message
    finally:
        await stores.close()
    return ""
