"""SIGHUP: the endpoints of the configuration file are read again, without a restart. A faulty file changes nothing."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

import msgspec

from router.errors import ConfigError

from ...config.schema import Config
from ..pools import Pools

_log = logging.getLogger("causeway.cloud.pool")


def reload_on_sighup(pools: Pools, config: Config, reread: Callable[[], Config]) -> None:
    """From now on, in the running loop. `config` is what the process started with."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, take, pools, config, reread)


def take(pools: Pools, config: Config, reread: Callable[[], Config]) -> None:
    try:
        new = reread()
    except ConfigError as error:
        _log.error("the endpoints stay as they are: %s", error.message)
        return
    if _without_endpoints(new) != _without_endpoints(config):
        _log.warning("only endpoints are taken from the new configuration; what else is in it needs a restart")
    pools.move(new.tiers)
    _log.info("the endpoints were read again")


def _without_endpoints(config: Config) -> Config:
    tiers = tuple(msgspec.structs.replace(tier, triton="", endpoints=()) for tier in config.tiers)
    return msgspec.structs.replace(config, tiers=tiers)
